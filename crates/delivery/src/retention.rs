//! What is deleted without anybody asking for it: messages that are too old or too many, ids that need not be
//! remembered any more, devices that were not seen for long.
//!
//! One step after the other: a look-up names some of it, one transaction takes it, and after a pause comes the next
//! step. So nobody waits longer than for a transaction of that size, whatever there is to be deleted. Messages go from
//! the front of a conversation: its floor moves up, every member is lifted to it, and what a member had not received
//! counts as expired.

use crate::{
    Core, Now, Slot,
    batch::{Effect, Entry, Forming},
    limits,
    persist::{Member, Overdue, Query, Write},
    reads::{Deferred, ReadPurpose},
    timers::Timer,
};
use bowline_protocol::{ConversationId, DeviceId, Millis, Seq, UserId};
use indexmap::IndexSet;
use std::collections::HashMap;

/// How long messages are kept, and their ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Messages older than this are deleted; 0: never.
    pub age_ms_max: u64,
    /// Of each conversation the newest so many are kept; 0: all.
    pub messages_max: u64,
    /// An id refuses a repeat for at least so long, also when its message is deleted.
    pub ids_ms_min: u64,
}

/// What a look-up of the sweep is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sweep {
    /// Messages and ids by age.
    Age,
    /// Messages beyond the number that is kept, in all conversations, and in one.
    Excess,
    ExcessOfOne,
    Devices,
}

/// How far the sweep is.
#[derive(Default)]
pub(crate) struct Sweeper {
    is_armed: bool,
    /// A step is under way: its look-up, or so many things that its transaction is to take.
    looking: Option<Sweep>,
    taking: usize,
    failed: bool,
    /// Conversations that have too many messages, as far as traffic told.
    overfull: IndexSet<ConversationId, ahash::RandomState>,
    age: Pass,
    excess: Pass,
    devices: Pass,
}

/// A walk over all that there is, page by page.
#[derive(Default, Clone, Copy)]
struct Pass {
    after: u64,
    /// When the next page is due.
    due: Millis,
    /// When the walk began anew at the beginning.
    began: Millis,
}

impl Core {
    /// Sets the sweep going, once.
    pub(crate) fn start_sweep(&mut self, now: Now) {
        if !std::mem::replace(&mut self.sweeper.is_armed, true) {
            let pass = Pass { after: 0, due: now.mono, began: now.mono };
            (self.sweeper.age, self.sweeper.excess, self.sweeper.devices) = (pass, pass, pass);
            self.timers.arm(now.mono, Timer::Sweep);
            self.timers.arm(now.mono + limits::SEEN_MS, Timer::Seen { from: 0 });
        }
    }

    /// A conversation has grown; should it hold too much, the sweep comes by.
    pub(crate) fn on_grown(&mut self, id: &ConversationId, last: Seq, floor: Seq, now: Now) {
        let max = self.config.retention.messages_max;
        if max == 0 || last - floor <= max || self.sweeper.overfull.len() >= limits::OVERFULL_MAX {
            return;
        }
        let is_first = self.sweeper.overfull.is_empty();
        if self.sweeper.overfull.insert(id.clone()) && is_first {
            self.timers.arm(now.mono + limits::SWEEP_MS, Timer::Sweep);
        }
    }

    /// Begins the next step, when none is under way and something is due.
    pub(crate) fn on_sweep_timer(&mut self, now: Now) {
        let sweeper = &mut self.sweeper;
        if sweeper.looking.is_some() || sweeper.taking > 0 {
            return;
        }
        if now.mono < self.store_rest_until {
            return self.timers.arm(self.store_rest_until, Timer::Sweep);
        }
        let Retention { age_ms_max, messages_max, ids_ms_min } = self.config.retention;
        let limit = limits::SWEPT_MESSAGES_MAX;
        let (sweep, query) = if let Some(id) = sweeper.overfull.pop() {
            (Sweep::ExcessOfOne, Query::Excess { keep: messages_max, of: Some(id), after: 0, limit })
        } else if messages_max > 0 && sweeper.excess.due <= now.mono {
            let after = sweeper.excess.after;
            (Sweep::Excess, Query::Excess { keep: messages_max, of: None, after, limit })
        } else if (age_ms_max > 0 || messages_max > 0) && sweeper.age.due <= now.mono {
            if now.mono - sweeper.age.began > limits::SWEEP_ANEW_MS {
                (sweeper.age.after, sweeper.age.began) = (0, now.mono);
            }
            let before = if age_ms_max > 0 { now.wall.saturating_sub(age_ms_max) } else { 0 };
            let ids_before = now.wall.saturating_sub(ids_ms_min);
            (Sweep::Age, Query::Overdue { before, ids_before, after: sweeper.age.after, limit })
        } else if sweeper.devices.due <= now.mono {
            let before = now.wall.saturating_sub(limits::DEVICE_UNSEEN_MS_MAX);
            let (after, limit) = (sweeper.devices.after, limits::DEVICES_SEARCHED);
            (Sweep::Devices, Query::StaleDevices { before, after, limit })
        } else {
            let due = self.next_sweep();
            return self.timers.arm(due, Timer::Sweep);
        };
        sweeper.looking = Some(sweep);
        self.read(query, ReadPurpose::Sweep(sweep));
    }

