//! What happens in a run: who takes part, how the network is, and the steps, all drawn from the seed.
//!
//! A step names its subjects by numbers that are taken modulo what there is when it is carried out. So any step can
//! be left out without the others losing their meaning, which is what shrinking does.

use crate::rng::Rng;

/// How much of everything there is, and how bad the network is.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    /// Devices of each user.
    pub devices: Vec<u64>,
    pub gateways: u64,
    pub network: Network,
    pub ack_timeout_ms: u64,
    pub batch_max: usize,
    pub before_send: bool,
    pub outbox: bool,
    /// How long a session is held.
    pub resume_ms: u64,
    pub steps: Vec<Step>,
    /// When the last step is over and the faults end.
    pub ends_at: u64,
}

#[derive(Debug, Clone)]
pub struct Network {
    pub socket_ms: u64,
    pub link_ms: u64,
    pub coordination_ms: u64,
    pub commit_ms: u64,
    pub read_ms: u64,
    /// Of a thousand messages of a link: come twice; come late and out of order (downlink only); are answered
    /// "not here" although somebody is (downlink only, each at most once).
    pub twice: u64,
    pub late: u64,
    /// The longest delay of one that is late.
    pub late_ms: u64,
    pub not_here: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub at: u64,
    pub act: Act,
}

/// One thing that a user, a back end or misfortune does. The numbers choose the subjects.
#[derive(Debug, Clone, PartialEq)]
pub enum Act {
    /// `count` messages of one device to one conversation, without waiting.
    Send {
        device: u64,
        to: u64,
        count: u64,
        binary: bool,
    },
    /// An id that was used before, with the same content.
    Repeat {
        device: u64,
        which: u64,
    },
    /// An id that was used before, with other content.
    Conflict {
        device: u64,
        which: u64,
    },
    /// A frame that claims to be from somebody else.
    Forge {
        device: u64,
        as_user: u64,
    },
    Read {
        device: u64,
        which: u64,
    },
    History {
        device: u64,
        which: u64,
        after: u64,
        limit: u64,
    },
    List {
        device: u64,
        limit: u64,
    },
    Clear {
        device: u64,
        which: u64,
    },
    Create {
        device: u64,
        members: u64,
    },
    Add {
        device: u64,
        group: u64,
        user: u64,
    },
    Remove {
        device: u64,
        group: u64,
        user: u64,
    },
    Leave {
        device: u64,
        group: u64,
    },
    Role {
        device: u64,
        group: u64,
        user: u64,
    },
    Rename {
        device: u64,
        group: u64,
    },
    ApiSend {
        gateway: u64,
        user: u64,
        to: u64,
        again: bool,
    },
    ApiAdd {
        gateway: u64,
        group: u64,
        user: u64,
    },
    ApiRemove {
        gateway: u64,
        group: u64,
        user: u64,
    },
    ApiKick {
        gateway: u64,
        user: u64,
    },
    /// The socket ends; who of the two notices at once is in `noticed`: 1 the client, 2 the gateway, 3 both.
    Cut {
        device: u64,
        noticed: u64,
    },
    /// The program on the device ends, comes again after a while, and has forgotten everything or not.
    Restart {
        device: u64,
        away_ms: u64,
        forgets: bool,
        says_bye: bool,
    },
    /// The client does not read for a while.
    Stall {
        device: u64,
        for_ms: u64,
    },
    GatewayCrash {
        gateway: u64,
        for_ms: u64,
    },
    /// The router dies, with its store or without.
    RouterCrash {
        for_ms: u64,
        with_store: bool,
    },
    /// Another router takes over while the old one lives on for a while.
    TakeOver {
        lives_on_ms: u64,
    },
    StoreCrash,
    StoreFails {
        for_ms: u64,
        reads_too: bool,
    },
    /// A wall clock jumps: 0 the router's, else a gateway's.
    Clock {
        whose: u64,
        by_ms: i64,
    },
    /// Coordination forgets everything.
    CoordinationLost,
}

