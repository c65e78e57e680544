//! A bounded queue that is filled and emptied in batches; its owner is woken when it stops being empty.

#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// A buffer that a burst has made larger than this is given back.
const KEPT_BYTES: usize = 64 * 1024;

pub struct Mailbox<T> {
    queue: Mutex<Vec<T>>,
    room: Condvar,
    capacity: usize,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl<T> Mailbox<T> {
    /// `wake` is called, outside the lock, after the queue stopped being empty.
    pub fn new(capacity: usize, wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { queue: Mutex::new(Vec::new()), room: Condvar::new(), capacity, wake: Box::new(wake) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes from the front of `batch` as far as there is room.
    pub fn offer(&self, batch: &mut Vec<T>) {
        if batch.is_empty() {
            return;
        }
        let mut queue = self.lock();
        let was_empty = queue.is_empty();
        let take = batch.len().min(self.capacity.saturating_sub(queue.len()));
        if take == batch.len() {
            queue.append(batch);
        } else {
            queue.extend(batch.drain(..take));
        }
        drop(queue);
        if was_empty && take > 0 {
            (self.wake)();
        }
    }

    /// Adds all of `batch`, waiting for room. A batch larger than the capacity goes in once the queue is empty.
    pub fn push(&self, mut batch: Vec<T>) {
        if batch.is_empty() {
            return;
        }
        let mut queue = self.lock();
        while !queue.is_empty() && queue.len() + batch.len() > self.capacity {
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let was_empty = queue.is_empty();
        queue.append(&mut batch);
        drop(queue);
        if was_empty {
            (self.wake)();
        }
    }

    /// Adds one item whatever the depth; for what is rare and must not wait, such as control messages.
    pub fn push_control(&self, item: T) {
        self.push_together([item]);
    }

    /// The same for several, which whoever empties the queue finds there together.
    pub fn push_together(&self, items: impl IntoIterator<Item = T>) {
        let mut queue = self.lock();
        let was_empty = queue.is_empty();
        queue.extend(items);
        let is_filled = was_empty && !queue.is_empty();
        drop(queue);
        if is_filled {
            (self.wake)();
        }
    }

    /// Moves everything into `into`, which must be empty; the two buffers change places.
    pub fn drain(&self, into: &mut Vec<T>) {
        debug_assert!(into.is_empty());
        if into.capacity() * size_of::<T>() > KEPT_BYTES {
            *into = Vec::new();
        }
        std::mem::swap(&mut *self.lock(), into);
        self.room.notify_all();
    }

    pub fn depth(&self) -> usize {
        self.lock().len()
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    #[test]
    fn what_finds_no_room_stays_with_the_sender_in_order() {
        let woken = Arc::new(AtomicUsize::new(0));
        let count = woken.clone();
        let mailbox = Mailbox::new(3, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let mut batch = vec![1, 2, 3, 4, 5];
        mailbox.offer(&mut batch);
        mailbox.offer(&mut batch);
        assert_eq!(batch, [4, 5]);
        let mut got = Vec::new();
        mailbox.drain(&mut got);
        assert_eq!(got, [1, 2, 3]);
        mailbox.offer(&mut batch);
        got.clear();
        mailbox.drain(&mut got);
        assert_eq!((got, woken.load(Ordering::Relaxed)), (vec![4, 5], 2));
    }

    #[test]
    fn a_pusher_waits_for_room() {
        let mailbox = Arc::new(Mailbox::new(2, || ()));
        mailbox.push(vec![1, 2]);
        let other = mailbox.clone();
        let pusher = std::thread::spawn(move || other.push(vec![3, 4]));
        let mut all = Vec::new();
        while all.len() < 4 {
            let mut got = Vec::new();
            mailbox.drain(&mut got);
            all.extend(got);
            std::thread::yield_now();
        }
        pusher.join().unwrap();
        assert_eq!(all, [1, 2, 3, 4]);
    }
}
