//! What is looked up in the store, and what goes on when the answer is there: conversations that are loaded on
//! demand, history, lists.

use crate::{
    Action, Asker, Core, Now, Origin, Slot,
    batch::Entry,
    conversation::{Conversation, Senders, named_by},
    deliver::Repeat,
    forbidden, limits,
    persist::{Found, Message, Query, Summary},
    resume::Resume,
    retention::Sweep,
    timers::Timer,
    unavailable,
    users::ConnKey,
};
use bowline_protocol::{
    ConversationId, DeviceId, ErrorCode, Frame, Millis, Seq, UserId,
    error::Refusal,
    frame::{LAST_MESSAGE_BODY_BYTES_MAX, SERVER_FIELDS_BYTES, write_number, write_string},
    link::Answer,
};

/// What waits for a conversation to be in memory.
#[derive(Debug)]
pub(crate) enum Deferred {
    /// This sender's messages go on as far as they can.
    Gate(UserId),
    Position {
        asker: Asker,
        user: UserId,
        device: DeviceId,
        conversation: ConversationId,
        seq: Seq,
        read: bool,
    },
    Entry(Box<Entry>),
    History(HistoryAsked),
    List(ListAsked),
    /// It was only to be loaded.
    Nothing,
}

/// A page that was asked for. `user` is none for the API, which sees everything that is stored.
#[derive(Debug, Clone)]
pub(crate) struct HistoryAsked {
    pub asker: Asker,
    pub user: Option<UserId>,
    pub conversation: ConversationId,
    pub page: Page,
    /// What was asked before it is decided.
    pub is_in_turn: bool,
}

/// A list of a user's conversations that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct ListAsked {
    pub asker: Asker,
    pub user: UserId,
    pub after: Option<ConversationId>,
    pub limit: u32,
}

/// What a look-up is for.
#[derive(Debug, Clone)]
pub(crate) enum ReadPurpose {
    Conversation(ConversationId),
    Sync {
        key: ConnKey,
        login: u64,
    },
    /// The conversation is looked at when it is the turn of this.
    HistoryAsked(HistoryAsked),
    History {
        asker: Asker,
        conversation: ConversationId,
        page: Page,
        range: (Seq, Seq),
        first: Seq,
    },
    List(ListAsked),
    Senders {
        conversation: ConversationId,
        user: UserId,
        from: Seq,
        to: Seq,
    },
    Known {
        conversation: ConversationId,
        user: UserId,
    },
    Repeat(Repeat),
    User {
        asker: Asker,
        user: UserId,
    },
    Resume(Box<Resume>),
    Sweep(Sweep),
}

impl ReadPurpose {
    fn asker(&self) -> Option<&Asker> {
        match self {
            Self::HistoryAsked(HistoryAsked { asker, .. })
            | Self::History { asker, .. }
            | Self::List(ListAsked { asker, .. })
            | Self::User { asker, .. } => Some(asker),
            _ => None,
        }
    }
}

/// Which part of a conversation is asked for; neither bound means the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub after: Option<Seq>,
    pub before: Option<Seq>,
    pub limit: u32,
}

impl Core {
    /// Goes on with `deferred` once the conversation is in memory; at once when it is.
    pub(crate) fn with_conversation(&mut self, id: &ConversationId, deferred: Deferred, now: Now) {
        match self.conversations.get_mut(id) {
            Some(Slot::Ready(conversation)) => {
                conversation.touched = now.mono;
                self.on_deferred(deferred, now);
            }
            Some(Slot::Loading(waiting)) => waiting.push(deferred),
            None => {
                self.conversations.insert(id.clone(), Slot::Loading(vec![deferred]));
                self.load_again(id);
            }
        }
    }

    /// Asks the store for a conversation that something waits for.
    pub(crate) fn load_again(&mut self, id: &ConversationId) {
        if matches!(self.conversations.get(id), Some(Slot::Loading(_))) {
            let query = Query::Conversation { conversation: id.clone(), tail: limits::TAIL_LOADED };
            self.read(query, ReadPurpose::Conversation(id.clone()));
        }
    }

