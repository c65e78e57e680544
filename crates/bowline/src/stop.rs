//! How a server ends: the first signal drains, the second stops at once.

use std::{io, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::{Receiver, channel},
    time::{Instant, sleep},
};

/// Signals that wait to be looked at; further ones wait in the system.
const SIGNALS_MAX: usize = 8;

/// How often a drain looks whether connections are left.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the closes of a drain may take beyond its deadline. Each connection is written what is queued for it and its
/// close, and has a time of its own for that, after which it is gone; this is only there should one not be.
const CLOSES_MAX: Duration = Duration::from_millis(bowline_gateway::CLOSE_MS_MAX + 1_000);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// SIGTERM or Ctrl-C.
    Stop,
    /// SIGHUP.
    Reload,
}

/// Signals as events. From here on they no longer end the process by themselves.
pub fn signals() -> io::Result<Receiver<Event>> {
    let (sender, receiver) = channel(SIGNALS_MAX);
    for (kind, event) in [
        (SignalKind::terminate(), Event::Stop),
        (SignalKind::interrupt(), Event::Stop),
        (SignalKind::hangup(), Event::Reload),
    ] {
        let (mut source, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(
            async move { while source.recv().await.is_some() && sender.send(event).await.is_ok() {} },
        );
    }
    Ok(receiver)
}

/// What ending a server takes.
pub struct Stopping<'a> {
    /// What SIGHUP asks for.
    pub reload: &'a (dyn Fn() + Sync),
    pub drain: &'a (dyn Fn(&str) + Sync),
    /// Connections that are left.
    pub remaining: &'a (dyn Fn() -> u64 + Sync),
    /// What is left until the drain's deadline; one that was begun earlier keeps its own.
    pub time_left: &'a (dyn Fn() -> Duration + Sync),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// No connection is left.
    Drained,
    /// The deadline and the time for its closes have passed.
    TimedOut { remaining: u64 },
    /// A second signal.
    Interrupted,
}

/// Waits for the first signal, drains, and returns as soon as no connection is left.
pub async fn run(events: &mut Receiver<Event>, stopping: Stopping<'_>) -> Ended {
    wait_for_stop(events, stopping.reload).await;
    (stopping.drain)("shutdown");
    let time_left = (stopping.time_left)();
    tracing::info!(
        connections = (stopping.remaining)(),
        time_left_ms = time_left.as_millis() as u64,
        "stopping when no connection is left; a second signal stops at once"
    );
    let deadline = Instant::now() + time_left + CLOSES_MAX;
    let drained = async {
        loop {
            match (stopping.remaining)() {
                0 => return Ended::Drained,
                remaining if Instant::now() >= deadline => return Ended::TimedOut { remaining },
                _ => sleep(LOOK_EVERY).await,
            }
        }
    };
    tokio::select! {
        ended = drained => ended,
        () = wait_for_stop(events, stopping.reload) => Ended::Interrupted,
    }
}

/// Returns too when nobody can send signals any more: a server that cannot be told to stop must not run.
async fn wait_for_stop(events: &mut Receiver<Event>, reload: &(dyn Fn() + Sync)) {
    while events.recv().await == Some(Event::Reload) {
        reload();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    };

    struct Server {
        reloads: AtomicU64,
        drains: Mutex<Vec<String>>,
        connections: AtomicU64,
    }

    /// Ends a server of so many connections, of which one goes at every look once it drains.
    async fn end(connections: u64, timeout_ms: u64, shrinks: bool, events: &[Event]) -> (Ended, Vec<String>) {
        let server = Server {
            reloads: AtomicU64::new(0),
            drains: Mutex::default(),
            connections: AtomicU64::new(connections),
        };
        let (sender, mut receiver) = channel(SIGNALS_MAX);
        for event in events {
            sender.send(*event).await.unwrap();
        }
        let stopping = Stopping {
            reload: &|| {
                server.reloads.fetch_add(1, Ordering::Relaxed);
            },
            drain: &|reason| server.drains.lock().unwrap().push(reason.to_owned()),
            remaining: &|| {
                let left = server.connections.load(Ordering::Relaxed);
                if shrinks {
                    server.connections.store(left.saturating_sub(1), Ordering::Relaxed);
                }
                left
            },
            time_left: &|| Duration::from_millis(timeout_ms),
        };
        let ended = run(&mut receiver, stopping).await;
        let wanted = events.iter().filter(|event| **event == Event::Reload).count() as u64;
        assert_eq!(server.reloads.load(Ordering::Relaxed), wanted);
        (ended, server.drains.into_inner().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_signal_drains_and_the_second_stops() {
        use Event::{Reload, Stop};
        let begun = vec!["shutdown".to_owned()];
        assert_eq!(end(0, 1000, false, &[Stop]).await, (Ended::Drained, begun.clone()));
        assert_eq!(end(5, 1000, true, &[Reload, Stop]).await, (Ended::Drained, begun.clone()));
        assert_eq!(end(5, 1000, false, &[Stop]).await, (Ended::TimedOut { remaining: 5 }, begun.clone()));
        assert_eq!(end(5, 1000, false, &[Stop, Reload, Stop]).await, (Ended::Interrupted, begun));
    }
}
