//! What a client sees, held against the model: every frame as it comes off the wire, and every message as the client
//! library gives it to the application.

use crate::model::{Checked, Conversation, Model, broken};
use bowline_client::{Body, Message};
use bowline_protocol::{ConversationId, DeviceId, MessageId, Seq, UserId};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What one connection has seen.
#[derive(Default)]
pub struct View {
    /// The newest number of each conversation that was pushed, announced or acknowledged here.
    seen: BTreeMap<String, Seq>,
    /// The ids that were sent on this connection.
    pub sent: BTreeSet<String>,
    /// It goes on with the session of another connection, which may have been sent what is marked redelivered here.
    is_resumed: bool,
}

/// What one device has of each conversation, in one life of its storage.
#[derive(Default)]
pub struct Holdings(BTreeMap<String, Seq>);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields {
    #[serde(rename = "type")]
    kind: String,
    id: String,
    conversation_id: String,
    seq: Seq,
    from: String,
    ts: u64,
    user_id: String,
    device_id: String,
    redelivered: bool,
    resumed: bool,
    messages: Vec<Fields>,
    conversations: Vec<Row>,
    first_seq: Seq,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Row {
    conversation_id: String,
    first_seq: Seq,
    last_seq: Seq,
    read_seq: Seq,
    unread: u64,
}

/// Who sees it.
pub struct Seer<'a> {
    pub user: &'a UserId,
    pub device: &'a DeviceId,
    /// Ids that the device sent more than once: it may have seen both the ack and the push.
    pub repeated: &'a BTreeSet<String>,
}

impl View {
    /// A frame came from the server.
    pub fn on_frame(&mut self, model: &Model, seer: &Seer<'_>, json: &str) -> Checked {
        let Ok(frame) = serde_json::from_str::<Fields>(json) else {
            return if json == "pong" {
                Ok(())
            } else {
                broken("answers", format!("a frame that nobody can read: {json}"))
            };
        };
        match frame.kind.as_str() {
            "connected" => {
                if frame.user_id != seer.user.as_str() || frame.device_id != seer.device.as_str() {
                    let text = format!("{}/{} was greeted as {json}", seer.user, seer.device);
                    return broken("identity", text);
                }
                self.is_resumed = frame.resumed;
                Ok(())
            }
            "msg.push" => self.on_push(model, seer, &frame),
            "msg.ack" => self.on_ack(model, seer, &frame),
            "msg.receipt" => on_receipt(model, seer, json),
            "sync.notice" => self.on_notice(model, seer, &frame),
            "history.page" => on_history(model, seer, &frame),
            "conversation.page" => on_list(model, seer, &frame),
            "conversation.changed" => on_changed(model, seer, &frame),
            _ => Ok(()),
        }
    }

    fn on_push(&mut self, model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
        let conversation = shown(model, seer, frame)?;
        let (id, seq) = (&frame.conversation_id, frame.seq);
        let before = self.seen.get(id).copied();
        let is_ahead = before.is_none_or(|before| seq > before);
        if frame.redelivered && !(is_ahead && self.is_resumed) {
            if is_ahead {
                let text =
                    format!("{id} {seq} came as redelivered, and was neither pushed nor announced before");
                return broken("order", text);
            }
            return Ok(());
        }
        let own = conversation
            .message(seq)
            .is_some_and(|kept| kept.from == *seer.user && kept.device.as_ref() == Some(seer.device));
        if own && self.sent.contains(&frame.id) && !seer.repeated.contains(&frame.id) {
            return broken("sender", format!("{} was pushed to the device that sent it", frame.id));
        }
        if let Some(before) = before.filter(|_| !is_ahead) {
            return broken("order", format!("{id} {seq} was pushed after {before}"));
        }
        let begins = || self.is_resumed.then(|| told_before(model, conversation, seer, id)).flatten();
        if let Some(before) = before.or_else(begins)
            && let Some(missing) = (before + 1..seq).find(|n| !is_excused(conversation, seer, *n))
        {
            let text = format!("{id} {seq} was pushed after {before}, and {missing} was not");
            return broken("complete", text);
        }
        self.seen.insert(id.clone(), seq);
        Ok(())
    }

    fn on_ack(&mut self, model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
        acknowledged(model, seer.user, &frame.id, &frame.conversation_id, frame.seq, frame.ts)
    }

