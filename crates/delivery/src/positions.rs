//! What devices say they have: `msg.recv` and `msg.read` on their way into a transaction.
//!
//! Several changes of one user in one conversation are joined. A position moves when it is known which devices the
//! user has and who sent what lies between; what memory does not know of this is asked of the store.

use crate::{
    Asker, Core, Now, Slot,
    batch::{Forming, Moved},
    conversation::{Conversation, Member, Senders, named_by},
    forbidden, limits,
    persist::Query,
    reads::{Deferred, ReadPurpose},
};
use bowline_protocol::{ConversationId, DeviceId, Seq, UserId};
use std::{collections::HashMap, sync::Arc};

/// A device's news of what it has, waiting for the next transaction. Several are joined.
#[derive(Debug)]
pub(crate) struct PendingPosition {
    pub device: DeviceId,
    pub received: Seq,
    pub read: Seq,
    /// Senders of the messages from `.0` to `.1`, when the store had to be asked.
    looked_up: Vec<(Seq, Seq, Senders)>,
    /// A look-up is under way.
    asked: bool,
    /// The user's devices, as far as they were known when the news came.
    known: Option<Arc<[DeviceId]>>,
}

impl Core {
    /// `msg.recv` or `msg.read`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn on_position(
        &mut self,
        asker: Asker,
        user: UserId,
        device: DeviceId,
        text: &str,
        seq: Seq,
        read: bool,
        now: Now,
    ) {
        let Some(id) = named_by(&user, text) else {
            return self.refuse(&asker, forbidden(text));
        };
        self.with_conversation(
            &id,
            Deferred::Position { asker, user, device, seq, read, conversation: id.clone() },
            now,
        );
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn on_position_ready(
        &mut self,
        asker: Asker,
        user: UserId,
        device: DeviceId,
        id: ConversationId,
        seq: Seq,
        read: bool,
        now: Now,
    ) {
        let Some(Slot::Ready(conversation)) = self.conversations.get(&id) else { return };
        let Some(member) = conversation.members.get(&user) else {
            return self.refuse(&asker, forbidden(&id));
        };
        // A number above the newest counts as the newest.
        let seq = seq.min(conversation.last);
        let is_news = seq > member.position(&device) || (read && seq > member.read);
        self.decide(&asker);
        self.on_device_has(&user, &device, &id, seq, now);
        if !is_news {
            return;
        }
        let known = self.users.get(&user).and_then(|u| u.known.clone());
        let key = (id, user);
        let pending = self.positions.entry(key.clone()).or_default();
        if pending.is_empty() {
            self.position_order.push_back(key);
        }
        let read = if read { seq } else { 0 };
        match pending.iter_mut().find(|p| p.device == device) {
            Some(p) => (p.received, p.read) = (p.received.max(seq), p.read.max(read)),
            None => {
                let (looked_up, asked) = (Vec::new(), false);
                pending.push(PendingPosition { device, received: seq, read, looked_up, asked, known });
            }
        }
    }

    /// Stages positions that can be: their conversation is in memory, the user's devices are known, and so are
    /// the senders of what lies between. For the others it asks.
    #[allow(clippy::type_complexity)]
    pub(crate) fn stage_positions(
        &mut self,
        forming: &mut Forming,
        now: Now,
    ) -> (Vec<Moved>, Vec<((ConversationId, UserId), Vec<PendingPosition>)>) {
        let (mut moved, mut taken, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.position_order.len().min(limits::POSITIONS_PER_BATCH_MAX) {
            let Some(key) = self.position_order.pop_front() else { break };
            let Some(mut pending) = self.positions.remove(&key) else { continue };
            let (id, user) = (&key.0, &key.1);
            let Some(Slot::Ready(conversation)) = self.conversations.get(id) else {
                // Dropped from memory meanwhile: every change comes again once it is loaded.
                kept.push((key, pending));
                continue;
            };
            let Some(member) = conversation.members.get(user) else { continue };
            // Devices that are behind must be named before the user's position moves past them.
            let known = match self.users.get(user) {
                Some(connected) => connected.known.clone(),
                None => pending.iter().find_map(|p| p.known.clone()),
            };
            let Some(known) = known else {
                if !self.users.contains_key(user) && !pending.iter().any(|p| p.asked) {
                    pending[0].asked = true;
                    let (conversation, user) = (id.clone(), user.clone());
                    self.read(
                        Query::Devices { user: user.clone() },
                        ReadPurpose::Known { conversation, user },
                    );
                }
                kept.push((key, pending));
                continue;
            };
            let mut next = member.clone();
            let mut news = Vec::new();
            let mut missing = None;
            for position in &pending {
                match plan_move(conversation, &mut next, user, position, &known) {
                    Ok(move_) => news.push(move_),
                    Err(range) => {
                        missing = Some(range);
                        break;
                    }
                }
            }
            if let Some((from, to)) = missing {
                if !pending.iter().any(|p| p.asked) {
                    pending[0].asked = true;
                    let query = Query::Senders { conversation: id.clone(), user: user.clone(), from, to };
                    self.read(
                        query,
                        ReadPurpose::Senders { conversation: id.clone(), user: user.clone(), from, to },
                    );
                }
                kept.push((key, pending));
                continue;
            }
            forming.batch.ledger.delivered +=
                member.waiting(conversation.last) - next.waiting(conversation.last);
            forming.fence(id);
            forming.stage(id, conversation).put_member(user, Some(next), conversation);
            for (position, (delivered, read)) in pending.iter().zip(news) {
                if delivered.is_some() || read.is_some() {
                    let (conversation, user, device) = (id.clone(), user.clone(), position.device.clone());
                    moved.push(Moved { conversation, user, device, delivered, read });
                }
            }
            taken.push((key, pending));
        }
        for (key, pending) in kept {
            if !self.conversations.contains_key(&key.0) {
                self.with_conversation(&key.0.clone(), Deferred::Nothing, now);
            }
            self.put_back(key, pending);
        }
        (moved, taken)
    }

    pub(crate) fn put_back(&mut self, key: (ConversationId, UserId), pending: Vec<PendingPosition>) {
        let now = self.positions.entry(key.clone()).or_default();
        if now.is_empty() {
            self.position_order.push_back(key);
            *now = pending;
            return;
        }
        for old in pending {
            match now.iter_mut().find(|p| p.device == old.device) {
                Some(p) => (p.received, p.read) = (p.received.max(old.received), p.read.max(old.read)),
                None => now.push(old),
            }
        }
    }

    /// The store told who sent what in a range.
    pub(crate) fn on_senders(
        &mut self,
        conversation: ConversationId,
        user: UserId,
        range: (Seq, Seq),
        found: Option<Senders>,
    ) {
        if let Some(pending) = self.positions.get_mut(&(conversation, user)) {
            // Whichever of the devices it was asked for.
            for position in pending.iter_mut() {
                position.asked = false;
                position.looked_up.extend(found.clone().map(|senders| (range.0, range.1, senders)));
            }
        }
    }

    /// The store told which devices a user has that is not connected any more.
    pub(crate) fn on_known(
        &mut self,
        conversation: ConversationId,
        user: UserId,
        found: Option<Arc<[DeviceId]>>,
    ) {
        for position in self.positions.get_mut(&(conversation, user)).into_iter().flatten() {
            position.asked = false;
            position.known = found.clone();
        }
    }
}

/// A device of a user appeared: news that wait to be written count it among those that may be behind.
pub(crate) fn widen(
    positions: &mut HashMap<(ConversationId, UserId), Vec<PendingPosition>, ahash::RandomState>,
    user: &UserId,
    device: &DeviceId,
) {
    let of_user = positions.iter_mut().filter(|((_, owner), _)| owner == user);
    for known in of_user.flat_map(|(_, pending)| pending).filter_map(|p| p.known.as_mut()) {
        if !known.contains(device) {
            *known = known.iter().chain([device]).cloned().collect();
        }
    }
}

type News = (Option<(Seq, Vec<UserId>)>, Option<(Seq, Vec<UserId>)>);

/// Moves a member's positions as one device says, or names the range whose senders must be asked of the store.
fn plan_move(
    conversation: &Conversation,
    member: &mut Member,
    user: &UserId,
    position: &PendingPosition,
    known: &[DeviceId],
) -> Result<News, (Seq, Seq)> {
    let senders = |from: Seq, to: Seq| {
        let looked_up =
            position.looked_up.iter().find(|(f, t, _)| (*f, *t) == (from, to)).map(|(.., s)| s.clone());
        conversation.tail.senders(user, from, to).or(looked_up).ok_or((from, to))
    };
    // A device has its own messages without being sent them.
    let mut to = position.received.min(conversation.last);
    while let Some(entry) = conversation.tail.entry(to + 1)
        && entry.from == *user
        && entry.device.as_ref() == Some(&position.device)
    {
        to += 1;
    }
    let mut news: News = (None, None);
    let read_senders = match position.read.min(conversation.last) {
        read if read > member.read => Some((read, senders(member.read + 1, read)?)),
        _ => None,
    };
    if to > member.delivered {
        let Senders { own, others } = senders(member.delivered + 1, to)?;
        member.move_device(&position.device, to, own, known);
        news.0 = Some((to, others));
    } else {
        member.move_device(&position.device, to, 0, known);
    }
    if let Some((read, Senders { own, others })) = read_senders {
        member.move_read(read, own);
        news.1 = Some((read, others));
    }
    Ok(news)
}
