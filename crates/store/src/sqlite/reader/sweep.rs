//! What retention asks: which messages are too old or too many, which devices were not seen for long.

use super::{Past, Reader};
use crate::sqlite::codec::{self, signed};
use bowline_delivery::persist::{Found, Overdue};
use bowline_protocol::{ConversationId, DeviceId, Millis, Seq, UserId};
use rusqlite::{Result, Row, params};
use std::collections::HashMap;

/// Conversations looked at for one page of what is too many.
const CONVERSATIONS_SEARCHED: u32 = 1_000;

impl Reader {
    pub(super) fn overdue(
        &mut self,
        before: Millis,
        ids_before: Millis,
        after: u64,
        limit: u32,
    ) -> Result<Found> {
        let mut runs = Runs::default();
        let (mut next, mut count) = (after, 0);
        {
            // In order of arrival, so that what is due stands at the front; a message whose time is ahead of the
            // clock is passed over.
            let mut select = self.db.prepare_cached(
                "SELECT id, conversation, seq, sender, ts FROM messages WHERE id > ?1 ORDER BY id LIMIT ?2",
            )?;
            let mut rows = select.query(params![signed(after), limit])?;
            while let Some(row) = rows.next()? {
                let (id, key): (i64, i64) = (row.get(0)?, row.get(1)?);
                count += 1;
                let is_gone = key < 0;
                if !is_gone && codec::unsigned(row, 4)? < before {
                    runs.add(key, codec::unsigned(row, 2)?, self.names.name(&self.db, row.get(3)?)?);
                }
                if is_gone || runs.message_count > 0 {
                    next = id as u64;
                }
            }
        }
        let ids = self
            .db
            .prepare_cached("SELECT 1 FROM messages WHERE conversation < 0 AND ts < ?1 LIMIT 1")?
            .exists([signed(ids_before)])?;
        let more = next > after && count == limit;
        Ok(Found::Overdue { runs: self.named(runs)?, next, more, ids })
    }

    pub(super) fn excess(
        &mut self,
        keep: u64,
        of: Option<&ConversationId>,
        after: u64,
        limit: u32,
    ) -> Result<Found> {
        let mut places = Vec::new();
        {
            let place = |row: &Row<'_>| Ok((row.get::<_, i64>(0)?, codec::unsigned(row, 1)?));
            let mut select = self.db.prepare_cached(match of {
                Some(_) => "SELECT id, floor_seq FROM conversations WHERE conversation_id = ?1 LIMIT ?2",
                None => "SELECT id, floor_seq FROM conversations WHERE id > ?1 ORDER BY id LIMIT ?2",
            })?;
            let found = match of {
                Some(of) => select.query_map(params![of.as_str(), 1], place)?.collect::<Result<Vec<_>>>(),
                None => select
                    .query_map(params![signed(after), CONVERSATIONS_SEARCHED], place)?
                    .collect::<Result<Vec<_>>>(),
            };
            places.extend(found?);
        }
        let mut more = of.is_none() && places.len() == CONVERSATIONS_SEARCHED as usize;
        let (mut runs, mut next) = (Runs::default(), after);
        for (key, floor) in places {
            let (last, ..) = self.newest(key, Past { floor, ts: 0 })?;
            let room = u64::from(limit) - runs.message_count.min(u64::from(limit));
            let excess = (last - floor).saturating_sub(keep);
            if excess > room {
                more = true;
            }
            if excess > 0 {
                let mut select = self.db.prepare_cached(
                    "SELECT seq, sender FROM messages WHERE conversation = ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3",
                )?;
                let mut rows = select.query(params![key, signed(last - keep), signed(room)])?;
                while let Some(row) = rows.next()? {
                    runs.add(key, codec::unsigned(row, 0)?, self.names.name(&self.db, row.get(1)?)?);
                }
            }
            if excess > room {
                break;
            }
            next = key as u64;
        }
        Ok(Found::Overdue { runs: self.named(runs)?, next, more, ids: false })
    }

    fn named(&self, runs: Runs) -> Result<Vec<Overdue>> {
        let named = |(key, messages)| Ok(Overdue { conversation: self.id(key)?.0, messages });
        runs.runs.into_iter().map(named).collect()
    }

    pub(super) fn stale_devices(&mut self, before: Millis, after: u64, limit: u32) -> Result<Found> {
        let mut seen = Vec::new();
        {
            let mut select = self.db.prepare_cached(
                "SELECT user, device, last_seen FROM devices WHERE user > ?1 ORDER BY user LIMIT ?2",
            )?;
            let mut rows = select.query(params![signed(after), limit])?;
            while let Some(row) = rows.next()? {
                let device = codec::unpack(row.get_ref(1)?, DeviceId::trusted)?;
                seen.push((row.get::<_, i64>(0)?, device, codec::unsigned(row, 2)?));
            }
        }
        let more = seen.len() == limit as usize;
        let mut next = seen.last().map_or(after, |(user, ..)| *user as u64);
        // The last user's devices may be cut: they are looked at again with the next page. A user has fewer than
        // fit into one.
        if more && seen.first().is_some_and(|(user, ..)| *user as u64 != next) {
            seen.retain(|(user, ..)| *user as u64 != next);
            next -= 1;
        }
        let stale = seen.into_iter().filter(|(.., last_seen)| *last_seen < before);
        let named = |(user, device, _)| Ok((self.names.name(&self.db, user)?, device));
        let devices = stale.map(named).collect::<Result<_>>()?;
        Ok(Found::StaleDevices { devices, next, more })
    }
}

/// Messages by conversation, each with its sender; the conversations in the order in which they came.
#[derive(Default)]
struct Runs {
    runs: Vec<(i64, Vec<(Seq, UserId)>)>,
    at: HashMap<i64, usize, ahash::RandomState>,
    message_count: u64,
}

impl Runs {
    fn add(&mut self, conversation: i64, seq: Seq, sender: UserId) {
        let at = *self.at.entry(conversation).or_insert_with(|| {
            self.runs.push((conversation, Vec::new()));
            self.runs.len() - 1
        });
        self.runs[at].1.push((seq, sender));
        self.message_count += 1;
    }
}
