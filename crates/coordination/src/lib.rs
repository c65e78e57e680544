//! What nodes share: who is connected where. [`Memory`] is the form for one process.
//!
//! A route says which connection serves a device. It is taken and given up by login time, in one step each, so
//! that word of an older login never undoes a newer one.

use bowline_protocol::{
    DeviceId, UserId,
    link::{Claim, ConnRef, Open, SameDevice},
};
use indexmap::IndexMap;
use smallvec::SmallVec;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Routes, taken and given up. Calls may answer later and on another thread; none waits.
pub trait Coordination: Send + Sync {
    /// Takes the route of a device for a connection, as `open.same_device` says when others hold it.
    fn claim(&self, conn: &ConnRef, open: &Open, reply: Box<dyn FnOnce(Claim) + Send>);

    /// Gives a route up, if it is still this connection's.
    fn release(&self, conn: &ConnRef, user: &UserId);

    /// Is there still a route to this connection?
    fn look_up(&self, conn: &ConnRef, user: &UserId, reply: Box<dyn FnOnce(bool) + Send>);
}

/// All routes of one process.
#[derive(Default)]
pub struct Memory {
    routes: Mutex<IndexMap<UserId, SmallVec<[Route; 1]>, ahash::RandomState>>,
}

struct Route {
    device: DeviceId,
    conn: ConnRef,
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, IndexMap<UserId, SmallVec<[Route; 1]>, ahash::RandomState>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections have a route.
    pub fn route_count(&self) -> usize {
        self.lock().values().map(SmallVec::len).sum()
    }

    fn claim_now(&self, conn: &ConnRef, open: &Open) -> Claim {
        let mut routes = self.lock();
        let of_user = routes.entry(open.user.clone()).or_default();
        let is_rival = |r: &Route| r.device == open.device && r.conn != *conn;
        let newer = of_user.iter().any(|r| is_rival(r) && r.conn.login > conn.login);
        let claim = match open.same_device {
            SameDevice::Allow => Claim::Won { ended: Vec::new() },
            SameDevice::Refuse if of_user.iter().any(is_rival) => Claim::InUse,
            SameDevice::Replace if newer => Claim::InUse,
            SameDevice::Replace | SameDevice::Refuse => {
                let (ended, kept): (Vec<Route>, Vec<Route>) =
                    std::mem::take(of_user).into_iter().partition(is_rival);
                *of_user = kept.into();
                Claim::Won { ended: ended.into_iter().map(|r: Route| r.conn).collect() }
            }
        };
        if matches!(claim, Claim::Won { .. }) && !of_user.iter().any(|r| r.conn == *conn) {
            of_user.push(Route { device: open.device.clone(), conn: conn.clone() });
        }
        claim
    }
}

impl Coordination for Memory {
    fn claim(&self, conn: &ConnRef, open: &Open, reply: Box<dyn FnOnce(Claim) + Send>) {
        reply(self.claim_now(conn, open));
    }

    fn release(&self, conn: &ConnRef, user: &UserId) {
        let mut routes = self.lock();
        if let Some(of_user) = routes.get_mut(user) {
            of_user.retain(|r| r.conn != *conn);
            if of_user.is_empty() {
                routes.swap_remove(user);
            }
        }
    }

    fn look_up(&self, conn: &ConnRef, user: &UserId, reply: Box<dyn FnOnce(bool) + Send>) {
        let here = self.lock().get(user).is_some_and(|of_user| of_user.iter().any(|r| r.conn == *conn));
        reply(here);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bowline_protocol::link::NodeRef;
    use std::sync::Arc;

    fn conn(connection: u64, login: u64) -> ConnRef {
        ConnRef { node: Arc::new(NodeRef { node_id: "n".into(), boot_id: "b".into() }), connection, login }
    }

    fn open(same_device: SameDevice) -> Open {
        let (user, device) = (UserId::trusted("u"), DeviceId::trusted("d"));
        Open { user, device, class: None, channel: None, session: "s".into(), resume: None, same_device }
    }

    #[test]
    fn a_newer_login_wins_and_an_older_word_changes_nothing() {
        let memory = Memory::default();
        let (old, new) = (conn(1, 10), conn(2, 20));
        assert_eq!(memory.claim_now(&new, &open(SameDevice::Replace)), Claim::Won { ended: vec![] });
        assert_eq!(memory.claim_now(&old, &open(SameDevice::Replace)), Claim::InUse);
        memory.release(&old, &UserId::trusted("u"));
        assert_eq!(memory.route_count(), 1);
        let newest = conn(3, 30);
        assert_eq!(memory.claim_now(&newest, &open(SameDevice::Replace)), Claim::Won { ended: vec![new] });
        memory.release(&newest, &UserId::trusted("u"));
        assert_eq!(memory.route_count(), 0);
    }

    #[test]
    fn the_policy_decides_about_a_second_login() {
        for (policy, second) in [
            (SameDevice::Replace, Claim::Won { ended: vec![conn(1, 10)] }),
            (SameDevice::Refuse, Claim::InUse),
            (SameDevice::Allow, Claim::Won { ended: vec![] }),
        ] {
            let memory = Memory::default();
            memory.claim_now(&conn(1, 10), &open(policy));
            assert_eq!(memory.claim_now(&conn(2, 20), &open(policy)), second);
        }
    }
}
