//! Who is connected: users, their devices, and the connections of those.

use crate::{flight::Flight, limits};
use bowline_protocol::{
    ClientFrame, CloseCode, ConversationId, DeviceId, Frame, Millis, Seq, UserId,
    ids::DeviceClass,
    link::{ConnRef, NodeRef},
};
use smallvec::SmallVec;
use std::{
    collections::{HashMap, VecDeque},
    ops::{Deref, DerefMut},
    sync::Arc,
};

/// A connection: the index of its node in [`Nodes`], and its number there.
pub(crate) type ConnKey = (u32, u64);

/// The nodes that were heard of; few, so a list.
#[derive(Default)]
pub(crate) struct Nodes(Vec<Arc<NodeRef>>);

impl Nodes {
    pub fn index(&mut self, node: &Arc<NodeRef>) -> u32 {
        let found = self.0.iter().position(|n| Arc::ptr_eq(n, node) || n == node);
        found.unwrap_or_else(|| {
            self.0.push(node.clone());
            self.0.len() - 1
        }) as u32
    }

    pub fn node(&self, index: u32) -> &Arc<NodeRef> {
        &self.0[index as usize]
    }
}

pub(crate) struct Conn {
    pub login: u64,
    pub user: UserId,
    pub device: DeviceId,
    /// Number of the last event sent down.
    pub sent: u64,
    /// Frames decided and not yet reported.
    pub decided: u32,
    pub congested: bool,
    /// Nobody can go on with its session.
    pub in_rooms: bool,
    /// The newest event that was answered "not here, gone"; a second answer for it, or for one before it, ends the
    /// connection.
    pub gone_no: u64,
    /// Of its session's id.
    pub session: u64,
    /// Present until the waiting conversations were announced.
    pub sync: Option<Box<Sync>>,
}

/// What became due for a connection before it could be told what waits.
#[derive(Default)]
pub(crate) struct Sync {
    pub held: Vec<Held>,
    /// More became due than is held: look again, and announce it all.
    pub overflowed: bool,
    /// What waits is being looked up.
    pub is_looking: bool,
    /// The session that it wants to go on with; it has not been accepted yet.
    pub resuming: Option<u64>,
    /// What else it is to be sent once it is accepted.
    pub early: Vec<Frame>,
    /// What its client said meanwhile.
    pub frames: Vec<ClientFrame>,
}

pub(crate) struct Held {
    pub conversation: ConversationId,
    pub seq: Seq,
    pub own: bool,
    pub frame: Frame,
}

/// How connections were closed lately: one that still speaks has not heard of it yet, and is told the same again.
#[derive(Default)]
pub(crate) struct Closes {
    codes: HashMap<ConnKey, (u64, CloseCode), ahash::RandomState>,
    order: VecDeque<ConnKey>,
}

impl Closes {
    pub fn note(&mut self, key: ConnKey, login: u64, code: CloseCode) {
        if self.codes.insert(key, (login, code)).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > limits::CLOSES_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.codes.remove(&oldest);
        }
    }

    pub fn find(&self, key: ConnKey, login: u64) -> Option<CloseCode> {
        self.codes.get(&key).filter(|(l, _)| *l == login).map(|(_, code)| *code)
    }
}

#[derive(Default)]
pub(crate) struct User {
    pub devices: SmallVec<[Device; 1]>,
    /// Every device that the store knows; `None` until it was asked.
    pub known: Option<Arc<[DeviceId]>>,
}

/// A device with at least one open connection.
pub(crate) struct Device {
    pub id: DeviceId,
    pub class: Option<DeviceClass>,
    pub conns: SmallVec<[ConnKey; 1]>,
    pub flights: Rare<Flight>,
    /// Conversations that were announced and not fetched yet, each with the last number announced.
    pub announced: Rare<(ConversationId, Seq)>,
}

