//! No frame is ever stranded in a queue: every order in which senders and the owner of a mailbox can meet is tried.
//! `scripts/loom` runs it.
#![cfg(loom)]

use bowline_links::mailbox::Mailbox;
use loom::{
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// What wakes the owner: it stays set until it is seen, as an event descriptor and a parked thread's token do.
#[derive(Default)]
struct Latch {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Latch {
    fn set(&self) {
        *self.set.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut set = self.set.lock().unwrap();
        while !*set {
            set = self.changed.wait(set).unwrap();
        }
        *set = false;
    }
}

fn mailbox(capacity: usize) -> (Arc<Mailbox<u32>>, Arc<Latch>) {
    let latch = Arc::new(Latch::default());
    let wake = latch.clone();
    (Arc::new(Mailbox::new(capacity, move || wake.set())), latch)
}

/// The owner's loop: sleeps, takes all, until it has so many. An item that is stranded leaves it asleep for ever,
/// which the model reports as a deadlock.
fn take(mailbox: &Mailbox<u32>, latch: &Latch, count: usize) -> Vec<u32> {
    let mut all = Vec::new();
    while all.len() < count {
        latch.wait();
        let mut some = Vec::new();
        mailbox.drain(&mut some);
        all.append(&mut some);
    }
    all
}

#[test]
fn what_is_offered_wakes_the_owner() {
    loom::model(|| {
        let (mailbox, latch) = mailbox(4);
        let senders = [1, 2].map(|item| {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.offer(&mut vec![item]))
        });
        let mut all = take(&mailbox, &latch, 2);
        all.sort();
        assert_eq!(all, [1, 2]);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

#[test]
fn what_finds_no_room_is_offered_again_and_arrives() {
    loom::model(|| {
        let (mailbox, latch) = mailbox(1);
        let theirs = mailbox.clone();
        let sender = thread::spawn(move || {
            let mut batch = vec![1, 2];
            while !batch.is_empty() {
                theirs.offer(&mut batch);
                thread::yield_now();
            }
        });
        assert_eq!(take(&mailbox, &latch, 2), [1, 2]);
        sender.join().unwrap();
    });
}

#[test]
fn control_messages_arrive_whatever_the_capacity() {
    loom::model(|| {
        let (mailbox, latch) = mailbox(1);
        let theirs = mailbox.clone();
        let sender = thread::spawn(move || {
            theirs.push_control(1);
            theirs.push_control(2);
        });
        assert_eq!(take(&mailbox, &latch, 2), [1, 2]);
        sender.join().unwrap();
    });
}

#[test]
fn a_sender_that_waits_for_room_gets_it() {
    loom::model(|| {
        let (mailbox, latch) = mailbox(1);
        let theirs = mailbox.clone();
        let sender = thread::spawn(move || {
            theirs.push(vec![1]);
            theirs.push(vec![2]);
        });
        assert_eq!(take(&mailbox, &latch, 2), [1, 2]);
        sender.join().unwrap();
    });
}

/// A queue that looks whether it was empty after it let go of the lock: the model must see the lost wake-up.
#[test]
#[should_panic(expected = "deadlock")]
fn a_lost_wake_up_is_found() {
    loom::model(|| {
        let queue = Arc::new(Mutex::new(Vec::new()));
        let latch = Arc::new(Latch::default());
        let senders = [1, 2].map(|item| {
            let (queue, latch) = (queue.clone(), latch.clone());
            thread::spawn(move || {
                queue.lock().unwrap().push(item);
                if queue.lock().unwrap().len() == 1 {
                    latch.set();
                }
            })
        });
        let mut all: Vec<u32> = Vec::new();
        while all.len() < 2 {
            latch.wait();
            all.append(&mut queue.lock().unwrap());
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}
