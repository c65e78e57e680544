//! Connections come, are replaced, and go. A connection is claimed in coordination before it counts; several of one
//! device are there only where the policy allows it.

use crate::{
    Action, Core, Now,
    batch::Entry,
    limits, positions, resume, timers,
    users::{self, Conn, ConnKey, Device, conn_ref},
};
use bowline_protocol::{
    CloseCode, DeviceId, UserId,
    link::{Claim, ConnRef, Down, Open, SameDevice, Up},
};

/// A connection whose route is being claimed.
pub(crate) struct Opening {
    pub login: u64,
    is_closed: bool,
    /// A newer login took the route before the answer to this one came.
    is_replaced: bool,
}

impl Core {
    pub(crate) fn on_open(&mut self, key: ConnKey, from: ConnRef, open: Open, now: Now) {
        // A link may bring it twice. A second claim would begin the numbers of the connection anew, and its
        // gateway would take what follows for what it had.
        let is_open = self.conns.get(&key).is_some_and(|c| c.login == from.login);
        if is_open || self.opening.get(&key).is_some_and(|o| o.login == from.login) {
            return;
        }
        // A session that this one goes on with is taken from the connection that has it, whatever the policy says of a
        // second login: it is the same client. What the old one still says concerns nobody any more.
        let asked = open.resume.as_deref().map(resume::session_key);
        let fenced = asked.and_then(|session| self.conn_of_session(session, &open.user, &open.device));
        if let Some(old_key) = fenced.filter(|old_key| *old_key != key) {
            self.send_down(old_key, Down::Close { code: CloseCode::Replaced, reason: None });
            self.remove_conn(old_key, true, now);
        }
        let opening = Opening { login: from.login, is_closed: false, is_replaced: false };
        self.opening.insert(key, opening);
        self.actions.push(Action::Claim { conn: from, open: Box::new(open) });
    }

    /// Something came from a connection that is not known, or not yet.
    pub(crate) fn on_stranger(&mut self, key: ConnKey, from: ConnRef, event: Up) {
        match event {
            Up::Closed(_) => {
                if let Some(opening) = self.opening.get_mut(&key).filter(|o| o.login == from.login) {
                    opening.is_closed = true;
                }
            }
            Up::Frame(_) => {
                // The gateway holds a connection that was given up here; its client has to come again, unless it was
                // sent away and that has not arrived yet.
                self.close_again(key, from);
            }
            Up::NotHere { no, event, .. } if no > 0 => {
                // It was given up, and something has not arrived: the close, or what came before it, without which the
                // close would never have its turn.
                match *event {
                    close @ Down::Close { .. } => self.send_again(from, 0, close),
                    _ => self.close_again(key, from),
                }
            }
            _ => {}
        }
    }

    /// Closes what was given up, outside the order: as it was closed before, if it was; else it has to come again.
    fn close_again(&mut self, key: ConnKey, conn: ConnRef) {
        let code = self.closes.find(key, conn.login).unwrap_or(CloseCode::Shutdown);
        self.send_again(conn, 0, Down::Close { code, reason: None });
    }

    pub(crate) fn on_claimed(&mut self, conn: ConnRef, open: Open, claim: Claim, now: Now) {
        let key = (self.nodes.index(&conn.node), conn.connection);
        let is_awaited = self.opening.get(&key).is_some_and(|opening| opening.login == conn.login);
        let opening = if is_awaited { self.opening.remove(&key) } else { None };
        let ended = match claim {
            Claim::Won { ended } => ended,
            Claim::InUse => {
                // Where a newer login replaces an older one, this one only looks older: the clocks of two nodes differ,
                // or it was overtaken. It may come again, the other is ended then.
                let code = match open.same_device {
                    SameDevice::Refuse => CloseCode::DeviceInUse,
                    SameDevice::Replace | SameDevice::Allow => CloseCode::Overloaded,
                };
                return self.send_again(conn, 1, Down::Refused(code));
            }
        };
        self.end_routes(ended, now);
        match opening {
            Some(Opening { is_closed: false, is_replaced: false, .. }) => {}
            Some(Opening { is_closed: false, is_replaced: true, .. }) => {
                return self.send_again(conn, 1, Down::Refused(CloseCode::Replaced));
            }
            _ => return self.actions.push(Action::Release { conn, user: open.user }),
        }
        if open.same_device != SameDevice::Allow {
            self.end_others(&open.user, &open.device, key, now);
        }
        if self.conns.contains_key(&key) {
            // The gateway gave this number to a new connection; the word that the old one closed is still due.
            self.remove_conn(key, true, now);
        }
        let asked = open.resume.as_deref().map(resume::session_key);
        let resuming = asked.filter(|session| self.is_held(*session, &open.user, &open.device, now));
        self.conns.insert(
            key,
            Conn {
                login: conn.login,
                user: open.user.clone(),
                device: open.device.clone(),
                sent: 0,
                decided: 0,
                congested: false,
                in_rooms: false,
                gone_no: 0,
                session: resume::session_key(&open.session),
                sync: Some(Box::new(users::Sync { resuming, ..users::Sync::default() })),
            },
        );
        let user = self.users.entry(open.user.clone()).or_default();
        // From here on it is one of the user's devices: it stays where it is when another moves on.
        if let Some(known) = &mut user.known
            && !known.contains(&open.device)
        {
            *known = known.iter().chain([&open.device]).cloned().collect();
            positions::widen(&mut self.positions, &open.user, &open.device);
        }
        match user.device_mut(&open.device) {
            Some(device) => {
                device.conns.push(key);
                device.class = open.class.or(device.class);
            }
            None => user.devices.push(Device {
                id: open.device,
                class: open.class,
                conns: [key].into(),
                flights: users::Rare::default(),
                announced: users::Rare::default(),
            }),
        }
        match resuming {
            None => self.send_down(key, Down::Accepted { resumed: false }),
            Some(_) => {
                let timer = timers::Timer::Resume { key, login: conn.login };
                self.timers.arm(now.mono + limits::RESUME_WAIT_MS, timer);
            }
        }
        self.begin_sync(key, now);
    }

