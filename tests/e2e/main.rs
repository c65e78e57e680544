//! The promises of `docs/promises.md`, checked from outside: the real program, real sockets, other people's client
//! libraries. `BOWLINE_TEST_TRIAL=1` runs everything over a link between gateway and router that delays and now and
//! then answers "not here".

/// Makes each of these functions two tests, `ws::…` and `tcp::…`.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod ws {
            $(#[test] fn $name() { super::$name(bowline_tests::Transport::Ws) })*
        }
        mod tcp {
            $(#[test] fn $name() { super::$name(bowline_tests::Transport::Tcp) })*
        }
    };
}

mod api;
mod backpressure;
mod bad_input;
mod bench;
mod check;
mod churn;
mod cli;
mod compression;
mod connect;
mod conversations;
mod crash;
mod delivery;
mod demo;
mod disk;
mod docs;
mod doctor;
mod drain;
mod drain_command;
mod groups;
mod heartbeat;
mod history;
mod lessons;
mod receipts;
mod refusals;
mod retention;
mod rooms;
mod strangers;
mod third_party;
mod three_clients;
mod tls;
mod top;
