//! The server API as a back end would call it.

use serde_json::Value;
use std::time::Duration;

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text)
            .unwrap_or_else(|error| panic!("{error} in the answer {} {:?}", self.status, self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body, after checking the status.
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "the answer was {:?}", self.text);
        self
    }

    /// Checks status and the shape `{"code","message"}`.
    pub fn expect_refusal(self, status: u16) -> Value {
        let body = self.expect(status).json();
        assert!(body["code"].as_str().is_some_and(|code| !code.is_empty()), "no code in {body}");
        assert!(body["message"].as_str().is_some_and(|text| !text.is_empty()), "no message in {body}");
        body
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(Duration::from_secs(30)))
        .max_redirects(0)
        .proxy(None)
        .allow_non_standard_methods(true)
        .build()
        .into()
}

/// One request on a connection of its own. `body` is sent as it is, with `application/json`.
pub fn request(method: &str, url: &str, headers: &[(&str, &str)], body: Option<&str>) -> Answer {
    let mut builder = ureq::http::Request::builder().method(method).uri(url);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    let agent = agent();
    let sent = match body {
        Some(body) => {
            let request = builder.header("content-type", "application/json").body(body.to_owned());
            agent.run(request.expect("the request is well formed"))
        }
        None => agent.run(builder.body(()).expect("the request is well formed")),
    };
    let mut response = sent.unwrap_or_else(|error| panic!("{method} {url}: {error}"));
    Answer {
        status: response.status().as_u16(),
        headers: response
            .headers()
            .iter()
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect(),
        text: response
            .body_mut()
            .with_config()
            .limit(64 << 20)
            .read_to_string()
            .unwrap_or_else(|error| panic!("{method} {url}: {error}")),
    }
}