impl Act {
    pub fn is_fault(&self) -> bool {
        matches!(
            self,
            Self::Cut { .. }
                | Self::Restart { .. }
                | Self::Stall { .. }
                | Self::GatewayCrash { .. }
                | Self::RouterCrash { .. }
                | Self::TakeOver { .. }
                | Self::StoreCrash
                | Self::StoreFails { .. }
                | Self::Clock { .. }
                | Self::CoordinationLost
        )
    }
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let users = rng.range(3, 5);
        let devices = (0..users).map(|_| *rng.pick(&[1, 1, 1, 2, 2, 3])).collect();
        let calm = rng.chance(150);
        let network = Network {
            socket_ms: *rng.pick(&[1, 10, 60]),
            link_ms: *rng.pick(&[0, 2, 10, 40]),
            coordination_ms: *rng.pick(&[0, 2, 20]),
            commit_ms: *rng.pick(&[1, 3, 20]),
            read_ms: *rng.pick(&[0, 2, 20]),
            twice: if calm { 0 } else { rng.below(60) },
            late: if calm { 0 } else { rng.below(120) },
            late_ms: *rng.pick(&[50, 200, 200, 2_500]),
            not_here: if calm { 0 } else { rng.below(60) },
        };
        let mut plan = Self {
            seed,
            devices,
            gateways: rng.range(1, 3),
            network,
            ack_timeout_ms: *rng.pick(&[300, 1_000, 3_000]),
            batch_max: *rng.pick(&[1, 4, 100]),
            before_send: rng.chance(200),
            outbox: rng.chance(500),
            resume_ms: *rng.pick(&[0, 1_000, 15_000]),
            steps: Vec::new(),
            ends_at: 0,
        };
        // Some runs see no fault but the network's, some see few kinds, some see all.
        let fault_permille = *rng.pick(&[0, 60, 120, 200]);
        let pace_ms = *rng.pick(&[15, 60, 250]);
        let mut at = 20;
        for _ in 0..rng.range(30, 70) {
            at += rng.below(pace_ms * 2);
            let act = if rng.chance(fault_permille) { fault(&mut rng) } else { work(&mut rng) };
            plan.steps.push(Step { at, act });
        }
        plan.ends_at = at + 500;
        plan
    }
}

/// What users and back ends do.
fn work(rng: &mut Rng) -> Act {
    let (device, which) = (rng.next() >> 8, rng.next() >> 8);
    let (gateway, group, user, to) = (rng.next() >> 8, rng.next() >> 8, rng.next() >> 8, rng.next() >> 8);
    match rng.below(100) {
        0..38 => Act::Send { device, to, count: *rng.pick(&[1, 1, 1, 2, 6]), binary: rng.chance(100) },
        38..44 => Act::Repeat { device, which },
        44..46 => Act::Conflict { device, which },
        46..47 => Act::Forge { device, as_user: user },
        47..56 => Act::Read { device, which },
        56..60 => Act::History { device, which, after: rng.below(8), limit: rng.range(1, 10) },
        60..64 => Act::List { device, limit: rng.range(1, 5) },
        64..66 => Act::Clear { device, which },
        66..72 => Act::Create { device, members: rng.next() >> 8 },
        72..77 => Act::Add { device, group, user },
        77..81 => Act::Remove { device, group, user },
        81..83 => Act::Leave { device, group },
        83..85 => Act::Role { device, group, user },
        85..86 => Act::Rename { device, group },
        86..93 => Act::ApiSend { gateway, user, to, again: rng.chance(250) },
        93..96 => Act::ApiAdd { gateway, group, user },
        96..99 => Act::ApiRemove { gateway, group, user },
        _ => Act::ApiKick { gateway, user },
    }
}

fn fault(rng: &mut Rng) -> Act {
    let device = rng.next() >> 8;
    match rng.below(100) {
        0..30 => Act::Cut { device, noticed: rng.below(4) },
        30..46 => Act::Restart {
            device,
            away_ms: *rng.pick(&[1, 50, 1_500]),
            forgets: rng.chance(250),
            says_bye: rng.chance(500),
        },
        46..52 => Act::Stall { device, for_ms: rng.range(50, 3_000) },
        52..60 => Act::GatewayCrash { gateway: rng.next() >> 8, for_ms: rng.range(1, 1_500) },
        60..70 => Act::RouterCrash { for_ms: rng.range(1, 1_500), with_store: rng.chance(500) },
        70..76 => Act::TakeOver { lives_on_ms: rng.range(1, 2_500) },
        76..82 => Act::StoreCrash,
        82..90 => Act::StoreFails { for_ms: rng.range(1, 2_500), reads_too: rng.chance(400) },
        90..97 => {
            let whose = rng.below(4);
            // Logins of one device are compared between gateways: their clocks are off by seconds, not by hours.
            let far = if whose == 0 { 3_600_000 } else { 20_000 };
            Act::Clock { whose, by_ms: rng.below(2 * far + 1) as i64 - far as i64 }
        }
        _ => Act::CoordinationLost,
    }
}
