//! Every bound of the core, with its unit and what happens when it is reached.

/// Entries waiting for a transaction. Above, requests are refused `overloaded`.
pub const QUEUE_ENTRIES_MAX: usize = 200_000;
/// Messages whose outcome is remembered for repeats: from so many up to twice as many. Older ones are found by the
/// store's unique index. It is what a table of 32,768 places takes before it grows.
pub const DEDUPE_GENERATION: usize = 28_672;
/// Conversations kept in memory. Above, those longest unused are dropped and loaded again on demand.
pub const CONVERSATIONS_MAX: usize = 20_000;
/// Newest messages of a conversation that are loaded with it.
pub const TAIL_LOADED: u32 = 16;
/// Newest messages of a conversation whose senders are remembered. Older ones are asked of the store.
pub const TAIL_ENTRIES_MAX: usize = 256;
/// Newest messages of a conversation whose bodies are kept for another push, and their bytes.
pub const TAIL_BODIES_MAX: usize = 64;
pub const TAIL_BODY_BYTES_MAX: usize = 64 * 1024;
/// Position changes carried in one transaction; the rest goes into the next.
pub const POSITIONS_PER_BATCH_MAX: usize = 2_000;
/// Pushes held for a connection whose waiting conversations are being looked up. Those beyond are announced
/// with them.
pub const HELD_PUSHES_MAX: usize = 1_000;
/// Frames of a client that wait until it was told what waits. Those beyond do not wait.
pub const HELD_FRAMES_MAX: usize = 1_000;
/// Other frames for a connection that is about to resume its session. Those beyond end the attempt.
pub const EARLY_FRAMES_MAX: usize = 1_000;
/// Sessions held after their connections have ended. Those beyond are not held.
pub const SESSIONS_HELD_MAX: usize = 50_000;
/// What a session may have open to be held and resumed. With more, what waits is announced.
pub const RESUME_CONVERSATIONS_MAX: usize = 100;
pub const RESUME_MESSAGES_MAX: u64 = 500;
pub const RESUME_BYTES_MAX: usize = 256 * 1024;
/// How long a client that wants to resume waits for the store. Then it is let in, and what waits is announced.
pub const RESUME_WAIT_MS: u64 = 2_000;
/// Connections that were closed from here and whose close is remembered, should they go on speaking. Those beyond are
/// told to come again.
pub const CLOSES_REMEMBERED: usize = 1_000;
/// Conversations in one `sync.notice`.
pub const NOTICES_PER_PAGE: usize = 100;
/// Messages read at once for another push.
pub const REDELIVERY_PAGE: u32 = 200;
/// Pushes of one conversation to one device that are due together when written within this time.
pub const FLIGHT_SPAN_MS: u64 = 100;
/// Groups beyond this many members have receipts that count instead of naming.
pub const NAMED_RECEIPTS_MEMBERS_MAX: usize = 100;
/// Receipts of one kind that one transaction causes in such a group, each for another number. Of more, the newest.
pub const COUNTED_RECEIPTS_MAX: usize = 16;
/// Devices remembered for one user. Above, the one longest unseen is forgotten.
pub const DEVICES_PER_USER_MAX: usize = 64;
/// Messages that one step of the sweep takes. More are left to the next.
pub const SWEPT_MESSAGES_MAX: u32 = 500;
/// Between two steps of the sweep.
pub const SWEEP_PAUSE_MS: u64 = 10;
/// The oldest messages are looked at after a twentieth of the time that messages are kept, but not more often and
/// not more seldom than this.
pub const SWEEP_MS: u64 = 1_000;
pub const SWEEP_MS_MAX: u64 = 60_000;
/// After this time the sweep looks at everything anew, so that nothing it passed over stays for ever.
pub const SWEEP_ANEW_MS: u64 = 3_600_000;
/// Conversations noted as having too many messages. Those beyond are found when everything is looked at.
pub const OVERFULL_MAX: usize = 10_000;
/// Ids forgotten in one transaction.
pub const IDS_FORGOTTEN_MAX: u32 = 1_000;
/// A device that was not seen for so long is forgotten: 30 days.
pub const DEVICE_UNSEEN_MS_MAX: u64 = 30 * 24 * 3_600_000;
/// Devices looked at in one step.
pub const DEVICES_SEARCHED: u32 = 2_000;
/// While a device stays connected, its `last_seen` in the store is at most so old: a day.
pub const SEEN_MS: u64 = 24 * 3_600_000;
/// Users looked at together for that.
pub const SEEN_USERS: usize = 1_000;
/// A device that connects is written down only when it was last seen before this.
pub const SEEN_COARSE_MS: u64 = 3_600_000;
/// How long to wait before the store is asked again after it failed.
pub const STORE_RETRY_MS: u64 = 1_000;