    pub(crate) fn on_deferred(&mut self, deferred: Deferred, now: Now) {
        match deferred {
            Deferred::Gate(user) => self.pass_gate(&user, now),
            Deferred::Position { asker, user, device, conversation, seq, read } => {
                self.on_position_ready(asker, user, device, conversation, seq, read, now);
            }
            Deferred::Entry(entry) => match *entry {
                Entry::Create(create) => {
                    let message = format!("group {} exists already", create.conversation);
                    self.refuse(&create.asker, Refusal::new(ErrorCode::Conflict, message));
                }
                entry => self.enqueue(entry),
            },
            Deferred::History(asked) => self.on_history_ready(asked, now),
            Deferred::List(asked) => self.on_list_asked(asked, now),
            Deferred::Nothing => {}
        }
    }

    pub(crate) fn read(&mut self, query: Query, purpose: ReadPurpose) {
        let read = self.number();
        let lane = match purpose.asker().map(|asker| &asker.origin) {
            // The answers of one connection keep their order.
            Some(Origin::Conn { key, .. }) => key.1,
            _ => read,
        };
        self.reads.insert(read, Box::new(purpose));
        self.actions.push(Action::Read { read, lane, query });
    }

    /// Carries out a look-up, for the first time or after the store failed.
    pub(crate) fn read_again(&mut self, purpose: ReadPurpose, now: Now) {
        match &purpose {
            ReadPurpose::HistoryAsked(asked) => {
                let asked = HistoryAsked { is_in_turn: true, ..asked.clone() };
                self.with_conversation(&asked.conversation.clone(), Deferred::History(asked), now);
            }
            ReadPurpose::Conversation(id) => self.load_again(&id.clone()),
            ReadPurpose::Sync { key, login } => {
                if let Some(query) = self.sync_query(*key, *login) {
                    self.read(query, purpose);
                }
            }
            ReadPurpose::List(ListAsked { user, after, limit, .. }) => {
                let query = Query::Conversations { user: user.clone(), after: after.clone(), limit: *limit };
                self.read(query, purpose);
            }
            ReadPurpose::User { user, .. } => self.read(Query::Devices { user: user.clone() }, purpose),
            // These are asked for where they are needed.
            ReadPurpose::History { .. }
            | ReadPurpose::Senders { .. }
            | ReadPurpose::Known { .. }
            | ReadPurpose::Resume(_)
            | ReadPurpose::Sweep(_)
            | ReadPurpose::Repeat(_) => {}
        }
    }

    pub(crate) fn on_found(&mut self, read: u64, found: Found, now: Now) {
        let Some(purpose) = self.reads.remove(&read).map(|purpose| *purpose) else { return };
        if let Found::Failed(reason) = &found {
            return self.on_read_failed(purpose, reason, now);
        }
        match (purpose, found) {
            (ReadPurpose::Conversation(id), Found::Conversation(state)) => self.on_loaded(id, state, now),
            (ReadPurpose::Sync { key, login }, Found::Waiting { devices, conversations }) => {
                self.on_waiting(key, login, devices, conversations, now);
            }
            (ReadPurpose::History { asker, conversation, page, range, first }, Found::Messages(messages)) => {
                self.on_history_found(&asker, &conversation, page, range, first, &messages);
            }
            (ReadPurpose::List(ListAsked { asker, .. }), Found::Conversations { conversations, more }) => {
                self.on_list_found(&asker, &conversations, more);
            }
            (ReadPurpose::Senders { conversation, user, from, to }, Found::Senders { own, others }) => {
                self.on_senders(conversation, user, (from, to), Some(Senders { own, others }));
            }
            (ReadPurpose::Known { conversation, user }, Found::Devices(devices)) => {
                let known = devices.into_iter().map(|d| d.device).collect();
                self.on_known(conversation, user, Some(known));
            }
            (ReadPurpose::Repeat(repeat), Found::Messages(messages)) => {
                self.on_repeat_found(repeat, messages)
            }
            (ReadPurpose::User { asker, user }, Found::Devices(devices)) => {
                self.on_user_found(&asker, &user, devices)
            }
            (ReadPurpose::Resume(resume), Found::Messages(messages)) => {
                self.on_resume_found(*resume, messages, now);
            }
            (ReadPurpose::Sweep(sweep), Found::Overdue { runs, next, more, ids }) => {
                self.on_overdue(sweep, runs, (next, more), ids, now);
            }
            (ReadPurpose::Sweep(_), Found::StaleDevices { devices, next, more }) => {
                self.on_stale_devices(devices, (next, more), now);
            }
            (purpose, _) => self.on_read_failed(purpose, "it answered another question", now),
        }
    }

