//! `bowline chat`: a chat in the terminal, line by line, so that it works in a pipe as well.

use anyhow::{Context, anyhow};
use bowline_client::{Client, Config, Event, Events, Message, core::Target};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io::{BufRead, Write},
};
use tokio::sync::mpsc;

const HELP: &str = "\
/to USER            talk to a user
/open CONVERSATION  talk in a conversation
/list               your conversations
/history [N]        the last N messages (20)
/group NAME USER…   make a group and talk in it
/add USER…          add users to this group
/join ROOM          join a room and talk in it
/leave              leave this group or room
/quit               end
Anything else is sent.";

/// Whom to talk to, and as whom.
pub struct Options {
    pub user: String,
    pub to: Option<String>,
    pub conversation: Option<String>,
    pub room: Option<String>,
    pub client: Config,
}

pub fn run(options: Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(chat(options))
}

struct Chat {
    user: String,
    client: Client,
    /// The conversation that is shown and written to.
    open: Option<String>,
    /// The room that is written to instead, and whether the server has yet to say that this user is in it.
    room: Option<String>,
    is_joining: bool,
    /// Up to where each conversation was shown and told to be read.
    seen: HashMap<String, u64>,
}

async fn chat(options: Options) -> anyhow::Result<()> {
    let Options { user, to, conversation, room, client } = options;
    let (client, mut events) = bowline_client::connect(client)?;
    let open = conversation.or_else(|| to.map(|to| direct(&user, &to)));
    let mut chat = Chat { user, client, open, room: None, is_joining: false, seen: HashMap::new() };
    if let Some(room) = &room {
        chat.join(room).await?;
    }
    let (lines, mut line) = mpsc::channel(16);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        for text in std::io::stdin().lock().lines().map_while(Result::ok) {
            if lines.blocking_send(text).is_err() {
                return;
            }
        }
    })?;
    let mut greeted = false;
    let mut unanswered = 0_usize;
    let mut input_ended = false;
    loop {
        // A pipe that has ended: everything that was written is acknowledged before the program ends.
        if input_ended && greeted && unanswered == 0 {
            return chat.finish(&mut events).await;
        }
        tokio::select! {
            event = events.recv() => {
                let event = event.context("the client ended")?;
                match &event {
                    Event::Acked { .. } | Event::Failed { .. } => unanswered = unanswered.saturating_sub(1),
                    Event::RoomRefused { room: refused, code, message } if room.as_ref() == Some(refused) => {
                        return Err(anyhow!("not let into the room {refused}: {code}: {message}"));
                    }
                    Event::Stopped { code, reason } => return Err(anyhow!("the server closed for good: {code} {reason}")),
                    _ => {}
                }
                let connected = matches!(event, Event::Connected { .. });
                chat.show(event).await?;
                if connected && !greeted {
                    greeted = true;
                    chat.open_conversation().await?;
                }
            }
            text = line.recv(), if greeted && !chat.is_joining && !input_ended => match text {
                None => input_ended = true,
                Some(text) if text.trim() == "/quit" => return Ok(()),
                Some(text) => unanswered += usize::from(chat.on_line(text.trim()).await?),
            },
        }
    }
}