    fn next_sweep(&self) -> Millis {
        let Retention { age_ms_max, messages_max, .. } = self.config.retention;
        let mut due = self.sweeper.devices.due;
        if messages_max > 0 {
            due = due.min(self.sweeper.excess.due);
        }
        if age_ms_max > 0 || messages_max > 0 {
            due = due.min(self.sweeper.age.due);
        }
        due
    }

    /// The store named messages to take.
    pub(crate) fn on_overdue(
        &mut self,
        sweep: Sweep,
        runs: Vec<Overdue>,
        (next, more): (u64, bool),
        ids: bool,
        now: Now,
    ) {
        let age_ms = self.sweep_age_ms();
        let sweeper = &mut self.sweeper;
        sweeper.looking = None;
        sweeper.taking = runs.len() + usize::from(ids);
        let pause = now.mono + limits::SWEEP_PAUSE_MS;
        match sweep {
            Sweep::Age => {
                sweeper.age.after = next;
                sweeper.age.due = if more || ids { pause } else { now.mono + age_ms };
            }
            Sweep::Excess => {
                sweeper.excess.after = if more { next } else { 0 };
                sweeper.excess.due = if more { pause } else { now.mono + limits::SWEEP_ANEW_MS };
            }
            Sweep::ExcessOfOne => {
                if let Some(run) = runs.first().filter(|_| more) {
                    sweeper.overfull.insert(run.conversation.clone());
                }
            }
            Sweep::Devices => {}
        }
        if ids {
            let before = now.wall.saturating_sub(self.config.retention.ids_ms_min);
            self.enqueue(Entry::ForgetIds { before });
        }
        for Overdue { conversation, messages } in runs {
            let is_cold = !self.conversations.contains_key(&conversation);
            let entry =
                Entry::Expire(Box::new(Expire { conversation: conversation.clone(), messages, is_cold }));
            self.with_conversation(&conversation, Deferred::Entry(Box::new(entry)), now);
        }
        self.end_step(now);
    }

    /// How often the oldest messages are looked at.
    fn sweep_age_ms(&self) -> u64 {
        let Retention { age_ms_max, ids_ms_min, .. } = self.config.retention;
        let shortest = if age_ms_max > 0 { age_ms_max.min(ids_ms_min.max(1)) } else { ids_ms_min };
        (shortest / 20).clamp(limits::SWEEP_MS, limits::SWEEP_MS_MAX)
    }

    /// The store named devices that were not seen for long.
    pub(crate) fn on_stale_devices(
        &mut self,
        devices: Vec<(UserId, DeviceId)>,
        (next, more): (u64, bool),
        now: Now,
    ) {
        let pass = &mut self.sweeper.devices;
        pass.after = if more { next } else { 0 };
        pass.due = now.mono + if more { limits::SWEEP_PAUSE_MS } else { limits::SWEEP_ANEW_MS };
        self.sweeper.looking = None;
        let stale = devices.into_iter().filter(|(user, device)| !self.is_connected(user, device));
        let entries: Vec<Entry> =
            stale.map(|(user, device)| Entry::ForgetDevice { asker: None, user, device }).collect();
        entries.into_iter().for_each(|entry| self.enqueue(entry));
        self.end_step(now);
    }

    pub(crate) fn is_connected(&self, user: &UserId, device: &DeviceId) -> bool {
        self.users.get(user).is_some_and(|u| u.device(device).is_some())
    }

    /// A look-up of the sweep failed.
    pub(crate) fn on_sweep_failed(&mut self, now: Now) {
        self.sweeper.looking = None;
        self.sweeper.failed = true;
        self.end_step(now);
    }

    /// One thing that a step was to take is taken, or is not to be taken.
    pub(crate) fn on_swept(&mut self, is_failed: bool, now: Now) {
        self.sweeper.failed |= is_failed;
        self.sweeper.taking = self.sweeper.taking.saturating_sub(1);
        self.end_step(now);
    }

    fn end_step(&mut self, now: Now) {
        let sweeper = &mut self.sweeper;
        if sweeper.looking.is_some() || sweeper.taking > 0 {
            return;
        }
        let mut wait = limits::SWEEP_PAUSE_MS;
        if std::mem::take(&mut sweeper.failed) {
            // What was passed and not taken is looked for again from the beginning.
            (sweeper.age.after, sweeper.excess.after) = (0, 0);
            (sweeper.age.due, sweeper.excess.due) = (now.mono, now.mono);
            wait = limits::STORE_RETRY_MS;
        }
        self.timers.arm(now.mono + wait, Timer::Sweep);
    }

