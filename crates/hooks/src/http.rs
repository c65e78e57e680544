//! Asking over HTTP: what every question to others has in common, whoever asks.

use reqwest::{Client, Response, Url};

/// An http or https address with a host.
pub fn address(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

/// A client that goes to the address that was configured and to no other. `is_plain` when all of them are plain HTTP:
/// a machine without root certificates can still ask there.
pub fn client(is_plain: bool) -> Result<Client, String> {
    let builder = || {
        Client::builder()
            .user_agent(concat!("bowline/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
    };
    let built = match builder().build() {
        Err(_) if is_plain => builder().tls_certs_only([]).build(),
        built => built,
    };
    built.map_err(|error| chain(&error))
}

/// Why an answer was not read to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("its answer is longer than {0} bytes")]
    Long(usize),
    #[error("{0}")]
    Broken(String),
}

/// The body of an answer, of so many bytes at most.
pub async fn read(mut response: Response, bytes_max: usize) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    while let Some(part) = response.chunk().await.map_err(|error| ReadError::Broken(chain(&error)))? {
        if bytes.len() + part.len() > bytes_max {
            return Err(ReadError::Long(bytes_max));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

/// An error with its causes: the client's own texts leave out why.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
