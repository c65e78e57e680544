//! The world of one run: virtual time, everything that is under way, and who takes part.
//!
//! One heap holds what is to happen; the next of it is the next step. What each part does about it stands in
//! [`client`](crate::client), [`node`](crate::node), [`router`](crate::router), [`store`](crate::store) and
//! [`acts`](crate::acts).

use crate::{
    client::Device,
    model::{Checked, Model, Violation},
    node::{Gateway, Wire},
    plan::Plan,
    plants::Plant,
    rng::Rng,
    router::Router,
    socket::Socket,
    store::Store,
};
use bowline_coordination::Memory;
use bowline_delivery::persist::Query;
use bowline_protocol::{
    DeviceId, Millis, UserId,
    link::{Down, NodeRef, Target, Uplink},
};
use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BinaryHeap, VecDeque},
    sync::Arc,
};

/// The wall clock when a run begins.
pub const WALL_START: Millis = 1_700_000_000_000;
/// How long everything may take to be well again after the faults: a client may have to wait 90 s for a server
/// that never greets it, and 30 s until it comes again.
const SETTLE_MS: u64 = 400_000;
/// A run that takes more steps than this does not end.
const STEPS_MAX: u64 = 400_000;
/// Lines of history that are kept.
const HISTORY_LINES: usize = 60;

/// What happens next.
pub enum Event {
    Step(usize),
    Heal,
    Settle,
    Dial { device: usize, life: u64, gateway: usize },
    ClientTimer { device: usize, life: u64 },
    Revive { device: usize, life: u64 },
    ToClient { socket: usize, wire: Wire },
    ToGateway { socket: usize, wire: Wire },
    Unstall { socket: usize },
    SessionTimer { gateway: usize, boot: u32, conn: u64 },
    Judged { gateway: usize, boot: u32, conn: u64, token: String },
    GatewayUp { gateway: usize },
    RouterNoticed { gateway: usize, boot: u32, router: usize },
    Up { router: usize, uplink: Uplink },
    Down { router: usize, node: Arc<NodeRef>, target: Option<Target>, event: Down },
    RouterUp,
    RouterGone { router: usize },
    RouterTurn { router: usize },
    RouterTimer { router: usize },
    Tell { router: usize, event: Box<bowline_delivery::Event> },
    Read { router: usize, read: u64, query: Query, answer_at: u64 },
    Sync { ticket: u64 },
}

struct Due {
    at: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// How a run went.
#[derive(Debug, Clone)]
pub struct Report {
    pub violation: Option<Violation>,
    /// Events that were carried out, and the virtual time at the end.
    pub steps: u64,
    pub ended_at: u64,
    /// Sums up everything that the clients saw, the order included.
    pub digest: u64,
    pub messages: usize,
    /// Connections that went on with the session of another.
    pub resumed: u64,
    /// The last lines, when they were asked for.
    pub history: Vec<String>,
}

pub struct World {
    pub plan: Plan,
    pub plant: Option<Plant>,
    pub rng: Rng,
    pub now: u64,
    pub model: Model,
    pub devices: Vec<Device>,
    pub users: Vec<UserId>,
    pub sockets: Vec<Socket>,
    pub gateways: Vec<Gateway>,
    pub routers: Vec<Router>,
    /// The router that owns the conversations; none while it is down.
    pub owner: Option<usize>,
    pub epoch: u64,
    pub store: Store,
    pub coordination: Memory,
    pub coordination_was_lost: bool,
    /// Names of the groups that somebody asked to create.
    pub groups: Vec<String>,
    /// Requests of the API that wait for an answer: the id of a message and who sends it.
    pub api: BTreeMap<u64, Option<(String, UserId)>>,
    pub api_sent: Vec<(String, UserId, bowline_protocol::link::Send)>,
    pub next_id: u64,
    pub resumed: u64,
    pub is_healed: bool,
    heap: BinaryHeap<Reverse<Due>>,
    next_number: u64,
    violation: Option<Violation>,
    is_over: bool,
    /// The final lists were asked for.
    asked_lists: bool,
    digest: u64,
    history: Option<VecDeque<String>>,
}

impl World {
    /// Runs a plan to its end, or to the first violation.
    pub fn run(plan: &Plan, plant: Option<Plant>, with_history: bool) -> Report {
        let mut world = Self::new(plan.clone(), plant, with_history);
        let mut steps = 0;
        while let Some(Reverse(Due { at, event, .. })) = world.heap.pop() {
            world.now = at;
            steps += 1;
            world.carry_out(event);
            if world.violation.is_none() && steps > STEPS_MAX {
                world.fail("liveness", format!("after {steps} steps there is still no end"));
            }
            if world.violation.is_some() || world.is_over {
                break;
            }
        }
        Report {
            violation: world.violation,
            steps,
            ended_at: world.now,
            digest: world.digest,
            messages: world.model.ids.len(),
            resumed: world.resumed,
            history: world.history.into_iter().flatten().collect(),
        }
    }