/// A list that is empty for a device at rest, and then takes no more than a pointer.
pub(crate) struct Rare<T>(#[allow(clippy::box_collection)] Option<Box<Vec<T>>>);

impl<T> Default for Rare<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Rare<T> {
    pub fn push(&mut self, item: T) {
        self.0.get_or_insert_default().push(item);
    }

    pub fn swap_remove(&mut self, index: usize) {
        if let Some(list) = &mut self.0 {
            list.swap_remove(index);
        }
        self.0.take_if(|list| list.is_empty());
    }

    pub fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        if let Some(list) = &mut self.0 {
            list.retain(keep);
        }
        self.0.take_if(|list| list.is_empty());
    }
}

impl<T> Deref for Rare<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }
}

impl<T> DerefMut for Rare<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.0.as_deref_mut().map_or(&mut [], Vec::as_mut_slice)
    }
}

impl Conn {
    /// When it was accepted.
    pub fn since(&self) -> Millis {
        self.login / 1000
    }
}

impl User {
    pub fn device(&self, id: &DeviceId) -> Option<&Device> {
        self.devices.iter().find(|d| d.id == *id)
    }

    pub fn device_mut(&mut self, id: &DeviceId) -> Option<&mut Device> {
        self.devices.iter_mut().find(|d| d.id == *id)
    }
}

impl Device {
    /// The flight of a conversation, begun if there is none.
    pub fn flight(&mut self, conversation: &ConversationId) -> &mut Flight {
        let index = match self.flights.iter().position(|f| f.conversation == *conversation) {
            Some(index) => index,
            None => {
                self.flights.push(Flight::new(conversation.clone()));
                self.flights.len() - 1
            }
        };
        &mut self.flights[index]
    }

    pub fn is_announced_above(&self, conversation: &ConversationId, position: Seq) -> bool {
        self.announced.iter().any(|(c, last)| c == conversation && *last > position)
    }
}

pub(crate) fn conn_ref(nodes: &Nodes, key: ConnKey, login: u64) -> ConnRef {
    ConnRef { node: nodes.node(key.0).clone(), connection: key.1, login }
}

// There is one of each for every session.
const _: () = assert!(size_of::<Conn>() <= 80);
const _: () = assert!(size_of::<User>() <= 104);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_its_id_and_its_life() {
        let node = |id: &str, boot: &str| Arc::new(NodeRef { node_id: id.into(), boot_id: boot.into() });
        let mut nodes = Nodes::default();
        let seen = [("n1", "b1"), ("n2", "b1"), ("n1", "b2"), ("n2", "b1"), ("n1", "b1")];
        assert_eq!(seen.map(|(id, boot)| nodes.index(&node(id, boot))), [0, 1, 2, 1, 0]);
        let known = nodes.node(1).clone();
        assert_eq!((&known, nodes.index(&known)), (&node("n2", "b1"), 1));
    }

    #[test]
    fn so_many_closes_are_remembered_and_the_oldest_goes_first() {
        let mut closes = Closes::default();
        let key = |n: usize| (0, n as u64);
        for n in 0..limits::CLOSES_REMEMBERED {
            closes.note(key(n), 1, CloseCode::Kicked);
        }
        // One more for the same connection, in another life of its number, takes no more room.
        closes.note(key(1), 2, CloseCode::Revoked);
        assert_eq!(closes.find(key(0), 1), Some(CloseCode::Kicked));
        assert_eq!((closes.find(key(1), 1), closes.find(key(1), 2)), (None, Some(CloseCode::Revoked)));
        closes.note(key(usize::MAX), 1, CloseCode::Replaced);
        assert_eq!((closes.find(key(0), 1), closes.find(key(1), 2)), (None, Some(CloseCode::Revoked)));
        assert_eq!(closes.codes.len(), limits::CLOSES_REMEMBERED);
    }

    #[test]
    fn a_list_that_is_empty_again_takes_no_room() {
        let mut list = Rare::default();
        (1..=3).for_each(|n| list.push(n));
        list.swap_remove(0);
        assert_eq!(list[..], [3, 2]);
        list[0] = 5;
        list.retain(|n| *n == 5);
        assert_eq!(list[..], [5]);
        list.swap_remove(0);
        assert!(list.0.is_none());
        list.push(1);
        list.retain(|_| false);
        assert!(list.0.is_none());
    }
}
