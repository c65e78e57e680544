CREATE TABLE users (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
) STRICT;

-- AUTOINCREMENT: the key of a deleted conversation is never given to another.
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id TEXT NOT NULL UNIQUE,
    name TEXT,
    meta BLOB,
    created_at INTEGER NOT NULL,
    -- Up to here retention has taken the messages.
    floor_seq INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    sender INTEGER NOT NULL,
    -- A UUID stands as 16 bytes, any other id as text.
    message_id ANY NOT NULL,
    device ANY,
    ts INTEGER NOT NULL,
    hash BLOB NOT NULL,
    body_kind INTEGER NOT NULL,
    -- NULL while a stream runs: it takes its number when it starts and its text when it ends.
    body BLOB,
    stream_status INTEGER,
    stream_chunks INTEGER
) STRICT;
CREATE UNIQUE INDEX messages_by_seq ON messages (conversation, seq);
CREATE UNIQUE INDEX messages_by_id ON messages (sender, message_id);

CREATE TABLE members (
    conversation INTEGER NOT NULL,
    user INTEGER NOT NULL,
    role INTEGER NOT NULL,
    joined INTEGER NOT NULL,
    first INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    read INTEGER NOT NULL,
    own_above_delivered INTEGER NOT NULL,
    own_above_read INTEGER NOT NULL,
    lagging BLOB,
    PRIMARY KEY (conversation, user)
) STRICT, WITHOUT ROWID;
CREATE INDEX members_by_user ON members (user, conversation);

CREATE TABLE devices (
    user INTEGER NOT NULL,
    device ANY NOT NULL,
    class TEXT,
    last_seen INTEGER NOT NULL,
    PRIMARY KEY (user, device)
) STRICT, WITHOUT ROWID;

CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    accepted INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    expired INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    -- Counted from the members' rows, not from the other columns.
    waiting INTEGER NOT NULL
) STRICT;
INSERT INTO ledger VALUES (1, 0, 0, 0, 0, 0);

-- AUTOINCREMENT: an event's number is never given to another, because receivers deduplicate by it.
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    at INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;

CREATE TABLE owners (
    partition INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    epoch INTEGER NOT NULL
) STRICT;
INSERT INTO owners
    WITH RECURSIVE partitions (partition) AS
        (SELECT 0 UNION ALL SELECT partition + 1 FROM partitions WHERE partition < 11)
    SELECT partition, '', 1 FROM partitions;

-- kind: token, session or user. What was issued until issued_until (0: whenever) counts as revoked; the row may go
-- after expires_at.
CREATE TABLE revocations (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    issued_until INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    user TEXT NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
