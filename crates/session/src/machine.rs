//! The states of a connection and every transition between them.
//!
//! A connection is judged silent only while it is read: in `Reading` the clock of the heartbeat runs, in `Pinged`
//! it has asked for a sign of life, either may end by silence, which does not wait for a ping that is due later; and in `Paused`, where bytes may lie unread in the socket, the heartbeat stands
//! still and a watchdog runs instead. The end of a client's output is not the end of the connection: what was asked
//! before is answered in `Answering`. After `Closing` nothing of the client counts any more: its input is discarded
//! until it closes too, ends, or the time is up.

use bowline_protocol::CloseCode;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// No identity yet: only `connect` and `ping` may come.
    Waiting,
    /// The token is being judged; input is held.
    Verifying,
    /// The identity is known, the router has not accepted it yet; input is held.
    Opening,
    /// Open, and the client was heard of lately.
    Reading,
    /// Open; silent so long that it was pinged.
    Pinged,
    /// Open, but not read: too much of it is undecided, or too much waits for it.
    Paused,
    /// The client's output has ended; what it asked for before is answered still.
    Answering,
    /// The server has said its last; the client's close or end is awaited.
    Closing,
    /// The client has said its last; what is queued is written, then the connection is gone.
    Leaving,
    /// Over. The socket is closed.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A token came, in the handshake or in `connect`.
    Connect,
    /// The token is good.
    Verified,
    /// The router has accepted the connection.
    Accepted,
    /// Bytes came from the client.
    Bytes,
    /// Undecided frames or queued bytes are above the mark.
    High,
    /// Both are low again.
    Low,
    /// The time of the state is over.
    TimeUp,
    /// Nothing was heard of the client for so long that it counts as gone, pinged or not.
    Silent,
    /// The server ends the connection.
    Close(CloseCode),
    /// The client has sent its close frame.
    PeerClosed,
    /// The client's output has ended; it may read on.
    PeerEnded,
    /// Everything that the client asked for is decided.
    Answered,
    /// The socket has failed.
    PeerGone,
    /// All that was queued is written.
    Flushed,
}

/// What a transition asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    None,
    /// Judge the token.
    Verify,
    /// Ask the router.
    Open,
    /// Send `connected`, read on.
    Greet,
    Ping,
    Pause,
    /// Read on.
    Resume,
    /// Send `session.closed`, then the transport's close.
    Farewell(CloseCode),
    /// Answer the client's close.
    AnswerClose,
    /// Tell the client that nothing more comes, where the transport can.
    EndOutput,
    /// Close the socket.
    Drop,
}

impl State {
    /// What the client sends is decoded now. In `Closing` it is read too, but only to be discarded.
    pub fn reads_frames(self) -> bool {
        matches!(self, Self::Waiting | Self::Reading | Self::Pinged)
    }