    /// The connections whose routes a newer login took.
    fn end_routes(&mut self, ended: Vec<ConnRef>, now: Now) {
        for old in ended {
            let key = (self.nodes.index(&old.node), old.connection);
            if self.conns.get(&key).is_some_and(|conn| conn.login == old.login) {
                self.replace(key, now);
            } else if let Some(opening) = self.opening.get_mut(&key).filter(|o| o.login == old.login) {
                opening.is_replaced = true;
            }
        }
    }

    /// All other connections of a device of which there is to be one. Coordination does not name them all: a router
    /// that was taken over may have been told of one that it never had, and nobody would ever say that it is gone.
    fn end_others(&mut self, user: &UserId, device: &DeviceId, key: ConnKey, now: Now) {
        let Some(device) = self.users.get(user).and_then(|user| user.device(device)) else { return };
        for other in device.conns.clone().into_iter().filter(|other| *other != key) {
            self.replace(other, now);
        }
    }

    fn replace(&mut self, key: ConnKey, now: Now) {
        self.send_down(key, Down::Close { code: CloseCode::Replaced, reason: None });
        self.remove_conn(key, false, now);
    }

    pub(crate) fn on_looked_up(&mut self, conn: ConnRef, here: bool, no: u64, event: Down, now: Now) {
        let key = (self.nodes.index(&conn.node), conn.connection);
        if self.conns.get(&key).is_none_or(|c| c.login != conn.login) {
            // Given up meanwhile: what did not arrive is not sent, and the close behind it would not have its turn.
            return self.close_again(key, conn);
        }
        if here { self.send_again(conn, no, event) } else { self.give_up(key, conn, now) }
    }

    /// Nobody seems to be there. Should the gateway hold the connection all the same, because a link or coordination
    /// erred, its client has to come again: it would wait for ever for what is not sent any more.
    pub(crate) fn give_up(&mut self, key: ConnKey, conn: ConnRef, now: Now) {
        self.remove_conn(key, true, now);
        self.send_again(conn, 0, Down::Close { code: CloseCode::Shutdown, reason: None });
    }

    /// Takes a connection out of every table; nothing happens when it is out already. Its session may be held.
    pub(crate) fn remove_conn(&mut self, key: ConnKey, is_held: bool, now: Now) {
        self.take_held_frames(key, now);
        let Some(conn) = self.conns.swap_remove(&key) else { return };
        let conn_ref = conn_ref(&self.nodes, key, conn.login);
        self.actions.push(Action::Release { conn: conn_ref, user: conn.user.clone() });
        let Some(user) = self.users.get_mut(&conn.user) else { return };
        let Some(index) = user.devices.iter().position(|d| d.id == conn.device) else { return };
        user.devices[index].conns.retain(|k| *k != key);
        let is_last = user.devices[index].conns.is_empty();
        if is_held && !conn.in_rooms {
            match conn.sync.as_ref().and_then(|sync| sync.resuming) {
                Some(session) => self.hold_longer(session, now),
                None => self.hold_session(conn.session, &conn.user, index, now),
            }
        }
        let Some(user) = self.users.get_mut(&conn.user) else { return };
        if is_last {
            let device = user.devices.remove(index);
            if user.known.is_none() {
                positions::widen(&mut self.positions, &conn.user, &device.id);
            }
            if user.devices.is_empty() {
                self.users.swap_remove(&conn.user);
            } else if user.known.is_none() {
                // It counts when the user's devices are found, even if it is stored behind that look-up.
                self.unstored_devices.push((conn.user.clone(), device.id.clone()));
            }
            self.enqueue(Entry::PutDevice {
                user: conn.user,
                device: device.id,
                class: device.class,
                at: now.wall,
            });
        }
    }
}
