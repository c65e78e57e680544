//! Reads the layers, one over the other.

use super::{
    Error, Origin, Setting, Settings, Value,
    keys::{self, KEYS, Key, Kind},
};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// What the operator gave, beside the defaults.
#[derive(Debug, Default)]
pub struct Sources {
    pub file: Option<PathBuf>,
    pub environment: Vec<(OsString, OsString)>,
    /// Flag, key and value.
    pub flags: Vec<(&'static str, &'static str, String)>,
    /// `KEY=VALUE`.
    pub sets: Vec<String>,
}

const PREFIX: &str = "BOWLINE_";

impl Sources {
    /// All layers, every value checked against its key.
    pub fn read(&self) -> Result<Settings, Error> {
        let mut values = BTreeMap::new();
        for key in KEYS {
            if let Some(default) = key.default {
                let value = default_value(key, default);
                values.insert(key.path.to_owned(), Setting { value, origin: Origin::Default });
            }
        }
        let mut settings = Settings { values };
        if let Some(path) = &self.file {
            read_file(path, &mut settings)?;
        }
        for (name, value) in &self.environment {
            read_variable(name, value, &mut settings)?;
        }
        for (flag, key, value) in &self.flags {
            put_text(&mut settings, key, value, Origin::Flag(flag))?;
        }
        for text in &self.sets {
            let (key, value) = text.split_once('=').ok_or_else(|| Error::Set { text: text.clone() })?;
            put_text(&mut settings, key.trim(), value.trim(), Origin::Flag("--set"))?;
        }
        Ok(settings)
    }
}

fn default_value(key: &Key, text: &str) -> Value {
    let table = toml::from_str::<toml::Table>(&format!("value = {text}"));
    let value = table.ok().and_then(|mut table| table.remove("value")).and_then(|value| match value {
        toml::Value::Boolean(value) => Some(Value::Bool(value)),
        toml::Value::Integer(value) => Some(Value::Int(value as u64)),
        toml::Value::String(text) => Some(Value::Text(text)),
        toml::Value::Array(items) => items
            .into_iter()
            .map(|item| item.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .map(Value::List),
        _ => None,
    });
    let value = value.expect("defaults are written as TOML");
    debug_assert!(is_allowed(key.kind, &value), "the default of {} is not allowed", key.path);
    value
}

// The file

fn read_file(path: &Path, settings: &mut Settings) -> Result<(), Error> {
    let text = std::fs::read_to_string(path).map_err(|error| Error::File { path: path.into(), error })?;
    let table = DeTable::parse(&text)
        .map_err(|error| Error::Syntax { path: path.into(), message: error.to_string().trim_end().into() })?;
    read_table(&Document { path, text: &text }, "", table.get_ref(), settings)
}

struct Document<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Document<'_> {
    fn origin(&self, at: usize) -> Origin {
        let before = self.text.as_bytes().iter().take(at);
        Origin::File { path: self.path.into(), line: 1 + before.filter(|b| **b == b'\n').count() }
    }
}

fn read_table(
    document: &Document<'_>,
    prefix: &str,
    table: &DeTable<'_>,
    settings: &mut Settings,
) -> Result<(), Error> {
    for (name, value) in table.iter() {
        let path = if prefix.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{prefix}.{}", name.get_ref())
        };
        let origin = document.origin(name.span().start);
        match (keys::find(&path), value.get_ref()) {
            (Some(key), _) => put_toml(settings, key, path, value, document, origin)?,
            (None, DeValue::Table(inner)) if !inner.is_empty() => {
                read_table(document, &path, inner, settings)?
            }
            (None, DeValue::Table(_)) if is_table(&path) => {}
            (None, _) => return Err(unknown(path, origin)),
        }
    }
    Ok(())
}

fn is_table(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
        || path.strip_prefix("agents.").is_some_and(|name| !name.contains('.'))
}

fn put_toml(
    settings: &mut Settings,
    key: &Key,
    path: String,
    value: &Spanned<DeValue<'_>>,
    document: &Document<'_>,
    origin: Origin,
) -> Result<(), Error> {
    let found = match value.get_ref() {
        DeValue::Boolean(value) => Some(Value::Bool(*value)),
        DeValue::String(text) => Some(Value::Text(text.to_string())),
        DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix()).ok().map(Value::Int),
        DeValue::Array(items) => items
            .iter()
            .map(|item| item.get_ref().as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .map(Value::List),
        _ => None,
    };
    let written = document.text.get(value.span()).unwrap_or_default();
    put(settings, key, path, found, written, origin)
}

