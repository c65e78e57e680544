//! What waits for a device when it connects: one line for each conversation, then the client pages.
//!
//! What was stored before the connection is announced. What became durable while it was looked up is held and
//! pushed right behind the notices, so that a device sees each number once and in order.

use crate::{
    Core, Now, Slot,
    batch::Entry,
    limits,
    persist::{Device, Query, Waiting},
    positions,
    reads::ReadPurpose,
    users::{self, ConnKey},
};
use bowline_protocol::{
    ClientFrame, ConversationId, DeviceId, Seq, ServerFrame, UserId,
    frame::{Notice, SERVER_FIELDS_BYTES},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

impl Core {
    pub(crate) fn begin_sync(&mut self, key: ConnKey, now: Now) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.sync.get_or_insert_default().is_looking = true;
        let purpose = ReadPurpose::Sync { key, login: conn.login };
        self.read_behind_writes(purpose, now);
    }

    pub(crate) fn sync_query(&self, key: ConnKey, login: u64) -> Option<Query> {
        let conn = self.conns.get(&key).filter(|c| c.login == login)?;
        Some(Query::Waiting { user: conn.user.clone(), device: conn.device.clone() })
    }

    pub(crate) fn on_waiting(
        &mut self,
        key: ConnKey,
        login: u64,
        devices: Vec<Device>,
        waiting: Vec<Waiting>,
        now: Now,
    ) {
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == login) else { return };
        let (user_id, device_id) = (conn.user.clone(), conn.device.clone());
        conn.sync.iter_mut().for_each(|sync| sync.is_looking = false);
        let is_resuming = conn.sync.as_ref().is_some_and(|sync| sync.resuming.is_some());
        if conn.sync.as_ref().is_some_and(|sync| sync.overflowed) {
            if is_resuming {
                return self.give_up_resume(key, now);
            }
            if let Some(sync) = &mut conn.sync {
                sync.overflowed = false;
                sync.held.clear();
            }
            return self.begin_sync(key, now);
        }
        let held: Vec<(ConversationId, Seq, bool)> = conn.sync.as_ref().map_or(Vec::new(), |sync| {
            sync.held.iter().map(|h| (h.conversation.clone(), h.seq, h.own)).collect()
        });
        self.learn_devices(&user_id, &device_id, devices, now);

        let mut notices = Vec::new();
        let mut ranges = VecDeque::new();
        for row in waiting {
            let Waiting { conversation, first, mut last, position, mut unread } = row;
            // What is durable already and not known to be is pushed once it is.
            if let Some((committed, others)) = self.not_pushed_yet(&conversation, &user_id, last) {
                last = committed;
                unread = unread.saturating_sub(others);
            }
            if let Some(pushed) = held.iter().filter(|h| h.0 == conversation).map(|h| h.1).min() {
                let covered = |h: &&(ConversationId, Seq, bool)| h.0 == conversation && h.1 <= last && !h.2;
                unread = unread.saturating_sub(held.iter().filter(covered).count() as u64);
                last = last.min(pushed - 1);
            }
            if last > position {
                let from = first.max(position + 1);
                ranges.extend((from <= last).then(|| (conversation.clone(), from, last)));
                notices.push(Notice {
                    conversation_id: conversation,
                    last_seq: last,
                    first_seq: first,
                    unread,
                });
            }
        }
        if is_resuming {
            return self.plan_resume(key, login, ranges, now);
        }
        let bytes_max = self.config.frame_bytes_max + SERVER_FIELDS_BYTES;
        let pages = pages(&notices, bytes_max);
        for (index, page) in pages.iter().enumerate() {
            let more = index + 1 < pages.len();
            let frame = ServerFrame::SyncNotice { conversations: page, more }.encode();
            self.broadcast(&[key], &frame);
        }
        let Some(device) = self.users.get_mut(&user_id).and_then(|u| u.device_mut(&device_id)) else {
            return;
        };
        for notice in notices {
            device.announced.retain(|(c, _)| *c != notice.conversation_id);
            device.announced.push((notice.conversation_id, notice.last_seq));
        }
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let users::Sync { held, frames, .. } = conn.sync.take().map(|sync| *sync).unwrap_or_default();
        let pushes = held.into_iter().map(|held| (held.conversation, held.seq, held.frame)).collect();
        self.push_to(key, (&user_id, &device_id), pushes, now);
        for frame in frames {
            self.take_frame(key, frame, now);
        }
    }

    /// What a client says before it was told what waits follows behind that, as far as there is room for it.
    pub(crate) fn on_frame(&mut self, key: ConnKey, frame: ClientFrame, now: Now) {
        match self.conns.get_mut(&key).and_then(|conn| conn.sync.as_mut()) {
            Some(sync) if sync.is_looking && sync.frames.len() < limits::HELD_FRAMES_MAX => {
                sync.frames.push(frame);
            }
            _ => {
                self.take_held_frames(key, now);
                self.take_frame(key, frame, now);
            }
        }
    }

    /// It does not wait any longer.
    pub(crate) fn take_held_frames(&mut self, key: ConnKey, now: Now) {
        let sync = self.conns.get_mut(&key).and_then(|conn| conn.sync.as_mut());
        for frame in sync.map(|sync| std::mem::take(&mut sync.frames)).unwrap_or_default() {
            self.take_frame(key, frame, now);
        }
    }

    /// Notes which devices a user has; one that is new is stored, and the oldest gives way when there are too
    /// many.
    fn learn_devices(&mut self, user_id: &UserId, device_id: &DeviceId, mut devices: Vec<Device>, now: Now) {
        let Some(user) = self.users.get_mut(user_id) else { return };
        let is_new = !devices.iter().any(|d| d.device == *device_id);
        let is_stored = |user: &UserId, device: &DeviceId| {
            user == user_id && devices.iter().any(|known| known.device == *device)
        };
        self.unstored_devices.retain(|(user, device)| !is_stored(user, device));
        let class = user.device(device_id).and_then(|d| d.class);
        let differs = |d: &Device| class.is_some() && d.class != class;
        let unseen = |d: &Device| d.last_seen + limits::SEEN_COARSE_MS < now.wall;
        let changed = devices.iter().any(|d| d.device == *device_id && (differs(d) || unseen(d)));
        let class = class.or(devices.iter().find(|d| d.device == *device_id).and_then(|d| d.class));
        let mut forgotten = Vec::new();
        if is_new {
            devices.sort_by_key(|d| d.last_seen);
            while devices.len() >= limits::DEVICES_PER_USER_MAX {
                let Some(index) = devices.iter().position(|d| user.device(&d.device).is_none()) else {
                    break;
                };
                forgotten.push(devices.remove(index).device);
            }
        }
        let mut known: Vec<DeviceId> = devices.into_iter().map(|d| d.device).collect();
        known.extend(user.known.iter().flat_map(|k| k.iter().cloned()));
        known.extend(user.devices.iter().map(|d| d.id.clone()));
        known.extend(self.unstored_devices.iter().filter(|(u, _)| u == user_id).map(|(_, d)| d.clone()));
        known.sort();
        known.dedup();
        known.retain(|d| !forgotten.contains(d));
        user.known = Some(Arc::from(known));
        for device in forgotten {
            self.enqueue(Entry::ForgetDevice { asker: None, user: user_id.clone(), device });
        }
        if is_new {
            positions::widen(&mut self.positions, user_id, device_id);
        }
        if is_new || changed {
            let (user, device) = (user_id.clone(), device_id.clone());
            self.enqueue(Entry::PutDevice { user, device, class, at: now.wall });
        }
    }

    /// Devices are forgotten: they are not behind anywhere any more.
    pub(crate) fn on_devices_forgotten(&mut self, forgotten: &[(UserId, DeviceId)]) {
        let mut by_user: HashMap<&UserId, Vec<&DeviceId>, _> = HashMap::with_hasher(self.hasher.clone());
        for (user, device) in forgotten {
            by_user.entry(user).or_default().push(device);
        }
        for (user_id, devices) in &by_user {
            if let Some(user) = self.users.get_mut(*user_id)
                && let Some(known) = user.known.take()
            {
                // One that is connected stays known.
                let is_kept = |d: &&DeviceId| !devices.contains(d) || user.device(d).is_some();
                user.known = Some(known.iter().filter(is_kept).cloned().collect());
            }
        }
        for slot in self.conversations.values_mut() {
            let Slot::Ready(conversation) = slot else { continue };
            // Whichever are fewer are looked up among the others.
            if conversation.members.len() < by_user.len() {
                for (user, member) in &mut conversation.members {
                    if let Some(devices) = by_user.get(user) {
                        member.lagging.retain(|(d, _)| !devices.contains(&d));
                    }
                }
            } else {
                for (user, devices) in &by_user {
                    if let Some(member) = conversation.members.get_mut(*user) {
                        member.lagging.retain(|(d, _)| !devices.contains(&d));
                    }
                }
            }
        }
    }

    /// Bounds what is kept in memory: conversations that nothing waits for and that were longest unused go.
    pub(crate) fn drop_idle_conversations(&mut self) {
        if self.conversations.len() <= limits::CONVERSATIONS_MAX {
            return;
        }
        let mut idle: Vec<_> = self
            .conversations
            .iter()
            .filter_map(|(id, slot)| match slot {
                Slot::Ready(conversation) if conversation.pending == 0 => {
                    Some((conversation.touched, id.clone()))
                }
                _ => None,
            })
            .collect();
        idle.sort();
        let excess = self.conversations.len() - limits::CONVERSATIONS_MAX * 9 / 10;
        for (_, id) in idle.into_iter().take(excess) {
            if !self.is_staged(&id) {
                self.conversations.remove(&id);
            }
        }
    }
}

