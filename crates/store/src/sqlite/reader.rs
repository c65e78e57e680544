//! Reads, each from one state of the database.

mod sweep;

use super::{
    Home,
    codec::{self, signed},
};
use crate::cache::Cache;
use bowline_delivery::persist::{
    ConversationState, Device, Found, Ledger, Member, Message, Query, Summary, Waiting,
};
use bowline_protocol::{ConversationId, DeviceId, MessageId, Millis, Seq, UserId};
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Result, Row, params, types::ValueRef};
use std::{cmp::Reverse, collections::HashMap, sync::Arc};

/// Names of users by key, in entries of one generation. Neither ever changes.
const NAMES_CACHED: usize = 20_000;

/// One connection for reads; for one thread.
pub struct Reader {
    db: Connection,
    names: Names,
    _home: Arc<Home>,
}

impl crate::Reader for Reader {
    fn read(&mut self, query: &Query) -> Found {
        match self.answer(query) {
            Ok(found) => found,
            Err(error) => {
                if !self.db.is_autocommit() {
                    // Should this fail, the next read fails too and says so.
                    let _ = self.db.execute_batch("ROLLBACK");
                }
                Found::Failed(format!("the database could not be read: {error}").into())
            }
        }
    }

    /// In one transaction: the locks of the file are taken once.
    fn read_all(&mut self, queries: &[Query]) -> Vec<Found> {
        let is_open = queries.len() > 1 && self.db.execute_batch("BEGIN").is_ok();
        let found = queries.iter().map(|query| crate::Reader::read(self, query)).collect();
        if is_open && self.db.execute_batch("COMMIT").is_err() {
            // Nothing was written; what matters is that the next look starts anew.
            let _ = self.db.execute_batch("ROLLBACK");
        }
        found
    }
}

/// Names and keys of users, as far as they were needed lately.
struct Names {
    by_key: HashMap<i64, UserId, ahash::RandomState>,
    keys: Cache<UserId, i64>,
}

impl Reader {
    pub(super) fn new(db: Connection, home: Arc<Home>) -> Self {
        let names = Names { by_key: Default::default(), keys: Cache::new(NAMES_CACHED) };
        Self { db, names, _home: home }
    }

    fn answer(&mut self, query: &Query) -> Result<Found> {
        // A user that the store has never seen is found out by one probe, without a transaction: at a burst of
        // connects this is the common case. Users are never deleted.
        let user = match query {
            Query::Waiting { user, .. } | Query::Conversations { user, .. } | Query::Devices { user } => {
                match self.names.key(&self.db, user)? {
                    Some(key) => key,
                    None => {
                        return Ok(match query {
                            Query::Waiting { .. } => {
                                Found::Waiting { devices: vec![], conversations: vec![] }
                            }
                            Query::Conversations { .. } => {
                                Found::Conversations { conversations: vec![], more: false }
                            }
                            _ => Found::Devices(vec![]),
                        });
                    }
                }
            }
            Query::Senders { user, .. } => self.names.key(&self.db, user)?.unwrap_or(0),
            _ => 0,
        };
        // Several look-ups at once share the transaction of `read_all`.
        let is_alone = self.db.is_autocommit();
        if is_alone {
            self.db.prepare_cached("BEGIN")?.execute([])?;
        }
        let found = self.look_up(query, user)?;
        if is_alone {
            self.db.prepare_cached("COMMIT")?.execute([])?;
        }
        Ok(found)
    }

