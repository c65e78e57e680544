//! What a device has of one conversation, and when it asks for the rest.

use crate::check::ranges::Ranges;
use std::time::Duration;
use tokio::time::Instant;

/// After a page that brought nothing new.
const AGAIN_AFTER: Duration = Duration::from_millis(400);

#[derive(Default)]
pub struct Timeline {
    have: Ranges,
    /// The newest number that was announced.
    announced: u64,
    /// Up to where it was acknowledged.
    told: u64,
    is_fetching: bool,
    asked_at: u64,
    /// A page brought nothing of what is missing; asked again then.
    in_vain: Option<Instant>,
}

impl Timeline {
    pub fn contiguous(&self) -> u64 {
        self.have.contiguous()
    }

    /// The newest number that it knows of.
    pub fn wants(&self) -> u64 {
        self.announced.max(self.have.max())
    }

    /// It asked for what is missing, and the server does not have it.
    pub fn is_in_vain(&self) -> bool {
        self.in_vain.is_some()
    }

    /// Whether to ask for what is missing now, or else when.
    pub fn fetch_at(&self, now: Instant) -> Option<Instant> {
        if self.is_fetching || self.contiguous() >= self.wants() {
            return None;
        }
        Some(self.in_vain.map_or(now, |at| at.max(now)))
    }

    pub fn on_fetching(&mut self) {
        self.is_fetching = true;
        self.asked_at = self.contiguous();
    }

    pub fn on_message(&mut self, seq: u64) {
        self.have.insert(seq);
    }

    pub fn on_page_end(&mut self, now: Instant) {
        self.is_fetching = false;
        self.in_vain = (self.contiguous() == self.asked_at).then(|| now + AGAIN_AFTER);
    }

    /// Announced is what the server does not know to have arrived: it is told again, if it has.
    pub fn on_announced(&mut self, last: u64) {
        self.announced = self.announced.max(last);
        self.told = 0;
    }

    pub fn on_closed(&mut self) {
        (self.is_fetching, self.in_vain) = (false, None);
    }

    pub fn has_news(&self) -> bool {
        self.contiguous() > self.told
    }

    pub fn take_news(&mut self) -> Option<u64> {
        let seq = self.contiguous();
        let is_news = seq > self.told;
        self.told = self.told.max(seq);
        is_news.then_some(seq)
    }
}
