-- Retention. A message that it takes keeps its row for as long as its id is remembered, out of sight: with the
-- conversation's key negated and without its content.
CREATE INDEX messages_gone ON messages (ts) WHERE conversation < 0;

-- The time of the newest message that retention has taken.
ALTER TABLE conversations ADD COLUMN floor_ts INTEGER NOT NULL DEFAULT 0;