    /// The client has an identity and no end has begun.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Reading | Self::Pinged | Self::Paused | Self::Answering)
    }

    /// No end has begun.
    pub fn is_active(self) -> bool {
        !matches!(self, Self::Closing | Self::Leaving | Self::Gone)
    }

    /// The transition table.
    pub fn next(self, event: Event) -> (Self, Effect) {
        use State::*;
        match (self, event) {
            (Gone, _) => (Gone, Effect::None),

            (Waiting, Event::Connect) => (Verifying, Effect::Verify),
            (Verifying, Event::Verified) => (Opening, Effect::Open),
            (Opening, Event::Accepted) => (Reading, Effect::Greet),

            (Pinged, Event::Bytes) => (Reading, Effect::None),
            (Reading | Pinged, Event::High) => (Paused, Effect::Pause),
            (Paused, Event::Low) => (Reading, Effect::Resume),

            (Waiting, Event::TimeUp) => (Closing, Effect::Farewell(CloseCode::ConnectTimeout)),
            (Verifying | Opening, Event::TimeUp) => (Closing, Effect::Farewell(CloseCode::Overloaded)),
            (Reading, Event::TimeUp) => (Pinged, Effect::Ping),
            (Pinged, Event::TimeUp) | (Reading | Pinged, Event::Silent) => {
                (Closing, Effect::Farewell(CloseCode::HeartbeatTimeout))
            }
            (Paused, Event::TimeUp) => (Closing, Effect::Farewell(CloseCode::BackpressureTimeout)),
            (Answering, Event::TimeUp) => (Leaving, Effect::None),
            (Closing | Leaving, Event::TimeUp) => (Gone, Effect::Drop),

            (Closing | Leaving, Event::Close(_)) => (self, Effect::None),
            (_, Event::Close(code)) => (Closing, Effect::Farewell(code)),

            (Closing, Event::PeerClosed) => (Leaving, Effect::None),
            (Leaving, Event::PeerClosed) => (Leaving, Effect::None),
            (_, Event::PeerClosed) => (Leaving, Effect::AnswerClose),

            // The input of one whose token is being judged is not read, its end included.
            (Verifying | Opening, Event::PeerEnded) => (Gone, Effect::Drop),
            (Reading | Pinged | Paused, Event::PeerEnded) => (Answering, Effect::None),
            (Waiting | Closing, Event::PeerEnded) => (Leaving, Effect::None),
            (Answering, Event::Answered) => (Leaving, Effect::None),

            (_, Event::PeerGone) => (Gone, Effect::Drop),

            (Closing, Event::Flushed) => (Closing, Effect::EndOutput),
            (Leaving, Event::Flushed) => (Gone, Effect::Drop),

            (_, Event::Connect | Event::Verified | Event::Accepted) => (self, Effect::None),
            (_, Event::Bytes | Event::High | Event::Low | Event::Flushed | Event::Silent) => {
                (self, Effect::None)
            }
            (_, Event::PeerEnded | Event::Answered) => (self, Effect::None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 10] = [
        State::Waiting,
        State::Verifying,
        State::Opening,
        State::Reading,
        State::Pinged,
        State::Paused,
        State::Answering,
        State::Closing,
        State::Leaving,
        State::Gone,
    ];
    const EVENTS: [Event; 14] = [
        Event::Connect,
        Event::Verified,
        Event::Accepted,
        Event::Bytes,
        Event::High,
        Event::Low,
        Event::TimeUp,
        Event::Silent,
        Event::Close(CloseCode::Kicked),
        Event::PeerClosed,
        Event::PeerEnded,
        Event::Answered,
        Event::PeerGone,
        Event::Flushed,
    ];

    /// Every pair of state and event that does something; every other leaves all as it is.
    #[test]
    fn every_row_of_the_table() {
        use Effect as E;
        use Event as V;
        use State::*;
        let bye = E::Farewell(CloseCode::Kicked);
        let close = V::Close(CloseCode::Kicked);
        let rows = [
            (Waiting, V::Connect, Verifying, E::Verify),
            (Waiting, V::TimeUp, Closing, E::Farewell(CloseCode::ConnectTimeout)),
            (Waiting, close, Closing, bye),
            (Waiting, V::PeerClosed, Leaving, E::AnswerClose),
            (Waiting, V::PeerEnded, Leaving, E::None),
            (Waiting, V::PeerGone, Gone, E::Drop),
            (Verifying, V::Verified, Opening, E::Open),
            (Verifying, V::TimeUp, Closing, E::Farewell(CloseCode::Overloaded)),
            (Verifying, close, Closing, bye),
            (Verifying, V::PeerClosed, Leaving, E::AnswerClose),
            (Verifying, V::PeerEnded, Gone, E::Drop),
            (Verifying, V::PeerGone, Gone, E::Drop),
            (Opening, V::Accepted, Reading, E::Greet),
            (Opening, V::TimeUp, Closing, E::Farewell(CloseCode::Overloaded)),
            (Opening, close, Closing, bye),
            (Opening, V::PeerClosed, Leaving, E::AnswerClose),
            (Opening, V::PeerEnded, Gone, E::Drop),
            (Opening, V::PeerGone, Gone, E::Drop),
            (Reading, V::High, Paused, E::Pause),
            (Reading, V::TimeUp, Pinged, E::Ping),
            (Reading, V::Silent, Closing, E::Farewell(CloseCode::HeartbeatTimeout)),
            (Reading, close, Closing, bye),
            (Reading, V::PeerClosed, Leaving, E::AnswerClose),
            (Reading, V::PeerEnded, Answering, E::None),
            (Reading, V::PeerGone, Gone, E::Drop),
            (Pinged, V::Bytes, Reading, E::None),
            (Pinged, V::High, Paused, E::Pause),
            (Pinged, V::TimeUp, Closing, E::Farewell(CloseCode::HeartbeatTimeout)),
            (Pinged, V::Silent, Closing, E::Farewell(CloseCode::HeartbeatTimeout)),
            (Pinged, close, Closing, bye),
            (Pinged, V::PeerClosed, Leaving, E::AnswerClose),
            (Pinged, V::PeerEnded, Answering, E::None),
            (Pinged, V::PeerGone, Gone, E::Drop),
            (Paused, V::Low, Reading, E::Resume),
            (Paused, V::TimeUp, Closing, E::Farewell(CloseCode::BackpressureTimeout)),
            (Paused, close, Closing, bye),
            (Paused, V::PeerClosed, Leaving, E::AnswerClose),
            (Paused, V::PeerEnded, Answering, E::None),
            (Paused, V::PeerGone, Gone, E::Drop),
            (Answering, V::TimeUp, Leaving, E::None),
            (Answering, close, Closing, bye),
            (Answering, V::PeerClosed, Leaving, E::AnswerClose),
            (Answering, V::Answered, Leaving, E::None),
            (Answering, V::PeerGone, Gone, E::Drop),
            (Closing, V::TimeUp, Gone, E::Drop),
            (Closing, V::PeerClosed, Leaving, E::None),
            (Closing, V::PeerEnded, Leaving, E::None),
            (Closing, V::PeerGone, Gone, E::Drop),
            (Closing, V::Flushed, Closing, E::EndOutput),
            (Leaving, V::TimeUp, Gone, E::Drop),
            (Leaving, V::PeerGone, Gone, E::Drop),
            (Leaving, V::Flushed, Gone, E::Drop),
        ];
        for state in STATES {
            for event in EVENTS {
                let listed = rows.iter().find(|row| (row.0, row.1) == (state, event));
                let expected = listed.map_or((state, E::None), |row| (row.2, row.3));
                assert_eq!(state.next(event), expected, "{state:?} on {event:?}");
            }
        }
    }

    /// Input is held while an identity is judged and while reading is paused, and discarded once an end has begun.
    #[test]
    fn what_may_happen_in_each_state() {
        use State::*;
        let rows = [
            (Waiting, true, false, true),
            (Verifying, false, false, true),
            (Opening, false, false, true),
            (Reading, true, true, true),
            (Pinged, true, true, true),
            (Paused, false, true, true),
            (Answering, false, true, true),
            (Closing, false, false, false),
            (Leaving, false, false, false),
            (Gone, false, false, false),
        ];
        assert_eq!(rows.map(|row| row.0), STATES);
        for (state, reads, open, active) in rows {
            let found = (state.reads_frames(), state.is_open(), state.is_active());
            assert_eq!(found, (reads, open, active), "{state:?} reads, is open, is active");
        }
    }

    /// From everywhere the end is reached when only time passes, and it is reached once.
    #[test]
    fn time_ends_every_silent_connection() {
        for start in STATES {
            let mut state = start;
            let mut drops = 0;
            for _ in 0..4 {
                let (next, effect) = state.next(Event::TimeUp);
                drops += usize::from(effect == Effect::Drop);
                state = next;
            }
            assert_eq!((state, drops), (State::Gone, usize::from(start != State::Gone)), "{start:?}");
        }
    }
}
