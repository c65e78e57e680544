//! One address of the application that is asked and waited for.

use crate::{
    Secret,
    limits::{ANSWER_BYTES_MAX, IN_FLIGHT_MAX, TIMEOUT, WAITING_MAX},
};
use reqwest::{Client, Url};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Semaphore;

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is no address that begins with http:// or https://")]
    Url(String),
    #[error("HTTP requests cannot be made: {0}")]
    Client(String),
    #[error("too many questions wait for the application")]
    Busy,
    #[error("no answer within {} ms", TIMEOUT.as_millis())]
    Timeout,
    #[error("it cannot be asked: {0}")]
    Request(String),
    #[error("it answered {0}")]
    Status(u16),
    #[error("its answer is longer than {ANSWER_BYTES_MAX} bytes")]
    Long,
    #[error("its answer cannot be read: {0}")]
    Answer(String),
}

pub struct Asker {
    client: Client,
    url: Url,
    secret: Secret,
    waiting: Semaphore,
    in_flight: Semaphore,
}

impl Asker {
    pub fn new(url: &str, secret: Secret) -> Result<Self, Error> {
        let parsed = Url::parse(url)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| Error::Url(url.to_owned()))?;
        let builder = || {
            Client::builder()
                .user_agent(concat!("bowline/", env!("CARGO_PKG_VERSION")))
                // A question goes to the address that was configured and to no other.
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
        };
        let built = match builder().build() {
            // A machine without root certificates can still ask over plain HTTP.
            Err(_) if parsed.scheme() == "http" => builder().tls_certs_only([]).build(),
            built => built,
        };
        Ok(Self {
            client: built.map_err(|error| Error::Client(error.to_string()))?,
            url: parsed,
            secret,
            waiting: Semaphore::new(WAITING_MAX),
            in_flight: Semaphore::new(IN_FLIGHT_MAX),
        })
    }

    /// Asks, and reads the answer. `id` is new for each question; `now_s` is in seconds since 1970.
    pub async fn ask<A: DeserializeOwned>(
        &self,
        id: &str,
        now_s: u64,
        question: &impl Serialize,
    ) -> Result<A, Error> {
        let _place = self.waiting.try_acquire().map_err(|_| Error::Busy)?;
        let body = serde_json::to_vec(question).map_err(|error| Error::Request(error.to_string()))?;
        let asking = async {
            let _permit = self.in_flight.acquire().await.map_err(|_| Error::Busy)?;
            self.exchange(id, now_s, body).await
        };
        let answer = tokio::time::timeout(TIMEOUT, asking).await.unwrap_or(Err(Error::Timeout))?;
        serde_json::from_slice(&answer).map_err(|error| Error::Answer(error.to_string()))
    }

    async fn exchange(&self, id: &str, now_s: u64, body: Vec<u8>) -> Result<Vec<u8>, Error> {
        let failed = |error: reqwest::Error| Error::Request(chain(&error));
        let request = self
            .client
            .post(self.url.clone())
            .header("content-type", "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", now_s)
            .header("webhook-signature", self.secret.sign(id, now_s, &body))
            .body(body);
        let mut response = request.send().await.map_err(failed)?;
        if !response.status().is_success() {
            return Err(Error::Status(response.status().as_u16()));
        }
        let mut bytes = Vec::new();
        while let Some(part) = response.chunk().await.map_err(failed)? {
            if bytes.len() + part.len() > ANSWER_BYTES_MAX {
                return Err(Error::Long);
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    }
}

/// An error with its causes: the client's own texts leave out why.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
