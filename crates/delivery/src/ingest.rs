//! From a message that arrives to one that may be numbered: its conversation, what became of the same id before,
//! and the verdict.
//!
//! Messages of one sender go on in the order in which they came, whichever conversations have to be loaded first.
//! Messages of one sender to one conversation form a lane while they wait for verdicts: they leave it in the
//! order in which they came, whatever order the verdicts have. Nobody else waits for them.

use crate::{
    Action, Asker, Core, Now, Slot, Verdict,
    batch::{Entry, Incoming},
    conversation::named_by,
    dedupe::{Known, content_hash},
    forbidden, limits,
    persist::Receipt,
    reads::Deferred,
};
use bowline_protocol::{
    ConversationId, DeviceId, ErrorCode, MessageId, ServerFrame, UserId,
    error::Refusal,
    link::{Answer, Send, SendTarget},
};
use std::collections::VecDeque;

/// One sender's messages to one conversation that wait for a verdict.
#[derive(Default)]
pub(crate) struct Lane(VecDeque<Waiting>);

struct Waiting {
    ticket: u64,
    incoming: Box<Incoming>,
    verdict: Option<Verdict>,
}

impl Core {
    pub(crate) fn on_send(&mut self, asker: Asker, send: Send, device: Option<DeviceId>, now: Now) {
        let Send { id, from, target, body } = send;
        let conversation = match &target {
            SendTarget::User(to) => ConversationId::direct(&from, to),
            SendTarget::Conversation(text) => match named_by(&from, text) {
                Some(conversation) => conversation,
                None => return self.refuse_message(&asker, forbidden(text)),
            },
        };
        if self.queue.len() >= limits::QUEUE_ENTRIES_MAX {
            let message = format!("{} requests wait for the store; send it again later", self.queue.len());
            return self.refuse_message(&asker, Refusal::new(ErrorCode::Overloaded, message));
        }
        let hash = content_hash(&conversation, &body);
        let mut known = self.dedupe.on_sent(&from, &id, &conversation, hash, &asker);
        if let Known::Stored(receipt) | Known::Conflict(Some(receipt)) = &known
            && self.may_be_forgotten(receipt, now)
        {
            self.dedupe.forget(&from, &id);
            known = self.dedupe.on_sent(&from, &id, &conversation, hash, &asker);
        }
        match known {
            Known::New => {}
            Known::Waits => return,
            Known::Stored(receipt) => {
                self.counters.messages_repeated += 1;
                return self.acknowledge(&asker, &id, &receipt);
            }
            Known::Conflict(_) => return self.refuse_message(&asker, conflict(&id)),
        }
        let incoming = Box::new(Incoming { asker, device, user: from, conversation, id, body, hash });
        if let Some(Slot::Ready(conversation)) = self.conversations.get_mut(&incoming.conversation)
            && !self.gates.contains_key(&incoming.user)
        {
            conversation.touched = now.mono;
            return self.on_message_ready(incoming);
        }
        let (user, conversation) = (incoming.user.clone(), incoming.conversation.clone());
        self.gates.entry(user.clone()).or_default().push_back(incoming);
        match self.conversations.contains_key(&conversation) {
            // All that is needed begins to load at once; the gate opens in order.
            false => self.with_conversation(&conversation, Deferred::Gate(user), now),
            true => self.pass_gate(&user, now),
        }
    }

    /// Retention has taken this message, and its id need not be remembered any longer.
    fn may_be_forgotten(&self, receipt: &Receipt, now: Now) -> bool {
        let ids_ms_min = self.config.retention.ids_ms_min;
        receipt.ts.saturating_add(ids_ms_min) < now.wall
            && matches!(self.conversations.get(&receipt.conversation),
                Some(Slot::Ready(conversation)) if receipt.seq <= conversation.floor)
    }

    /// Lets a sender's messages go on until one needs a conversation that is still being loaded.
    pub(crate) fn pass_gate(&mut self, user: &UserId, now: Now) {
        while let Some(first) = self.gates.get(user).and_then(VecDeque::front) {
            let id = first.conversation.clone();
            match self.conversations.get_mut(&id) {
                Some(Slot::Ready(conversation)) => conversation.touched = now.mono,
                Some(Slot::Loading(waiting)) => {
                    let is_there = |d: &Deferred| matches!(d, Deferred::Gate(u) if u == user);
                    if !waiting.iter().any(is_there) {
                        waiting.push(Deferred::Gate(user.clone()));
                    }
                    return;
                }
                // Dropped since: it is loaded again, and the gate opens then.
                None => return self.with_conversation(&id, Deferred::Gate(user.clone()), now),
            }
            let Some(incoming) = self.gates.get_mut(user).and_then(VecDeque::pop_front) else { break };
            self.on_message_ready(incoming);
        }
        if self.gates.get(user).is_some_and(VecDeque::is_empty) {
            self.gates.remove(user);
        }
    }

