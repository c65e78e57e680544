//! Requests of the API: the same decisions, with another asker.

use crate::{
    Asker, Core, Now, Origin,
    batch::Entry,
    groups,
    persist::Device,
    reads::{Page, ReadPurpose},
};
use bowline_protocol::{
    ConversationId, DeviceId, UserId,
    link::{Answer, DeviceState, Down, Request},
};

impl Core {
    pub(crate) fn on_request(&mut self, asker: Asker, request: Request, now: Now) {
        match request {
            Request::Send(send) => self.on_send(asker, send, None, now),
            Request::GroupCreate { group_id, name, members, owner, meta } => {
                let create = groups::Create { group_id, name, members, owner, meta, by: None };
                self.on_create(asker, create, now);
            }
            Request::GroupAdd { group, user } => {
                let id = ConversationId::group(&group);
                self.on_group_change(asker, None, id, groups::Change::Add(vec![user]), now);
            }
            Request::GroupRemove { group, user } => {
                let id = ConversationId::group(&group);
                self.on_group_change(asker, None, id, groups::Change::Remove(vec![user]), now);
            }
            Request::GroupChange { group, name, meta } => {
                let id = ConversationId::group(&group);
                self.on_group_change(asker, None, id, groups::Change::Rename { name, meta }, now);
            }
            Request::GroupDelete { group } => {
                let id = ConversationId::group(&group);
                self.on_group_change(asker, None, id, groups::Change::Delete, now);
            }
            Request::History { conversation, after, before, limit } => {
                let page = Page { after, before, limit };
                self.on_history_asked(asker, None, conversation, page, now);
            }
            Request::User { user } => self.read_behind_writes(ReadPurpose::User { asker, user }, now),
            Request::Kick { user, device, reason, code } => {
                let devices = self.users.get(&user).map_or(&[][..], |u| &u.devices[..]);
                let named = devices.iter().filter(|d| device.as_ref().is_none_or(|id| d.id == *id));
                let keys: Vec<_> = named.flat_map(|d| d.conns.iter().copied()).collect();
                for key in &keys {
                    self.send_down(*key, Down::Close { code, reason: reason.clone() });
                    self.remove_conn(*key, false, now);
                }
                let Origin::Api { node, request_id } = asker.origin else { return };
                self.answer_api(node, request_id, Answer::Closed { count: keys.len() as u32 });
            }
            Request::ForgetDevice { user, device } => {
                self.enqueue(Entry::ForgetDevice { asker: Some(asker), user, device });
            }
        }
    }

    pub(crate) fn on_user_found(&mut self, asker: &Asker, user_id: &UserId, devices: Vec<Device>) {
        let Origin::Api { node, request_id } = asker.origin else { return };
        let mut states: Vec<DeviceState> = Vec::new();
        let connected = |id: &DeviceId| self.users.get(user_id).and_then(|u| u.device(id));
        for Device { device, class, last_seen } in devices {
            if connected(&device).is_none() {
                let (node_id, connected_at) = (None, None);
                states.push(DeviceState {
                    device_id: device,
                    device_class: class,
                    node_id,
                    connected_at,
                    last_seen,
                });
            }
        }
        let open = self.users.get(user_id).map_or(&[][..], |u| &u.devices[..]);
        for device in open {
            let newest = device
                .conns
                .iter()
                .filter_map(|k| Some((k, self.conns.get(k)?)))
                .max_by_key(|(_, c)| c.login);
            let Some((key, conn)) = newest else { continue };
            states.push(DeviceState {
                device_id: device.id.clone(),
                device_class: device.class,
                node_id: Some(self.nodes.node(key.0).node_id.clone()),
                connected_at: Some(conn.since()),
                last_seen: conn.since(),
            });
        }
        states.sort_by(|a, b| a.device_id.cmp(&b.device_id));
        let answer = Answer::User { online: !open.is_empty(), devices: states };
        self.answer_api(node, request_id, answer);
    }
}
