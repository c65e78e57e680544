//! One address of the application that is asked and waited for.

use crate::{
    Secret, http,
    limits::{ANSWER_BYTES_MAX, IN_FLIGHT_MAX, TIMEOUT, WAITING_MAX},
};
use bowline_protocol::json;
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
        let url = http::address(url).ok_or_else(|| Error::Url(url.to_owned()))?;
        Ok(Self {
            client: http::client(url.scheme() == "http").map_err(Error::Client)?,
            url,
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
        json::object(&answer).map_err(|error| Error::Answer(error.to_string()))
    }

    async fn exchange(&self, id: &str, now_s: u64, body: Vec<u8>) -> Result<Vec<u8>, Error> {
        let request = self
            .client
            .post(self.url.clone())
            .header("content-type", "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", now_s)
            .header("webhook-signature", self.secret.sign(id, now_s, &body))
            .body(body);
        let response = request.send().await.map_err(|error| Error::Request(http::chain(&error)))?;
        if !response.status().is_success() {
            return Err(Error::Status(response.status().as_u16()));
        }
        http::read(response, ANSWER_BYTES_MAX).await.map_err(|error| match error {
            http::ReadError::Long(_) => Error::Long,
            http::ReadError::Broken(cause) => Error::Request(cause),
        })
    }
}
