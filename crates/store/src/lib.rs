//! The store: what is durable. [`Writer`] and [`Reader`] are the seam; [`sqlite`] is its embedded form, [`model`]
//! a naive one in memory, and [`conformance`] what every form has to pass.

use bowline_delivery::persist::{Batch, Found, Outcome, Query};

mod cache;
pub mod conformance;
pub mod model;
pub mod sqlite;

/// The one writer of a store: group commit, one batch a transaction.
pub trait Writer: Send {
    /// Carries out one transaction. When it answers `Committed`, the batch is on disk.
    fn commit(&mut self, batch: &Batch) -> Outcome;
}

/// Reads beside the writer; sees everything that was committed before the call.
pub trait Reader: Send {
    fn read(&mut self, query: &Query) -> Found;

    /// Several at once, for a store that can share the cost of a look.
    fn read_all(&mut self, queries: &[Query]) -> Vec<Found> {
        queries.iter().map(|query| self.read(query)).collect()
    }
}
