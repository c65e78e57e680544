//! Signs tokens: for `bowline token` and for the demo page.

use crate::{cli::Failure, config::Config, data::DataDir};
use anyhow::{Context, anyhow};
use base64::Engine;
use bowline_protocol::{DeviceId, UserId};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde::Serialize;
use std::time::{Duration, SystemTime};

#[derive(Serialize)]
struct Claims<'a> {
    sub: &'a str,
    iat: u64,
    exp: u64,
    jti: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aud: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    iss: Option<&'a str>,
}

pub struct Signer {
    key: EncodingKey,
    audience: Option<String>,
    issuer: Option<String>,
}

impl Signer {
    pub fn new(secret: &str, config: &Config) -> Self {
        Self {
            key: EncodingKey::from_secret(secret.as_bytes()),
            audience: config.auth.audience.clone(),
            issuer: config.auth.issuer.clone(),
        }
    }

    /// With the configured secret, or with the one of the data directory.
    pub fn for_config(config: &Config) -> Result<Self, Failure> {
        match (&config.auth.secret, config.auth.has_key()) {
            (Some(secret), _) => Ok(Self::new(secret, config)),
            (None, true) => Err(Failure::Usage(anyhow!(
                "tokens are judged with auth.public_key: whoever holds the private key signs them, Bowline cannot"
            ))),
            (None, false) => {
                let secret = DataDir::open(&config.node.data)?.secret(DataDir::TOKEN_SECRET)?;
                Ok(Self::new(&secret, config))
            }
        }
    }

    pub fn sign(&self, user: &UserId, device: Option<&DeviceId>, ttl: Duration) -> anyhow::Result<String> {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .context("the clock is before 1970; set it")?;
        let mut random = [0_u8; 16];
        getrandom::fill(&mut random).map_err(|error| anyhow!("the system gives no random bytes: {error}"))?;
        let claims = Claims {
            sub: user,
            iat: now.as_secs(),
            // Whole seconds: what is shorter would have expired already.
            exp: now.saturating_add(ttl).as_secs().max(now.as_secs() + 1),
            jti: base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(random),
            device_id: device.map(DeviceId::as_str),
            aud: self.audience.as_deref(),
            iss: self.issuer.as_deref(),
        };
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &self.key)
            .context("the token cannot be signed")
    }
}