    fn on_read_failed(&mut self, purpose: ReadPurpose, reason: &str, now: Now) {
        let retry = now.mono + limits::STORE_RETRY_MS;
        match purpose {
            ReadPurpose::Conversation(id) => {
                let Some(Slot::Loading(waiting)) = self.conversations.remove(&id) else { return };
                let (positions, others): (Vec<_>, Vec<_>) =
                    waiting.into_iter().partition(|d| matches!(d, Deferred::Position { .. }));
                for deferred in others {
                    match deferred {
                        Deferred::Gate(user) => self.refuse_gated(&user, &id, &unavailable(reason), now),
                        deferred => self.on_deferred_failed(deferred, reason, now),
                    }
                }
                self.keep_positions(id, positions, retry);
            }
            ReadPurpose::HistoryAsked(HistoryAsked { asker, .. })
            | ReadPurpose::History { asker, .. }
            | ReadPurpose::List(ListAsked { asker, .. })
            | ReadPurpose::User { asker, .. } => {
                self.refuse(&asker, unavailable(reason));
            }
            ReadPurpose::Senders { conversation, user, from, to } => {
                self.on_senders(conversation, user, (from, to), None);
                self.store_rest_until = retry;
            }
            ReadPurpose::Known { conversation, user } => {
                self.on_known(conversation, user, None);
                self.store_rest_until = retry;
            }
            ReadPurpose::Sync { key, login } => {
                let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == login) else { return };
                conn.sync.iter_mut().for_each(|sync| sync.is_looking = false);
                // Whoever wanted to go on with a session is let in without it rather than kept waiting.
                match conn.sync.as_ref().is_some_and(|sync| sync.resuming.is_some()) {
                    true => self.give_up_resume(key, now),
                    false => {
                        self.timers.arm(retry, Timer::Retry(Box::new(ReadPurpose::Sync { key, login })));
                        // Meanwhile it is answered that the store cannot be read.
                        self.take_held_frames(key, now);
                    }
                }
            }
            ReadPurpose::Resume(resume) => {
                let Resume { key, login, .. } = *resume;
                if self.conns.get(&key).is_some_and(|c| c.login == login) {
                    self.give_up_resume(key, now);
                }
            }
            ReadPurpose::Sweep(_) => self.on_sweep_failed(now),
            // The range stays in its flight and is due again.
            ReadPurpose::Repeat(_) => {}
        }
    }

    /// What devices said that they have waits until the conversation can be loaded: nobody would say it again.
    fn keep_positions(&mut self, id: ConversationId, positions: Vec<Deferred>, retry: Millis) {
        if positions.is_empty() {
            return;
        }
        match self.conversations.get_mut(&id) {
            Some(Slot::Loading(waiting)) => waiting.extend(positions),
            Some(Slot::Ready(_)) => {}
            None => {
                self.conversations.insert(id.clone(), Slot::Loading(positions));
                self.timers.arm(retry, Timer::Retry(Box::new(ReadPurpose::Conversation(id))));
            }
        }
    }

    fn on_deferred_failed(&mut self, deferred: Deferred, reason: &str, now: Now) {
        match deferred {
            // Refused, or kept, by the caller.
            Deferred::Gate(_) | Deferred::Position { .. } => {}
            Deferred::History(asked) => self.refuse(&asked.asker, unavailable(reason)),
            Deferred::List(asked) => self.on_list_asked(asked, now),
            Deferred::Entry(entry) => match *entry {
                Entry::Message(incoming) => self.refuse_incoming(&incoming, unavailable(reason)),
                Entry::Create(create) => self.refuse(&create.asker, unavailable(reason)),
                Entry::Change(change) => self.refuse(&change.asker, unavailable(reason)),
                Entry::Clear { asker, .. } => self.refuse(&asker, unavailable(reason)),
                Entry::Expire(_) => self.on_swept(true, now),
                Entry::PutDevice { .. }
                | Entry::ForgetDevice { .. }
                | Entry::ForgetIds { .. }
                | Entry::Read(_) => {}
            },
            Deferred::Nothing => {}
        }
    }

    fn on_loaded(
        &mut self,
        id: ConversationId,
        state: Option<Box<crate::persist::ConversationState>>,
        now: Now,
    ) {
        if !matches!(self.conversations.get(&id), Some(Slot::Loading(_))) {
            return;
        }
        let loaded = match (state, id.peers()) {
            (Some(state), _) => Some(Conversation::load(*state, self.hasher.clone(), now.mono)),
            (None, Some((a, b))) => Some(Conversation::unwritten(a, b, self.hasher.clone(), now.mono)),
            (None, None) => None,
        };
        let slot = match loaded {
            Some(conversation) => self.conversations.insert(id.clone(), Slot::Ready(Box::new(conversation))),
            None => self.conversations.remove(&id),
        };
        let Some(Slot::Loading(waiting)) = slot else { return };
        for deferred in waiting {
            match deferred {
                Deferred::Gate(user) if !self.conversations.contains_key(&id) => {
                    self.refuse_gated(&user, &id, &forbidden(&id), now);
                }
                Deferred::History(asked) if asked.conversation != id => self.on_history_ready(asked, now),
                deferred => self.on_found_or_missing(deferred, now),
            }
        }
    }

    /// Goes on after a look-up, whether there is such a conversation or not.
    fn on_found_or_missing(&mut self, deferred: Deferred, now: Now) {
        let (id, asker) = match &deferred {
            Deferred::Gate(user) => return self.pass_gate(&user.clone(), now),
            Deferred::List(asked) => return self.on_list_asked(asked.clone(), now),
            Deferred::Position { conversation, asker, .. }
            | Deferred::History(HistoryAsked { conversation, asker, .. }) => (conversation, asker),
            Deferred::Entry(entry) => match &**entry {
                Entry::Message(incoming) => (&incoming.conversation, &incoming.asker),
                Entry::Create(create) => (&create.conversation, &create.asker),
                Entry::Change(change) => (&change.conversation, &change.asker),
                Entry::Clear { asker, conversation, .. } => (conversation, asker),
                Entry::Expire(expire) => {
                    let is_there =
                        matches!(self.conversations.get(&expire.conversation), Some(Slot::Ready(_)));
                    // Deleted since the sweep saw it.
                    return if is_there {
                        self.on_deferred(deferred, now)
                    } else {
                        self.on_swept(false, now)
                    };
                }
                Entry::PutDevice { .. }
                | Entry::ForgetDevice { .. }
                | Entry::ForgetIds { .. }
                | Entry::Read(_) => return,
            },
            Deferred::Nothing => return,
        };
        match self.conversations.get_mut(id) {
            Some(Slot::Ready(_)) => self.on_deferred(deferred, now),
            // A group that was asked to be created while this was looked up.
            Some(Slot::Loading(waiting)) => waiting.push(deferred),
            None => {
                let refusal = match asker.origin {
                    Origin::Api { .. } => {
                        Refusal::new(ErrorCode::NotFound, format!("there is no conversation {id}"))
                    }
                    _ => forbidden(id),
                };
                match deferred {
                    Deferred::Entry(entry) => match *entry {
                        Entry::Create(create) => self.on_create_ready(create),
                        Entry::Message(incoming) => self.refuse_incoming(&incoming, refusal),
                        _ => {
                            let asker = asker_of(&entry);
                            asker.into_iter().for_each(|asker| self.refuse(&asker, refusal.clone()));
                        }
                    },
                    Deferred::Position { asker, .. } | Deferred::History(HistoryAsked { asker, .. }) => {
                        self.refuse(&asker, refusal)
                    }
                    Deferred::Nothing | Deferred::Gate(_) | Deferred::List(_) => {}
                }
            }
        }
    }

    pub(crate) fn is_staged(&self, id: &ConversationId) -> bool {
        self.in_flight.as_ref().is_some_and(|f| f.touches(id))
    }

    pub(crate) fn on_history(&mut self, asker: Asker, user: UserId, text: &str, page: Page, now: Now) {
        let Some(id) = named_by(&user, text) else {
            return self.refuse(&asker, forbidden(text));
        };
        self.on_history_asked(asker, Some(user), id, page, now);
    }

    pub(crate) fn on_history_asked(
        &mut self,
        asker: Asker,
        user: Option<UserId>,
        id: ConversationId,
        page: Page,
        now: Now,
    ) {
        let asked = HistoryAsked { asker, user, conversation: id.clone(), page, is_in_turn: false };
        self.with_conversation(&id, Deferred::History(asked), now);
    }

    fn on_history_ready(&mut self, asked: HistoryAsked, now: Now) {
        let Some(Slot::Ready(conversation)) = self.conversations.get(&asked.conversation) else {
            // It waited for another one, and this has left memory meanwhile.
            return self.with_conversation(&asked.conversation.clone(), Deferred::History(asked), now);
        };
        // Whoever asks sees what it did before: its messages in this conversation may still wait for another one to be
        // loaded, and what changes this one for the transaction.
        if let Some(behind) = asked.user.as_ref().and_then(|user| self.gate_before(user, &asked.conversation))
        {
            if let Some(Slot::Loading(waiting)) = self.conversations.get_mut(&behind) {
                waiting.push(Deferred::History(asked));
            }
            return;
        }
        if conversation.pending > 0 && !asked.is_in_turn {
            return self.queue.push_back(Entry::Read(Box::new(ReadPurpose::HistoryAsked(asked))));
        }
        let HistoryAsked { asker, user, conversation: id, page, .. } = asked;
        let first = match user {
            None if !conversation.exists => {
                let message = format!("there is no conversation {id}");
                return self.refuse(&asker, Refusal::new(ErrorCode::NotFound, message));
            }
            None => conversation.floor + 1,
            Some(user) => match conversation.members.get(&user) {
                Some(member) => member.first,
                None => return self.refuse(&asker, forbidden(&id)),
            },
        };
        let from = first.max(page.after.map_or(0, |after| after.saturating_add(1)));
        let to = conversation.last.min(page.before.map_or(Seq::MAX, |before| before.saturating_sub(1)));
        if from > to {
            return self.on_history_found(&asker, &id, page, (from, to), first, &[]);
        }
        let query = Query::Messages {
            conversation: id.clone(),
            from,
            to,
            limit: page.limit,
            bytes_max: (self.config.frame_bytes_max + SERVER_FIELDS_BYTES) as u64,
            newest: page.after.is_none(),
        };
        self.read(query, ReadPurpose::History { asker, conversation: id, page, range: (from, to), first });
    }

    fn on_history_found(
        &mut self,
        asker: &Asker,
        id: &ConversationId,
        page: Page,
        range: (Seq, Seq),
        first: Seq,
        messages: &[Message],
    ) {
        // Retention may have gone on since the range was drawn: what is missing at its beginning is not there any more.
        let first = match messages.first() {
            Some(message) if page.after.is_some() && message.seq > range.0 => first.max(message.seq),
            None if range.0 <= range.1 => first.max(range.1 + 1),
            _ => first,
        };
        let items: Vec<Vec<u8>> = messages.iter().map(encode_message).collect();
        let head = b"{\"type\":\"history.page\",\"id\":,\"conversation_id\":,\"first_seq\":,\"messages\":[],\"more\":false}";
        let fields = head.len() + asker.frame_id.as_ref().map_or(0, |id| id.len() * 6) + id.len() * 6 + 24;
        let kept = fit(&items, self.page_bytes_max(fields), page.after.is_none());
        let shown = &messages[kept.clone()];
        let more = match (shown.first(), shown.last()) {
            (Some(_), Some(last)) if page.after.is_some() => last.seq < range.1,
            (Some(oldest), _) => oldest.seq > range.0,
            _ => false,
        };
        let mut json = Vec::with_capacity(256);
        match &asker.frame_id {
            Some(frame_id) => {
                json.extend_from_slice(b"{\"type\":\"history.page\",\"id\":");
                write_string(&mut json, frame_id);
                json.push(b',');
            }
            None => json.push(b'{'),
        }
        json.extend_from_slice(b"\"conversation_id\":");
        write_string(&mut json, id);
        json.extend_from_slice(b",\"first_seq\":");
        write_number(&mut json, first);
        json.extend_from_slice(b",\"messages\":[");
        json.extend_from_slice(&items[kept].join(&b','));
        json.extend_from_slice(if more { b"],\"more\":true}" } else { b"],\"more\":false}" });
        self.answer_page(asker, json);
    }

    pub(crate) fn on_list(&mut self, asker: Asker, user: UserId, after: Option<&str>, limit: u32, now: Now) {
        let after = match after.map(|text| named_by(&user, text).ok_or_else(|| forbidden(text))).transpose() {
            Ok(after) => after,
            Err(refusal) => return self.refuse(&asker, refusal),
        };
        self.on_list_asked(ListAsked { asker, user, after, limit }, now);
    }

    /// Who asks sees its own messages in it, and these may wait for a conversation to be loaded.
    fn on_list_asked(&mut self, asked: ListAsked, now: Now) {
        let first = self.gates.get(&asked.user).and_then(|gate| gate.front());
        let behind = first.map(|incoming| incoming.conversation.clone());
        match behind.and_then(|behind| self.conversations.get_mut(&behind)) {
            Some(Slot::Loading(waiting)) => waiting.push(Deferred::List(asked)),
            _ => self.read_behind_writes(ReadPurpose::List(asked), now),
        }
    }

    fn on_list_found(&mut self, asker: &Asker, conversations: &[Summary], more: bool) {
        let items: Vec<Vec<u8>> = conversations.iter().map(encode_summary).collect();
        let fields = 80 + asker.frame_id.as_ref().map_or(0, |id| id.len() * 6);
        let kept = fit(&items, self.page_bytes_max(fields), false);
        let more = more || kept.end < items.len();
        let mut json = Vec::with_capacity(256);
        json.extend_from_slice(b"{\"type\":\"conversation.page\",\"id\":");
        write_string(&mut json, asker.frame_id.as_deref().unwrap_or_default());
        json.extend_from_slice(b",\"conversations\":[");
        json.extend_from_slice(&items[kept].join(&b','));
        json.extend_from_slice(if more { b"],\"more\":true}" } else { b"],\"more\":false}" });
        self.answer_page(asker, json);
    }

    /// What a page's items may take, with `fields` bytes for the rest of the frame.
    fn page_bytes_max(&self, fields: usize) -> usize {
        (self.config.frame_bytes_max + SERVER_FIELDS_BYTES).saturating_sub(fields)
    }

    fn answer_page(&mut self, asker: &Asker, json: Vec<u8>) {
        match asker.origin {
            Origin::Api { node, request_id } => self.answer_api(node, request_id, Answer::Page(json.into())),
            Origin::Conn { .. } => self.answer_frame(asker, Frame { json: json.into(), body: None }),
        }
    }
}

