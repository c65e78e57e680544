//! Who is a member of a group, and with which role.
//!
//! Owner and admins add, remove and rename; the owner gives roles, and an admin does not remove another admin or
//! the owner. The API may do all of it. Whoever leaves loses what waits, and sees nothing of the group any more.

use crate::{
    Asker, Core, Now, Slot,
    batch::{Effect, Entry, Forming, Staged, expire},
    conversation::{Conversation, named_by, new_member},
    forbidden,
    persist::{Member, Write},
    reads::Deferred,
};
use bowline_protocol::{
    ConversationId, ErrorCode, Frame, ServerFrame, UserId,
    error::Refusal,
    frame::{self, Role},
    ids::GroupId,
};
use bytes::Bytes;
use serde_json::value::RawValue;

/// A group to be made, as it was asked for.
pub(crate) struct Create {
    pub group_id: Option<GroupId>,
    pub name: Option<String>,
    pub members: Vec<UserId>,
    pub owner: Option<UserId>,
    pub meta: Option<Bytes>,
    /// None for the API.
    pub by: Option<UserId>,
}

#[derive(Debug, Clone)]
pub(crate) struct CreateEntry {
    pub asker: Asker,
    pub conversation: ConversationId,
    name: Option<String>,
    meta: Option<Bytes>,
    members: Vec<(UserId, Role)>,
    by: Option<UserId>,
}

#[derive(Debug, Clone)]
pub(crate) struct ChangeEntry {
    pub asker: Asker,
    pub conversation: ConversationId,
    by: Option<UserId>,
    change: Change,
}

#[derive(Debug, Clone)]
pub(crate) enum Change {
    Add(Vec<UserId>),
    Remove(Vec<UserId>),
    Role(UserId, Role),
    Rename { name: Option<String>, meta: Option<Bytes> },
    Leave,
    Delete,
}

/// A `conversation.changed` and whom it is for.
pub(crate) struct Announcement {
    pub conversation: ConversationId,
    pub change: frame::Change,
    by: Option<UserId>,
    pub users: Vec<UserId>,
    name: Option<String>,
    meta: Option<Bytes>,
    to: Vec<UserId>,
}

