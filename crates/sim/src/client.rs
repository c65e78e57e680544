//! Client programs: the driver of the client library's core, and the application on it, which keeps what it sent until
//! that is acknowledged and remembers where it was.

use crate::{
    checks::{Holdings, Seer},
    node::Wire,
    plants::Plant,
    world::{Event, World},
};
use bowline_client::Body;
use bowline_client::core::{Core, Event as Told, Output, Settings, Target};
use bowline_protocol::{CloseCode, ConversationId, DeviceId, MessageId, UserId};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a device sent, or is about to.
#[derive(Debug, Clone)]
pub struct Mail {
    pub id: String,
    pub target: Target,
    pub body: Body,
}

pub struct Device {
    pub user: UserId,
    pub id: DeviceId,
    /// None while the program does not run.
    pub core: Option<Core>,
    /// How often the program was started.
    pub life: u64,
    pub socket: Option<usize>,
    pub is_connected: bool,
    /// The session that it asks to go on with; known while the program runs.
    session: Option<String>,
    timer: u64,
    /// What survives the program: positions, and what is not acknowledged.
    kept: HashMap<String, u64>,
    pub mail: Vec<Mail>,
    /// Everything that was ever sent, and the ids that went out more than once.
    pub sent: Vec<Mail>,
    sent_ids: BTreeSet<String>,
    pub repeated: BTreeSet<String>,
    pub holdings: Holdings,
    pub has_forgotten: bool,
    /// Requests that wait for an answer.
    pub asked: BTreeSet<String>,
    pub final_list: Option<Value>,
}

#[derive(serde::Deserialize)]
struct Position {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    id: String,
    #[serde(default)]
    conversation_id: String,
    #[serde(default)]
    seq: u64,
}

impl Device {
    pub fn new(user: UserId, id: DeviceId) -> Self {
        Self {
            user,
            id,
            core: None,
            life: 0,
            socket: None,
            is_connected: false,
            session: None,
            timer: u64::MAX,
            kept: HashMap::new(),
            mail: Vec::new(),
            sent: Vec::new(),
            sent_ids: BTreeSet::new(),
            repeated: BTreeSet::new(),
            holdings: Holdings::default(),
            has_forgotten: false,
            asked: BTreeSet::new(),
            final_list: None,
        }
    }

    fn seer(&self) -> Seer<'_> {
        Seer { user: &self.user, device: &self.id, repeated: &self.repeated }
    }
}

fn is_heartbeat(text: &str) -> bool {
    text == "pong" || text.contains("\"type\":\"ping\"") || text.contains("\"type\":\"pong\"")
}