/// Deals notices out to frames of at most `bytes_max`.
fn pages(notices: &[Notice], bytes_max: usize) -> Vec<&[Notice]> {
    let bytes = |notice: &Notice| serde_json::to_vec(notice).map_or(0, |json| json.len());
    let fields = r#"{"type":"sync.notice","conversations":[],"more":false}"#.len();
    let (mut pages, mut rest) = (Vec::new(), notices);
    while !rest.is_empty() {
        let mut room = bytes_max.saturating_sub(fields);
        let fits = rest.iter().take(limits::NOTICES_PER_PAGE).take_while(|notice| {
            let needed = bytes(notice) + 1;
            let fits = needed <= room;
            room = room.saturating_sub(needed);
            fits
        });
        let (page, after) = rest.split_at(fits.count().max(1));
        pages.push(page);
        rest = after;
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_fill_frames_up_to_the_limit_and_no_further() {
        // Each character of this id takes two bytes in JSON.
        let id = ConversationId::trusted(&format!("g:{}", "\"".repeat(64)));
        let notice = |last_seq| Notice { conversation_id: id.clone(), last_seq, first_seq: 1, unread: 1 };
        let notices: Vec<Notice> = (1..=250).map(notice).collect();
        for bytes_max in [1, 300, 1280, 33_792, 1 << 20] {
            let pages = pages(&notices, bytes_max);
            assert_eq!(pages.concat(), notices, "{bytes_max}");
            for page in &pages {
                let frame = ServerFrame::SyncNotice { conversations: page, more: false }.encode();
                assert!(page.len() <= limits::NOTICES_PER_PAGE);
                assert!(
                    frame.json.len() <= bytes_max || page.len() == 1,
                    "{} of {bytes_max}",
                    frame.json.len()
                );
            }
        }
        assert_eq!(pages(&notices, 1 << 20).len(), 3);
        assert!(pages(&notices, 33_792).len() <= 3);
        assert!(pages(&[], 100).is_empty());
    }
}