    pub(crate) fn stage_expire(&self, forming: &mut Forming, expire: &Expire, now: Now) -> Effect {
        let Expire { conversation: id, messages, .. } = expire;
        let Some(Slot::Ready(conversation)) = self.conversations.get(id) else { return Effect::Nothing };
        let (Some((first, _)), Some((last, _))) = (messages.first(), messages.last()) else {
            return Effect::Nothing;
        };
        let staged = forming.stage(id, conversation);
        let is_lifted = staged.floor > conversation.floor;
        if staged.deleted || is_lifted || *last <= staged.floor || *first > staged.floor + 1 {
            return Effect::Nothing;
        }
        let floor = *last;
        let mut own: HashMap<&UserId, Vec<Seq>> = HashMap::new();
        for (seq, from) in messages {
            own.entry(from).or_default().push(*seq);
        }
        let newest = staged.last;
        let mut expired = 0;
        let mut changed = Vec::new();
        let mut take = |user: &UserId, member: &Member, is_staged: bool| {
            let own = own.get(user).map_or(&[][..], Vec::as_slice);
            let mut lifted = member.clone();
            lifted.expire(floor, own);
            expired += member.waiting(newest) - lifted.waiting(newest);
            // Everybody else is lifted when the transaction is durable, and by whoever reads the row.
            if is_staged || !own.is_empty() {
                changed.push((user.clone(), lifted));
            }
        };
        for (user, member) in &conversation.members {
            if !staged.members.contains_key(user) {
                take(user, member, false);
            }
        }
        for user in &staged.touched {
            if let Some(Some(member)) = staged.members.get(user) {
                take(user, member, true);
            }
        }
        staged.floor = floor;
        for (user, member) in changed {
            staged.put_member(&user, Some(member), conversation);
        }
        forming.fence(id);
        forming.batch.ledger.expired += expired;
        let ids_from = now.wall.saturating_sub(self.config.retention.ids_ms_min);
        forming.batch.writes.push(Write::ExpireMessages { conversation: id.clone(), up_to: floor, ids_from });
        Effect::Expired { floor }
    }

    /// The messages are gone. A conversation that was loaded for this only is the first to leave memory again.
    pub(crate) fn on_expired(&mut self, expire: &Expire, effect: &Effect, now: Now) {
        if let Effect::Expired { floor } = effect {
            let taken = expire.messages.iter().filter(|(seq, _)| seq <= floor);
            self.counters.messages_expired += taken.count() as u64;
        }
        if let Some(Slot::Ready(conversation)) = self.conversations.get_mut(&expire.conversation)
            && expire.is_cold
            && conversation.pending == 0
        {
            conversation.touched = 0;
        }
        self.on_swept(false, now);
    }

    /// Devices that stay connected are seen all the time; now and then that is written down, should the process end
    /// without a word.
    pub(crate) fn on_seen_timer(&mut self, from: usize, now: Now) {
        let mut entries = Vec::new();
        let (from, to) = (from.min(self.users.len()), self.users.len().min(from + limits::SEEN_USERS));
        for (user, state) in &self.users[from..to] {
            for device in &state.devices {
                let since = device.conns.iter().filter_map(|k| self.conns.get(k)).map(|c| c.since()).max();
                if since.is_some_and(|since| since + limits::SEEN_MS / 2 < now.wall) {
                    let (user, device, class) = (user.clone(), device.id.clone(), device.class);
                    entries.push(Entry::PutDevice { user, device, class, at: now.wall });
                }
            }
        }
        entries.into_iter().for_each(|entry| self.enqueue(entry));
        let is_done = to == self.users.len();
        let (from, wait) = if is_done { (0, limits::SEEN_MS) } else { (to, limits::SWEEP_MS) };
        self.timers.arm(now.mono + wait, Timer::Seen { from });
    }
}

/// Messages at the front of a conversation that are to go.
#[derive(Debug, Clone)]
pub(crate) struct Expire {
    pub conversation: ConversationId,
    messages: Vec<(Seq, UserId)>,
    /// It was not in memory.
    is_cold: bool,
}

impl Member {
    /// The messages up to `floor` are gone, of which these were the user's own.
    pub(crate) fn expire(&mut self, floor: Seq, own: &[Seq]) {
        let above =
            |position: Seq| own.iter().filter(|seq| **seq > position && **seq <= floor).count() as u64;
        self.own_above_delivered = self.own_above_delivered.saturating_sub(above(self.delivered));
        self.own_above_read = self.own_above_read.saturating_sub(above(self.read));
        self.lift(floor);
    }
}

#[cfg(test)]
mod tests {
    use crate::conversation::new_member;
    use bowline_protocol::frame::Role;

    #[test]
    fn what_is_gone_is_neither_unread_nor_waiting() {
        let mut member = new_member(Role::Member, 1);
        // Ten messages, 2, 5 and 9 the user's own; up to 3 delivered, none read.
        (member.delivered, member.own_above_delivered, member.own_above_read) = (3, 2, 3);
        assert_eq!((member.waiting(10), member.unread(10)), (5, 7));
        member.expire(5, &[2, 5]);
        assert_eq!((member.first, member.delivered, member.read), (6, 5, 5));
        assert_eq!((member.waiting(10), member.unread(10)), (4, 4), "6, 7, 8 and 10");
        member.expire(10, &[9]);
        assert_eq!((member.waiting(10), member.unread(10), member.first), (0, 0, 11));
    }
}
