//! Tokens, made as an application would make them.

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The `auth.secret` of the servers under test.
pub const SECRET: &str = "the-secret-of-the-tests-long-enough-for-hs256";
/// Their `api.key`.
pub const API_KEY: &str = "the-api-key-of-the-tests";

pub fn now_secs() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock stands after 1970").as_secs()
}

pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock stands after 1970").as_millis() as u64
}

/// A good token of `user` for an hour.
pub fn of(user: &str) -> String {
    signed(&json!({"sub": user, "exp": now_secs() + 3600}))
}

/// A good token that binds a device.
pub fn of_device(user: &str, device: &str) -> String {
    signed(&json!({"sub": user, "exp": now_secs() + 3600, "device_id": device}))
}

pub fn signed(claims: &Value) -> String {
    signed_with(claims, SECRET)
}

pub fn signed_with(claims: &Value, secret: &str) -> String {
    encode(&Header::new(Algorithm::HS256), claims, &EncodingKey::from_secret(secret.as_bytes()))
        .expect("claims are JSON")
}

/// A token whose header says that it needs no signature.
pub fn unsigned(claims: &Value) -> String {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.", part(&json!({"alg": "none", "typ": "JWT"})), part(claims))
}
