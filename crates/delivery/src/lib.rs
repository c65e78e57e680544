//! The router's decisions, sans-IO: what came from gateways, what the store answered and the time go in,
//! [`Action`]s come out.

pub mod persist;
