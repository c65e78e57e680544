//! The gateway with a router that is rehearsed, raw sockets as clients, and both transports.

mod backpressure;
mod closing;
mod drain;
mod opening;
mod refusals;
mod rig;
mod rooms;
