//! The threads that wait for the store, so that the deciding one never does.

use crate::Shared;
use bowline_delivery::{
    Event,
    persist::{Batch, Query},
};
use bowline_store::{Reader, Writer};
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

/// Look-ups that share one look at the store.
const READS_AT_ONCE: usize = 64;

/// The way to the writer and the readers. Dropping it ends their threads, after what was given to them.
pub(crate) struct Stores {
    writes: Arc<Queue<Box<Batch>>>,
    /// One for each reader: what has to keep its order goes to the same.
    reads: Vec<Arc<Queue<(u64, Query)>>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Stores {
    pub fn start(
        writer: Box<dyn Writer>,
        readers: Vec<Box<dyn Reader>>,
        shared: &Arc<Shared>,
    ) -> io::Result<Self> {
        let writes: Arc<Queue<Box<Batch>>> = Arc::default();
        let mut reads = Vec::new();
        let mut threads = Vec::new();
        let (queue, to, mut writer) = (writes.clone(), shared.clone(), writer);
        threads.push(thread::Builder::new().name("store-writer".into()).spawn(move || {
            while let Some(batch) = queue.pop() {
                to.events.push_control(Event::Outcome(writer.commit(&batch)));
            }
        })?);
        for mut reader in readers {
            let queue: Arc<Queue<(u64, Query)>> = Arc::default();
            reads.push(queue.clone());
            let to = shared.clone();
            threads.push(thread::Builder::new().name("store-reader".into()).spawn(move || {
                while let Some(reads) = queue.pop_some(READS_AT_ONCE) {
                    let (reads, queries): (Vec<u64>, Vec<Query>) = reads.into_iter().unzip();
                    let found = reader.read_all(&queries);
                    let events =
                        reads.into_iter().zip(found).map(|(read, found)| Event::Found { read, found });
                    to.events.push(events.collect());
                }
            })?);
        }
        Ok(Self { writes, reads, threads })
    }

    pub fn commit(&self, batch: Box<Batch>) {
        self.writes.extend([batch]);
    }

    /// Look-ups, each with its lane.
    pub fn read(&self, reads: Vec<(u64, (u64, Query))>) {
        for (lane, read) in reads {
            self.reads[(lane % self.reads.len() as u64) as usize].extend([read]);
        }
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        self.writes.close();
        self.reads.iter().for_each(|queue| queue.close());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A queue that its takers wait on. Bounded by who fills it: one transaction at a time, and look-ups that stand
/// for frames which count against their connection's high-water mark.
struct Queue<T> {
    state: Mutex<(VecDeque<T>, bool)>,
    filled: Condvar,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { state: Mutex::new((VecDeque::new(), false)), filled: Condvar::new() }
    }
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<T>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn extend(&self, items: impl IntoIterator<Item = T>) {
        let mut state = self.lock();
        let before = state.0.len();
        state.0.extend(items);
        let added = state.0.len() - before;
        drop(state);
        match added {
            0 => {}
            1 => self.filled.notify_one(),
            _ => self.filled.notify_all(),
        }
    }

    fn close(&self) {
        self.lock().1 = true;
        self.filled.notify_all();
    }

    /// The next item; `None` once it is closed and empty.
    fn pop(&self) -> Option<T> {
        self.pop_some(1)?.pop()
    }

    /// What waits, at most `max` items; `None` once it is closed and empty.
    fn pop_some(&self, max: usize) -> Option<Vec<T>> {
        let mut state = self.lock();
        loop {
            if !state.0.is_empty() {
                let count = state.0.len().min(max);
                return Some(state.0.drain(..count).collect());
            }
            if state.1 {
                return None;
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