    fn on_notice(&mut self, model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
        for row in &frame.conversations {
            let id = &row.conversation_id;
            let conversation = known(model, seer, id)?;
            let most = conversation.others_in(seer.user, row.first_seq.saturating_sub(1), row.last_seq);
            if row.last_seq > conversation.last() || row.unread > most {
                let text = format!(
                    "{}/{}: {id} was announced up to {} with {} unread; there are {} with {most} of others",
                    seer.user,
                    seer.device,
                    row.last_seq,
                    row.unread,
                    conversation.last()
                );
                return broken("unread", text);
            }
            let seen = self.seen.entry(id.clone()).or_default();
            *seen = row.last_seq.max(*seen);
        }
        Ok(())
    }
}

/// An acknowledgement, by a frame or by an answer of the API: it must be what is durable.
pub fn acknowledged(
    model: &Model,
    user: &UserId,
    id: &str,
    conversation_id: &str,
    seq: Seq,
    ts: u64,
) -> Checked {
    let place = model.ids.get(&(user.clone(), MessageId::trusted(id)));
    let kept = place.and_then(|(c, n)| Some((c, n, model.conversations.get(c)?.message(*n)?)));
    match kept {
        Some((c, n, kept)) if c.as_str() == conversation_id && *n == seq && kept.ts == ts => Ok(()),
        Some((c, n, _)) => {
            let text = format!("{id} was acknowledged as {conversation_id} {seq}; it is {c} {n}");
            broken("once", text)
        }
        None => {
            let text = format!("{id} was acknowledged as {conversation_id} {seq} and is not durable");
            broken("durable", text)
        }
    }
}

/// From where a session that is gone on with has to be pushed everything, if that is known: what the device said that it
/// has, or where it began.
fn told_before(model: &Model, conversation: &Conversation, seer: &Seer<'_>, id: &str) -> Option<Seq> {
    let key = (seer.user.clone(), seer.device.clone(), ConversationId::trusted(id));
    model.said.received.get(&key).copied().max(conversation.start(seer.user, seer.device))
}

/// A message that was shown: it is durable, is what its sender sent, and may be seen.
fn shown<'m>(
    model: &'m Model,
    seer: &Seer<'_>,
    frame: &Fields,
) -> Result<&'m Conversation, crate::model::Violation> {
    let Fields { conversation_id: id, seq, .. } = frame;
    let conversation = known(model, seer, id)?;
    let Some(kept) = conversation.message(*seq) else {
        return broken("durable", format!("{id} {seq} was shown to {} and is not durable", seer.user));
    };
    if kept.id.as_str() != frame.id || kept.from.as_str() != frame.from || kept.ts != frame.ts {
        let text = format!("{id} {seq} was shown as {} of {}, it is {}", frame.id, frame.from, kept.id);
        return broken("durable", text);
    }
    if !kept.audience.contains(seer.user) && !kept.doubtful.contains(seer.user) {
        let text = format!("{id} {seq} was shown to {}, who was no member then", seer.user);
        return broken("members", text);
    }
    Ok(conversation)
}

/// A conversation of which something is shown: the user is a member, or was.
fn known<'m>(
    model: &'m Model,
    seer: &Seer<'_>,
    id: &str,
) -> Result<&'m Conversation, crate::model::Violation> {
    match model.conversations.get(&ConversationId::trusted(id)) {
        Some(conversation) if conversation.was_member(seer.user) => Ok(conversation),
        Some(_) => broken("members", format!("{} saw something of {id} and never was a member", seer.user)),
        None => broken("durable", format!("{} saw something of {id}, which does not exist", seer.user)),
    }
}

/// Is this a number that the device need not be sent?
fn is_excused(conversation: &Conversation, seer: &Seer<'_>, seq: Seq) -> bool {
    conversation.is_not_for(seer.user, seq)
        || conversation
            .message(seq)
            .is_some_and(|kept| kept.from == *seer.user && kept.device.as_ref() == Some(seer.device))
}

fn on_receipt(model: &Model, seer: &Seer<'_>, json: &str) -> Checked {
    let frame: Value = serde_json::from_str(json).unwrap_or_default();
    let (id, reader) = (frame["conversation_id"].as_str(), frame["user_id"].as_str());
    let (Some(id), Some(reader)) = (id, reader) else { return Ok(()) };
    let conversation = known(model, seer, id)?;
    let Some(member) = conversation.members.get(reader) else { return Ok(()) };
    let seq = frame["seq"].as_u64().unwrap_or(u64::MAX);
    let is_read = frame["kind"] == "read";
    let position = if is_read { member.read } else { member.delivered };
    if seq > position {
        let text = format!("{reader} was said to be at {seq} in {id}; {position} is durable ({json})");
        return broken("receipts", text);
    }
    if reader == seer.user.as_str() && !is_read {
        return broken("receipts", format!("{reader} got a receipt of its own ({json})"));
    }
    Ok(())
}