    fn look_up(&mut self, query: &Query, user: i64) -> Result<Found> {
        Ok(match query {
            Query::Conversation { conversation, tail } => {
                Found::Conversation(self.conversation(conversation, *tail)?.map(Box::new))
            }
            Query::Messages { conversation, from, to, limit, bytes_max, newest } => {
                Found::Messages(match self.key(conversation)? {
                    Some(key) => {
                        self.messages(key, conversation, (*from, *to), *limit, *bytes_max, *newest)?
                    }
                    None => vec![],
                })
            }
            Query::Senders { conversation, from, to, .. } => self.senders(conversation, user, *from, *to)?,
            Query::Waiting { device, .. } => {
                Found::Waiting { devices: self.devices(user)?, conversations: self.waiting(user, device)? }
            }
            Query::Conversations { after, limit, .. } => {
                self.conversations(user, after.as_ref(), *limit as usize)?
            }
            Query::Devices { .. } => Found::Devices(self.devices(user)?),
            Query::Ledger => self.ledger()?,
            Query::Overdue { before, ids_before, after, limit } => {
                self.overdue(*before, *ids_before, *after, *limit)?
            }
            Query::Excess { keep, of, after, limit } => self.excess(*keep, of.as_ref(), *after, *limit)?,
            Query::StaleDevices { before, after, limit } => self.stale_devices(*before, *after, *limit)?,
        })
    }

    fn key(&self, conversation: &ConversationId) -> Result<Option<i64>> {
        self.db
            .prepare_cached("SELECT id FROM conversations WHERE conversation_id = ?1")?
            .query_row([conversation.as_str()], |row| row.get(0))
            .optional()
    }

    /// The newest number, its time, and its place among all messages; what `past` says where there is no message.
    fn newest(&self, key: i64, past: Past) -> Result<(Seq, Millis, i64)> {
        let found = self
            .db
            .prepare_cached(
                "SELECT seq, ts, id FROM messages WHERE conversation = ?1 ORDER BY seq DESC LIMIT 1",
            )?
            .query_row([key], |row| Ok((codec::unsigned(row, 0)?, codec::unsigned(row, 1)?, row.get(2)?)))
            .optional()?;
        Ok(found.unwrap_or((past.floor, past.ts, 0)))
    }

    fn conversation(&mut self, id: &ConversationId, tail: u32) -> Result<Option<ConversationState>> {
        let found = self
            .db
            .prepare_cached(
                "SELECT id, name, meta, floor_seq, max(created_at, floor_ts) FROM conversations \
                 WHERE conversation_id = ?1",
            )?
            .query_row([id.as_str()], |row| {
                Ok((row.get::<_, i64>(0)?, row.get(1)?, meta(row, 2)?, Past::of(row, 3)?))
            })
            .optional()?;
        let Some((key, name, meta, past)) = found else { return Ok(None) };
        let (last, last_ts, _) = self.newest(key, past)?;
        let floor = past.floor;
        let mut members = Vec::new();
        {
            let mut select = self.db.prepare_cached(
                "SELECT m.user, m.role, m.joined, m.first, m.delivered, m.read, m.own_above_delivered, \
                 m.own_above_read, m.lagging FROM members m WHERE m.conversation = ?1",
            )?;
            let mut rows = select.query([key])?;
            while let Some(row) = rows.next()? {
                let user = self.names.name(&self.db, row.get(0)?)?;
                members.push((user, lifted(codec::member(row, 1)?, floor)));
            }
        }
        let tail = match tail {
            0 => vec![],
            limit => self.messages(key, id, (1, last), limit, u64::MAX, true)?,
        };
        Ok(Some(ConversationState { name, meta, last, last_ts, floor, members, tail }))
    }

    fn messages(
        &mut self,
        key: i64,
        conversation: &ConversationId,
        (from, to): (Seq, Seq),
        limit: u32,
        bytes_max: u64,
        newest: bool,
    ) -> Result<Vec<Message>> {
        let mut select = self.db.prepare_cached(if newest {
            "SELECT m.seq, m.sender, m.message_id, m.device, m.ts, m.hash, m.body_kind, m.body FROM messages m \
             WHERE m.conversation = ?1 AND m.seq BETWEEN ?2 AND ?3 ORDER BY m.seq DESC LIMIT ?4"
        } else {
            "SELECT m.seq, m.sender, m.message_id, m.device, m.ts, m.hash, m.body_kind, m.body FROM messages m \
             WHERE m.conversation = ?1 AND m.seq BETWEEN ?2 AND ?3 ORDER BY m.seq LIMIT ?4"
        })?;
        let mut rows = select.query(params![key, signed(from), signed(to), limit])?;
        let (mut messages, mut bytes) = (Vec::new(), 0);
        while let Some(row) = rows.next()? {
            let message = message(row, conversation, &mut self.names, &self.db)?;
            bytes += message.body.bytes().len() as u64;
            if bytes > bytes_max && !messages.is_empty() {
                break;
            }
            messages.push(message);
        }
        if newest {
            messages.reverse();
        }
        Ok(messages)
    }

