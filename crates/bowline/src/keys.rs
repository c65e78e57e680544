//! The keys of a running server: what signs and judges tokens, and what opens the API.

use crate::{
    cli::Failure,
    config::Config,
    data::DataDir,
    token::{Signer, cannot_sign},
};
use anyhow::Context;
use bowline_auth::Verifier;
use std::{sync::Arc, time::Duration};

pub struct Keys {
    pub verifier: bowline_auth::Config,
    /// The secret of this data directory, when nobody has configured a key.
    pub generated: Option<String>,
    pub api: String,
    is_api_generated: bool,
}

impl Keys {
    pub fn of(config: &Config, data: &DataDir) -> Result<Self, Failure> {
        let generated = match config.auth.has_key() {
            true => None,
            false => Some(data.secret(DataDir::TOKEN_SECRET)?),
        };
        let secret = config.auth.secret.as_ref().or(generated.as_ref());
        let verifier = bowline_auth::Config {
            secret: secret.map(|secret| secret.clone().into_bytes()),
            public_key: config.auth.public_key.as_deref().map(read_public_key).transpose()?,
            jwks_url: config.auth.jwks_url.clone(),
            hook_url: config.auth.hook_url.clone(),
            audience: config.auth.audience.clone(),
            issuer: config.auth.issuer.clone(),
            sessions: config.auth.sessions,
            ..bowline_auth::Config::default()
        };
        let api = match &config.api.key {
            Some(key) => key.clone(),
            None => data.secret(DataDir::API_KEY)?,
        };
        Ok(Self { verifier, generated, api, is_api_generated: config.api.key.is_none() })
    }

    pub fn signer(&self, config: &Config) -> Result<Signer, String> {
        match config.auth.secret.as_ref().or(self.generated.as_ref()) {
            Some(secret) => Ok(Signer::new(secret, config)),
            None => Err(cannot_sign(&config.auth)),
        }
    }

    /// How to get in while nothing is configured.
    pub fn announce(&self, config: &Config) {
        let data = config.node.data.display();
        if self.generated.is_some() {
            tracing::info!(
                "no key is configured: loopback only, tokens are signed for this data directory; get one with: \
                 bowline token --user alice --data {data}"
            );
        }
        if let Some(url) = &config.auth.hook_url {
            tracing::info!("the application judges tokens at {url} (auth.hook_url)");
        }
        if self.is_api_generated && config.node.has_api {
            tracing::info!("no api.key is configured: this data directory's is {}", self.api);
        }
    }
}

/// What is wrong with the keys may last; it is said once, and again when it has changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Keys {
    /// Says when the issuer's key set cannot be fetched, and when it can be again.
    pub fn watch(&self, config: &Config, verifier: Arc<Verifier>) {
        let Some(url) = config.auth.jwks_url.clone() else { return };
        tracing::info!("the keys of tokens are fetched from {url} (auth.jwks_url)");
        tokio::spawn(async move {
            let mut told = None;
            loop {
                let fault = verifier.keys_fault();
                match &fault {
                    _ if fault == told => {}
                    Some(fault) => tracing::warn!(
                        cause = %fault,
                        "keys cannot be fetched; those that were fetched before stay in force, and it is tried again"
                    ),
                    None => tracing::info!("the key set at {url} is used again"),
                }
                told = fault;
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
    }

    /// Reads the file of `auth.public_key` again and has the issuer's key set fetched. What cannot be used is told,
    /// and the keys stay as they were.
    pub fn reload(&self, config: &Config, verifier: &Verifier) {
        let public_key = match config.auth.public_key.as_deref().map(read_public_key).transpose() {
            Ok(key) => key,
            Err(Failure::Failed(error) | Failure::Usage(error)) => {
                tracing::error!(cause = %format!("{error:#}"), "SIGHUP: the keys stay as they were");
                return;
            }
        };
        match verifier.reload(self.verifier.secret.as_deref(), public_key.as_deref()) {
            Ok(()) => tracing::info!(
                "SIGHUP: auth.public_key is read again and auth.jwks_url fetched, where they are configured; other \
                 keys take a restart"
            ),
            Err(error) => tracing::error!(cause = %error, "SIGHUP: the keys stay as they were"),
        }
    }
}

/// `auth.public_key` is PEM text, or the path of a PEM file.
fn read_public_key(value: &str) -> Result<Vec<u8>, Failure> {
    if value.contains("-----BEGIN") {
        return Ok(value.as_bytes().to_vec());
    }
    std::fs::read(value)
        .with_context(|| format!("auth.public_key: the file {value} cannot be read"))
        .map_err(Failure::Usage)
}