    fn new(plan: Plan, plant: Option<Plant>, with_history: bool) -> Self {
        let mut world = Self {
            plant,
            rng: Rng::new(plan.seed, 2),
            now: 0,
            model: Model::new(plan.outbox),
            devices: Vec::new(),
            users: (0..plan.devices.len()).map(|n| UserId::trusted(&format!("u{n}"))).collect(),
            sockets: Vec::new(),
            gateways: (0..plan.gateways as usize).map(Gateway::new).collect(),
            routers: Vec::new(),
            owner: None,
            epoch: 0,
            store: Store::default(),
            coordination: Memory::default(),
            coordination_was_lost: false,
            groups: Vec::new(),
            api: BTreeMap::new(),
            api_sent: Vec::new(),
            next_id: 0,
            resumed: 0,
            is_healed: false,
            heap: BinaryHeap::new(),
            next_number: 0,
            violation: None,
            is_over: false,
            asked_lists: false,
            digest: 0,
            history: with_history.then(VecDeque::new),
            plan,
        };
        world.start_router();
        for (user, count) in world.plan.devices.clone().into_iter().enumerate() {
            for number in 0..count {
                let device = DeviceId::trusted(&format!("d{number}"));
                world.devices.push(Device::new(world.users[user].clone(), device));
            }
        }
        for device in 0..world.devices.len() {
            // Not all are there from the beginning: those who come later are new to the server then.
            let late = if device > 0 && world.rng.chance(250) { world.plan.ends_at / 2 } else { 10 };
            let at = world.rng.below(late + 1);
            world.after(at, Event::Revive { device, life: 0 });
        }
        for (index, step) in world.plan.steps.clone().into_iter().enumerate() {
            world.after(step.at, Event::Step(index));
        }
        world.after(world.plan.ends_at, Event::Heal);
        world
    }

    pub fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    pub fn at(&mut self, at: u64, event: Event) {
        self.next_number += 1;
        self.heap.push(Reverse(Due { at, number: self.next_number, event }));
    }

    pub fn wall(&self, offset: i64) -> Millis {
        (WALL_START + self.now).saturating_add_signed(offset)
    }

    pub fn fail(&mut self, invariant: &'static str, text: String) {
        self.note(|| format!("VIOLATION of {invariant}: {text}"));
        self.violation.get_or_insert(Violation { invariant, text });
    }

    pub fn check(&mut self, checked: Checked) {
        if let Err(Violation { invariant, text }) = checked {
            self.fail(invariant, text);
        }
    }

