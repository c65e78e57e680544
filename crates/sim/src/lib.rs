//! A whole cluster under one seed: clients, sessions, links, gateways, routers, coordination and store, with virtual
//! time, and a checker that holds all that happens against a naive model.
//!
//! What decides is the product: the cores of `bowline_client`, `bowline_session` and `bowline_delivery`, the routes of
//! `bowline_coordination` and the naive store of `bowline_store`. Here are only their drivers, a bad network, crashes,
//! and the checks. Everything is drawn from the seed: the same seed is the same run.

#![forbid(unsafe_code)]

mod acts;
mod checks;
mod client;
pub mod model;
mod node;
pub mod plan;
pub mod plants;
mod rng;
mod router;
pub mod shrink;
mod socket;
mod store;
mod world;

pub use model::Violation;
pub use plan::Plan;
pub use plants::Plant;
pub use shrink::{Shrunk, shrink};
pub use world::{Report, World};

/// Runs one seed.
pub fn run(seed: u64, plant: Option<Plant>) -> Report {
    World::run(&Plan::new(seed), plant, false)
}
