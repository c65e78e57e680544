//! Keys, each for one algorithm: the token does not choose.

use crate::{
    Fault,
    token::{HeaderText, Parts},
};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, crypto};

#[derive(Clone)]
pub(crate) struct Key {
    pub(crate) algorithm: Algorithm,
    pub(crate) id: Option<Box<str>>,
    pub(crate) key: DecodingKey,
}

/// Why a configured key cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("auth.public_key is a private key; give the server the public key only")]
    Private,
    #[error(
        "auth.public_key is no public key in PEM form that the server knows; it takes RSA (RS256), P-256 (ES256) and \
         Ed25519 (EdDSA)"
    )]
    Unknown,
}

impl Key {
    pub(crate) fn secret(secret: &[u8]) -> Self {
        Self { algorithm: Algorithm::HS256, id: None, key: DecodingKey::from_secret(secret) }
    }

    /// The algorithm follows from the kind of key.
    pub(crate) fn public(pem: &[u8]) -> Result<Self, KeyError> {
        if String::from_utf8_lossy(pem).contains("PRIVATE KEY") {
            return Err(KeyError::Private);
        }
        let key = DecodingKey::from_rsa_pem(pem)
            .or_else(|_| DecodingKey::from_ec_pem(pem))
            .or_else(|_| DecodingKey::from_ed_pem(pem))
            .map_err(|_| KeyError::Unknown)?;
        let algorithm = match key.family() {
            AlgorithmFamily::Rsa => Algorithm::RS256,
            // An uncompressed point of P-256; the other curves have longer ones.
            AlgorithmFamily::Ec if key.as_bytes().len() == 65 => Algorithm::ES256,
            AlgorithmFamily::Ed if key.as_bytes().len() == 32 => Algorithm::EdDSA,
            _ => return Err(KeyError::Unknown),
        };
        Ok(Self { algorithm, id: None, key })
    }
}

/// The name that a token's header gives to an algorithm.
pub(crate) fn name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::HS256 => "HS256",
        Algorithm::RS256 => "RS256",
        Algorithm::ES256 => "ES256",
        Algorithm::EdDSA => "EdDSA",
        _ => "unsupported",
    }
}

/// Checks a token's signature with the keys of its algorithm, and of its `kid` where keys have names.
pub(crate) fn verify(keys: &[Key], header: &HeaderText, parts: &Parts<'_>) -> Result<(), Fault> {
    let header = header.read()?;
    let mut tried = false;
    for key in keys.iter().filter(|key| name(key.algorithm) == header.alg) {
        if let (Some(id), Some(asked)) = (&key.id, &header.kid)
            && **id != **asked
        {
            continue;
        }
        tried = true;
        // An error is a signature that cannot be decoded.
        if crypto::verify(parts.signature, parts.signed.as_bytes(), &key.key, key.algorithm).unwrap_or(false)
        {
            return Ok(());
        }
    }
    if tried {
        return Err(Fault::Invalid("the token's signature is not that of a configured key".into()));
    }
    Err(Fault::Invalid(match &header.kid {
        Some(kid) if keys.iter().any(|key| name(key.algorithm) == header.alg) => {
            format!("the token's key {kid:?} is not known")
        }
        _ => {
            let mut names: Vec<_> = keys.iter().map(|key| name(key.algorithm)).collect();
            names.sort_unstable();
            names.dedup();
            format!(
                "the token's algorithm {:?} is not that of a configured key ({})",
                header.alg,
                names.join(", ")
            )
        }
    }))
}
