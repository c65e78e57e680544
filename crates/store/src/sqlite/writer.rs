//! The one writer: a batch is a transaction.
//!
//! What waits is counted here, apart from what the core adds to the ledger. A user's place in a conversation
//! contributes `last − max(delivered, floor) − own_above_delivered`, so a message adds one for every member, a
//! member's row that is replaced adds the difference between the old and the new sum of the other two, and joining,
//! leaving, expiring and deleting add or take what the term says. The old rows are known from a cache that holds what
//! this writer wrote last. The sum stands in the ledger's row, in the same transaction; [`Writer::recount_waiting`]
//! computes it anew from all rows, which is done at each start.
//!
//! Retention moves a conversation's floor and writes no member's row but those of the senders: whoever reads a row
//! lifts its positions to the floor.

use super::{
    Home, Options,
    checkpoint::Checkpointer,
    codec::{self, Packed},
};
use crate::cache::Cache;
use bowline_delivery::persist::{
    Batch, Fence, LedgerDelta, Member, Message, OutboxEvent, Outcome, Receipt, Refused, Write,
};
use bowline_protocol::{ConversationId, DeviceId, MessageId, Seq, UserId};
use rusqlite::{Connection, OptionalExtension, params};
use std::sync::Arc;

/// Bounds of the caches, in entries of one generation (twice that in all): some 30 MB when full.
const USERS_CACHED: usize = 50_000;
const CONVERSATIONS_CACHED: usize = 50_000;
const MEMBERS_CACHED: usize = 200_000;

pub struct Writer {
    // Before `db`: its thread ends first, so that closing the last connection can fold the log in.
    checkpointer: Checkpointer,
    db: Connection,
    home: Arc<Home>,
    users: Cache<UserId, i64>,
    conversations: Cache<ConversationId, Place>,
    /// What of their conversation members have or sent themselves, by the keys of conversation and user.
    covered: Cache<(i64, i64), Covered>,
    /// What this transaction put into `covered`.
    touched: Vec<(i64, i64)>,
    /// The key of the next message. A key is never given twice while this runs, whatever was deleted, so that who
    /// walks over the messages in order of arrival misses none.
    next_row: i64,
}

/// What the writer knows of a conversation.
#[derive(Clone, Copy)]
struct Place {
    key: i64,
    members: i64,
    last: i64,
    floor: i64,
}

/// What a member's row says of what does not wait for that user.
#[derive(Clone, Copy)]
struct Covered {
    delivered: i64,
    own_above: i64,
}

impl Covered {
    fn above(self, floor: i64) -> i64 {
        self.delivered.max(floor) + self.own_above
    }
}

/// Why a batch is not carried out.
enum Stop {
    Refused(Vec<(usize, Fault)>),
    Stale(Fence),
    Failed(Arc<str>),
}

/// A fault as it is found. The newest number of a conversation is looked up after the batch was undone, which may
/// have brought numbers of its own.
enum Fault {
    Duplicate(Receipt),
    SeqTaken,
    ConversationExists,
}

impl From<rusqlite::Error> for Stop {
    fn from(error: rusqlite::Error) -> Self {
        Self::Failed(format!("the database refused a write: {error}").into())
    }
}

impl crate::Writer for Writer {
    fn commit(&mut self, batch: &Batch) -> Outcome {
        let home = Arc::clone(&self.home);
        let _turn = home.enter();
        let stop = match self.carry_out(batch) {
            Ok(()) => {
                self.checkpointer.after_commit(&self.db);
                return Outcome::Committed;
            }
            Err(stop) => stop,
        };
        self.undo(batch);
        match stop {
            Stop::Refused(faults) => self.explain(batch, faults),
            Stop::Stale(fence) => Outcome::Stale { partition: fence.partition, epoch: fence.epoch },
            Stop::Failed(text) => Outcome::Failed(text),
        }
    }
}

