//! Carries out the steps of a plan: what users and back ends do, and what goes wrong.

use crate::{
    client::{Device, Mail},
    node::Wire,
    plan::Act,
    world::{Event, World},
};
use bowline_client::{Body, core::Target};
use bowline_protocol::{
    CloseCode, ConversationId, MessageId, UserId,
    ids::GroupId,
    link::{Request, Send, SendTarget},
};
use bytes::Bytes;
use serde_json::{Value, json};

/// Index `number` of so many, whatever the number.
fn of(number: u64, count: usize) -> usize {
    (number % count.max(1) as u64) as usize
}

impl World {
    pub fn act(&mut self, act: Act) {
        let devices = self.devices.len();
        let gateways = self.gateways.len();
        match act {
            Act::Send { device, to, count, binary } => {
                for _ in 0..count {
                    self.send(of(device, devices), to, binary);
                }
            }
            Act::Repeat { device, which } => self.repeat(of(device, devices), which, false),
            Act::Conflict { device, which } => self.repeat(of(device, devices), which, true),
            Act::Forge { device, as_user } => self.forge(of(device, devices), as_user),
            Act::Read { device, which } => self.read_up(of(device, devices), which),
            Act::History { device, which, after, limit } => {
                let device = of(device, devices);
                if let Some(id) = self.some_conversation(device, which) {
                    let mut frame = json!({"type": "history", "conversation_id": id, "limit": limit});
                    if after > 0 {
                        frame["after_seq"] = json!(after - 1);
                    }
                    self.request(device, frame);
                }
            }
            Act::List { device, limit } => {
                self.request(of(device, devices), json!({"type": "conversation.list", "limit": limit}));
            }
            Act::Clear { device, which } => {
                let device = of(device, devices);
                if let Some(id) = self.some_conversation(device, which) {
                    let user = self.devices[device].user.clone();
                    self.model.said.cleared.insert((user, ConversationId::trusted(&id)));
                    self.request(device, json!({"type": "conversation.clear", "conversation_id": id}));
                }
            }
            Act::Create { device, members } => self.create(of(device, devices), members),
            Act::Add { device, group, user } => self.change_group(of(device, devices), group, user, true),
            Act::Remove { device, group, user } => self.change_group(of(device, devices), group, user, false),
            Act::Leave { device, group } => {
                let device = of(device, devices);
                if let Some(id) = self.some_group(group) {
                    let user = self.devices[device].user.clone();
                    self.model.said.removed.insert((ConversationId::trusted(&id), user));
                    self.request(device, json!({"type": "group.leave", "conversation_id": id}));
                }
            }
            Act::Role { device, group, user } => {
                if let Some(id) = self.some_group(group) {
                    let user = self.users[of(user, self.users.len())].to_string();
                    let role = ["member", "admin", "owner"][of(group >> 8, 3)];
                    let frame =
                        json!({"type": "group.role", "conversation_id": id, "user": user, "role": role});
                    self.request(of(device, devices), frame);
                }
            }
            Act::Rename { device, group } => {
                if let Some(id) = self.some_group(group) {
                    let frame = json!({"type": "group.rename", "conversation_id": id, "name": "renamed"});
                    self.request(of(device, devices), frame);
                }
            }
            Act::ApiSend { gateway, user, to, again } => {
                self.api_send(of(gateway, gateways), user, to, again)
            }
            Act::ApiAdd { gateway, group, user } => self.api_change(of(gateway, gateways), group, user, true),
            Act::ApiRemove { gateway, group, user } => {
                self.api_change(of(gateway, gateways), group, user, false);
            }
            Act::ApiKick { gateway, user } => {
                let user = self.users[of(user, self.users.len())].clone();
                let request = Request::Kick { user, device: None, reason: None, code: CloseCode::Kicked };
                if let Some(id) = self.send_request(of(gateway, gateways), request) {
                    self.api.insert(id, None);
                }
            }
            fault => self.go_wrong(fault),
        }
    }