// The environment

/// `BOWLINE_GATEWAY__PING_AFTER_MS`. A name without `__` is no configuration: orchestrators make such names by
/// themselves (`BOWLINE_PORT`, `BOWLINE_SERVICE_HOST`). One that only lacks an underscore is an error, though.
fn read_variable(name: &OsString, value: &OsString, settings: &mut Settings) -> Result<(), Error> {
    let Some(name) = name.to_str() else { return Ok(()) };
    let Some(rest) = name.strip_prefix(PREFIX) else { return Ok(()) };
    if matches!(rest, "API_URL" | "API_KEY") {
        return Ok(());
    }
    let path = rest.to_ascii_lowercase().replace("__", ".");
    let origin = Origin::Environment(name.to_owned());
    if !rest.contains("__") {
        let slip = KEYS.iter().find(|key| key.path.replace('.', "_") == path);
        return match slip {
            Some(key) => Err(Error::Unknown {
                key: path,
                origin,
                nearest: Some(format!("{PREFIX}{}", key.path.replace('.', "__").to_ascii_uppercase())),
            }),
            None => Ok(()),
        };
    }
    let value = value.to_str().ok_or_else(|| Error::Environment { name: name.to_owned() })?;
    put_text(settings, &path, value, origin)
}

// Values

/// Takes a value that came as text: from the environment, a flag or `--set`.
fn put_text(settings: &mut Settings, path: &str, text: &str, origin: Origin) -> Result<(), Error> {
    let key = keys::find(path).ok_or_else(|| unknown(path.to_owned(), origin.clone()))?;
    let value = match key.kind {
        Kind::Bool => text.parse().ok().map(Value::Bool),
        Kind::Int { .. } => text.parse().ok().map(Value::Int),
        Kind::List | Kind::Set(_) if text.starts_with('[') => {
            toml::from_str::<toml::Table>(&format!("value = {text}"))
                .ok()
                .and_then(|mut table| table.remove("value"))
                .and_then(|value| value.try_into::<Vec<String>>().ok())
                .map(Value::List)
        }
        Kind::List | Kind::Set(_) => Some(Value::List(
            text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect(),
        )),
        _ => Some(Value::Text(text.to_owned())),
    };
    put(settings, key, path.to_owned(), value, text, origin)
}

fn put(
    settings: &mut Settings,
    key: &Key,
    path: String,
    value: Option<Value>,
    written: &str,
    origin: Origin,
) -> Result<(), Error> {
    match value {
        // An empty text takes back what an earlier layer has set.
        Some(Value::Text(text)) if text.is_empty() && key.default.is_none() => {
            settings.values.remove(&path);
            Ok(())
        }
        Some(value) if is_allowed(key.kind, &value) => {
            settings.values.insert(path, Setting { value, origin });
            Ok(())
        }
        _ => Err(Error::Value {
            value: if key.is_secret() { "<hidden>".into() } else { written.chars().take(128).collect() },
            takes: key.kind.takes(),
            key: path,
            origin,
        }),
    }
}

fn is_allowed(kind: Kind, value: &Value) -> bool {
    match (kind, value) {
        (Kind::Bool, Value::Bool(_)) | (Kind::List, Value::List(_)) => true,
        (Kind::Int { min, max, .. }, Value::Int(value)) => (min..=max).contains(value),
        (Kind::Text | Kind::Secret, Value::Text(text)) => !text.is_empty(),
        (Kind::Address, Value::Text(text)) => {
            text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        }
        (Kind::Url, Value::Text(text)) => ["http://", "https://"]
            .iter()
            .any(|scheme| text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())),
        (Kind::Path, Value::Text(text)) => {
            text.starts_with('/') && !text.contains(|c: char| c.is_whitespace() || c == '?' || c == '#')
        }
        (Kind::Choice(all), Value::Text(text)) => all.contains(&text.as_str()),
        (Kind::Set(all), Value::List(items)) => items.iter().all(|item| all.contains(&item.as_str())),
        _ => false,
    }
}

fn unknown(key: String, origin: Origin) -> Error {
    let nearest = KEYS
        .iter()
        .map(|known| (strsim::damerau_levenshtein(known.path, &key), known.path))
        .min()
        .filter(|(distance, _)| *distance <= (key.len() / 3).max(2))
        .map(|(_, path)| path.to_owned());
    Error::Unknown { key, origin, nearest }
}