/// The session that `connected` names.
fn session_of(text: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Connected {
        session_id: String,
    }
    let is_connected = text.starts_with(r#"{"type":"connected""#);
    is_connected.then(|| serde_json::from_str::<Connected>(text).ok()).flatten().map(|c| c.session_id)
}

impl World {
    /// Starts the program of a device, unless it runs.
    pub fn revive(&mut self, device: usize, life: u64) {
        let seed = self.rng.next();
        let now = self.now;
        let found = &mut self.devices[device];
        if found.core.is_some() || found.life != life {
            return;
        }
        found.life += 1;
        let mut core = Core::new(Settings {
            device_id: Some(found.id.to_string()),
            positions: found.kept.clone(),
            seed,
            ..Settings::default()
        });
        for Mail { id, target, body } in found.mail.clone() {
            found.repeated.insert(id.clone());
            // The core takes far more than a device ever has here.
            let _full = core.send(id, target, body, now);
        }
        found.core = Some(core);
        (found.timer, found.is_connected) = (u64::MAX, false);
        self.note(|| format!("device {device} starts"));
        self.on_client_time(device);
    }

    /// Ends the program: `forgets` what it kept, and says good-bye or not.
    pub fn end_client(&mut self, device: usize, forgets: bool, says_bye: bool) {
        let found = &mut self.devices[device];
        let Some(core) = found.core.take() else { return };
        (found.is_connected, found.session) = (false, None);
        found.asked.clear();
        found.kept = core.positions().map(|(id, seq)| (id.to_owned(), seq)).collect();
        if forgets {
            found.kept.clear();
            found.mail.clear();
            found.holdings.forget();
            found.has_forgotten = true;
        }
        if let Some(socket) = found.socket.take() {
            self.sockets[socket].client_has_it = false;
            self.send_to_gateway(socket, if says_bye { Wire::Close(1000) } else { Wire::End });
        }
    }

    pub fn on_client_timer(&mut self, device: usize, life: u64) {
        let found = &mut self.devices[device];
        if found.life == life && found.timer <= self.now {
            found.timer = u64::MAX;
            self.on_client_time(device);
        }
    }

    fn on_client_time(&mut self, device: usize) {
        let now = self.now;
        if let Some(core) = &mut self.devices[device].core {
            core.on_time(now);
        }
        self.drive(device);
    }

    /// The connection ends for the client.
    pub fn close_client(&mut self, device: usize, code: Option<u16>, reason: &str) {
        let now = self.now;
        let found = &mut self.devices[device];
        if let Some(socket) = found.socket.take() {
            self.sockets[socket].client_has_it = false;
        }
        if let Some(core) = &mut found.core {
            core.on_closed(code, reason, now);
        }
        self.drive(device);
    }

    /// A gateway was dialled.
    pub fn dial(&mut self, device: usize, life: u64, gateway: usize) {
        if self.devices[device].life != life || self.devices[device].core.is_none() {
            return;
        }
        match self.accept(gateway, device, life) {
            None => self.close_client(device, None, "nobody listens"),
            Some(socket) => {
                let now = self.now;
                let found = &mut self.devices[device];
                found.socket = Some(socket);
                let token = format!("token of {}", found.user);
                if let Some(core) = &mut found.core {
                    core.on_opened(&token, now);
                }
                self.drive(device);
            }
        }
    }

    /// Something came from a gateway.
    pub fn on_client_wire(&mut self, socket: usize, wire: Wire) {
        let (device, is_mine) = {
            let found = &self.sockets[socket];
            let is_mine = found.client_has_it && self.devices[found.device].life == found.life;
            (found.device, is_mine && !found.is_cut)
        };
        if !is_mine {
            return;
        }
        let now = self.now;
        match wire {
            Wire::Text(text) => {
                let text = String::from_utf8_lossy(&text).into_owned();
                self.saw(device, text.as_bytes());
                if !is_heartbeat(&text) {
                    self.note(|| format!("device {device} < {text}"));
                }
                let found = &self.devices[device];
                let seer = found.seer();
                let checked = self.sockets[socket].view.on_frame(&self.model, &seer, &text);
                self.check(checked);
                if let Some(session) = session_of(&text) {
                    self.devices[device].session = Some(session);
                }
                if let Some(core) = &mut self.devices[device].core {
                    core.on_text(&text, now);
                }
            }
            Wire::Binary(bytes) => {
                let length =
                    bytes.first_chunk::<4>().map_or(0, |length| u32::from_be_bytes(*length) as usize);
                let head = bytes.get(4..4 + length).unwrap_or_default();
                let text = String::from_utf8_lossy(head).into_owned();
                self.saw(device, text.as_bytes());
                self.note(|| format!("device {device} < {text} + bytes"));
                let found = &self.devices[device];
                let seer = found.seer();
                let checked = self.sockets[socket].view.on_frame(&self.model, &seer, &text);
                self.check(checked);
                if let Some(core) = &mut self.devices[device].core {
                    core.on_binary(&bytes, now);
                }
            }
            Wire::Close(code) => {
                self.send_to_gateway(socket, Wire::Close(code));
                return self.close_client(device, Some(code), "closed");
            }
            Wire::End => {
                self.send_to_gateway(socket, Wire::End);
                return self.close_client(device, None, "the connection ended");
            }
        }
        self.drive(device);
    }

    /// Does what the client's core asks for.
    pub fn drive(&mut self, device: usize) {
        while let Some(core) = &mut self.devices[device].core {
            let outputs = core.take_outputs();
            if outputs.is_empty() {
                break;
            }
            for output in outputs {
                self.carry_out_client(device, output);
            }
        }
        let found = &mut self.devices[device];
        let (life, now) = (found.life, self.now);
        if let Some(due) = found.core.as_ref().and_then(Core::next_due)
            && due < found.timer
        {
            found.timer = due;
            self.at(due.max(now + 1), Event::ClientTimer { device, life });
        }
    }

    fn carry_out_client(&mut self, device: usize, output: Output) {
        match output {
            Output::Connect { .. } => {
                let gateway = self.rng.below(self.gateways.len() as u64) as usize;
                let delay = self.rng.range(1, 1 + self.plan.network.socket_ms);
                let life = self.devices[device].life;
                self.after(delay, Event::Dial { device, life, gateway });
            }
            Output::Text(text) => {
                let text = self.with_resume(device, text);
                self.on_client_says(device, &text);
                if self.plant == Some(Plant::NoGapRepair) && text.contains("\"id\":\"~") {
                    return;
                }
                if let Some(socket) = self.devices[device].socket {
                    self.send_to_gateway(socket, Wire::Text(text.into_bytes().into()));
                }
            }
            Output::Binary(bytes) => {
                let head = bytes.get(4..).unwrap_or_default();
                if let Some(Ok(said)) =
                    serde_json::Deserializer::from_slice(head).into_iter::<Position>().next()
                {
                    self.on_client_sends(device, said.id);
                }
                if let Some(socket) = self.devices[device].socket {
                    self.send_to_gateway(socket, Wire::Binary(bytes));
                }
            }
            Output::Close => {
                if let Some(socket) = self.devices[device].socket.take() {
                    self.sockets[socket].client_has_it = false;
                    self.send_to_gateway(socket, Wire::Close(1000));
                }
            }
            Output::Event(event) => self.on_told(device, event),
        }
    }

    /// The client library asks for no session; programs that do are simulated all the same.
    fn with_resume(&self, device: usize, text: String) -> String {
        let Some(session) = self.devices[device].session.as_ref().filter(|_| self.plan.resume_ms > 0) else {
            return text;
        };
        match serde_json::from_str::<Value>(&text) {
            Ok(mut connect) if connect["type"] == "connect" => {
                connect["resume"] = json!(session);
                connect.to_string()
            }
            _ => text,
        }
    }

    /// Notes what a client says, before anything can happen to it.
    fn on_client_says(&mut self, device: usize, text: &str) {
        if is_heartbeat(text) {
            return;
        }
        self.note(|| format!("device {device} > {text}"));
        let Ok(said) = serde_json::from_str::<Position>(text) else { return };
        let is_read = said.kind == "msg.read";
        if said.kind == "msg.send" {
            return self.on_client_sends(device, said.id);
        }
        if !is_read && said.kind != "msg.recv" {
            return;
        }
        let found = &self.devices[device];
        let checked = found.holdings.on_told(&self.model, &found.seer(), &said.conversation_id, said.seq);
        let id = ConversationId::trusted(&said.conversation_id);
        let (user, name) = (found.user.clone(), found.id.clone());
        self.check(checked);
        let heard = self.model.said.received.entry((user.clone(), name, id.clone())).or_default();
        *heard = said.seq.max(*heard);
        if is_read {
            let read = self.model.said.read.entry((user, id)).or_default();
            *read = said.seq.max(*read);
        }
    }

    fn on_client_sends(&mut self, device: usize, id: String) {
        let found = &mut self.devices[device];
        if !found.sent_ids.insert(id.clone()) {
            found.repeated.insert(id.clone());
        }
        if let Some(socket) = found.socket {
            self.sockets[socket].view.sent.insert(id);
        }
    }

    /// The library tells the application something.
    fn on_told(&mut self, device: usize, told: Told) {
        match told {
            Told::Connected { resumed, .. } => {
                self.devices[device].is_connected = true;
                self.resumed += u64::from(resumed);
            }
            Told::Message(message) => {
                let found = &mut self.devices[device];
                let (user, id, repeated) = (found.user.clone(), found.id.clone(), found.repeated.clone());
                let seer = Seer { user: &user, device: &id, repeated: &repeated };
                let checked = found.holdings.on_message(&self.model, &seer, &message);
                self.check(checked);
            }
            Told::Failed { id, code, .. } if self.is_stored_once_sent(device, &id) => {
                self.fail("answers", format!("{id} is durable and was answered with {code}"));
            }
            Told::Acked { id, .. } | Told::Failed { id, .. } => {
                let mail = &mut self.devices[device].mail;
                if let Some(index) = mail.iter().position(|m| m.id == id) {
                    mail.remove(index);
                }
            }
            Told::Answer { id, frame } => {
                self.devices[device].asked.remove(&id);
                if id == "final" {
                    self.devices[device].final_list = Some(frame);
                }
            }
            Told::Disconnected { .. } => {
                self.devices[device].is_connected = false;
            }
            Told::Stopped { code, reason } => {
                self.note(|| format!("device {device} was stopped by {code}"));
                if ![CloseCode::Kicked.code(), CloseCode::Replaced.code()].contains(&code) {
                    self.fail("liveness", format!("device {device} was told never to come again: {reason}"));
                }
                self.end_client(device, false, false);
                let delay = self.rng.range(500, 3_000);
                let life = self.devices[device].life;
                self.after(delay, Event::Revive { device, life });
            }
            Told::Receipt { .. } | Told::Waiting { .. } | Told::Frame(_) => {}
            Told::RoomJoined { .. } | Told::RoomMessage(_) | Told::RoomRefused { .. } => {}
        }
    }

    /// Of a message that went out once: is it durable?
    fn is_stored_once_sent(&self, device: usize, id: &str) -> bool {
        let found = &self.devices[device];
        let key = (found.user.clone(), MessageId::trusted(id));
        !found.repeated.contains(id) && self.model.ids.contains_key(&key)
    }

    /// Asks each device for its conversations, all at once.
    pub fn ask_lists(&mut self) {
        for device in 0..self.devices.len() {
            if let Some(core) = &mut self.devices[device].core {
                // It has room for one more request.
                let _full = core.request(json!({"type": "conversation.list", "limit": 200}), "final".into());
            }
            self.drive(device);
        }
    }

    /// Compares what the devices were told of their conversations with what is durable.
    pub fn compare_lists(&mut self) {
        for device in 0..self.devices.len() {
            let found = &self.devices[device];
            let mut listed: BTreeMap<String, (u64, u64, u64, u64)> = BTreeMap::new();
            let list = found.final_list.clone().unwrap_or_default();
            for row in list["conversations"].as_array().into_iter().flatten() {
                let number = |name: &str| row[name].as_u64().unwrap_or(u64::MAX);
                let line = (number("first_seq"), number("last_seq"), number("read_seq"), number("unread"));
                listed.insert(row["conversation_id"].as_str().unwrap_or_default().to_owned(), line);
            }
            let mut durable = BTreeMap::new();
            for (id, conversation) in &self.model.conversations {
                if let Some(member) = conversation.members.get(&found.user) {
                    let last = conversation.last();
                    let unread =
                        conversation.others_in(&found.user, member.read.max(member.joined - 1), last);
                    durable.insert(id.to_string(), (member.first, last, member.read, unread));
                }
            }
            if listed != durable {
                let text = format!("device {device} was told {listed:?} at the end; {durable:?} is durable");
                self.fail("unread", text);
            }
        }
    }
}