impl Chat {
    /// Carries a line out; true when it was sent as a message.
    async fn on_line(&mut self, line: &str) -> anyhow::Result<bool> {
        let mut words = line.split_whitespace();
        match words.next() {
            None => {}
            Some("/help") => say(HELP)?,
            Some("/to") => match words.next() {
                Some(peer) => {
                    self.room = None;
                    self.open = Some(direct(&self.user, peer));
                    self.open_conversation().await?;
                }
                None => say("/to takes a user")?,
            },
            Some("/open") => match words.next() {
                Some(id) => {
                    self.room = None;
                    self.open = Some(id.to_owned());
                    self.open_conversation().await?;
                }
                None => say("/open takes a conversation id; /list shows yours")?,
            },
            Some("/list") => self.list().await?,
            Some("/history") => self.history(words.next().and_then(|n| n.parse().ok()).unwrap_or(20)).await?,
            Some("/group") => {
                let (name, members): (Option<&str>, Vec<&str>) = (words.next(), words.collect());
                let frame = json!({"type": "conversation.create", "name": name, "members": members});
                if let Some(answer) = self.ask(frame).await? {
                    self.room = None;
                    self.open = answer["conversation_id"].as_str().map(str::to_owned);
                    self.open_conversation().await?;
                }
            }
            Some("/add") => {
                let users: Vec<&str> = words.collect();
                self.ask(json!({"type": "group.add", "conversation_id": self.open, "users": users})).await?;
            }
            Some("/join") => match words.next() {
                Some(room) => self.join(room).await?,
                None => say("/join takes the name of a room")?,
            },
            Some("/leave") if self.room.is_some() => {
                if let Some(room) = self.room.take() {
                    self.client.leave(&room).await?;
                    say(&format!("-- left {room}"))?;
                }
            }
            Some("/leave") => {
                self.ask(json!({"type": "group.leave", "conversation_id": self.open})).await?;
            }
            Some(command) if command.starts_with('/') => {
                say(&format!("there is no command {command}; /help names them"))?
            }
            Some(_) if self.room.is_some() => {
                let body = bowline_client::Body::Json(json!({"text": line}).to_string());
                if let Some(room) = &self.room
                    && let Err(error) = self.client.send_in_room(room, body).await
                {
                    say(&format!("! not sent: {error}"))?;
                }
            }
            Some(_) => match &self.open {
                None => say("nobody to send to; /to USER opens a conversation")?,
                Some(id) => {
                    let body = bowline_client::Body::Json(json!({"text": line}).to_string());
                    self.client.send(Target::Conversation(id.clone()), body).await?;
                    return Ok(true);
                }
            },
        }
        Ok(false)
    }

    /// Joins a room; lines wait until the server has answered.
    async fn join(&mut self, room: &str) -> anyhow::Result<()> {
        self.client.join(room).await?;
        (self.room, self.is_joining) = (Some(room.to_owned()), true);
        Ok(())
    }

    /// What was sent in a room has no acknowledgement: leaving is answered after all of it has come back.
    async fn finish(&mut self, events: &mut Events) -> anyhow::Result<()> {
        let Some(room) = self.room.clone() else { return Ok(()) };
        let client = self.client.clone();
        let left = client.request(json!({"type": "room.leave", "room": room}));
        tokio::pin!(left);
        loop {
            tokio::select! {
                answer = &mut left => {
                    answer?;
                    break;
                }
                event = events.recv() => self.show(event.context("the client ended")?).await?,
            }
        }
        while let Ok(event) = events.try_recv() {
            self.show(event).await?;
        }
        Ok(())
    }

    async fn open_conversation(&mut self) -> anyhow::Result<()> {
        if self.room.is_some() {
            return Ok(());
        }
        match &self.open {
            None => say("/to USER or /open CONVERSATION begins; /help shows everything"),
            Some(id) => {
                say(&format!("-- {id}"))?;
                self.history(20).await
            }
        }
    }

    async fn history(&mut self, limit: u32) -> anyhow::Result<()> {
        let Some(id) = self.open.clone() else { return say("no conversation is open") };
        let frame = json!({"type": "history", "conversation_id": id, "limit": limit.clamp(1, 200)});
        let Some(page) = self.ask(frame).await? else { return Ok(()) };
        for message in page["messages"].as_array().into_iter().flatten() {
            let text = said(&message["body"]);
            let seq = message["seq"].as_u64().unwrap_or_default();
            say(&format!("#{seq} {}: {text}", message["from"].as_str().unwrap_or("?")))?;
            self.mark_read(&id, seq).await?;
        }
        Ok(())
    }

    async fn list(&mut self) -> anyhow::Result<()> {
        let Some(page) = self.ask(json!({"type": "conversation.list", "limit": 50})).await? else {
            return Ok(());
        };
        for row in page["conversations"].as_array().into_iter().flatten() {
            let id = row["conversation_id"].as_str().unwrap_or("?");
            let name = row["name"].as_str().map(|n| format!(" {n:?}")).unwrap_or_default();
            say(&format!("{id}{name}  {} unread, {} messages", row["unread"], row["last_seq"]))?;
        }
        Ok(())
    }

    /// Asks the server; a refusal is shown.
    async fn ask(&self, frame: Value) -> anyhow::Result<Option<Value>> {
        let answer = self.client.request(frame).await?;
        if answer["type"] == "error" {
            say(&format!("! {}: {}", text(&answer["code"]), text(&answer["message"])))?;
            return Ok(None);
        }
        Ok(Some(answer))
    }

