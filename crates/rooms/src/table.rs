//! All rooms of a node, by name.

use crate::{
    Carrier, Joined, Limits, Message, Post, Refused, Room,
    limits::{ROOMS_MAX, STRIPES, SWEEP_ROOMS},
    room::State,
};
use ahash::RandomState;
use bowline_protocol::{Millis, frame::Since, ids::RoomName};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

type Stripe = HashMap<RoomName, Arc<Room>, RandomState>;

pub struct Rooms {
    limits: Limits,
    shards: usize,
    /// Random; tells this life of the node from others.
    life: u64,
    hasher: RandomState,
    stripes: Box<[Mutex<Stripe>]>,
    /// Rooms made so far, and the stripe that is looked through next.
    made: AtomicU64,
    next_sweep: AtomicUsize,
    rooms: AtomicUsize,
    members: AtomicU64,
    published: AtomicU64,
}

impl Rooms {
    /// For so many shards, with two random numbers: clients get to know the first.
    pub fn new(limits: Limits, shards: usize, [life, seed]: [u64; 2]) -> Self {
        let hasher = RandomState::with_seeds(seed, !seed, seed.rotate_left(21), seed.rotate_left(42));
        Self {
            limits,
            shards,
            life,
            stripes: (0..STRIPES).map(|_| Mutex::new(Stripe::with_hasher(hasher.clone()))).collect(),
            hasher,
            made: AtomicU64::new(0),
            next_sweep: AtomicUsize::new(0),
            rooms: AtomicUsize::new(0),
            members: AtomicU64::new(0),
            published: AtomicU64::new(0),
        }
    }

    /// How many rooms there are.
    pub fn rooms(&self) -> usize {
        self.rooms.load(Ordering::Relaxed)
    }

    /// How many members all rooms have; one that is in two counts twice.
    pub fn members(&self) -> u64 {
        self.members.load(Ordering::Relaxed)
    }

    pub fn published(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }

    /// Counts a new member of `shard` in. Everything that is published later is mailed to that shard.
    pub fn join(
        &self,
        name: &RoomName,
        shard: usize,
        since: Option<&Since>,
        now: Millis,
    ) -> Result<Joined, Refused> {
        self.with(name, |room, state| {
            state.add(shard, &self.limits)?;
            self.members.fetch_add(1, Ordering::Relaxed);
            state.window.trim(now, &self.limits);
            Ok(room.answer(state, since, state.window.newest(), state.total))
        })
    }

    /// What a member is told that asks again: it has been sent everything up to `offset`.
    pub fn join_again(&self, room: &Arc<Room>, since: Option<&Since>, offset: u64, now: Millis) -> Joined {
        let mut state = room.lock();
        state.window.trim(now, &self.limits);
        room.answer(&state, since, offset, state.total)
    }

    /// A member of `shard` has gone.
    pub fn leave(&self, room: &Arc<Room>, shard: usize, now: Millis) {
        let is_idle = {
            let mut state = room.lock();
            state.remove(shard);
            state.window.trim(now, &self.limits);
            state.is_idle()
        };
        self.members.fetch_sub(1, Ordering::Relaxed);
        if is_idle {
            let mut stripe = self.stripe(room.name());
            self.close_if_idle(room, &mut stripe);
        }
    }

    /// Publishes for a member of `shard`, which delivers the message to its own members itself.
    pub fn send(
        &self,
        room: &Arc<Room>,
        shard: usize,
        post: Post<'_>,
        now: Millis,
        carrier: &impl Carrier,
    ) -> Result<Message, Refused> {
        let mut state = room.lock();
        state.check(Some(shard), carrier)?;
        let message = state.publish(room, post, now, &self.limits);
        state.mail(room, Some(shard), std::slice::from_ref(&message), carrier);
        drop(state);
        self.published.fetch_add(1, Ordering::Relaxed);
        Ok(message)
    }

    /// Publishes for the application, all or nothing; says the number of the last message.
    pub fn publish(
        &self,
        name: &RoomName,
        posts: &[Post<'_>],
        now: Millis,
        carrier: &impl Carrier,
    ) -> Result<u64, Refused> {
        self.with(name, |room, state| {
            state.check(None, carrier)?;
            let messages: Vec<Message> =
                posts.iter().map(|post| state.publish(room, *post, now, &self.limits)).collect();
            state.mail(room, None, &messages, carrier);
            self.published.fetch_add(posts.len() as u64, Ordering::Relaxed);
            Ok(state.window.newest())
        })
    }

    /// Drops messages that are too old, and rooms that nobody needs: looks through the table, or when there are many
    /// rooms through as many parts of it as have a bounded number, going on where it was the last time.
    pub fn sweep(&self, now: Millis) {
        let mut rooms = 0;
        for _ in 0..self.stripes.len() {
            let at = self.next_sweep.fetch_add(1, Ordering::Relaxed) % self.stripes.len();
            rooms += self.sweep_stripe(at, now);
            if rooms >= SWEEP_ROOMS {
                break;
            }
        }
    }

    /// Looks through one part; says how many rooms it had.
    fn sweep_stripe(&self, at: usize, now: Millis) -> usize {
        let mut stripe = self.stripes[at].lock().unwrap_or_else(PoisonError::into_inner);
        let rooms = stripe.len();
        let mut idle = Vec::new();
        for room in stripe.values() {
            let mut state = room.lock();
            state.window.trim(now, &self.limits);
            if state.is_idle() {
                idle.push(room.clone());
            }
        }
        for room in idle {
            self.close_if_idle(&room, &mut stripe);
        }
        rooms
    }

    fn stripe(&self, name: &RoomName) -> MutexGuard<'_, Stripe> {
        // Bits that the tables do not go by.
        let at = (self.hasher.hash_one(name) >> 40) as usize % self.stripes.len();
        self.stripes[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With the stripe locked nobody finds the room; who found it before sees that it is closed.
    fn close_if_idle(&self, room: &Arc<Room>, stripe: &mut Stripe) {
        let mut state = room.lock();
        if state.is_idle() && !state.is_closed {
            state.is_closed = true;
            stripe.remove(room.name());
            self.rooms.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Calls `step` with the room of this name, locked; it is made if there is none.
    fn with<T>(
        &self,
        name: &RoomName,
        step: impl FnOnce(&Arc<Room>, &mut State) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        loop {
            let room = self.find(name)?;
            let mut state = room.lock();
            if !state.is_closed {
                return step(&room, &mut state);
            }
        }
    }

    fn find(&self, name: &RoomName) -> Result<Arc<Room>, Refused> {
        let mut stripe = self.stripe(name);
        if let Some(room) = stripe.get(name) {
            return Ok(room.clone());
        }
        if self.rooms.load(Ordering::Relaxed) >= ROOMS_MAX {
            return Err(Refused::TooManyRooms);
        }
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let room = Arc::new(Room::new(name.clone(), format!("{:016x}-{number:x}", self.life), self.shards));
        stripe.insert(name.clone(), room.clone());
        self.rooms.fetch_add(1, Ordering::Relaxed);
        Ok(room)
    }
}
