//! Copying the log into the database.
//!
//! A commit is durable in the log; the log is copied later, so that no commit waits for the many pages that this
//! writes. A thread copies while the writer goes on. The log begins anew only when it was copied to its end, which
//! never happens behind the back of a busy writer; so, once the thread has brought the remainder down to a few
//! pages, the writer copies these itself between two commits. Should the thread not keep up, or a read hold an old
//! state, the writer does the whole remainder when the log reaches its limit.

use rusqlite::Connection;
use std::{
    cell::Cell,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

/// The writer copies this many pages itself: about a millisecond.
const REMAINDER_PAGES: u32 = 512;

thread_local! {
    /// Pages in the log after the last commit of this thread.
    static LOG_PAGES: Cell<u32> = const { Cell::new(0) };
}

pub(super) struct Checkpointer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pages: u32,
    pages_max: u32,
    /// Below this many pages another attempt makes no sense: the last one was held up by a reader.
    not_before: u32,
    /// Pages at the last commit; fewer now means that the log began anew.
    seen: u32,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// So many pages of the log were copied.
    Idle {
        copied: u32,
    },
    Asked,
    Running,
    Stopped,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.state() = state;
        self.changed.notify_all();
    }

    /// The state, as soon as it is one that `held` refuses.
    fn wait_while(&self, held: impl Fn(State) -> bool) -> State {
        let guard = self.state();
        *self.changed.wait_while(guard, |state| held(*state)).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Checkpointer {
    /// `writer` counts from now on; `copier` belongs to the thread.
    pub(super) fn start(writer: &Connection, copier: Connection, pages: u32, pages_max: u32) -> Self {
        writer.wal_hook(Some(|_, pages| {
            LOG_PAGES.set(u32::try_from(pages).unwrap_or(0));
            Ok(())
        }));
        let shared =
            Arc::new(Shared { state: Mutex::new(State::Idle { copied: 0 }), changed: Condvar::new() });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("store-checkpoint".into())
            .spawn(move || run(&theirs, &copier))
            // Without the thread the writer copies at the limit; slower, and as safe.
            .ok();
        if thread.is_none() {
            shared.set(State::Stopped);
        }
        Self { shared, thread, pages, pages_max, not_before: 0, seen: 0 }
    }

    /// To be called after each commit, on the thread that committed.
    pub(super) fn after_commit(&mut self, writer: &Connection) {
        let pages = LOG_PAGES.get();
        if pages < self.seen {
            self.not_before = 0;
            let mut state = self.shared.state();
            if let State::Idle { copied } = &mut *state {
                *copied = 0;
            }
        }
        self.seen = pages;
        if pages < self.pages.max(self.not_before) {
            return;
        }
        let mut state = *self.shared.state();
        if pages >= self.pages_max && matches!(state, State::Asked | State::Running) {
            state = self.shared.wait_while(|state| matches!(state, State::Asked | State::Running));
        }
        match state {
            State::Asked | State::Running => {}
            State::Idle { copied }
                if pages < self.pages_max && pages > copied.saturating_add(REMAINDER_PAGES) =>
            {
                self.shared.set(State::Asked);
            }
            State::Stopped if pages < self.pages_max => {}
            State::Idle { .. } | State::Stopped => {
                let (length, copied) = copy(writer).unwrap_or((pages, 0));
                if copied < length {
                    self.not_before = pages.saturating_add(self.pages / 4 + 1);
                }
                if state != State::Stopped {
                    // The log begins anew with the next commit: nothing of it will have been copied.
                    self.shared.set(State::Idle { copied: if copied < length { copied } else { 0 } });
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn settle(&self) {
        self.shared.wait_while(|state| matches!(state, State::Asked | State::Running));
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        self.shared.set(State::Stopped);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the hook; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, db: &Connection) {
    loop {
        if shared.wait_while(|state| matches!(state, State::Idle { .. })) == State::Stopped {
            return;
        }
        let proceed = |to| {
            let mut state = shared.state();
            if *state != State::Stopped {
                *state = to;
            }
            shared.changed.notify_all();
        };
        proceed(State::Running);
        // A copy that failed (disk full) is tried again after the next commit; the log still holds everything.
        let copied = copy(db).map_or(0, |(_, copied)| copied);
        proceed(State::Idle { copied });
    }
}

/// Copies what no reader is in the way of: (pages in the log, pages copied).
fn copy(db: &Connection) -> rusqlite::Result<(u32, u32)> {
    db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
        let count = |at| row.get::<_, i64>(at).map(|pages| u32::try_from(pages).unwrap_or(0));
        Ok((count(1)?, count(2)?))
    })
}
