//! Sessions that are held for a while after their connection has ended, so that a client whose network dropped goes on
//! where it was: what its device has not acknowledged is pushed, instead of announced.
//!
//! A resume is complete or is none. Before the client is told `resumed`, all that waits has been read; when that is
//! too much, or fails, the answer is `false` and everything is announced as at any other login. Meanwhile what
//! becomes due for the connection is kept, and follows in order.

use crate::{
    Core, Now,
    flight::Flight,
    limits,
    persist::{Message, Query},
    reads::ReadPurpose,
    timers::Timer,
    users::{ConnKey, Sync},
};
use bowline_protocol::{
    CloseCode, ConversationId, DeviceId, Frame, Millis, Seq, UserId, frame::encode_push, link::Down,
};
use std::collections::{HashMap, VecDeque};

/// A session without a connection.
pub(crate) struct HeldSession {
    user: UserId,
    device: DeviceId,
    /// What was stored before this, was pushed and is not listed here, was given up after its last attempt.
    given_up_before: Millis,
    until: Millis,
    /// Up to where each conversation was pushed of which something was not acknowledged.
    pushed: Vec<(ConversationId, Seq)>,
    /// Up to where conversations were announced, and not fetched.
    announced: Vec<(ConversationId, Seq)>,
}

/// Sessions by the hash of their id.
pub(crate) type Sessions = HashMap<u64, HeldSession, ahash::RandomState>;

/// What a connection that wants to go on with a session is to be sent, as far as it is read.
#[derive(Debug, Clone)]
pub(crate) struct Resume {
    pub key: ConnKey,
    pub login: u64,
    rest: VecDeque<(ConversationId, Seq, Seq)>,
    found: Vec<Message>,
    bytes: usize,
}

pub(crate) fn session_key(id: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(id.as_bytes())
}

/// Whether a client may go on after its connection ended so. Who was sent away may not.
pub(crate) fn may_resume(code: CloseCode) -> bool {
    use CloseCode::*;
    !matches!(
        code,
        ConnectTimeout | Replaced | Unauthenticated | Revoked | Kicked | Policy | DeviceInUse | Version
    )
}

impl HeldSession {
    /// Whether this message was pushed while the connection was open: all that was stored then was.
    fn was_sent(&self, message: &Message) -> bool {
        let of = |list: &[(ConversationId, Seq)]| {
            list.iter().find(|(id, _)| *id == message.conversation).map(|(_, seq)| *seq)
        };
        if of(&self.announced).is_some_and(|last| message.seq <= last) {
            return false;
        }
        match of(&self.pushed) {
            Some(last) => message.seq <= last,
            None => message.ts < self.given_up_before,
        }
    }
}

impl Core {
    /// The connection has ended; its session waits for another one.
    pub(crate) fn hold_session(&mut self, session: u64, user: &UserId, device: usize, now: Now) {
        let Some(device) = self.users.get(user).and_then(|u| u.devices.get(device)) else { return };
        let open = device.flights.len() + device.announced.len();
        if self.config.resume_ms == 0
            || self.sessions.len() >= limits::SESSIONS_HELD_MAX
            || open > limits::RESUME_CONVERSATIONS_MAX
        {
            return;
        }
        let until = now.mono + self.config.resume_ms;
        let pushed = device.flights.iter().filter_map(|f| Some((f.conversation.clone(), f.last()?)));
        let held = HeldSession {
            user: user.clone(),
            device: device.id.clone(),
            given_up_before: now.wall.saturating_sub(self.config.ack_timeout_ms),
            until,
            pushed: pushed.collect(),
            announced: device.announced.to_vec(),
        };
        self.sessions.insert(session, held);
        self.timers.arm(until, Timer::Session(session));
    }

    pub(crate) fn on_session_timer(&mut self, session: u64, now: Now) {
        match self.sessions.get(&session).map(|held| held.until) {
            Some(until) if until > now.mono => self.timers.arm(until, Timer::Session(session)),
            Some(_) => drop(self.sessions.remove(&session)),
            None => {}
        }
    }