impl Writer {
    /// Also tells the ledger's waiting count when the rows say something else.
    pub(super) fn new(
        db: Connection,
        home: Arc<Home>,
        options: &Options,
    ) -> rusqlite::Result<(Self, Option<i64>)> {
        let page_bytes: u64 = db.query_row("PRAGMA page_size", [], |row| codec::unsigned(row, 0))?;
        let pages = |bytes: u64| u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX).max(16);
        let copier = home.connect(1 << 20)?;
        let checkpointer =
            Checkpointer::start(&db, copier, pages(options.log_bytes), pages(options.log_bytes_max));
        let next_row = db.query_row("SELECT ifnull(max(id), 0) + 1 FROM messages", [], |row| row.get(0))?;
        let mut writer = Self {
            checkpointer,
            db,
            home,
            users: Cache::new(USERS_CACHED),
            conversations: Cache::new(CONVERSATIONS_CACHED),
            covered: Cache::new(MEMBERS_CACHED),
            touched: Vec::new(),
            next_row,
        };
        let said: i64 = writer.db.query_row("SELECT waiting FROM ledger", [], |row| row.get(0))?;
        let counted = writer.recount_waiting()?;
        if said != counted {
            writer.db.execute("UPDATE ledger SET waiting = ?1", [counted])?;
        }
        Ok((writer, (said != counted).then_some(said)))
    }

    /// What waits for all users, computed from the members' rows and the messages.
    pub fn recount_waiting(&mut self) -> rusqlite::Result<i64> {
        // One pass over the members in order of conversation; the newest number is looked up once for each.
        self.db.query_row(
            "SELECT ifnull(sum(m.count * max(c.floor_seq, ifnull((SELECT max(seq) FROM messages \
                 WHERE conversation = m.conversation), 0)) - m.covered), 0) \
                 - (SELECT ifnull(sum(c.floor_seq - m.delivered), 0) FROM conversations c \
                    JOIN members m ON m.conversation = c.id WHERE c.floor_seq > 0 AND m.delivered < c.floor_seq) \
             FROM (SELECT conversation, count(*) AS count, sum(delivered + own_above_delivered) AS covered \
                   FROM members GROUP BY conversation) m \
             JOIN conversations c ON c.id = m.conversation",
            [],
            |row| row.get(0),
        )
    }

    fn carry_out(&mut self, batch: &Batch) -> Result<(), Stop> {
        self.touched.clear();
        self.run("BEGIN IMMEDIATE")?;
        self.check_fences(&batch.fences)?;
        let mut faults = Vec::new();
        let mut waiting = 0;
        for (index, write) in batch.writes.iter().enumerate() {
            match self.write(write, &mut waiting)? {
                Ok(()) => {}
                Err(fault) => faults.push((index, fault)),
            }
        }
        if !faults.is_empty() {
            return Err(Stop::Refused(faults));
        }
        self.add_events(&batch.outbox)?;
        self.add_to_ledger(batch.ledger, waiting)?;
        self.run("COMMIT")?;
        Ok(())
    }

    /// Takes back the transaction and what the caches learned from it.
    fn undo(&mut self, batch: &Batch) {
        if !self.db.is_autocommit() {
            // Should this fail, the next BEGIN fails too and says so; nothing was stored.
            let _ = self.db.execute_batch("ROLLBACK");
        }
        for place in self.touched.drain(..) {
            self.covered.forget(&place);
        }
        for write in &batch.writes {
            match write {
                Write::CreateConversation { conversation, members, .. } => {
                    self.conversations.forget(conversation);
                    members.iter().for_each(|(user, _)| self.users.forget(user));
                }
                Write::Message(Message { conversation, from: user, .. })
                | Write::PutMember { conversation, user, .. }
                | Write::RemoveMember { conversation, user } => {
                    self.conversations.forget(conversation);
                    self.users.forget(user);
                }
                Write::RenameConversation { conversation, .. }
                | Write::ExpireMessages { conversation, .. }
                | Write::DeleteConversation { conversation } => {
                    self.conversations.forget(conversation);
                }
                Write::PutDevice { user, .. } | Write::ForgetDevice { user, .. } => self.users.forget(user),
                Write::ForgetIds { .. } => {}
            }
        }
    }

    fn explain(&mut self, batch: &Batch, faults: Vec<(usize, Fault)>) -> Outcome {
        let mut refused = Vec::with_capacity(faults.len());
        for (index, fault) in faults {
            refused.push((
                index,
                match fault {
                    Fault::Duplicate(receipt) => Refused::Duplicate(receipt),
                    Fault::ConversationExists => Refused::ConversationExists,
                    Fault::SeqTaken => match self.newest(&batch.writes[index]) {
                        Ok(last) => Refused::SeqTaken { last },
                        Err(Stop::Failed(text)) => return Outcome::Failed(text),
                        Err(Stop::Refused(_) | Stop::Stale(_)) => Refused::SeqTaken { last: 0 },
                    },
                },
            ));
        }
        Outcome::Refused(refused)
    }

    fn newest(&mut self, write: &Write) -> Result<Seq, Stop> {
        let Write::Message(message) = write else { return Ok(0) };
        Ok(self.place(&message.conversation)?.map_or(0, |place| place.last as Seq))
    }

    fn run(&self, sql: &str) -> rusqlite::Result<()> {
        self.db.prepare_cached(sql)?.execute([]).map(|_| ())
    }

    fn check_fences(&self, fences: &[Fence]) -> Result<(), Stop> {
        if fences.is_empty() {
            return Ok(());
        }
        let mut owners = self.db.prepare_cached("SELECT partition, epoch FROM owners")?;
        let mut rows = owners.query([])?;
        let mut found = Vec::with_capacity(16);
        while let Some(row) = rows.next()? {
            found.push((codec::unsigned(row, 0)?, codec::unsigned(row, 1)?));
        }
        for fence in fences {
            let epoch = found
                .iter()
                .find(|(partition, _)| *partition == u64::from(fence.partition))
                .map_or(0, |(_, epoch)| *epoch);
            if epoch != fence.epoch {
                return Err(Stop::Stale(Fence { partition: fence.partition, epoch }));
            }
        }
        Ok(())
    }

    fn write(&mut self, write: &Write, waiting: &mut i64) -> Result<Result<(), Fault>, Stop> {
        match write {
            Write::Message(message) => return self.add_message(message, waiting),
            Write::PutMember { conversation, user, member } => {
                self.put_member(conversation, user, member, waiting)?;
            }
            Write::CreateConversation { conversation, name, meta, at, members } => {
                if self.place(conversation)?.is_some() {
                    return Ok(Err(Fault::ConversationExists));
                }
                self.db
                    .prepare_cached(
                        "INSERT INTO conversations (conversation_id, name, meta, created_at) VALUES (?1, ?2, ?3, ?4)",
                    )?
                    .execute(params![conversation.as_str(), name, meta.as_deref(), *at as i64])?;
                let key = self.db.last_insert_rowid();
                self.conversations.insert(conversation.clone(), Place { key, members: 0, last: 0, floor: 0 });
                for (user, member) in members {
                    self.put_member(conversation, user, member, waiting)?;
                }
            }
            Write::RemoveMember { conversation, user } => self.remove_member(conversation, user, waiting)?,
            Write::RenameConversation { conversation, name, meta } => {
                self.db
                    .prepare_cached(
                        "UPDATE conversations SET name = ifnull(?2, name), meta = ifnull(?3, meta) \
                         WHERE conversation_id = ?1",
                    )?
                    .execute(params![conversation.as_str(), name, meta.as_deref()])?;
            }
            Write::DeleteConversation { conversation } => self.delete_conversation(conversation, waiting)?,
            Write::PutDevice { user, device, class, last_seen } => {
                let user = self.user(user)?;
                self.db
                    .prepare_cached(
                        "INSERT INTO devices (user, device, class, last_seen) VALUES (?1, ?2, ?3, ?4) \
                         ON CONFLICT DO UPDATE SET class = excluded.class, last_seen = excluded.last_seen",
                    )?
                    .execute(params![
                        user,
                        Packed::new(device),
                        class.map(|class| class.as_str()),
                        *last_seen as i64
                    ])?;
            }
            Write::ForgetDevice { user, device } => self.forget_device(user, device)?,
            Write::ExpireMessages { conversation, up_to, ids_from } => {
                self.expire_messages(conversation, codec::signed(*up_to), codec::signed(*ids_from), waiting)?;
            }
            Write::ForgetIds { before, limit } => {
                self.db
                    .prepare_cached(
                        "DELETE FROM messages WHERE id IN \
                         (SELECT id FROM messages WHERE conversation < 0 AND ts < ?1 ORDER BY ts LIMIT ?2)",
                    )?
                    .execute(params![codec::signed(*before), limit])?;
            }
        }
        Ok(Ok(()))
    }

    fn add_message(&mut self, message: &Message, waiting: &mut i64) -> Result<Result<(), Fault>, Stop> {
        let place = self.place_of(&message.conversation)?;
        let sender = self.user(&message.from)?;
        let id = Packed::new(&message.id);
        if message.seq as i64 <= place.floor {
            return Ok(Err(match self.receipt(sender, &message.id)? {
                Some(receipt) => Fault::Duplicate(receipt),
                None => Fault::SeqTaken,
            }));
        }
        self.next_row += 1;
        let inserted = self
            .db
            .prepare_cached(
                "INSERT INTO messages (id, conversation, seq, sender, message_id, device, ts, hash, body_kind, body) \
                 VALUES (?10, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )?
            .execute(params![
                place.key,
                message.seq as i64,
                sender,
                &id,
                message.device.as_deref().map(Packed::new),
                message.ts as i64,
                message.hash.to_be_bytes(),
                codec::body_kind(&message.body),
                &message.body.bytes()[..],
                self.next_row - 1,
            ]);
        match inserted {
            Ok(_) => {}
            Err(error) if is_taken(&error) => {
                return match self.receipt(sender, &message.id)? {
                    Some(receipt) => Ok(Err(Fault::Duplicate(receipt))),
                    None => Ok(Err(Fault::SeqTaken)),
                };
            }
            Err(error) => return Err(error.into()),
        }
        let seq = message.seq as i64;
        if seq > place.last {
            *waiting += place.members * (seq - place.last);
            if let Some(place) = self.conversations.find(&message.conversation) {
                place.last = seq;
            }
        }
        Ok(Ok(()))
    }

    /// Where the message of this sender and id is.
    fn receipt(&self, sender: i64, id: &MessageId) -> rusqlite::Result<Option<Receipt>> {
        self.db
            .prepare_cached(
                "SELECT c.conversation_id, m.seq, m.ts, m.hash FROM messages m \
                 JOIN conversations c ON c.id = abs(m.conversation) WHERE m.sender = ?1 AND m.message_id = ?2",
            )?
            .query_row(params![sender, Packed::new(id)], |row| {
                Ok(Receipt {
                    conversation: ConversationId::trusted(row.get_ref(0)?.as_str()?),
                    seq: codec::unsigned(row, 1)?,
                    ts: codec::unsigned(row, 2)?,
                    hash: codec::hash(row.get_ref(3)?)?,
                })
            })
            .optional()
    }

    fn put_member(
        &mut self,
        conversation: &ConversationId,
        user: &UserId,
        member: &Member,
        waiting: &mut i64,
    ) -> Result<(), Stop> {
        let place = self.place_of(conversation)?;
        let user = self.user(user)?;
        let covered =
            Covered { delivered: member.delivered as i64, own_above: member.own_above_delivered as i64 };
        let sql = match self.covered(place.key, user)? {
            Some(before) => {
                *waiting += before.above(place.floor) - covered.above(place.floor);
                "UPDATE members SET role = ?3, joined = ?4, first = ?5, delivered = ?6, read = ?7, \
                 own_above_delivered = ?8, own_above_read = ?9, lagging = ?10 WHERE conversation = ?1 AND user = ?2"
            }
            None => {
                *waiting += place.last - covered.above(place.floor);
                if let Some(place) = self.conversations.find(conversation) {
                    place.members += 1;
                }
                "INSERT INTO members (conversation, user, role, joined, first, delivered, read, \
                 own_above_delivered, own_above_read, lagging) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
            }
        };
        self.db.prepare_cached(sql)?.execute(params![
            place.key,
            user,
            codec::role_code(member.role),
            member.joined as i64,
            member.first as i64,
            member.delivered as i64,
            member.read as i64,
            member.own_above_delivered as i64,
            member.own_above_read as i64,
            codec::lagging_blob(&member.lagging),
        ])?;
        self.covered.insert((place.key, user), covered);
        self.touched.push((place.key, user));
        Ok(())
    }

    fn remove_member(
        &mut self,
        conversation: &ConversationId,
        user: &UserId,
        waiting: &mut i64,
    ) -> Result<(), Stop> {
        let Some(place) = self.place(conversation)? else { return Ok(()) };
        let user = self.user(user)?;
        let Some(covered) = self.covered(place.key, user)? else { return Ok(()) };
        self.db
            .prepare_cached("DELETE FROM members WHERE conversation = ?1 AND user = ?2")?
            .execute([place.key, user])?;
        self.covered.forget(&(place.key, user));
        *waiting -= place.last - covered.above(place.floor);
        if let Some(place) = self.conversations.find(conversation) {
            place.members -= 1;
        }
        Ok(())
    }

    fn delete_conversation(&mut self, conversation: &ConversationId, waiting: &mut i64) -> Result<(), Stop> {
        let Some(place) = self.place(conversation)? else { return Ok(()) };
        let covered: i64 = self
            .db
            .prepare_cached(
                "SELECT ifnull(sum(max(delivered, ?2) + own_above_delivered), 0) FROM members WHERE conversation = ?1",
            )?
            .query_row([place.key, place.floor], |row| row.get(0))?;
        *waiting -= place.members * place.last - covered;
        for sql in [
            "DELETE FROM messages WHERE conversation IN (?1, -?1)",
            "DELETE FROM members WHERE conversation = ?1",
            "DELETE FROM conversations WHERE id = ?1",
        ] {
            self.db.prepare_cached(sql)?.execute([place.key])?;
        }
        // Its members stay in `covered` until they age out: the key is never given to another conversation.
        self.conversations.forget(conversation);
        Ok(())
    }

    /// Takes the messages up to `up_to`, and with them what waited of them. The ids of those from `ids_from` on stay.
    fn expire_messages(
        &mut self,
        conversation: &ConversationId,
        up_to: i64,
        ids_from: i64,
        waiting: &mut i64,
    ) -> Result<(), Stop> {
        let place = self.place_of(conversation)?;
        let floor = up_to.min(place.last);
        if floor <= place.floor {
            return Ok(());
        }
        let taken: i64 = self
            .db
            .prepare_cached(
                "SELECT ifnull(sum(?2 - max(delivered, ?3)), 0) FROM members \
                 WHERE conversation = ?1 AND delivered < ?2",
            )?
            .query_row([place.key, floor, place.floor], |row| row.get(0))?;
        *waiting -= taken;
        self.db
            .prepare_cached(
                "UPDATE conversations SET floor_seq = ?2, floor_ts = max(floor_ts, ifnull((SELECT ts FROM messages \
                 WHERE conversation = ?1 AND seq <= ?2 ORDER BY seq DESC LIMIT 1), 0)) WHERE id = ?1",
            )?
            .execute([place.key, floor])?;
        self.db
            .prepare_cached(
                "UPDATE messages SET conversation = -conversation, body = NULL, device = NULL \
                 WHERE conversation = ?1 AND seq <= ?2 AND ts >= ?3",
            )?
            .execute([place.key, floor, ids_from])?;
        self.db
            .prepare_cached("DELETE FROM messages WHERE conversation = ?1 AND seq <= ?2")?
            .execute([place.key, floor])?;
        if let Some(place) = self.conversations.find(conversation) {
            place.floor = floor;
        }
        Ok(())
    }

    fn forget_device(&mut self, user: &UserId, device: &DeviceId) -> Result<(), Stop> {
        let user = self.user(user)?;
        self.db
            .prepare_cached("DELETE FROM devices WHERE user = ?1 AND device = ?2")?
            .execute(params![user, Packed::new(device)])?;
        let mut changed = Vec::new();
        {
            let mut select = self.db.prepare_cached(
                "SELECT m.conversation, m.lagging FROM members m WHERE m.user = ?1 AND m.lagging IS NOT NULL",
            )?;
            let mut rows = select.query([user])?;
            while let Some(row) = rows.next()? {
                let mut lagging = codec::lagging(row.get_ref(1)?)?;
                let count = lagging.len();
                lagging.retain(|(other, _)| other != device);
                if lagging.len() < count {
                    changed.push((row.get::<_, i64>(0)?, lagging));
                }
            }
        }
        let mut update = self
            .db
            .prepare_cached("UPDATE members SET lagging = ?3 WHERE conversation = ?1 AND user = ?2")?;
        for (conversation, lagging) in changed {
            update.execute(params![conversation, user, codec::lagging_blob(&lagging)])?;
        }
        Ok(())
    }

    fn add_events(&self, events: &[OutboxEvent]) -> rusqlite::Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let mut insert =
            self.db.prepare_cached("INSERT INTO outbox (kind, key, at, data) VALUES (?1, ?2, ?3, ?4)")?;
        for event in events {
            insert.execute(params![event.kind, &*event.key, event.at as i64, &event.data[..]])?;
        }
        Ok(())
    }

    fn add_to_ledger(&self, delta: LedgerDelta, waiting: i64) -> rusqlite::Result<()> {
        if delta == LedgerDelta::default() && waiting == 0 {
            return Ok(());
        }
        self.db
            .prepare_cached(
                "UPDATE ledger SET accepted = accepted + ?1, delivered = delivered + ?2, \
                 expired = expired + ?3, waiting = waiting + ?4 WHERE one = 1",
            )?
            .execute([delta.accepted as i64, delta.delivered as i64, delta.expired as i64, waiting])
            .map(|_| ())
    }

    /// The key of a user, which is made when there is none.
    fn user(&mut self, user: &UserId) -> rusqlite::Result<i64> {
        if let Some(key) = self.users.find(user) {
            return Ok(*key);
        }
        let found = self
            .db
            .prepare_cached("SELECT id FROM users WHERE name = ?1")?
            .query_row([user.as_str()], |row| row.get(0))
            .optional()?;
        let key = match found {
            Some(key) => key,
            None => {
                self.db.prepare_cached("INSERT INTO users (name) VALUES (?1)")?.execute([user.as_str()])?;
                self.db.last_insert_rowid()
            }
        };
        self.users.insert(user.clone(), key);
        Ok(key)
    }

    /// A conversation that a write needs; the core creates it before.
    fn place_of(&mut self, conversation: &ConversationId) -> Result<Place, Stop> {
        self.place(conversation)?.ok_or_else(|| {
            Stop::Failed(
                format!("conversation {conversation} was to be written to and does not exist").into(),
            )
        })
    }

    fn place(&mut self, conversation: &ConversationId) -> rusqlite::Result<Option<Place>> {
        if let Some(place) = self.conversations.find(conversation) {
            return Ok(Some(*place));
        }
        let found = self
            .db
            .prepare_cached(
                "SELECT id, (SELECT count(*) FROM members WHERE conversation = id), \
                 max(floor_seq, ifnull((SELECT max(seq) FROM messages WHERE conversation = conversations.id), 0)), \
                 floor_seq FROM conversations WHERE conversation_id = ?1",
            )?
            .query_row([conversation.as_str()], |row| {
                Ok(Place { key: row.get(0)?, members: row.get(1)?, last: row.get(2)?, floor: row.get(3)? })
            })
            .optional()?;
        if let Some(place) = found {
            self.conversations.insert(conversation.clone(), place);
        }
        Ok(found)
    }

    /// What a member's row says; none when there is no row.
    fn covered(&mut self, conversation: i64, user: i64) -> rusqlite::Result<Option<Covered>> {
        if let Some(covered) = self.covered.find(&(conversation, user)) {
            return Ok(Some(*covered));
        }
        self.db
            .prepare_cached(
                "SELECT delivered, own_above_delivered FROM members WHERE conversation = ?1 AND user = ?2",
            )?
            .query_row([conversation, user], |row| {
                Ok(Covered { delivered: row.get(0)?, own_above: row.get(1)? })
            })
            .optional()
    }

    #[cfg(test)]
    pub(super) fn connection(&self) -> &Connection {
        &self.db
    }

    #[cfg(test)]
    pub(super) fn settle(&self) {
        self.checkpointer.settle();
    }
}

/// A unique index holds the key already.
fn is_taken(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|e| e.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE)
}