fn asker_of(entry: &Entry) -> Option<Asker> {
    match entry {
        Entry::Change(change) => Some(change.asker.clone()),
        Entry::Clear { asker, .. } => Some(asker.clone()),
        _ => None,
    }
}

/// Which items fit into `bytes_max` with a comma each, from the front or from the back; at least one.
fn fit(items: &[Vec<u8>], bytes_max: usize, from_back: bool) -> std::ops::Range<usize> {
    let mut bytes = 0;
    let mut takes = |item: &Vec<u8>| {
        let is_first = bytes == 0;
        bytes += item.len() + 1;
        is_first || bytes <= bytes_max
    };
    if from_back {
        let count = items.iter().rev().take_while(|item| takes(item)).count();
        items.len() - count..items.len()
    } else {
        0..items.iter().take_while(|item| takes(item)).count()
    }
}

/// One message of a history page.
fn encode_message(message: &Message) -> Vec<u8> {
    let mut json = Vec::with_capacity(128 + message.body.bytes().len());
    json.extend_from_slice(b"{\"seq\":");
    write_number(&mut json, message.seq);
    json.extend_from_slice(b",\"id\":");
    write_string(&mut json, &message.id);
    json.extend_from_slice(b",\"from\":");
    write_string(&mut json, &message.from);
    json.extend_from_slice(b",\"ts\":");
    write_number(&mut json, message.ts);
    json.push(b',');
    message.body.write_json(&mut json);
    json.push(b'}');
    json
}

