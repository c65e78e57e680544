//! Making tokens: `bowline token`, `POST /api/v1/tokens`, the demo page.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bowline_protocol::{DeviceId, Millis, UserId, ids::DeviceClass};
use jsonwebtoken::{Algorithm, EncodingKey, crypto};
use serde::Serialize;

/// What a new token says.
#[derive(Debug, Clone)]
pub struct Claims {
    pub user: UserId,
    pub issued_at: Millis,
    pub ttl_ms: Millis,
    pub device: Option<DeviceId>,
    pub class: Option<DeviceClass>,
    pub token_id: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
    pub rooms: Option<Vec<Box<str>>>,
    /// Where `auth.audience` and `auth.issuer` are configured, the server's own tokens name them too.
    pub audience: Option<String>,
    pub issuer: Option<String>,
}

#[derive(Serialize)]
struct Written<'a> {
    sub: &'a str,
    /// With its milliseconds: a token that is made right after its user's were revoked is not one of those.
    iat: f64,
    exp: Millis,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_class: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jti: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sid: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rooms: Option<&'a [Box<str>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aud: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    iss: Option<&'a str>,
}

impl Claims {
    pub fn new(user: UserId, issued_at: Millis, ttl_ms: Millis) -> Self {
        Self {
            user,
            issued_at,
            ttl_ms,
            device: None,
            class: None,
            token_id: None,
            session_id: None,
            rooms: None,
            audience: None,
            issuer: None,
        }
    }

    /// When the token runs out: `ttl_ms` later, in whole seconds.
    pub fn expires_at(&self) -> Millis {
        self.issued_at.saturating_add(self.ttl_ms).div_ceil(1000).saturating_mul(1000)
    }
}

/// A token signed with a secret (HS256).
pub fn mint(secret: &[u8], claims: &Claims) -> String {
    let written = Written {
        sub: &claims.user,
        iat: claims.issued_at as f64 / 1000.0,
        exp: claims.expires_at() / 1000,
        device_id: claims.device.as_deref(),
        device_class: claims.class.map(|class| class.as_str()),
        jti: claims.token_id.as_deref(),
        sid: claims.session_id.as_deref(),
        rooms: claims.rooms.as_deref(),
        aud: claims.audience.as_deref(),
        iss: claims.issuer.as_deref(),
    };
    let json = serde_json::to_string(&written).expect("texts and numbers are always JSON");
    let mut token = URL_SAFE_NO_PAD.encode(r#"{"typ":"JWT","alg":"HS256"}"#);
    token.push('.');
    URL_SAFE_NO_PAD.encode_string(json, &mut token);
    let signature = crypto::sign(token.as_bytes(), &EncodingKey::from_secret(secret), Algorithm::HS256)
        .expect("a secret signs with HS256");
    token.push('.');
    token.push_str(&signature);
    token
}