    fn senders(&mut self, conversation: &ConversationId, user: i64, from: Seq, to: Seq) -> Result<Found> {
        let (mut own, mut others) = (0, Vec::new());
        if let Some(key) = self.key(conversation)? {
            let mut select = self.db.prepare_cached(
                "SELECT sender, count(*) FROM messages WHERE conversation = ?1 AND seq BETWEEN ?2 AND ?3 \
                 GROUP BY sender ORDER BY sender",
            )?;
            let mut rows = select.query(params![key, signed(from), signed(to)])?;
            while let Some(row) = rows.next()? {
                let sender: i64 = row.get(0)?;
                if sender == user {
                    own = codec::unsigned(row, 1)?;
                } else {
                    others.push(self.names.name(&self.db, sender)?);
                }
            }
        }
        Ok(Found::Senders { own, others })
    }

    fn devices(&self, user: i64) -> Result<Vec<Device>> {
        let mut select =
            self.db.prepare_cached("SELECT device, class, last_seen FROM devices WHERE user = ?1")?;
        let mut rows = select.query([user])?;
        let mut devices = Vec::new();
        while let Some(row) = rows.next()? {
            devices.push(Device {
                device: codec::unpack(row.get_ref(0)?, DeviceId::trusted)?,
                class: codec::class(row.get_ref(1)?)?,
                last_seen: codec::unsigned(row, 2)?,
            });
        }
        Ok(devices)
    }

    fn waiting(&self, user: i64, device: &DeviceId) -> Result<Vec<Waiting>> {
        let mut select = self.db.prepare_cached(
            "SELECT m.conversation, (SELECT max(seq) FROM messages WHERE conversation = m.conversation), \
             m.role, m.joined, m.first, m.delivered, m.read, m.own_above_delivered, m.own_above_read, m.lagging \
             FROM members m WHERE m.user = ?1",
        )?;
        let mut waiting = Vec::new();
        let mut rows = select.query([user])?;
        while let Some(row) = rows.next()? {
            // Where retention took all messages nothing can wait.
            let Some(last) = row.get::<_, Option<i64>>(1)? else { continue };
            let (key, last, member) = (row.get(0)?, last as Seq, codec::member(row, 2)?);
            let position = member.position(device);
            // Below the floor there is nothing to find, so it matters only to what is told.
            if last <= position || !self.others_above(key, &member, position, user, device)? {
                continue;
            }
            let (conversation, floor) = self.id(key)?;
            let member = lifted(member, floor);
            waiting.push(Waiting {
                conversation,
                first: member.first,
                last,
                position: member.position(device),
                unread: member.unread(last),
            });
        }
        Ok(waiting)
    }

    /// Whether a message that the user sees lies above the position and was not sent by this device. Own ones are
    /// passed over one by one; there are few, because they move the position when nothing lies between.
    fn others_above(
        &self,
        key: i64,
        member: &Member,
        position: Seq,
        user: i64,
        device: &DeviceId,
    ) -> Result<bool> {
        self.db
            .prepare_cached(
                "SELECT 1 FROM messages WHERE conversation = ?1 AND seq >= ?2 \
                 AND NOT (sender = ?3 AND device IS ?4) LIMIT 1",
            )?
            .exists(params![key, signed(member.first.max(position + 1)), user, codec::Packed::new(device)])
    }