    /// Adds a line to the history, if one is kept.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push_back(format!("{:>7} {}", self.now, line()));
            if history.len() > HISTORY_LINES {
                history.pop_front();
            }
        }
    }

    /// Adds something that a client saw to the digest.
    pub fn saw(&mut self, device: usize, bytes: &[u8]) {
        let mut hash = self.digest ^ self.now.rotate_left(32) ^ device as u64;
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.digest = hash;
    }

    fn carry_out(&mut self, event: Event) {
        match event {
            Event::Step(index) => {
                let act = self.plan.steps[index].act.clone();
                self.note(|| format!("step {index}: {act:?}"));
                self.act(act);
            }
            Event::Heal => self.heal(),
            Event::Settle => self.settle(),
            Event::Dial { device, life, gateway } => self.dial(device, life, gateway),
            Event::ClientTimer { device, life } => self.on_client_timer(device, life),
            Event::Revive { device, life } => self.revive(device, life),
            Event::ToClient { socket, wire } => self.on_client_wire(socket, wire),
            Event::ToGateway { socket, wire } => self.on_gateway_wire(socket, wire),
            Event::Unstall { socket } => self.unstall(socket),
            Event::SessionTimer { gateway, boot, conn } => self.on_session_timer(gateway, boot, conn),
            Event::Judged { gateway, boot, conn, token } => self.on_judged(gateway, boot, conn, &token),
            Event::GatewayUp { gateway } => self.start_gateway(gateway),
            Event::RouterNoticed { gateway, boot, router } => self.on_router_noticed(gateway, boot, router),
            Event::Up { router, uplink } => self.on_up(router, uplink),
            Event::Down { router, node, target, event } => self.on_down(router, &node, target, event),
            // It may have been started already, when the faults ended.
            Event::RouterUp if self.owner.is_none() => self.start_router(),
            Event::RouterUp => {}
            Event::RouterGone { router } => self.end_router(router),
            Event::RouterTurn { router } => self.on_router_turn(router),
            Event::RouterTimer { router } => self.on_router_timer(router),
            Event::Tell { router, event } => self.tell(router, *event),
            Event::Read { router, read, query, answer_at } => self.on_read(router, read, &query, answer_at),
            Event::Sync { ticket } => self.on_sync(ticket),
        }
    }

    /// The faults are over: everything is up, every clock is right, every device is there.
    fn heal(&mut self) {
        self.note(|| "the faults are over".into());
        self.is_healed = true;
        let network = &mut self.plan.network;
        (network.twice, network.late, network.not_here) = (0, 0, 0);
        self.store.heal(self.now);
        for router in &mut self.routers {
            router.offset = 0;
        }
        for gateway in 0..self.gateways.len() {
            self.gateways[gateway].offset = 0;
            if !self.gateways[gateway].is_up {
                self.start_gateway(gateway);
            }
        }
        if self.owner.is_none() {
            self.start_router();
        }
        for socket in 0..self.sockets.len() {
            self.unstall(socket);
        }
        for device in 0..self.devices.len() {
            let life = self.devices[device].life;
            self.revive(device, life);
        }
        // What was sent late is still under way: a close, for one, that ends a program for good.
        self.after(1_000 + self.plan.network.late_ms, Event::Settle);
    }

    /// Is everything as it should be? Then the lists are asked for, and compared.
    fn settle(&mut self) {
        let unwell = self.find_unwell();
        match unwell {
            None if !self.asked_lists => {
                self.asked_lists = true;
                self.ask_lists();
            }
            None if self.devices.iter().all(|device| device.final_list.is_some()) => {
                self.compare_lists();
                self.check_tables();
                self.is_over = true;
                return;
            }
            Some(text) if self.now > self.plan.ends_at + SETTLE_MS => return self.fail("liveness", text),
            None if self.now > self.plan.ends_at + SETTLE_MS => {
                return self.fail("liveness", "a list that was asked for has no answer".into());
            }
            _ => {}
        }
        self.after(500, Event::Settle);
    }

    /// What is not as it should be after the faults.
    fn find_unwell(&self) -> Option<String> {
        for device in &self.devices {
            let name = format!("{}/{}", device.user, device.id);
            let Some(core) = &device.core else { return Some(format!("{name} is not running")) };
            if !device.is_connected {
                return Some(format!("{name} is not connected"));
            }
            if core.unacknowledged() > 0 {
                return Some(format!("{name} waits for {} acknowledgements", core.unacknowledged()));
            }
            if let Some(id) = device.asked.first() {
                return Some(format!("{name} waits for the answer to {id}"));
            }
            let positions: BTreeMap<&str, u64> = core.positions().collect();
            for (id, conversation) in &self.model.conversations {
                let last = conversation.last();
                let Some(member) = conversation.members.get(&device.user).filter(|m| m.first <= last) else {
                    continue;
                };
                let has = positions.get(id.as_str()).copied();
                // A device that no owner knew by then began where its user stood.
                let is_known = self.model.devices.contains(&(device.user.clone(), device.id.clone()));
                let start = if is_known { 0 } else { last };
                let start = conversation.start(&device.user, &device.id).unwrap_or(start);
                // And one that forgot what it had said that it has is not told it again.
                let key = (device.user.clone(), device.id.clone(), id.clone());
                let said = match device.has_forgotten {
                    true => self.model.said.received.get(&key).copied().unwrap_or(0),
                    false => 0,
                };
                // Nor is it told of its own messages, even if it holds them for refused.
                let up_to =
                    |has: u64| conversation.over_own(&device.user, &device.id, has.max(start).max(said));
                if has.is_some_and(|has| up_to(has) < last) {
                    return Some(format!("{name} has {id} up to {has:?}, the newest is {last}"));
                }
                let position = member.position(&device.id);
                if conversation.over_own(&device.user, &device.id, position) < last
                    || member.waiting(last) > 0
                {
                    return Some(format!("{name} has not acknowledged {id} up to {last}: {member:?}"));
                }
            }
        }
        let busy =
            self.owner.and_then(|owner| self.routers[owner].core.as_ref()).map_or(0, |c| c.queue_depth());
        (busy > 0).then(|| format!("{busy} requests wait in the router"))
    }

    /// After the end nothing is left in the router's tables but who is there.
    fn check_tables(&mut self) {
        let Some(core) = self.owner.and_then(|owner| self.routers[owner].core.as_ref()) else { return };
        let [conns, users, _] = core.table_sizes();
        let least = self.devices.len();
        if conns < least || users != self.users.len() || (conns > least && !self.coordination_was_lost) {
            let text = format!(
                "{} devices of {} users are connected; the router has {conns} connections of {users} users",
                least,
                self.users.len()
            );
            self.fail("liveness", text);
        }
    }
}
