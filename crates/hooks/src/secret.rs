//! What signs webhooks.

use aws_lc_rs::hmac;
use base64::{Engine, engine::general_purpose::STANDARD};

const PREFIX: &str = "whsec_";
/// What the specification asks of a secret, in bytes.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// `whsec_` and 24 to 64 bytes as Base64.
#[derive(Clone)]
pub struct Secret(hmac::Key);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("it does not begin with whsec_")]
    Prefix,
    #[error("what follows whsec_ is no Base64")]
    Base64,
    #[error("it holds {0} bytes; it takes 24 to 64")]
    Length(usize),
}

impl Secret {
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let encoded = text.strip_prefix(PREFIX).ok_or(SecretError::Prefix)?;
        let bytes = STANDARD.decode(encoded).map_err(|_| SecretError::Base64)?;
        if !BYTES.contains(&bytes.len()) {
            return Err(SecretError::Length(bytes.len()));
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes)))
    }

    /// The header `webhook-signature`.
    pub fn sign(&self, id: &str, timestamp_s: u64, body: &[u8]) -> String {
        let mut context = hmac::Context::with_key(&self.0);
        context.update(format!("{id}.{timestamp_s}.").as_bytes());
        context.update(body);
        format!("v1,{}", STANDARD.encode(context.sign()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_of_the_reference_implementation() {
        let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signed = secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn secrets_are_checked() {
        let rows = [
            ("secret", SecretError::Prefix),
            ("whsec_*", SecretError::Base64),
            ("whsec_AAAA", SecretError::Length(3)),
        ];
        for (text, expected) in rows {
            assert_eq!(Secret::parse(text).err(), Some(expected), "{text}");
        }
    }
}