    /// The conversation whose loading keeps a sender's messages to this one from going on, when something does.
    pub(crate) fn gate_before(&self, user: &UserId, id: &ConversationId) -> Option<ConversationId> {
        let gate = self.gates.get(user)?;
        let first = &gate.front()?.conversation;
        let is_loading = matches!(self.conversations.get(first), Some(Slot::Loading(_)));
        (is_loading && gate.iter().any(|incoming| incoming.conversation == *id)).then(|| first.clone())
    }

    /// Refuses a sender's waiting messages to one conversation; the others go on.
    pub(crate) fn refuse_gated(&mut self, user: &UserId, id: &ConversationId, refusal: &Refusal, now: Now) {
        let Some(gate) = self.gates.get_mut(user) else { return };
        let (refused, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(gate).into_iter().partition(|incoming| incoming.conversation == *id);
        *gate = kept;
        for incoming in refused {
            self.refuse_incoming(&incoming, refusal.clone());
        }
        self.pass_gate(user, now);
    }

    /// The conversation is in memory: ask for the verdict, or go on.
    pub(crate) fn on_message_ready(&mut self, incoming: Box<Incoming>) {
        if !self.is_member(&incoming.conversation, &incoming.user) {
            let refusal = forbidden(&incoming.conversation);
            return self.refuse_incoming(&incoming, refusal);
        }
        if !self.config.before_send {
            return self.enqueue(Entry::Message(incoming));
        }
        let ticket = self.number();
        let lane_key = (incoming.user.clone(), incoming.conversation.clone());
        self.tickets.insert(ticket, lane_key.clone());
        let message = Box::new(Send {
            id: incoming.id.clone(),
            from: incoming.user.clone(),
            target: SendTarget::Conversation(incoming.conversation.as_str().into()),
            body: incoming.body.clone(),
        });
        self.actions.push(Action::AskVerdict {
            ticket,
            message,
            conversation: incoming.conversation.clone(),
        });
        self.lanes.entry(lane_key).or_default().0.push_back(Waiting { ticket, incoming, verdict: None });
    }

    pub(crate) fn on_verdict(&mut self, ticket: u64, verdict: Verdict) {
        let Some(lane_key) = self.tickets.remove(&ticket) else { return };
        let Some(lane) = self.lanes.get_mut(&lane_key) else { return };
        if let Some(waiting) = lane.0.iter_mut().find(|w| w.ticket == ticket) {
            waiting.verdict = Some(verdict);
        }
        let mut decided = Vec::new();
        while lane.0.front().is_some_and(|w| w.verdict.is_some()) {
            decided.extend(lane.0.pop_front());
        }
        if lane.0.is_empty() {
            self.lanes.remove(&lane_key);
        }
        for Waiting { mut incoming, verdict, .. } in decided {
            match verdict {
                Some(Verdict::Refuse(refusal)) => self.refuse_incoming(&incoming, refusal),
                Some(Verdict::Allow { body }) => {
                    incoming.body = body.unwrap_or(incoming.body);
                    self.enqueue(Entry::Message(incoming));
                }
                None => {}
            }
        }
    }

    pub(crate) fn is_member(&self, conversation: &ConversationId, user: &UserId) -> bool {
        match self.conversations.get(conversation) {
            Some(Slot::Ready(conversation)) => conversation.members.contains_key(user),
            _ => false,
        }
    }

    /// Answers the sender, and whoever repeated the message meanwhile.
    pub(crate) fn refuse_incoming(&mut self, incoming: &Incoming, refusal: Refusal) {
        for asker in self.dedupe.on_refused(&incoming.user, &incoming.id) {
            self.refuse_message(&asker, refusal.clone());
        }
        self.refuse_message(&incoming.asker, refusal);
    }

    fn refuse_message(&mut self, asker: &Asker, refusal: Refusal) {
        self.counters.messages_refused += 1;
        self.refuse(asker, refusal);
    }

    /// `msg.ack`, or the API's answer.
    pub(crate) fn acknowledge(&mut self, asker: &Asker, id: &MessageId, receipt: &Receipt) {
        let Receipt { conversation, seq, ts, .. } = receipt;
        match asker.origin {
            crate::Origin::Api { node, request_id } => {
                let answer = Answer::Stored { conversation_id: conversation.clone(), seq: *seq, ts: *ts };
                self.answer_api(node, request_id, answer);
            }
            crate::Origin::Conn { .. } => {
                let frame =
                    ServerFrame::MsgAck { id, conversation_id: conversation, seq: *seq, ts: *ts }.encode();
                self.answer_frame(asker, frame);
            }
        }
    }
}

pub(crate) fn conflict(id: &MessageId) -> Refusal {
    let message =
        format!("message id {id:?} was used for another message; every message needs an id of its own");
    Refusal::new(ErrorCode::Conflict, message)
}