impl Core {
    pub(crate) fn on_create(&mut self, asker: Asker, create: Create, now: Now) {
        let Create { group_id, name, members, owner, meta, by } = create;
        let chosen = group_id.is_none();
        let group_id = group_id.unwrap_or_else(|| {
            let number = self.number();
            let text = format!("{:x}.{number}.{:x}", now.wall, self.config.seed);
            GroupId::trusted(&format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes())))
        });
        let mut roles: Vec<(UserId, Role)> = members.into_iter().map(|user| (user, Role::Member)).collect();
        roles.extend(owner.map(|user| (user, Role::Owner)));
        // The highest role of each user counts.
        roles.sort_by(|a, b| a.0.cmp(&b.0).then((b.1 as u8).cmp(&(a.1 as u8))));
        roles.dedup_by(|a, b| a.0 == b.0);
        let max = self.config.group_members_max;
        if roles.len() > max || roles.is_empty() {
            let message = format!("a group of {} members; it takes 1 to {max}", roles.len());
            let code = if roles.is_empty() { ErrorCode::Malformed } else { ErrorCode::TooLarge };
            return self.refuse(&asker, Refusal::new(code, message));
        }
        let conversation = ConversationId::group(&group_id);
        let entry = Box::new(CreateEntry {
            asker,
            conversation: conversation.clone(),
            name,
            meta,
            members: roles,
            by,
        });
        if chosen {
            self.on_create_ready(entry);
        } else {
            self.with_conversation(&conversation, Deferred::Entry(Box::new(Entry::Create(entry))), now);
        }
    }

    /// There is no such group so far. What is asked of it from now on waits until it is there.
    pub(crate) fn on_create_ready(&mut self, entry: Box<CreateEntry>) {
        self.conversations.insert(entry.conversation.clone(), Slot::Loading(Vec::new()));
        self.enqueue(Entry::Create(entry));
    }

    pub(crate) fn stage_create(&self, forming: &mut Forming, entry: &CreateEntry, now: Now) -> Effect {
        // One at a time for each group: whatever else is asked of it waits, another creation included.
        let id = &entry.conversation;
        let members: Vec<_> =
            entry.members.iter().map(|(u, role)| (u.clone(), new_member(*role, 1))).collect();
        let mut staged = Staged {
            last_ts: now.wall,
            member_count: members.len(),
            exists: true,
            created: true,
            // Seeded as every other table: in which order members come must follow from the seed.
            members: std::collections::HashMap::with_hasher(self.hasher.clone()),
            ..Staged::default()
        };
        // Not through `put_member`: the members are written with the conversation.
        staged.members.extend(members.iter().map(|(u, m)| (u.clone(), Some(m.clone()))));
        forming.order.push(id.clone());
        forming.staged.insert(id.clone(), staged);
        forming.fence(id);
        let (name, meta) = (entry.name.clone(), entry.meta.clone());
        forming.batch.writes.push(Write::CreateConversation {
            conversation: id.clone(),
            name: name.clone(),
            meta: meta.clone(),
            at: now.wall,
            members,
        });
        let to: Vec<UserId> = entry.members.iter().map(|(user, _)| user.clone()).collect();
        let users = if to.len() <= frame::GROUP_CHANGE_USERS_MAX { to.clone() } else { Vec::new() };
        let (conversation, by) = (id.clone(), entry.by.clone());
        Effect::Changed(Announcement {
            conversation,
            change: frame::Change::Created,
            by,
            users,
            name,
            meta,
            to,
        })
    }

    /// A member's request about a group.
    pub(crate) fn on_group(&mut self, asker: Asker, by: UserId, text: &str, change: Change, now: Now) {
        match named_by(&by, text) {
            Some(id) if id.is_group() => self.on_group_change(asker, Some(by), id, change, now),
            Some(id) => {
                let message = format!("{id} is a direct conversation; its members are always the two");
                self.refuse(&asker, Refusal::new(ErrorCode::Malformed, message));
            }
            None => self.refuse(&asker, forbidden(text)),
        }
    }

    pub(crate) fn on_group_change(
        &mut self,
        asker: Asker,
        by: Option<UserId>,
        id: ConversationId,
        change: Change,
        now: Now,
    ) {
        let entry = ChangeEntry { asker, conversation: id.clone(), by, change };
        self.with_conversation(&id, Deferred::Entry(Box::new(Entry::Change(Box::new(entry)))), now);
    }

    pub(crate) fn stage_change(&self, forming: &mut Forming, entry: &ChangeEntry) -> Effect {
        let id = &entry.conversation;
        let missing = || match &entry.by {
            Some(_) => forbidden(id),
            None => Refusal::new(ErrorCode::NotFound, format!("there is no conversation {id}")),
        };
        let Some(Slot::Ready(conversation)) = self.conversations.get(id) else {
            return Effect::Refuse(missing());
        };
        let staged = forming.stage(id, conversation);
        if staged.deleted {
            return Effect::Refuse(missing());
        }
        let role = match &entry.by {
            None => Role::Owner,
            Some(by) => match staged.member(by, conversation) {
                Some(member) => member.role,
                None => return Effect::Refuse(forbidden(id)),
            },
        };
        match plan_change(entry, role, staged, conversation, self.config.group_members_max) {
            Err(refusal) => Effect::Refuse(refusal),
            Ok(None) => Effect::Nothing,
            Ok(Some((change, users))) => self.carry_out(forming, entry, conversation, change, users),
        }
    }

    /// Stages a change that is allowed; `users` are those whom it touches.
    fn carry_out(
        &self,
        forming: &mut Forming,
        entry: &ChangeEntry,
        conversation: &Conversation,
        change: frame::Change,
        users: Vec<UserId>,
    ) -> Effect {
        let id = &entry.conversation;
        let mut ledger = forming.batch.ledger;
        let staged = forming.stage(id, conversation);
        // Each once: the members so far, those who joined since, and those whom it touches.
        let was_member = |user: &&UserId| conversation.members.contains_key(*user);
        let joined = staged.touched.iter().filter(|user| !was_member(user));
        let mut to: Vec<UserId> = conversation.members.keys().chain(joined).cloned().collect();
        to.retain(|user| staged.is_member(user, conversation));
        to.extend(users.iter().filter(|user| !staged.is_member(user, conversation)).cloned());
        let mut announcement = Announcement {
            conversation: id.clone(),
            change,
            by: entry.by.clone(),
            users,
            name: None,
            meta: None,
            to,
        };
        let mut writes = Vec::new();
        match &entry.change {
            Change::Add(_) => {
                for user in &announcement.users {
                    let member = new_member(Role::Member, staged.last + 1);
                    staged.put_member(user, Some(member), conversation);
                }
            }
            Change::Remove(_) | Change::Leave => {
                for user in &announcement.users {
                    if let Some(member) = staged.member(user, conversation) {
                        expire(&mut ledger, &member, staged.last);
                    }
                    staged.put_member(user, None, conversation);
                }
            }
            Change::Role(user, role) => {
                if let Some(member) = staged.member(user, conversation) {
                    let member = Member { role: *role, ..member };
                    staged.put_member(user, Some(member), conversation);
                }
            }
            Change::Rename { name, meta } => {
                (announcement.name, announcement.meta) = (name.clone(), meta.clone());
                writes.push(Write::RenameConversation {
                    conversation: id.clone(),
                    name: name.clone(),
                    meta: meta.clone(),
                });
            }
            Change::Delete => {
                for user in &announcement.to {
                    if let Some(member) = staged.member(user, conversation) {
                        expire(&mut ledger, &member, staged.last);
                    }
                }
                announcement.users = Vec::new();
                staged.deleted = true;
                writes.push(Write::DeleteConversation { conversation: id.clone() });
            }
        }
        forming.batch.ledger = ledger;
        forming.batch.writes.extend(writes);
        forming.fence(id);
        Effect::Changed(announcement)
    }

    pub(crate) fn announce(&mut self, announcement: Announcement) {
        let Announcement { conversation, change, by, users, name, meta, to } = announcement;
        let meta: Option<&RawValue> = meta.as_ref().and_then(|text| serde_json::from_slice(text).ok());
        let frame = |users: &[UserId], meta| {
            ServerFrame::ConversationChanged {
                conversation_id: &conversation,
                change,
                by: by.as_deref(),
                users: (!users.is_empty()).then_some(users),
                name: name.as_deref(),
                meta,
            }
            .encode()
        };
        // What does not fit into a frame is left out; members can be told apart by the messages that come.
        let bytes_max = self.config.frame_bytes_max + frame::SERVER_FIELDS_BYTES;
        let fits = |frame: &Frame| frame.json.len() <= bytes_max;
        let candidates = [(&users[..], meta), (&[], meta), (&[], None)];
        let frame = candidates.into_iter().map(|(users, meta)| frame(users, meta)).find(fits);
        let frame = frame.unwrap_or_else(|| {
            let (conversation_id, by) = (&*conversation, None);
            let (users, name, meta) = (None, None, None);
            ServerFrame::ConversationChanged { conversation_id, change, by, users, name, meta }.encode()
        });
        let mut keys = Vec::new();
        for device in to.iter().filter_map(|user| self.users.get(user)).flat_map(|user| &user.devices) {
            keys.extend_from_slice(&device.conns);
        }
        self.broadcast(&keys, &frame);
    }

    pub(crate) fn announce_cleared(&mut self, user: &UserId, conversation: &ConversationId) {
        self.announce(Announcement {
            conversation: conversation.clone(),
            change: frame::Change::Cleared,
            by: Some(user.clone()),
            users: Vec::new(),
            name: None,
            meta: None,
            to: vec![user.clone()],
        });
        self.forget_flights(user, conversation);
    }

    /// Those who were removed, or whose group is gone, are sent nothing of it again.
    pub(crate) fn on_members_left(&mut self, announcement: &Announcement) {
        if announcement.change == frame::Change::MemberRemoved {
            let is_deleted = announcement.users.is_empty();
            let left = if is_deleted { &announcement.to } else { &announcement.users };
            for user in left {
                self.forget_flights(user, &announcement.conversation);
            }
        }
    }
}

