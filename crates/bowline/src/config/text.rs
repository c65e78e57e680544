//! Configuration as text: the effective values, an example file, the reference.

use super::{
    Settings, Value,
    keys::{KEYS, Key, Kind, State},
};
use std::fmt::Write;

const HIDDEN: &str = "<hidden>";

/// The effective values with their origin, as a TOML file would have them.
pub fn print(settings: &Settings) -> String {
    let mut out = String::new();
    let rows = settings.all();
    let shown: Vec<(String, String)> = rows
        .iter()
        .map(|(key, path, setting)| match setting {
            None => (format!("# {path} is not set"), unset_note(key).to_owned()),
            Some(setting) if key.is_secret() => {
                (format!("{path} = \"{HIDDEN}\""), setting.origin.to_string())
            }
            Some(setting) => (format!("{path} = {}", setting.value), setting.origin.to_string()),
        })
        .collect();
    let width = shown.iter().map(|(line, _)| line.chars().count()).filter(|n| *n <= 56).max().unwrap_or(0);
    for (line, note) in shown {
        if note.is_empty() {
            let _ = writeln!(out, "{line}");
        } else {
            let _ = writeln!(out, "{line:width$}  # {note}");
        }
    }
    out
}

fn unset_note(key: &Key) -> &'static str {
    key.zero.strip_prefix("not set: ").unwrap_or(key.zero.strip_prefix("not set, ").unwrap_or(""))
}

/// The same for programs: an object by key, each with `value` and `origin`.
pub fn print_json(settings: &Settings) -> serde_json::Value {
    let rows = settings.all().into_iter().map(|(key, path, setting)| {
        let (value, origin) = match setting {
            None => (serde_json::Value::Null, "default".to_owned()),
            Some(setting) if key.is_secret() => (HIDDEN.into(), setting.origin.to_string()),
            Some(setting) => {
                let value = match &setting.value {
                    Value::Bool(value) => (*value).into(),
                    Value::Int(value) => (*value).into(),
                    Value::Text(text) => text.as_str().into(),
                    Value::List(items) => items.clone().into(),
                };
                (value, setting.origin.to_string())
            }
        };
        (path, serde_json::json!({ "value": value, "origin": origin }))
    });
    serde_json::Value::Object(rows.collect())
}

/// A TOML file with every key, commented out, at its default.
pub fn example() -> String {
    let mut out = String::from(
        "# Every key of Bowline at its default. Remove the # in front of a key to change it.\n\
         # The environment wins over this file: BOWLINE_GATEWAY__PING_AFTER_MS=30000; flags and --set win over both.\n",
    );
    let mut table = String::new();
    for key in KEYS {
        let path = key.path.replace('*', "helper");
        let (place, name) = path.split_once('.').unwrap_or(("", &path));
        if place != table {
            let _ = write!(out, "\n[{place}]\n");
            table = place.to_owned();
        }
        let _ = writeln!(out, "# {}", sentence(key));
        let value = key.default.unwrap_or(match key.kind {
            Kind::Int { .. } => "0",
            Kind::Bool => "false",
            Kind::List | Kind::Set(_) => "[]",
            _ => "\"\"",
        });
        let _ = writeln!(out, "# {name} = {value}");
    }
    out
}

fn sentence(key: &Key) -> String {
    let mut text = format!("{}.", key.meaning);
    match key.kind {
        Kind::Int { unit, .. } if !unit.is_empty() => {
            let _ = write!(text, " In {unit}.");
        }
        Kind::Choice(_) | Kind::Set(_) => {
            let _ = write!(text, " Takes {}.", key.kind.takes());
        }
        _ => {}
    }
    if !key.zero.is_empty() {
        let _ = write!(text, " {}{}.", key.zero[..1].to_uppercase(), &key.zero[1..]);
    }
    if let Some(state) = state(key) {
        let _ = write!(text, " {state}.");
    }
    text
}

fn state(key: &Key) -> Option<String> {
    match key.state {
        State::Works => None,
        State::NoEffect => Some("No effect yet".into()),
        State::Only([]) => Some("Not built yet: leave it unset".into()),
        State::Only(values) => Some(format!("Built so far: {}", values.join(", "))),
    }
}

/// `docs/config.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         Generated from the table in `crates/bowline/src/config/keys.rs` by `bowline config reference`.\n\n\
         Values come from, later ones winning: the default, the TOML file given with `--config`, the environment\n\
         (`BOWLINE_GATEWAY__PING_AFTER_MS=30000`; lists with commas), the flags of `serve`, and `--set KEY=VALUE`.\n\
         An unknown key, a value that a key does not take, and a choice that is not built end the start with exit\n\
         code 2. `bowline config print` shows what holds and why, `config check` judges it, `config example` prints\n\
         a file to begin with. All durations are whole milliseconds. An empty text takes back what an earlier layer\n\
         has set.\n",
    );
    let mut table = "";
    for key in KEYS {
        let place = key.path.split('.').next().unwrap_or(key.path);
        if place != table {
            let _ = write!(out, "\n## {place}\n\n| key | takes | default | meaning |\n|---|---|---|---|\n");
            table = place;
        }
        let default = key.default.map_or("–".to_owned(), |text| format!("`{text}`"));
        let mut meaning = key.meaning.to_owned();
        for part in [Some(key.zero.to_owned()), state(key)].into_iter().flatten() {
            if !part.is_empty() {
                let _ = write!(meaning, ". {}{}", part[..1].to_uppercase(), &part[1..]);
            }
        }
        let path = key.path.replace('*', "<name>");
        let _ = writeln!(out, "| `{path}` | {} | {default} | {meaning} |", cell(key.kind));
    }
    out
}

fn cell(kind: Kind) -> String {
    match kind {
        Kind::Int { max, unit, .. } if max > 1 << 30 => {
            let Kind::Int { min, .. } = kind else { return String::new() };
            format!("{min} and more{}{unit}", if unit.is_empty() { "" } else { " " })
        }
        Kind::Int { min, max, unit } => {
            format!("{min}–{max}{}{unit}", if unit.is_empty() { "" } else { " " })
        }
        Kind::Secret => "a text, never shown".into(),
        other => other.takes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;

    #[test]
    fn docs_config_md_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(found == reference(), "run: cargo run -p bowline -- config reference > docs/config.md");
    }

    #[test]
    fn the_example_names_every_key_and_parses_when_it_is_uncommented() {
        let paths: Vec<String> = KEYS.iter().map(|key| key.path.replace('*', "helper")).collect();
        let names: Vec<&str> = paths.iter().filter_map(|path| Some(path.split_once('.')?.1)).collect();
        let text: String = example()
            .lines()
            .filter_map(|line| {
                let bare = line.strip_prefix("# ").unwrap_or(line);
                let is_key = bare.split(" = ").next().is_some_and(|name| names.contains(&name));
                (is_key || bare.starts_with('[')).then(|| format!("{bare}\n"))
            })
            .collect();
        let table: toml::Table = toml::from_str(&text).unwrap();
        for key in KEYS {
            let path = key.path.replace('*', "helper");
            let found = path
                .split('.')
                .try_fold(&toml::Value::Table(table.clone()), |at, name| at.get(name))
                .is_some();
            assert!(found, "{path}");
        }
    }

    #[test]
    fn secrets_are_never_shown() {
        let settings = Sources {
            sets: vec!["auth.secret=very-secret".into(), "api.key=very-secret".into()],
            ..Sources::default()
        }
        .read()
        .unwrap();
        assert!(!print(&settings).contains("very-secret"));
        assert!(!print_json(&settings).to_string().contains("very-secret"));
    }
}
