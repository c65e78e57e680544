//! Keys, each for one algorithm: the token does not choose.

use crate::{
    Fault,
    token::{Header, Parts},
};
use bowline_protocol::json::{self, Object};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, crypto};
use serde::Deserialize;

#[derive(Clone)]
pub(crate) struct Key {
    pub(crate) algorithm: Algorithm,
    pub(crate) id: Option<Box<str>>,
    pub(crate) key: DecodingKey,
}

/// Why a configured key, or what tells keys, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("auth.public_key is a private key; give the server the public key only")]
    Private,
    #[error(
        "auth.public_key is no public key in PEM form that the server knows; it takes RSA (RS256), P-256 (ES256) and \
         Ed25519 (EdDSA)"
    )]
    Unknown,
    #[error("{key} is {text:?}, which is no http or https address")]
    Url { key: &'static str, text: String },
    #[error(
        "asking over HTTPS cannot be set up ({error}); install the system's root certificates (ca-certificates)"
    )]
    Client { error: String },
    #[error("the thread that fetches keys and asks the hook cannot be started: {error}")]
    Thread { error: String },
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

/// How a token's signature was judged.
pub(crate) enum Signature {
    Good,
    Bad(Fault),
    /// None of the keys is the one that the token names; newer ones may be.
    UnknownKey(Fault),
}

/// Checks a token's signature with the keys of its algorithm, and of its `kid` where keys have names.
pub(crate) fn verify(keys: &[&[Key]], header: &Header<'_>, parts: &Parts<'_>) -> Signature {
    let (mut is_tried, mut is_named) = (false, false);
    let all = || keys.iter().copied().flatten();
    for key in all().filter(|key| name(key.algorithm) == header.alg) {
        match (&key.id, &header.kid) {
            (Some(id), Some(asked)) if **id != **asked => continue,
            (Some(_), Some(_)) => is_named = true,
            _ => {}
        }
        is_tried = true;
        // An error is a signature that cannot be decoded.
        if crypto::verify(parts.signature, parts.signed.as_bytes(), &key.key, key.algorithm).unwrap_or(false)
        {
            return Signature::Good;
        }
    }
    let bad = || Fault::Invalid("the token's signature is not that of a configured key".into());
    match &header.kid {
        _ if is_named => Signature::Bad(bad()),
        _ if is_tried => Signature::UnknownKey(bad()),
        Some(kid) if all().any(|key| name(key.algorithm) == header.alg) => {
            Signature::UnknownKey(Fault::Invalid(format!("the token's key {kid:?} is not known")))
        }
        _ => {
            let mut names: Vec<_> = all().map(|key| name(key.algorithm)).collect();
            names.sort_unstable();
            names.dedup();
            let alg = &header.alg;
            Signature::UnknownKey(Fault::Invalid(format!(
                "the token's algorithm {alg:?} is not that of a configured key ({})",
                names.join(", ")
            )))
        }
    }
}

/// Whether an issuer's key set can hold keys for this algorithm. Secrets have no place in one.
pub(crate) fn is_asymmetric(algorithm: &str) -> bool {
    [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA].into_iter().any(|known| name(known) == algorithm)
}

/// The most keys of a set that are used.
const SET_KEYS_MAX: usize = 256;

#[derive(Deserialize)]
struct Set {
    keys: Vec<serde_json::Value>,
}

/// A key of a set (RFC 7517), as far as it is needed.
#[derive(Deserialize)]
struct SetKey {
    kty: String,
    kid: Option<Box<str>>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// The keys of a set that can be used; others are passed over, as the RFC asks.
pub(crate) fn of_set(text: &[u8]) -> Result<Vec<Key>, String> {
    let set: Set = json::object(text).map_err(|error| format!("it is no key set: {error}"))?;
    let keys = set.keys.into_iter().filter_map(|value| {
        let Object(key) = serde_json::from_value(value).ok()?;
        of_set_key(key)
    });
    Ok(keys.take(SET_KEYS_MAX).collect())
}

fn of_set_key(key: SetKey) -> Option<Key> {
    let (algorithm, decoding) = match (key.kty.as_str(), key.crv.as_deref()) {
        ("RSA", _) => (Algorithm::RS256, DecodingKey::from_rsa_components(&key.n?, &key.e?)),
        ("EC", Some("P-256")) => (Algorithm::ES256, DecodingKey::from_ec_components(&key.x?, &key.y?)),
        ("OKP", Some("Ed25519")) => (Algorithm::EdDSA, DecodingKey::from_ed_components(&key.x?)),
        _ => return None,
    };
    let is_for_signatures = key.purpose.is_none_or(|purpose| purpose == "sig");
    let is_for_algorithm = key.alg.is_none_or(|alg| alg == name(algorithm));
    (is_for_signatures && is_for_algorithm).then_some(Key { algorithm, id: key.kid, key: decoding.ok()? })
}