/// Is this change allowed, and whom does it touch? `None` when nothing is to be done.
#[allow(clippy::type_complexity)]
fn plan_change(
    entry: &ChangeEntry,
    role: Role,
    staged: &Staged,
    conversation: &Conversation,
    members_max: usize,
) -> Result<Option<(frame::Change, Vec<UserId>)>, Refusal> {
    let id = &entry.conversation;
    let not_allowed =
        |who: &str| Refusal::new(ErrorCode::Forbidden, format!("only {who} may do this in {id}"));
    if matches!(entry.change, Change::Add(_) | Change::Remove(_) | Change::Rename { .. })
        && role == Role::Member
    {
        return Err(not_allowed("the owner and admins"));
    }
    let is_member = |user: &UserId| staged.is_member(user, conversation);
    Ok(match &entry.change {
        Change::Add(users) => {
            let mut new: Vec<UserId> = users.iter().filter(|user| !is_member(user)).cloned().collect();
            new.sort();
            new.dedup();
            let count = staged.member_count + new.len();
            if count > members_max {
                let message = format!("{id} would have {count} members; it takes at most {members_max}");
                return Err(Refusal::new(ErrorCode::TooLarge, message));
            }
            (!new.is_empty()).then_some((frame::Change::MemberAdded, new))
        }
        Change::Remove(users) => {
            let mut old: Vec<UserId> = users.iter().filter(|user| is_member(user)).cloned().collect();
            old.sort();
            old.dedup();
            let above =
                |user: &UserId| staged.member(user, conversation).is_some_and(|m| m.role != Role::Member);
            let himself = |user: &UserId| entry.by.as_ref() == Some(user);
            if role != Role::Owner && old.iter().any(|user| above(user) && !himself(user)) {
                return Err(not_allowed("the owner"));
            }
            if old.is_empty() && entry.by.is_none() {
                return Err(Refusal::new(ErrorCode::NotFound, format!("no such member in {id}")));
            }
            (!old.is_empty()).then_some((frame::Change::MemberRemoved, old))
        }
        Change::Role(user, _) if role != Role::Owner => {
            return Err(not_allowed(if entry.by.as_ref() == Some(user) {
                "somebody else, the owner,"
            } else {
                "the owner"
            }));
        }
        Change::Role(user, to) => match staged.member(user, conversation) {
            None => return Err(Refusal::new(ErrorCode::NotFound, format!("{user} is no member of {id}"))),
            Some(member) => (member.role != *to).then(|| (frame::Change::Role, vec![user.clone()])),
        },
        Change::Rename { name: None, meta: None } => None,
        Change::Rename { .. } => Some((frame::Change::Renamed, Vec::new())),
        Change::Leave => entry.by.clone().map(|by| (frame::Change::MemberRemoved, vec![by])),
        Change::Delete => Some((frame::Change::MemberRemoved, Vec::new())),
    })
}
