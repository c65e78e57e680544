//! Routers: the driver of the product's delivery core. One owns the conversations at a time; one that was taken over
//! may live on for a while, and the store refuses what it still wants to write.

use crate::{
    node::NOTICE_MS,
    plants::Plant,
    world::{Event, World},
};
use bowline_coordination::Coordination;
use bowline_delivery::{Action, Config, Core, Now, Retention, Verdict, persist::Query};
use bowline_protocol::{
    ErrorCode,
    error::Refusal,
    link::{Claim, Down, Downlink, Target, Uplink},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

/// The members that a group may have; small enough to be met.
const GROUP_MEMBERS_MAX: usize = 5;

/// One life of a router.
pub struct Router {
    /// None once it is dead.
    pub core: Option<Core>,
    began: u64,
    /// How wrong its wall clock is.
    pub offset: i64,
    turn_is_due: bool,
    timer: u64,
    /// For each lane of look-ups, when the last one is answered.
    lanes: BTreeMap<u64, u64>,
    /// Events that were answered "not here" although somebody is; each at most once.
    refused: BTreeSet<(u64, u64, u64)>,
}

impl World {
    /// A router takes over, with an owner epoch of its own.
    pub fn start_router(&mut self) {
        self.epoch += 1;
        self.store.take_over(self.epoch);
        let config = Config {
            ack_timeout_ms: self.plan.ack_timeout_ms,
            max_redeliveries: 3,
            batch_max: self.plan.batch_max,
            group_members_max: GROUP_MEMBERS_MAX,
            frame_bytes_max: 32 * 1024,
            seed: self.rng.next(),
            owner_epoch: self.epoch,
            before_send: self.plan.before_send,
            outbox: self.plan.outbox,
            retention: Retention::default(),
            resume_ms: self.plan.resume_ms,
        };
        let router = self.routers.len();
        self.routers.push(Router {
            core: Some(Core::new(config)),
            began: self.now,
            offset: 0,
            turn_is_due: false,
            timer: u64::MAX,
            lanes: BTreeMap::new(),
            refused: BTreeSet::new(),
        });
        self.owner = Some(router);
        let epoch = self.epoch;
        self.note(|| format!("router {router} owns the conversations with epoch {epoch}"));
        for gateway in 0..self.gateways.len() {
            let boot = self.gateways[gateway].boot;
            let delay = self.rng.below(NOTICE_MS);
            self.after(delay, Event::RouterNoticed { gateway, boot, router });
        }
    }

    pub fn end_router(&mut self, router: usize) {
        if self.routers[router].core.take().is_some() {
            self.note(|| format!("router {router} is dead"));
        }
        if self.owner == Some(router) {
            self.owner = None;
        }
    }

    fn router_now(&self, router: usize) -> Now {
        let Router { began, offset, .. } = self.routers[router];
        Now { wall: self.wall(offset), mono: self.now - began }
    }

    /// An event for the core; its turn follows a little later, so that several share it.
    pub fn tell(&mut self, router: usize, event: bowline_delivery::Event) {
        let now = self.router_now(router);
        let found = &mut self.routers[router];
        let Some(core) = &mut found.core else { return };
        core.on_event(event, now);
        if !std::mem::replace(&mut found.turn_is_due, true) {
            let delay = self.rng.below(2);
            self.after(delay, Event::RouterTurn { router });
        }
    }

    pub fn on_up(&mut self, router: usize, uplink: Uplink) {
        self.tell(router, bowline_delivery::Event::Uplink(uplink));
    }

    pub fn on_router_timer(&mut self, router: usize) {
        let found = &mut self.routers[router];
        if found.timer <= self.now && !std::mem::replace(&mut found.turn_is_due, true) {
            found.timer = u64::MAX;
            self.on_router_turn(router);
        }
    }

    pub fn on_router_turn(&mut self, router: usize) {
        let now = self.router_now(router);
        let found = &mut self.routers[router];
        found.turn_is_due = false;
        let Some(core) = &mut found.core else { return };
        core.on_turn(now);
        let actions = core.take_actions();
        if let Some(due) = core.next_due() {
            let at = (found.began + due).max(self.now + 1);
            if at < found.timer || found.timer <= self.now {
                found.timer = at;
                self.at(at, Event::RouterTimer { router });
            }
        }
        for action in actions {
            self.carry_out_router(router, action);
        }
    }

    fn carry_out_router(&mut self, router: usize, action: Action) {
        match action {
            Action::Send(downlink) => self.send_down(router, downlink),
            Action::Commit(batch) => self.commit(router, *batch),
            Action::Read { read, lane, query } => self.plan_read(router, read, lane, query),
            Action::Claim { conn, open } => {
                let answer: Arc<Mutex<Option<Claim>>> = Arc::default();
                let reply = answer.clone();
                let take = move |claim| {
                    *reply.lock().unwrap_or_else(PoisonError::into_inner) = Some(claim);
                };
                self.coordination.claim(&conn, &open, Box::new(take));
                let claim = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(claim) = claim {
                    self.tell_later(router, bowline_delivery::Event::Claimed { conn, open, claim });
                }
            }
            Action::Release { conn, user } => self.coordination.release(&conn, &user),
            Action::LookUp { conn, user, no, event } => {
                let answer: Arc<Mutex<bool>> = Arc::default();
                let reply = answer.clone();
                let take = move |here| *reply.lock().unwrap_or_else(PoisonError::into_inner) = here;
                self.coordination.look_up(&conn, &user, Box::new(take));
                let here = *answer.lock().unwrap_or_else(PoisonError::into_inner);
                self.tell_later(router, bowline_delivery::Event::LookedUp { conn, here, no, event });
            }
            Action::AskVerdict { ticket, .. } => {
                let verdict = match self.rng.chance(30) {
                    true => Verdict::Refuse(Refusal::new(ErrorCode::Forbidden, "the application says no")),
                    false => Verdict::Allow { body: None },
                };
                self.tell_later(router, bowline_delivery::Event::Verdict { ticket, verdict });
            }
        }
    }

    fn tell_later(&mut self, router: usize, event: bowline_delivery::Event) {
        let delay = self.rng.range(0, self.plan.network.coordination_ms);
        self.after(delay, Event::Tell { router, event: Box::new(event) });
    }

    fn plan_read(&mut self, router: usize, read: u64, lane: u64, query: Query) {
        let (wait, answer) =
            (self.rng.range(0, self.plan.network.read_ms), self.rng.range(0, self.plan.network.read_ms));
        let until = self.routers[router].lanes.entry(lane).or_default();
        let at = (self.now + wait).max(*until);
        let answer_at = at + answer;
        *until = answer_at;
        self.at(at, Event::Read { router, read, query, answer_at });
    }

    /// Each target of a downlink travels alone: late, twice, or answered "not here", as the network has it.
    fn send_down(&mut self, router: usize, downlink: Downlink) {
        let Downlink { node, to, event } = downlink;
        if to.is_empty() {
            let delay = self.rng.range(0, self.plan.network.link_ms);
            return self.after(delay, Event::Down { router, node, target: None, event });
        }
        for target in to {
            self.send_to_target(router, &node, target, event.clone());
        }
    }

    fn send_to_target(
        &mut self,
        router: usize,
        node: &Arc<bowline_protocol::link::NodeRef>,
        target: Target,
        event: Down,
    ) {
        if self.plant == Some(Plant::EventLost) && self.rng.chance(20) {
            return;
        }
        let (twice, late, not_here) = {
            let network = &self.plan.network;
            (network.twice, network.late, network.not_here)
        };
        let link_ms = self.plan.network.link_ms;
        let mut delay = self.rng.range(0, link_ms);
        if self.rng.chance(late) {
            delay += self.rng.range(0, self.plan.network.late_ms);
        }
        let key = (target.connection, target.login, target.no);
        if target.no > 0 && self.rng.chance(not_here) && self.routers[router].refused.insert(key) {
            let from = bowline_protocol::link::ConnRef {
                node: node.clone(),
                connection: target.connection,
                login: target.login,
            };
            let event =
                bowline_protocol::link::Up::NotHere { no: target.no, event: Box::new(event), gone: true };
            return self.after(delay, Event::Up { router, uplink: Uplink { from, event } });
        }
        if self.rng.chance(twice) {
            let again = delay + self.rng.range(0, 100);
            let (node, event) = (node.clone(), event.clone());
            self.after(again, Event::Down { router, node, target: Some(target), event });
        }
        self.after(delay, Event::Down { router, node: node.clone(), target: Some(target), event });
    }
}