    /// The connection that wanted to go on with a session has ended before it could: there may be another.
    pub(crate) fn hold_longer(&mut self, session: u64, now: Now) {
        if let Some(held) = self.sessions.get_mut(&session) {
            held.until = now.mono + self.config.resume_ms;
        }
    }

    pub(crate) fn is_held(&self, session: u64, user: &UserId, device: &DeviceId, now: Now) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|held| held.user == *user && held.device == *device && held.until > now.mono)
    }

    /// The connection that has this session open, when it is this device's.
    pub(crate) fn conn_of_session(&self, session: u64, user: &UserId, device: &DeviceId) -> Option<ConnKey> {
        let device = self.users.get(user)?.device(device)?;
        device.conns.iter().copied().find(|key| self.conns.get(key).is_some_and(|c| c.session == session))
    }

    /// What waits is known: reads it, unless that is too much.
    pub(crate) fn plan_resume(
        &mut self,
        key: ConnKey,
        login: u64,
        ranges: VecDeque<(ConversationId, Seq, Seq)>,
        now: Now,
    ) {
        let count: u64 = ranges.iter().map(|(_, from, to)| to + 1 - from).sum();
        if count > limits::RESUME_MESSAGES_MAX || ranges.len() > limits::RESUME_CONVERSATIONS_MAX {
            return self.give_up_resume(key, now);
        }
        self.go_on_resuming(Resume { key, login, rest: ranges, found: Vec::new(), bytes: 0 }, now);
    }

    fn go_on_resuming(&mut self, resume: Resume, now: Now) {
        match resume.rest.front() {
            None => self.end_resume(resume, now),
            Some((conversation, from, to)) => {
                let query = Query::Messages {
                    conversation: conversation.clone(),
                    from: *from,
                    to: *to,
                    limit: limits::REDELIVERY_PAGE,
                    bytes_max: limits::RESUME_BYTES_MAX as u64,
                    newest: false,
                };
                self.read(query, ReadPurpose::Resume(Box::new(resume)));
            }
        }
    }

    pub(crate) fn on_resume_found(&mut self, mut resume: Resume, messages: Vec<Message>, now: Now) {
        let is_wanted = |sync: &Sync| sync.resuming.is_some();
        let conn = self.conns.get(&resume.key).filter(|c| c.login == resume.login);
        if !conn.and_then(|c| c.sync.as_deref()).is_some_and(is_wanted) {
            return;
        }
        let last = messages.last().map(|m| m.seq);
        if let Some(range) = resume.rest.front_mut() {
            // What retention took meanwhile does not come any more.
            match last {
                Some(last) if last < range.2 => range.1 = last + 1,
                _ => drop(resume.rest.pop_front()),
            }
        }
        resume.bytes += messages.iter().map(|m| m.body.bytes().len()).sum::<usize>();
        resume.found.extend(messages);
        match resume.bytes > limits::RESUME_BYTES_MAX {
            true => self.give_up_resume(resume.key, now),
            false => self.go_on_resuming(resume, now),
        }
    }

    /// Everything is there: the session goes on with this connection.
    fn end_resume(&mut self, resume: Resume, now: Now) {
        let Resume { key, login, found, .. } = resume;
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == login) else { return };
        let Some(sync) = conn.sync.as_mut().filter(|sync| !sync.overflowed) else {
            return self.give_up_resume(key, now);
        };
        let Some(session) = sync.resuming else { return };
        let Some(held) = self.sessions.remove(&session) else { return self.give_up_resume(key, now) };
        let sync = conn.sync.take().unwrap_or_default();
        conn.session = session;
        let (user, device) = (conn.user.clone(), conn.device.clone());
        self.send_down(key, Down::Accepted { resumed: true });
        for frame in &sync.early {
            self.broadcast(&[key], frame);
        }
        let own = |m: &Message| m.from == user && m.device.as_ref() == Some(&device);
        let mut pushes: Vec<(ConversationId, Seq, Frame)> = Vec::new();
        for message in found.iter().filter(|m| !own(m)) {
            let Message { conversation, seq, id, from, ts, body, .. } = message;
            let frame = encode_push(conversation, *seq, id, from, *ts, held.was_sent(message), body);
            pushes.push((conversation.clone(), *seq, frame));
        }
        pushes.extend(sync.held.into_iter().map(|held| (held.conversation, held.seq, held.frame)));
        self.push_to(key, (&user, &device), pushes, now);
        self.counters.resumed += 1;
    }

    /// The session does not go on: what waits is announced, as at any login.
    pub(crate) fn give_up_resume(&mut self, key: ConnKey, now: Now) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let Some(sync) = conn.sync.as_mut().filter(|sync| sync.resuming.is_some()) else { return };
        sync.resuming = None;
        let is_looking = sync.is_looking;
        let early = std::mem::take(&mut sync.early);
        self.send_down(key, Down::Accepted { resumed: false });
        for frame in &early {
            self.broadcast(&[key], frame);
        }
        if !is_looking {
            self.begin_sync(key, now);
        }
    }

    /// Pushes to one connection, in this order, and sets the timers of what is to be acknowledged.
    pub(crate) fn push_to(
        &mut self,
        key: ConnKey,
        (user_id, device_id): (&UserId, &DeviceId),
        pushes: Vec<(ConversationId, Seq, Frame)>,
        now: Now,
    ) {
        let due = now.mono + self.config.ack_timeout_ms;
        let Some(device) = self.users.get_mut(user_id).and_then(|u| u.device_mut(device_id)) else { return };
        let mut armed = Vec::new();
        for (conversation, seq, _) in &pushes {
            let flight: &mut Flight = device.flight(conversation);
            flight.on_pushed(*seq, now.mono);
            if flight.arm(due) {
                armed.push(conversation.clone());
            }
        }
        for conversation in armed {
            let (user, device) = (user_id.clone(), device_id.clone());
            self.timers.arm(due, Timer::Flight { user, device, conversation });
        }
        self.counters.pushes += pushes.len() as u64;
        for (_, _, frame) in pushes {
            self.broadcast(&[key], &frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Retention};

    fn core() -> Core {
        Core::new(Config {
            ack_timeout_ms: 3_000,
            max_redeliveries: 3,
            batch_max: 10,
            group_members_max: 10,
            frame_bytes_max: 1_000,
            seed: 1,
            owner_epoch: 1,
            before_send: false,
            outbox: false,
            retention: Retention::default(),
            resume_ms: 15_000,
        })
    }

    /// A user with one device, which is connected.
    fn add_device(core: &mut Core, user: &UserId) {
        let device = crate::users::Device {
            id: DeviceId::trusted("1"),
            class: None,
            conns: [(0, 1)].into(),
            flights: Default::default(),
            announced: Default::default(),
        };
        core.users.entry(user.clone()).or_default().devices.push(device);
    }

    fn at(mono: Millis) -> Now {
        Now { wall: mono + 1_000_000, mono }
    }

    #[test]
    fn a_session_leaves_memory_when_its_time_is_over() {
        let mut core = core();
        let user = UserId::trusted("a");
        add_device(&mut core, &user);
        core.hold_session(7, &user, 0, at(0));
        core.hold_session(8, &user, 0, at(0));
        core.hold_longer(8, at(5_000));
        for (mono, count) in [(14_999, 2), (15_000, 1), (19_999, 1), (20_000, 0)] {
            core.on_timers(at(mono));
            assert_eq!(core.sessions.len(), count, "at {mono}");
        }
        assert_eq!(core.next_due(), None);
    }

    #[test]
    fn so_many_sessions_are_held_and_no_more() {
        let mut core = core();
        let user = UserId::trusted("a");
        add_device(&mut core, &user);
        let max = limits::SESSIONS_HELD_MAX as u64;
        (0..=max).for_each(|session| core.hold_session(session, &user, 0, at(0)));
        assert_eq!(core.sessions.len() as u64, max);
        assert!(core.is_held(max - 1, &user, &DeviceId::trusted("1"), at(0)));
        assert!(!core.is_held(max, &user, &DeviceId::trusted("1"), at(0)));
    }
}
