//! Faults that can be planted, to see that the checks find them. Each sits at a seam or in a driver of the simulator:
//! the product carries no switch for any of them.

/// A planted fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    AckBeforeSync,
    SyncIgnored,
    DedupeForgotten,
    SeqReused,
    StaleOwner,
    CursorEarly,
    CursorBack,
    UnreadCountsOwn,
    LedgerApart,
    RemovedMemberStays,
    ReceiptEarly,
    PushLost,
    EventLost,
    OutOfOrder,
    EarlierBoot,
    WrongSender,
    NoGapRepair,
    ReadsOldState,
    ResumeHole,
}

impl Plant {
    pub const ALL: [(Self, &'static str, &'static str); 19] = [
        (Self::AckBeforeSync, "ack-before-sync", "the outcome of a transaction is told before it is on disk"),
        (
            Self::SyncIgnored,
            "sync-ignored",
            "a crash of the store takes the last transaction that was synced",
        ),
        (Self::DedupeForgotten, "dedupe-forgotten", "the store takes an id that it has, once a crash was"),
        (Self::SeqReused, "seq-reused", "a restarted store names an older newest number and takes it again"),
        (Self::StaleOwner, "stale-owner", "the store does not look at the owner's epoch, nor at its numbers"),
        (Self::CursorEarly, "cursor-early", "a position is written one above what was said"),
        (Self::CursorBack, "cursor-back", "now and then an older read position is written over a newer one"),
        (Self::UnreadCountsOwn, "unread-counts-own", "own messages are written as unread"),
        (Self::LedgerApart, "ledger-apart", "now and then the ledger misses what its transaction did"),
        (Self::RemovedMemberStays, "removed-member-stays", "who is removed stays in the store's rows"),
        (Self::ReceiptEarly, "receipt-early", "the outcome of positions is told before they are on disk"),
        (Self::PushLost, "push-lost", "the gateway takes a push and does not pass it on"),
        (Self::EventLost, "event-lost", "the downlink loses an event and does not say so"),
        (Self::OutOfOrder, "out-of-order", "the gateway takes events as they come, whatever their numbers"),
        (Self::EarlierBoot, "earlier-boot", "the gateway takes what is meant for its earlier lives"),
        (Self::WrongSender, "wrong-sender", "now and then a frame goes up as another connection's"),
        (Self::NoGapRepair, "no-gap-repair", "the client does not fetch what it misses"),
        (Self::ReadsOldState, "reads-old-state", "what waits is looked up in a state that is out of date"),
        (Self::ResumeHole, "resume-hole", "the first push of a session that is gone on with is lost"),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, other, _)| *other == name).map(|(plant, ..)| *plant)
    }

    /// What goes wrong.
    pub fn meaning(self) -> &'static str {
        Self::ALL.iter().find(|(plant, ..)| *plant == self).map_or("", |(.., meaning)| meaning)
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(plant, ..)| *plant == self).map_or("", |(_, name, _)| name)
    }
}