/// One line of a conversation list.
fn encode_summary(summary: &Summary) -> Vec<u8> {
    let Summary { conversation, name, meta, last, member, peer, last_message } = summary;
    let mut json = Vec::with_capacity(256);
    json.extend_from_slice(b"{\"conversation_id\":");
    write_string(&mut json, conversation);
    json.extend_from_slice(if conversation.is_group() {
        b",\"kind\":\"group\""
    } else {
        b",\"kind\":\"direct\""
    });
    if let Some(name) = name {
        json.extend_from_slice(b",\"name\":");
        write_string(&mut json, name);
    }
    if let Some(meta) = meta {
        json.extend_from_slice(b",\"meta\":");
        json.extend_from_slice(meta);
    }
    let numbers = [
        ("first_seq", Some(member.first)),
        ("last_seq", Some(*last)),
        ("read_seq", Some(member.read)),
        ("unread", Some(member.unread(*last))),
        ("peer_recv_seq", peer.map(|(received, _)| received)),
        ("peer_read_seq", peer.map(|(_, read)| read)),
    ];
    for (name, number) in numbers {
        if let Some(number) = number {
            json.extend_from_slice(format!(",\"{name}\":{number}").as_bytes());
        }
    }
    if let Some(message) = last_message {
        json.extend_from_slice(b",\"last_message\":");
        if message.body.bytes().len() <= LAST_MESSAGE_BODY_BYTES_MAX {
            json.extend_from_slice(&encode_message(message));
        } else {
            let Message { seq, id, from, ts, .. } = message;
            json.extend_from_slice(format!("{{\"seq\":{seq},\"id\":").as_bytes());
            write_string(&mut json, id);
            json.extend_from_slice(b",\"from\":");
            write_string(&mut json, from);
            json.extend_from_slice(format!(",\"ts\":{ts}}}").as_bytes());
        }
    }
    json.push(b'}');
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_at_least_one_item_and_at_most_what_fits() {
        let items: Vec<Vec<u8>> = [3, 4, 5].map(|n| vec![b'x'; n]).to_vec();
        let rows = [
            (100, false, 0..3),
            (100, true, 0..3),
            (9, false, 0..2),
            (9, true, 2..3),
            (11, true, 1..3),
            (1, false, 0..1),
            (1, true, 2..3),
        ];
        for (bytes, from_back, expected) in rows {
            assert_eq!(fit(&items, bytes, from_back), expected, "{bytes} {from_back}");
        }
        assert_eq!(fit(&[], 5, true), 0..0);
    }
}
