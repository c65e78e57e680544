//! What the clients saw, in the order in which it was noted: one JSON object a line.
//!
//! A send is noted before its bytes leave, everything else when it has arrived. So whatever depends on another event
//! stands behind it, and the judge can read the history once, from top to bottom.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufRead, BufReader, BufWriter, Write},
    path::Path,
    sync::Arc,
};

/// A name that many events share.
pub type Name = Arc<str>;

/// Who takes part. The first line of a history.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct World {
    pub seed: u64,
    pub devices: Vec<DeviceInfo>,
    pub conversations: Vec<ConversationInfo>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub name: Name,
    pub user: Name,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConversationInfo {
    pub id: Name,
    /// Users.
    pub members: Vec<Name>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Microseconds since the run began.
    pub us: u64,
    /// Whose event it is; none for what concerns the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Name>,
    #[serde(flatten)]
    pub what: What,
}

/// A message as the server told it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Told {
    pub conversation: Name,
    pub seq: u64,
    pub id: String,
    pub from: String,
    pub ts: u64,
    /// The body is what was sent under this id.
    pub intact: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    pub accepted: u64,
    pub delivered: u64,
    pub waiting: u64,
    pub expired: u64,
    pub dropped: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// The device begins to connect.
    Opening,
    Connected {
        resumed: bool,
    },
    Closed {
        /// The client ended it, on purpose.
        by_us: bool,
        why: String,
    },
    Send {
        conversation: Name,
        id: String,
        /// The id was sent before.
        again: bool,
    },
    Ack {
        conversation: String,
        id: String,
        seq: u64,
        ts: u64,
    },
    Refused {
        id: String,
        code: String,
        /// The code invites to send it again.
        for_now: bool,
    },
    Push {
        #[serde(flatten)]
        told: Told,
        redelivered: bool,
    },
    Notice {
        conversation: String,
        first_seq: u64,
        last_seq: u64,
        unread: u64,
    },
    Recv {
        conversation: Name,
        seq: u64,
    },
    Read {
        conversation: Name,
        seq: u64,
    },
    Receipt {
        conversation: String,
        seq: u64,
        user: String,
        read: bool,
    },
    /// A request with an answer: history or list.
    Ask {
        request: String,
    },
    Answer {
        request: String,
    },
    /// A page of history begins; its rows follow.
    Page {
        conversation: Name,
        after: u64,
    },
    Row {
        #[serde(flatten)]
        told: Told,
    },
    /// From here on the device looks at everything, from the first number on.
    Reviewing,
    /// It has seen everything that there is.
    Reviewed,
    /// It could not get that far in time.
    Unfinished {
        what: String,
    },
    /// An entry of the list of conversations, in the review.
    Listed {
        conversation: String,
        last_seq: u64,
        read_seq: u64,
        unread: u64,
    },
    Killed,
    Ready,
    Ledger {
        #[serde(flatten)]
        ledger: Ledger,
        /// Everything was received and acknowledged, and nobody else uses this server.
        at_rest: bool,
    },
}

/// Writes a history.
pub struct Writer {
    out: BufWriter<File>,
}

impl Writer {
    pub fn create(path: &Path, world: &World) -> anyhow::Result<Self> {
        let file = File::options().create_new(true).write(true).open(path).with_context(|| {
            format!("the history {} cannot be made; it must not exist yet", path.display())
        })?;
        let mut writer = Self { out: BufWriter::with_capacity(1 << 18, file) };
        writer.line(world)?;
        Ok(writer)
    }

    pub fn write(&mut self, entry: &Entry) -> anyhow::Result<()> {
        self.line(entry)
    }

    fn line(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        serde_json::to_writer(&mut self.out, value).context("the history cannot be written")?;
        self.out.write_all(b"\n").context("the history cannot be written")
    }

    pub fn finish(mut self) -> anyhow::Result<()> {
        self.out.flush().context("the history cannot be written")
    }
}

/// The most lines that an explanation shows.
const EVENTS_MAX: usize = 24;

/// What a history has on one message, as lines to read; kills between them included.
pub fn events_of(
    path: &Path,
    conversation: Option<&str>,
    seq: Option<u64>,
    id: Option<&str>,
) -> anyhow::Result<Vec<String>> {
    let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
    let conversation = conversation.map(|text| format!("\"conversation\":{}", quoted(text)));
    let seq = seq.map(|seq| format!("\"seq\":{seq},"));
    let id = id.map(|text| format!("\"id\":{}", quoted(text)));
    let is_of = |line: &str| {
        let has = |part: &Option<String>| part.as_deref().is_some_and(|part| line.contains(part));
        has(&conversation) && (has(&seq) || has(&id)) || (has(&id) && line.contains("\"event\":\"refused\""))
    };
    let mut lines = Vec::new();
    let mut between: Vec<String> = Vec::new();
    let mut left = 0;
    for line in BufReader::new(File::open(path)?).lines().skip(1) {
        let line = line?;
        if is_of(&line) {
            if lines.len() + between.len() < EVENTS_MAX {
                lines.append(&mut between);
                lines.push(human(&line));
            } else {
                left += 1;
            }
        } else if !lines.is_empty()
            && between.len() < 3
            && (line.contains("\"event\":\"killed\"") || line.contains("\"event\":\"ready\""))
        {
            between.push(human(&line));
        }
    }
    if left > 0 {
        lines.push(format!("and {left} more"));
    }
    Ok(lines)
}

/// `12.345678 s  u1/a  push  …`
fn human(line: &str) -> String {
    let Ok(entry) = serde_json::from_str::<serde_json::Value>(line) else { return line.to_owned() };
    let field = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let seconds = entry["us"].as_u64().unwrap_or_default() as f64 / 1e6;
    let mut text = format!("{seconds:10.6} s  {:<14} {:<8}", field("device"), field("event"));
    for (name, value) in entry.as_object().into_iter().flatten() {
        if !["us", "device", "event", "conversation"].contains(&name.as_str()) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text += &format!(" {name} {value}");
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_lines_that_can_be_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history.ndjson");
        let mut writer = Writer::create(&path, &World::default()).unwrap();
        let told = Told {
            conversation: "d:a:b".into(),
            seq: 3,
            id: "x\"1".into(),
            from: "a".into(),
            ts: 5,
            intact: true,
        };
        let entries = [
            Entry {
                us: 1,
                device: Some("a/1".into()),
                what: What::Send { conversation: "d:a:b".into(), id: "x\"1".into(), again: false },
            },
            Entry { us: 2, device: None, what: What::Killed },
            Entry { us: 3, device: Some("b/1".into()), what: What::Push { told, redelivered: false } },
            Entry {
                us: 4,
                device: Some("b/1".into()),
                what: What::Recv { conversation: "d:a:b".into(), seq: 30 },
            },
        ];
        for entry in &entries {
            writer.write(entry).unwrap();
        }
        writer.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let read: Vec<Entry> = text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, entries);
        let events = events_of(&path, Some("d:a:b"), Some(3), Some("x\"1")).unwrap();
        assert_eq!(events.len(), 3, "{events:?}");
        assert!(events[0].contains("a/1") && events[0].contains("send"), "{events:?}");
        assert!(events[1].contains("killed") && events[2].contains("push"), "{events:?}");
        assert!(Writer::create(&path, &World::default()).is_err(), "an existing file is not overwritten");
    }
}
