//! What no single value shows: choices that are not built, values that do not go together.

use super::{
    Config, Error, Origin, Setting, Settings, Value,
    keys::{Key, State},
};
use bowline_gateway::RoomJoin;
use std::fmt;

/// Something that is allowed, and that the operator may not expect.
#[derive(Debug, PartialEq, Eq)]
pub enum Note {
    NoEffect { key: String },
    ShortSecret { bytes: usize },
}

/// HS256 has keys of 256 bits.
const SECRET_BYTES_MIN: usize = 32;

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoEffect { key } => write!(f, "{key} has no effect yet in this build"),
            Self::ShortSecret { bytes } => write!(
                f,
                "auth.secret is {bytes} bytes long; below {SECRET_BYTES_MIN} it can be guessed from one token"
            ),
        }
    }
}

pub fn check(settings: &Settings, config: &Config) -> Result<Vec<Note>, Error> {
    let mut notes = Vec::new();
    for (key, path, setting) in settings.all() {
        let Some(setting) = setting.filter(|setting| setting.origin != Origin::Default) else { continue };
        match key.state {
            State::Works => {}
            State::NoEffect => notes.push(Note::NoEffect { key: path }),
            State::Only(possible) => check_built(key, path, setting, possible)?,
        }
    }
    check_node(settings)?;
    check_advertised(settings, "node.advertise_ws", &["ws", "wss"])?;
    check_advertised(settings, "node.advertise_tcp", &["tcp", "tls"])?;
    check_exposure(settings, config)?;
    check_rooms(settings, config)?;
    check_paths(settings)?;
    config.gateway.check()?;
    if let Some(secret) = config.auth.secret.as_ref().filter(|secret| secret.len() < SECRET_BYTES_MIN) {
        notes.push(Note::ShortSecret { bytes: secret.len() });
    }
    Ok(notes)
}

fn check_built(key: &Key, path: String, setting: &Setting, possible: &[&str]) -> Result<(), Error> {
    let text = match &setting.value {
        Value::Text(text) => text.clone(),
        other => other.to_string(),
    };
    if possible.contains(&text.as_str()) {
        return Ok(());
    }
    Err(Error::Unbuilt {
        key: path,
        value: if key.is_secret() { "<hidden>".into() } else { setting.value.to_string() },
        origin: setting.origin.clone(),
        possible: match possible {
            [] => "leave it unset".into(),
            all => format!("possible: {}", all.join(", ")),
        },
    })
}

fn check_node(settings: &Settings) -> Result<(), Error> {
    let origin = |path| settings.setting(path).map_or(Origin::Default, |setting| setting.origin.clone());
    let roles = settings.list("node.roles");
    let has = |role: &str| roles.iter().any(|one| one == role);
    if has("front") || !has("gateway") || !has("router") {
        return Err(Error::Unbuilt {
            key: "node.roles".into(),
            value: Value::List(roles.to_vec()).to_string(),
            origin: origin("node.roles"),
            possible: "possible: gateway and router in one process, with or without api".into(),
        });
    }
    match settings.text("node.id") {
        Some(id) if id.len() > 64 || id.contains(|c: char| c == ':' || c.is_control()) => Err(Error::Value {
            key: "node.id".into(),
            value: format!("{id:?}"),
            origin: origin("node.id"),
            takes: "1 to 64 bytes without ':' and control characters".into(),
        }),
        _ => Ok(()),
    }
}

/// `host:port` as the URL that clients take; what is a URL stays.
pub fn with_scheme(text: &str, scheme: &str, path: &str) -> String {
    if text.contains("://") { text.to_owned() } else { format!("{scheme}://{text}{path}") }
}

fn check_advertised(settings: &Settings, path: &str, schemes: &[&str]) -> Result<(), Error> {
    let Some(setting) = settings.setting(path) else { return Ok(()) };
    let text = settings.text(path).unwrap_or_default();
    let is_good = match text.split_once("://") {
        Some((scheme, rest)) => schemes.contains(&scheme) && !rest.is_empty() && !rest.starts_with('/'),
        None => text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
        }),
    };
    if is_good && !text.contains(char::is_whitespace) {
        return Ok(());
    }
    let urls = schemes.iter().map(|scheme| format!("{scheme}://host:port")).collect::<Vec<_>>().join(" or ");
    Err(Error::Value {
        key: path.into(),
        value: format!("{text:?}"),
        origin: setting.origin.clone(),
        takes: format!("host:port, {urls}"),
    })
}

/// Who asks the application says where it is.
fn check_rooms(settings: &Settings, config: &Config) -> Result<(), Error> {
    let Some(setting) = settings.setting("rooms.join") else { return Ok(()) };
    if config.gateway.room_join != RoomJoin::Hook || config.hooks.room_join_url.is_some() {
        return Ok(());
    }
    Err(Error::Value {
        key: "rooms.join".into(),
        value: setting.value.to_string(),
        origin: setting.origin.clone(),
        takes: "\"hook\" only together with hooks.room_join_url".into(),
    })
}

/// The WebSocket and HTTP share a listener.
fn check_paths(settings: &Settings) -> Result<(), Error> {
    for key in ["gateway.ws_path", "gateway.echo_path"] {
        if let (Some(path), Some(setting)) = (settings.text(key), settings.setting(key))
            && bowline_api::public::serves(path)
        {
            return Err(Error::Value {
                key: key.into(),
                value: setting.value.to_string(),
                origin: setting.origin.clone(),
                takes: "a path that HTTP does not have on the same listener, such as /ws; /, /v1/messages, /v1/place and \
                        /demo/... are taken"
                    .into(),
            });
        }
    }
    Ok(())
}

/// Without a configured key everybody who reaches a listener may be anybody.
fn check_exposure(settings: &Settings, config: &Config) -> Result<(), Error> {
    const TOKEN_KEYS: &str = "auth.secret, auth.public_key, auth.jwks_url or auth.hook_url";
    let tcp = config.gateway.tcp_listen.unwrap_or(config.gateway.listen);
    let rows = [
        ("gateway.listen", config.gateway.listen, config.auth.has_key(), TOKEN_KEYS),
        ("gateway.tcp_listen", tcp, config.auth.has_key(), TOKEN_KEYS),
        ("api.listen", config.api.listen, config.api.key.is_some() || !config.node.has_api, "api.key"),
    ];
    for (key, address, has_key, needed) in rows {
        if let Some(setting) = settings.setting(key)
            && !has_key
            && !address.ip().to_canonical().is_loopback()
        {
            return Err(Error::Exposed {
                key,
                value: setting.value.to_string(),
                origin: setting.origin.clone(),
                needed,
            });
        }
    }
    Ok(())
}