    fn go_wrong(&mut self, act: Act) {
        let devices = self.devices.len();
        match act {
            Act::Cut { device, noticed } => self.cut(of(device, devices), noticed),
            Act::Restart { device, away_ms, forgets, says_bye } => {
                let device = of(device, devices);
                if self.devices[device].core.is_some() {
                    self.end_client(device, forgets, says_bye);
                    let life = self.devices[device].life;
                    self.after(away_ms, Event::Revive { device, life });
                }
            }
            Act::Stall { device, for_ms } => {
                if let Some(socket) = self.devices[of(device, devices)].socket {
                    let (gateway, conn) = (self.sockets[socket].gateway, self.sockets[socket].conn);
                    if let Some(conn) = self.gateways[gateway].conns.get_mut(&conn) {
                        conn.is_stalled = true;
                        self.after(for_ms, Event::Unstall { socket });
                    }
                }
            }
            Act::GatewayCrash { gateway, for_ms } => {
                let gateway = of(gateway, self.gateways.len());
                if self.gateways[gateway].is_up {
                    self.crash_gateway(gateway);
                    self.after(for_ms, Event::GatewayUp { gateway });
                }
            }
            Act::RouterCrash { for_ms, with_store } => {
                if let Some(owner) = self.owner {
                    self.end_router(owner);
                    if with_store {
                        self.crash_store();
                    }
                    self.after(for_ms, Event::RouterUp);
                }
            }
            Act::TakeOver { lives_on_ms } => {
                if let Some(owner) = self.owner {
                    self.start_router();
                    self.after(lives_on_ms, Event::RouterGone { router: owner });
                }
            }
            Act::StoreCrash => self.crash_store(),
            Act::StoreFails { for_ms, reads_too } => self.store.fail_until(self.now + for_ms, reads_too),
            Act::Clock { whose: 0, by_ms } => {
                if let Some(owner) = self.owner {
                    self.routers[owner].offset = by_ms;
                }
            }
            Act::Clock { whose, by_ms } => {
                let gateway = of(whose, self.gateways.len());
                self.gateways[gateway].offset = by_ms;
            }
            Act::CoordinationLost => {
                self.coordination = Default::default();
                self.coordination_was_lost = true;
            }
            _ => {}
        }
    }

    /// A target for a message of `user`: another user, or a group of which the user may be a member.
    fn target(&self, user: &UserId, to: u64) -> Target {
        let others: Vec<&UserId> = self.users.iter().filter(|other| *other != user).collect();
        let mine: Vec<&String> = self
            .groups
            .iter()
            .filter(|id| {
                let found = self.model.conversations.get(&ConversationId::trusted(id));
                // Now and then somebody tries a group that is not theirs.
                found.is_some_and(|c| c.members.contains_key(user)) || to.is_multiple_of(31)
            })
            .collect();
        // Few conversations have most of the messages, so that something happens in them.
        let choice = of(to, (others.len().min(2) + mine.len()).max(1));
        match mine.get(choice) {
            Some(id) => Target::Conversation((*id).clone()),
            None => Target::User(others[of(to, others.len())].to_string()),
        }
    }

    fn send(&mut self, device: usize, to: u64, binary: bool) {
        self.next_id += 1;
        let found = &self.devices[device];
        let id = format!("{}.{}.{}", found.user, found.id, self.next_id);
        let target = self.target(&found.user, to);
        let body = match binary {
            true => Body::Binary(Bytes::from(format!("bytes of {id}"))),
            false => Body::Json(json!(id).to_string()),
        };
        self.post(device, Mail { id, target, body });
    }

    /// Gives something to the library, and keeps it until it is answered.
    fn post(&mut self, device: usize, mail: Mail) {
        let now = self.now;
        let found = &mut self.devices[device];
        let Some(core) = &mut found.core else { return };
        let Mail { id, target, body } = mail.clone();
        if core.send(id, target, body, now).is_ok() {
            found.mail.push(mail.clone());
            found.sent.push(mail);
        }
        self.drive(device);
    }

    fn repeat(&mut self, device: usize, which: u64, with_other_body: bool) {
        let Device { sent, .. } = &self.devices[device];
        if sent.is_empty() {
            return;
        }
        let mut mail = sent[of(which, sent.len())].clone();
        if with_other_body {
            mail.body = Body::Json("\"something else\"".into());
        }
        let id = mail.id.clone();
        self.devices[device].repeated.insert(id);
        self.post(device, mail);
    }

    fn forge(&mut self, device: usize, as_user: u64) {
        self.next_id += 1;
        let found = &self.devices[device];
        let others: Vec<&UserId> = self.users.iter().filter(|other| **other != found.user).collect();
        let victim = others[of(as_user, others.len())].to_string();
        let frame = json!({
            "type": "msg.send", "id": format!("forged.{}", self.next_id), "to": victim, "from": victim, "body": 1
        });
        if let (Some(socket), true) = (found.socket, found.is_connected) {
            self.send_to_gateway(socket, Wire::Text(frame.to_string().into_bytes().into()));
        }
    }

