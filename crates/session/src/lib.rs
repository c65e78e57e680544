//! One client connection as a state machine, sans-IO: no socket, clock or random source.
//!
//! [`machine`] is the table of states and transitions. [`Session`] keeps the counters that drive it (silence,
//! undecided frames, bytes queued), turns client frames into what goes up to the router or back to the client, and
//! takes the router's events in order. [`Outbox`] is the queue of frames that the socket has not taken yet.
//!
//! Everything that happens is a method `on_*`; what has to be done about it is pushed to a list of [`Action`]s,
//! which the gateway carries out in order.

pub mod machine;
mod opening;
mod outbox;
pub mod rules;
mod session;

pub use machine::State;
pub use opening::{Denial, Fresh, Grant, Hello, Refusal};
pub use outbox::{Chunk, Outbox};
pub use rules::{Context, Now, RoomJoin, Rules};
pub use session::{Action, Claims, Session, Turn};