fn on_history(model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
    let mut before = None;
    for message in &frame.messages {
        let message = Fields {
            conversation_id: frame.conversation_id.clone(),
            id: message.id.clone(),
            from: message.from.clone(),
            seq: message.seq,
            ts: message.ts,
            ..Fields::default()
        };
        shown(model, seer, &message)?;
        if before.is_some_and(|before| message.seq != before + 1) || message.seq < frame.first_seq {
            let text = format!("{} {} follows {before:?} in a page", frame.conversation_id, message.seq);
            return broken("order", text);
        }
        before = Some(message.seq);
    }
    Ok(())
}

fn on_list(model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
    for row in &frame.conversations {
        let id = &row.conversation_id;
        let conversation = known(model, seer, id)?;
        let naive = conversation.others_in(seer.user, row.read_seq, row.last_seq);
        if row.last_seq > conversation.last() || row.unread != naive {
            let text = format!("{}: {id} was listed with {} unread, {naive} are", seer.user, row.unread);
            return broken("unread", text);
        }
    }
    Ok(())
}

fn on_changed(model: &Model, seer: &Seer<'_>, frame: &Fields) -> Checked {
    // Who was removed is told so.
    known(model, seer, &frame.conversation_id).map(|_| ())
}

impl Holdings {
    pub fn position(&self, conversation: &str) -> Option<Seq> {
        self.0.get(conversation).copied()
    }

    pub fn forget(&mut self) {
        self.0.clear();
    }

    pub fn conversations(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    /// The library gave a message to the application.
    pub fn on_message(&mut self, model: &Model, seer: &Seer<'_>, message: &Message) -> Checked {
        let id = &message.conversation_id;
        let fields = Fields {
            conversation_id: id.clone(),
            id: message.id.clone(),
            from: message.from.clone(),
            seq: message.seq,
            ts: message.ts,
            ..Fields::default()
        };
        let conversation = shown(model, seer, &fields)?;
        let stored = conversation.message(message.seq).map(|kept| &kept.body);
        let is_same = match (&message.body, stored) {
            (Body::Json(json), Some(bowline_protocol::Body::Json(stored))) => json.as_bytes() == &stored[..],
            (Body::Binary(bytes), Some(bowline_protocol::Body::Binary(stored))) => bytes == stored,
            _ => false,
        };
        if !is_same {
            return broken("durable", format!("{id} {} arrived with another body", message.seq));
        }
        let before = self.0.get(id).copied();
        if before.is_some_and(|before| message.seq <= before) {
            return broken("order", format!("{id} {} was handed out after {before:?}", message.seq));
        }
        self.check_gap(model, seer, id, message.seq)?;
        self.0.insert(id.clone(), message.seq);
        Ok(())
    }

    /// The device says that it has everything up to `seq`.
    pub fn on_told(&self, model: &Model, seer: &Seer<'_>, id: &str, seq: Seq) -> Checked {
        self.check_gap(model, seer, id, seq + 1)
    }

    /// Nothing is missing between what the device has and `next`.
    fn check_gap(&self, model: &Model, seer: &Seer<'_>, id: &str, next: Seq) -> Checked {
        let Some(conversation) = model.conversations.get(&ConversationId::trusted(id)) else { return Ok(()) };
        if !conversation.members.contains_key(seer.user) {
            // Whoever left gets nothing any more, not even what is missing.
            return Ok(());
        }
        // Of a device that has nothing yet, the server knows where it was.
        let key = (seer.user.clone(), seer.device.clone(), ConversationId::trusted(id));
        let said = model.said.received.get(&key).copied();
        let Some(from) =
            self.position(id).or(said.max(conversation.start(seer.user, seer.device))).or_else(|| {
                // A device that became known before this conversation was there.
                let is_known = model.devices.contains(&(seer.user.clone(), seer.device.clone()));
                is_known.then_some(0)
            })
        else {
            return Ok(());
        };
        match (from + 1..next).find(|n| !is_excused(conversation, seer, *n)) {
            Some(missing) => {
                let text = format!(
                    "{}/{} went from {from} to {next} in {id} and never had {missing}",
                    seer.user, seer.device
                );
                broken("complete", text)
            }
            None => Ok(()),
        }
    }
}