    /// A conversation that the device has something of.
    fn some_conversation(&self, device: usize, which: u64) -> Option<String> {
        let all = self.devices[device].holdings.conversations();
        (!all.is_empty()).then(|| all[of(which, all.len())].to_owned())
    }

    fn some_group(&self, which: u64) -> Option<String> {
        (!self.groups.is_empty()).then(|| self.groups[of(which, self.groups.len())].clone())
    }

    fn read_up(&mut self, device: usize, which: u64) {
        let Some(id) = self.some_conversation(device, which) else { return };
        let found = &mut self.devices[device];
        let Some(seq) = found.holdings.position(&id) else { return };
        if let Some(core) = &mut found.core {
            core.read(&id, seq);
        }
        self.drive(device);
    }

    fn request(&mut self, device: usize, frame: Value) {
        self.next_id += 1;
        let id = format!("q{}", self.next_id);
        if let Some(core) = &mut self.devices[device].core {
            // A client that was stopped asks nothing.
            if core.request(frame, id.clone()).is_ok() {
                self.devices[device].asked.insert(id);
            }
        }
        self.drive(device);
    }

    fn create(&mut self, device: usize, members: u64) {
        if self.devices[device].core.is_none() {
            return;
        }
        let group = format!("group{}", self.groups.len());
        let id = ConversationId::trusted(&format!("g:{group}"));
        let chosen: Vec<UserId> = self
            .users
            .iter()
            .enumerate()
            .filter(|(n, _)| members >> n & 1 == 1)
            .map(|(_, u)| u.clone())
            .collect();
        let creator = self.devices[device].user.clone();
        for user in chosen.iter().chain([&creator]) {
            self.model.said.added.insert((id.clone(), user.clone()));
        }
        self.groups.push(id.to_string());
        let names: Vec<&str> = chosen.iter().map(|user| user.as_str()).collect();
        self.request(device, json!({"type": "conversation.create", "group_id": group, "members": names}));
    }

    fn change_group(&mut self, device: usize, group: u64, user: u64, adds: bool) {
        let Some(id) = self.some_group(group) else { return };
        let user = self.users[of(user, self.users.len())].clone();
        self.note_change(&id, &user, adds);
        let kind = if adds { "group.add" } else { "group.remove" };
        self.request(device, json!({"type": kind, "conversation_id": id, "users": [user.as_str()]}));
    }

    fn note_change(&mut self, id: &str, user: &UserId, adds: bool) {
        let key = (ConversationId::trusted(id), user.clone());
        let said = &mut self.model.said;
        if adds {
            said.added.insert(key)
        } else {
            said.removed.insert(key)
        };
    }

    fn api_change(&mut self, gateway: usize, group: u64, user: u64, adds: bool) {
        let Some(id) = self.some_group(group) else { return };
        let user = self.users[of(user, self.users.len())].clone();
        self.note_change(&id, &user, adds);
        let group = GroupId::trusted(id.trim_start_matches("g:"));
        let request = match adds {
            true => Request::GroupAdd { group, user },
            false => Request::GroupRemove { group, user },
        };
        if let Some(request_id) = self.send_request(gateway, request) {
            self.api.insert(request_id, None);
        }
    }

    fn api_send(&mut self, gateway: usize, user: u64, to: u64, again: bool) {
        self.next_id += 1;
        let user = self.users[of(user, self.users.len())].clone();
        let id = format!("{user}.api.{}", self.next_id);
        let target = match self.target(&user, to) {
            Target::User(other) => SendTarget::User(UserId::trusted(&other)),
            Target::Conversation(id) => SendTarget::Conversation(id.as_str().into()),
        };
        let body = bowline_protocol::Body::Json(json!(id).to_string().into_bytes().into());
        let mut sent =
            (id.clone(), user.clone(), Send { id: MessageId::trusted(&id), from: user, target, body });
        if again && !self.api_sent.is_empty() {
            sent = self.api_sent[of(to, self.api_sent.len())].clone();
        }
        let (id, user, send) = sent.clone();
        self.api_sent.push(sent);
        if let Some(request_id) = self.send_request(gateway, Request::Send(send)) {
            self.api.insert(request_id, Some((id, user)));
        }
    }

    /// The network between a client and its gateway ends.
    fn cut(&mut self, device: usize, noticed: u64) {
        let Some(socket) = self.devices[device].socket else { return };
        self.sockets[socket].is_cut = true;
        if noticed & 2 != 0 {
            self.send_to_gateway(socket, Wire::End);
        }
        if noticed & 1 != 0 {
            self.close_client(device, None, "the network is gone");
        }
    }
}
