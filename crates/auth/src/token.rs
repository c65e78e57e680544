//! What a token says: JSON Web Tokens (RFC 7519) in their compact form (RFC 7515).

use crate::{Fault, Identity};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bowline_protocol::{DeviceId, Millis, UserId, ids::DeviceClass, json};
use serde::Deserialize;
use std::borrow::Cow;

/// How far clocks may differ.
pub const LEEWAY_MS: Millis = 30_000;
/// The most rooms that a token may name.
const ROOMS_MAX: usize = 1000;

fn invalid(text: impl Into<String>) -> Fault {
    Fault::Invalid(text.into())
}

/// The three parts of a token, still encoded.
pub(crate) struct Parts<'a> {
    /// Header and claims: what is signed.
    pub(crate) signed: &'a str,
    pub(crate) signature: &'a str,
    header: &'a str,
    claims: &'a str,
}

#[derive(Deserialize)]
pub(crate) struct Header<'a> {
    #[serde(borrow)]
    pub(crate) alg: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(crate) kid: Option<Cow<'a, str>>,
    /// Extensions that must be understood (RFC 7515, 4.1.11); none are.
    #[serde(default)]
    crit: Option<serde::de::IgnoredAny>,
}

/// A header that is decoded and not yet read.
pub(crate) struct HeaderText(Vec<u8>);

impl HeaderText {
    pub(crate) fn read(&self) -> Result<Header<'_>, Fault> {
        let header: Header<'_> = json::object(&self.0)
            .map_err(|error| invalid(format!("the token's header is not as it should be: {error}")))?;
        match header.crit {
            Some(_) => Err(invalid("the token's header names extensions (crit) that are not understood")),
            None => Ok(header),
        }
    }
}

#[derive(Deserialize)]
struct ClaimSet<'a> {
    #[serde(borrow, default)]
    sub: Option<Cow<'a, str>>,
    #[serde(default)]
    exp: Option<f64>,
    #[serde(default)]
    nbf: Option<f64>,
    #[serde(default)]
    iat: Option<f64>,
    #[serde(borrow, default)]
    aud: Option<Audience<'a>>,
    #[serde(borrow, default)]
    iss: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    jti: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    sid: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    device_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    device_class: Option<Cow<'a, str>>,
    #[serde(default)]
    rooms: Option<Vec<Box<str>>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience<'a> {
    One(#[serde(borrow)] Cow<'a, str>),
    Several(#[serde(borrow)] Vec<Cow<'a, str>>),
}

/// What the configuration asks of the claims.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    pub(crate) audience: Option<String>,
    pub(crate) issuer: Option<String>,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(token: &'a str) -> Result<Self, Fault> {
        let parts = || {
            let (signed, signature) = token.rsplit_once('.')?;
            let (header, claims) = signed.split_once('.')?;
            (!claims.contains('.')).then_some(Self { signed, signature, header, claims })
        };
        parts().ok_or_else(|| invalid("the token is no JSON Web Token: it does not have three parts"))
    }

    pub(crate) fn header(&self) -> Result<HeaderText, Fault> {
        decode("header", self.header).map(HeaderText)
    }
}

/// The JSON text of a part.
fn decode(part: &str, text: &str) -> Result<Vec<u8>, Fault> {
    URL_SAFE_NO_PAD
        .decode(text)
        .map_err(|error| invalid(format!("the token's {part} is not Base64: {error}")))
}

/// Checks the claims of a token whose signature is good.
pub(crate) fn identity(parts: &Parts<'_>, expected: &Expected, now: Millis) -> Result<Identity, Fault> {
    let text = decode("claims", parts.claims)?;
    let claims: ClaimSet<'_> = json::object(&text)
        .map_err(|error| invalid(format!("the token's claims are not as they should be: {error}")))?;
    let expires_at =
        millis(claims.exp.ok_or_else(|| invalid("the token never expires: claim exp is missing"))?);
    if expires_at.saturating_add(LEEWAY_MS) <= now {
        return Err(Fault::Expired);
    }
    if let Some(not_before) = claims.nbf.map(millis)
        && not_before > now + LEEWAY_MS
    {
        return Err(invalid(format!(
            "the token is not valid yet: nbf is {} s ahead",
            (not_before - now) / 1000
        )));
    }
    let issued_at = claims.iat.map_or(0, millis);
    if issued_at > now + LEEWAY_MS {
        return Err(invalid(format!(
            "the token was issued in the future: iat is {} s ahead; compare the clocks",
            (issued_at - now) / 1000
        )));
    }
    if let Some(issuer) = &expected.issuer
        && claims.iss.as_deref() != Some(issuer)
    {
        return Err(invalid(format!("the token is not from the issuer {issuer:?}: iss is {:?}", claims.iss)));
    }
    if let Some(audience) = &expected.audience {
        let named = match &claims.aud {
            None => false,
            Some(Audience::One(one)) => one == audience,
            Some(Audience::Several(several)) => several.iter().any(|one| one == audience),
        };
        if !named {
            return Err(invalid(format!("the token is not for the audience {audience:?}")));
        }
    }
    let user = claims.sub.filter(|sub| !sub.is_empty()).ok_or(Fault::NoSubject)?;
    let user = UserId::parse(&user).map_err(|error| invalid(format!("claim sub: {error}")))?;
    let device = claims
        .device_id
        .map(|id| DeviceId::parse(&id).map_err(|error| invalid(format!("claim device_id: {error}"))))
        .transpose()?;
    let class = claims
        .device_class
        .map(|class| {
            DeviceClass::parse(&class)
                .ok_or_else(|| invalid(format!("claim device_class: {class:?} is unknown")))
        })
        .transpose()?;
    let rooms = match claims.rooms {
        Some(rooms) if rooms.len() > ROOMS_MAX => {
            return Err(invalid(format!("claim rooms names {} rooms; it takes {ROOMS_MAX}", rooms.len())));
        }
        rooms => rooms.map(Into::into),
    };
    Ok(Identity {
        user,
        device,
        class,
        expires_at,
        issued_at,
        token_id: claims.jti.map(Into::into),
        session_id: claims.sid.map(Into::into),
        rooms,
    })
}

/// Seconds of a claim, which may have a fraction. What lies before 1970 is 0.
fn millis(seconds: f64) -> Millis {
    (seconds * 1000.0).round() as Millis
}