    /// The id of a conversation, and its floor.
    fn id(&self, key: i64) -> Result<(ConversationId, Seq)> {
        self.db
            .prepare_cached("SELECT conversation_id, floor_seq FROM conversations WHERE id = ?1")?
            .query_row([key], |row| {
                Ok((ConversationId::trusted(row.get_ref(0)?.as_str()?), codec::unsigned(row, 1)?))
            })
    }

    fn conversations(&mut self, user: i64, after: Option<&ConversationId>, limit: usize) -> Result<Found> {
        // Activity is not kept anywhere, so that a message writes one row; it is looked up for all of the user's
        // conversations, and the rest only for those of the page.
        let mut all = Vec::new();
        {
            let mut select = self.db.prepare_cached(
                "SELECT c.id, c.conversation_id, c.floor_seq, max(c.created_at, c.floor_ts) FROM members m \
                 JOIN conversations c ON c.id = m.conversation WHERE m.user = ?1",
            )?;
            let mut rows = select.query([user])?;
            while let Some(row) = rows.next()? {
                let (key, past) = (row.get(0)?, Past::of(row, 2)?);
                let (last, at, arrived) = self.newest(key, past)?;
                let id = ConversationId::trusted(row.get_ref(1)?.as_str()?);
                all.push(Line { order: (Reverse((at, arrived)), id), key, last, floor: past.floor });
            }
        }
        all.sort_unstable_by(|a, b| a.order.cmp(&b.order));
        let begin = match after {
            None => 0,
            // After a conversation that the user has left since, the list goes on where that one would stand.
            Some(after) => match self.activity(after)? {
                Some(at) => {
                    let cursor = (Reverse(at), after.clone());
                    all.partition_point(|line| line.order <= cursor)
                }
                None => all.len(),
            },
        };
        let page = &all[begin..all.len().min(begin.saturating_add(limit))];
        let more = begin + page.len() < all.len();
        let conversations = page.iter().map(|line| self.summary(line, user)).collect::<Result<_>>()?;
        Ok(Found::Conversations { conversations, more })
    }

    fn activity(&self, conversation: &ConversationId) -> Result<Option<(Millis, i64)>> {
        let found = self
            .db
            .prepare_cached(
                "SELECT id, floor_seq, max(created_at, floor_ts) FROM conversations WHERE conversation_id = ?1",
            )?
            .query_row([conversation.as_str()], |row| Ok((row.get(0)?, Past::of(row, 1)?)))
            .optional()?;
        let Some((key, past)) = found else { return Ok(None) };
        let (_, at, arrived) = self.newest(key, past)?;
        Ok(Some((at, arrived)))
    }

    fn summary(&mut self, line: &Line, user: i64) -> Result<Summary> {
        let (id, last) = (&line.order.1, line.last);
        let (name, meta) = self
            .db
            .prepare_cached("SELECT name, meta FROM conversations WHERE id = ?1")?
            .query_row([line.key], |row| Ok((row.get(0)?, meta(row, 1)?)))?;
        let member = self
            .db
            .prepare_cached(
                "SELECT m.role, m.joined, m.first, m.delivered, m.read, m.own_above_delivered, m.own_above_read, \
                 m.lagging FROM members m WHERE m.conversation = ?1 AND m.user = ?2",
            )?
            .query_row([line.key, user], |row| Ok(lifted(codec::member(row, 0)?, line.floor)))?;
        let peer = match id.peers() {
            None => None,
            Some((one, other)) => {
                let mine = self.names.name(&self.db, user)?;
                match self.names.key(&self.db, if one == mine { &other } else { &one })? {
                    Some(key) if key != user => self
                        .db
                        .prepare_cached(
                            "SELECT delivered, read FROM members WHERE conversation = ?1 AND user = ?2",
                        )?
                        .query_row([line.key, key], |row| {
                            let position = |at| codec::unsigned(row, at).map(|seq| seq.max(line.floor));
                            Ok((position(0)?, position(1)?))
                        })
                        .optional()?,
                    _ => None,
                }
            }
        };
        let last_message = if last < member.first {
            None
        } else {
            self.messages(line.key, id, (last, last), 1, u64::MAX, true)?.pop()
        };
        Ok(Summary { conversation: id.clone(), name, meta, last, member, peer, last_message })
    }

