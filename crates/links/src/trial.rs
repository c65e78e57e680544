//! A local link that behaves like a bad network, for rehearsals: every message is serialised, waits a random
//! time (in order for one connection), and now and then an event finds "nobody here".

use crate::{Downlinks, Uplinks};
use bowline_protocol::link::{ConnRef, Down, Downlink, Target, Up, Uplink};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap, HashSet},
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Messages under way at once; beyond, the senders keep theirs.
const UNDER_WAY_MAX: usize = 65_536;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialConfig {
    /// The longest delay of a message.
    pub delay_ms: u64,
    /// How many of a thousand events for connections are answered "not here".
    pub not_here_permille: u32,
    pub seed: u64,
}

/// Stands between the two ends of a local link, for both ways. Clones share the state.
#[derive(Clone)]
pub struct Trial {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    config: TrialConfig,
}

struct State {
    heap: BinaryHeap<Reverse<Item>>,
    /// For each lane, when its last message arrives: no later one may overtake it.
    lanes: HashMap<(bool, u64), Instant>,
    refused: HashSet<Target>,
    random: u64,
    number: u64,
}

struct Item {
    due: Instant,
    number: u64,
    bytes: Vec<u8>,
    is_up: bool,
}

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Item {}

impl PartialOrd for Item {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Item {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl Trial {
    /// Starts the thread that carries messages to the two ends.
    pub fn start(config: TrialConfig, up: Arc<dyn Uplinks>, down: Arc<dyn Downlinks>) -> io::Result<Self> {
        let (heap, lanes, refused) = (BinaryHeap::new(), HashMap::new(), HashSet::new());
        let state = Mutex::new(State { heap, lanes, refused, random: config.seed | 1, number: 0 });
        let shared = Arc::new(Shared { state, changed: Condvar::new(), config });
        let carrier = Trial { shared: shared.clone() };
        thread::Builder::new().name("trial-link".into()).spawn(move || carrier.carry(&*up, &*down))?;
        Ok(Self { shared })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry(&self, up: &dyn Uplinks, down: &dyn Downlinks) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            match state.heap.peek() {
                Some(Reverse(item)) if item.due <= now => {
                    let Some(Reverse(item)) = state.heap.pop() else { continue };
                    drop(state);
                    if item.is_up {
                        let mut batch = vec![thaw::<Uplink>(&item.bytes)];
                        while !batch.is_empty() {
                            up.send(&mut batch);
                            if !batch.is_empty() {
                                thread::sleep(Duration::from_millis(1));
                            }
                        }
                    } else if let Some(message) = self.refuse_some(thaw::<Downlink>(&item.bytes)) {
                        down.send(vec![message]);
                    }
                    state = self.lock();
                }
                Some(Reverse(item)) => {
                    let wait = item.due - now;
                    let waited = self.shared.changed.wait_timeout(state, wait);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => {
                    state.lanes.clear();
                    state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Answers "not here" for some of the targets, no event twice; the others go on.
    fn refuse_some(&self, mut message: Downlink) -> Option<Downlink> {
        let mut state = self.lock();
        let mut refused = Vec::new();
        message.to.retain(|target| {
            let hit = state.roll() % 1000 < u64::from(self.shared.config.not_here_permille);
            let refuse = hit && target.no > 0 && state.refused.insert(*target);
            if refuse {
                refused.push(*target);
            }
            !refuse
        });
        drop(state);
        for Target { connection, login, no } in refused.iter().copied() {
            let from = ConnRef { node: message.node.clone(), connection, login };
            let event = Up::NotHere { no, event: Box::new(message.event.clone()), gone: true };
            self.put(true, connection, &Uplink { from, event });
        }
        let is_answer = matches!(message.event, Down::Answer { .. });
        (is_answer || !message.to.is_empty()).then_some(message)
    }

    fn put(&self, is_up: bool, lane: u64, message: &impl Serialize) {
        let bytes = serde_json::to_vec(message).expect("link messages are plain data");
        let mut state = self.lock();
        let delay = Duration::from_millis(state.roll() % (self.shared.config.delay_ms + 1));
        let mut due = Instant::now() + delay;
        let last = state.lanes.entry((is_up, lane)).or_insert(due);
        due = due.max(*last);
        *last = due;
        state.number += 1;
        let number = state.number;
        state.heap.push(Reverse(Item { due, number, bytes, is_up }));
        drop(state);
        self.shared.changed.notify_one();
    }
}

impl State {
    fn roll(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }
}

fn thaw<T: DeserializeOwned>(bytes: &[u8]) -> T {
    serde_json::from_slice(bytes).expect("what was written here can be read")
}

impl Uplinks for Trial {
    fn send(&self, batch: &mut Vec<Uplink>) {
        let room = UNDER_WAY_MAX.saturating_sub(self.lock().heap.len());
        for message in batch.drain(..room.min(batch.len())) {
            self.put(true, message.from.connection, &message);
        }
    }

    fn depth(&self) -> (usize, usize) {
        (self.lock().heap.len(), UNDER_WAY_MAX)
    }
}

impl Downlinks for Trial {
    fn send(&self, batch: Vec<Downlink>) {
        for mut message in batch {
            if message.to.len() <= 1 {
                let lane = message.to.first().map_or(0, |t| t.connection);
                self.put(false, lane, &message);
                continue;
            }
            // Each connection has its own delays.
            for target in std::mem::take(&mut message.to) {
                let one = Downlink {
                    node: message.node.clone(),
                    to: [target].into(),
                    event: message.event.clone(),
                };
                self.put(false, target.connection, &one);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bowline_protocol::{CloseCode, link::NodeRef};
    use std::sync::mpsc;

    struct Ups(mpsc::Sender<Uplink>);
    impl Uplinks for Ups {
        fn send(&self, batch: &mut Vec<Uplink>) {
            batch.drain(..).for_each(|m| self.0.send(m).unwrap());
        }
        fn depth(&self) -> (usize, usize) {
            (0, 1)
        }
    }

    struct Downs(mpsc::Sender<Downlink>);
    impl Downlinks for Downs {
        fn send(&self, batch: Vec<Downlink>) {
            batch.into_iter().for_each(|m| self.0.send(m).unwrap());
        }
    }

    #[test]
    fn one_connection_stays_in_order_and_every_event_arrives_or_comes_back_once() {
        let (ups, up) = mpsc::channel();
        let (downs, down) = mpsc::channel();
        let config = TrialConfig { delay_ms: 3, not_here_permille: 300, seed: 7 };
        let trial = Trial::start(config, Arc::new(Ups(ups)), Arc::new(Downs(downs))).unwrap();
        let node = Arc::new(NodeRef { node_id: "n".into(), boot_id: "b".into() });
        for no in 1..=100 {
            let to = [1, 2].map(|connection| Target { connection, login: 5, no });
            let event = Down::Close { code: CloseCode::Kicked, reason: None };
            Downlinks::send(&trial, vec![Downlink { node: node.clone(), to: to.to_vec().into(), event }]);
        }
        let mut seen: HashMap<u64, Vec<u64>> = HashMap::new();
        let mut back = 0;
        let wait = Duration::from_secs(10);
        while seen.values().map(Vec::len).sum::<usize>() < 200 {
            if let Ok(message) = down.recv_timeout(Duration::from_millis(1)) {
                seen.entry(message.to[0].connection).or_default().push(message.to[0].no);
            }
            if let Ok(Uplink { from, event: Up::NotHere { no, event, gone: true } }) = up.try_recv() {
                back += 1;
                let to = [Target { connection: from.connection, login: from.login, no }].into();
                Downlinks::send(&trial, vec![Downlink { node: from.node, to, event: *event }]);
            }
        }
        assert!(back > 0, "some were answered not here");
        for numbers in seen.values_mut() {
            numbers.sort();
            assert!(numbers.iter().copied().eq(1..=100), "each once: {numbers:?}");
        }
        for no in 1..=50 {
            let from = ConnRef { node: node.clone(), connection: 9, login: no };
            Uplinks::send(&trial, &mut vec![Uplink { from, event: Up::Flowing }]);
        }
        let order: Vec<u64> = (0..50).map(|_| up.recv_timeout(wait).unwrap().from.login).collect();
        assert!(order.iter().copied().eq(1..=50), "{order:?}");
    }
}