    async fn show(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Connected { user_id, device_id, node_id, .. } => {
                say(&format!("-- connected as {user_id} (device {device_id}, node {node_id})"))
            }
            Event::Message(message) => self.show_message(message).await,
            Event::RoomJoined { room, members, is_gap } => {
                self.is_joining &= self.room.as_ref() != Some(&room);
                let gap = if is_gap { "; something was missed" } else { "" };
                say(&format!("-- in room {room}, {members} there{gap}"))
            }
            Event::RoomRefused { room, code, message } => {
                if self.room.as_ref() == Some(&room) {
                    (self.room, self.is_joining) = (None, false);
                }
                say(&format!("! not let into the room {room}: {code}: {message}"))
            }
            Event::RoomMessage(message) => {
                let from = if message.from.is_empty() { "*" } else { &message.from };
                let elsewhere = match self.room.as_ref() == Some(&message.room) {
                    true => String::new(),
                    false => format!("  ({})", message.room),
                };
                say(&format!("#{} {from}: {}{elsewhere}", message.offset, shown(&message.body)))
            }
            Event::Acked { conversation_id, seq, .. } => {
                say(&format!("#{seq} stored{}", self.elsewhere(&conversation_id)))
            }
            Event::Failed { code, message, .. } => say(&format!("! not sent: {code}: {message}")),
            Event::Receipt { conversation_id, seq, user_id, count, is_read } => {
                let who = user_id.unwrap_or_else(|| format!("{} members", count.unwrap_or_default()));
                let what = if is_read { "read" } else { "received" };
                say(&format!("-- {who} {what} up to #{seq}{}", self.elsewhere(&conversation_id)))
            }
            Event::Waiting { conversation_id, unread, .. } => {
                say(&format!("-- {unread} unread in {conversation_id}"))
            }
            Event::Disconnected { code, reason, retry_in_ms } => {
                let code = code.map(|c| format!("{c} ")).unwrap_or_default();
                say(&format!(
                    "-- disconnected: {code}{reason}; next try in {:.1} s",
                    retry_in_ms as f64 / 1000.0
                ))
            }
            Event::Frame(frame) if frame["type"] == "conversation.changed" => {
                let users =
                    frame["users"].as_array().map(|u| u.iter().map(text).collect::<Vec<_>>().join(", "));
                let users = users.unwrap_or_default();
                say(&format!("-- {}: {} {users}", text(&frame["conversation_id"]), text(&frame["change"])))
            }
            Event::Frame(frame) if frame["type"] == "error" => {
                say(&format!("! {}: {}", text(&frame["code"]), text(&frame["message"])))
            }
            Event::Frame(_) | Event::Answer { .. } | Event::Stopped { .. } => Ok(()),
        }
    }

    async fn show_message(&mut self, message: Message) -> anyhow::Result<()> {
        let body = shown(&message.body);
        say(&format!(
            "#{} {}: {body}{}",
            message.seq,
            message.from,
            self.elsewhere(&message.conversation_id)
        ))?;
        if self.open.as_ref() == Some(&message.conversation_id) {
            self.mark_read(&message.conversation_id, message.seq).await?;
        }
        Ok(())
    }

    async fn mark_read(&mut self, conversation: &str, seq: u64) -> anyhow::Result<()> {
        let seen = self.seen.entry(conversation.to_owned()).or_default();
        if seq > *seen {
            *seen = seq;
            self.client.read(conversation, seq).await?;
        }
        Ok(())
    }

    /// Names the conversation when it is not the open one.
    fn elsewhere(&self, conversation: &str) -> String {
        if self.open.as_deref() == Some(conversation) { String::new() } else { format!("  ({conversation})") }
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn shown(body: &bowline_client::Body) -> String {
    match body {
        bowline_client::Body::Json(json) => {
            serde_json::from_str::<Value>(json).map(|v| said(&v)).unwrap_or_else(|_| json.clone())
        }
        bowline_client::Body::Binary(bytes) => format!("({} bytes)", bytes.len()),
    }
}

/// What a body says: its `text`, or all of it.
fn said(body: &Value) -> String {
    text(body.get("text").filter(|text| text.is_string()).unwrap_or(body))
}

/// The direct conversation of two users.
fn direct(one: &str, other: &str) -> String {
    let (a, b) = if one.as_bytes() <= other.as_bytes() { (one, other) } else { (other, one) };
    format!("d:{a}:{b}")
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("standard output is gone")
}