    fn ledger(&self) -> Result<Found> {
        self.db
            .prepare_cached("SELECT accepted, delivered, expired, dropped, max(waiting, 0) FROM ledger")?
            .query_row([], |row| {
                Ok(Found::Ledger {
                    ledger: Ledger {
                        accepted: codec::unsigned(row, 0)?,
                        delivered: codec::unsigned(row, 1)?,
                        expired: codec::unsigned(row, 2)?,
                        dropped: codec::unsigned(row, 3)?,
                    },
                    waiting: codec::unsigned(row, 4)?,
                })
            })
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.db
    }
}

/// A conversation in the list, before its details are looked up.
struct Line {
    order: (Reverse<(Millis, i64)>, ConversationId),
    key: i64,
    last: Seq,
    floor: Seq,
}

/// What a conversation says of itself when it holds no message: up to where they were taken, and when it was last
/// written to.
#[derive(Clone, Copy)]
struct Past {
    floor: Seq,
    ts: Millis,
}

impl Past {
    fn of(row: &Row<'_>, at: usize) -> Result<Self> {
        Ok(Self { floor: codec::unsigned(row, at)?, ts: codec::unsigned(row, at + 1)? })
    }
}

fn lifted(mut member: Member, floor: Seq) -> Member {
    if floor > 0 {
        member.lift(floor);
    }
    member
}

impl Names {
    fn key(&mut self, db: &Connection, user: &UserId) -> Result<Option<i64>> {
        if let Some(key) = self.keys.find(user) {
            return Ok(Some(*key));
        }
        let found = db
            .prepare_cached("SELECT id FROM users WHERE name = ?1")?
            .query_row([user.as_str()], |row| row.get(0))
            .optional()?;
        if let Some(key) = found {
            self.keys.insert(user.clone(), key);
        }
        Ok(found)
    }

    fn name(&mut self, db: &Connection, key: i64) -> Result<UserId> {
        if let Some(name) = self.by_key.get(&key) {
            return Ok(name.clone());
        }
        let name = db
            .prepare_cached("SELECT name FROM users WHERE id = ?1")?
            .query_row([key], |row| Ok(UserId::trusted(row.get_ref(0)?.as_str()?)))?;
        if self.by_key.len() >= NAMES_CACHED {
            self.by_key.clear();
        }
        self.by_key.insert(key, name.clone());
        Ok(name)
    }
}

fn message(
    row: &Row<'_>,
    conversation: &ConversationId,
    names: &mut Names,
    db: &Connection,
) -> Result<Message> {
    // A stream that runs has no text yet.
    let bytes = match row.get_ref(7)? {
        ValueRef::Null => Bytes::from_static(b"null"),
        value => Bytes::copy_from_slice(value.as_blob()?),
    };
    Ok(Message {
        conversation: conversation.clone(),
        seq: codec::unsigned(row, 0)?,
        from: names.name(db, row.get(1)?)?,
        id: codec::unpack(row.get_ref(2)?, MessageId::trusted)?,
        device: codec::unpack_optional(row.get_ref(3)?, DeviceId::trusted)?,
        ts: codec::unsigned(row, 4)?,
        hash: codec::hash(row.get_ref(5)?)?,
        body: codec::body(row.get(6)?, bytes)?,
    })
}

fn meta(row: &Row<'_>, at: usize) -> Result<Option<Bytes>> {
    Ok(row.get_ref(at)?.as_blob_or_null()?.map(Bytes::copy_from_slice))
}
