//! Who takes part in a run, who talks to whom, and what each message says. All of it follows from the seed, the number
//! of users and the name of the run.

use super::history::{ConversationInfo, DeviceInfo, Name, World};
use bowline_protocol::{ConversationId, UserId};
use std::fmt::Write;

/// The largest body but one in a hundred.
const BODY_BYTES: u64 = 400;
const BODY_BYTES_LARGE: u64 = 6_000;
/// The most members of a group, and of the one that has as many as there are.
const MEMBERS_MAX: usize = 8;
const MEMBERS_OF_LARGE_MAX: usize = 60;

pub struct Plan {
    pub world: World,
    pub devices: Vec<DevicePlan>,
    /// Users of each group, the owner first.
    pub groups: Vec<Group>,
}

#[derive(Clone)]
pub struct DevicePlan {
    pub name: Name,
    pub user: Name,
    pub device_id: String,
    /// It takes its time before it acknowledges, so that the server pushes again.
    pub is_lazy: bool,
    /// It stays connected for as long as it can.
    pub is_steady: bool,
    /// Conversations it talks in, each with how often. Direct ones have the peer.
    pub targets: Vec<Target>,
    pub seed: u64,
}

#[derive(Clone)]
pub struct Target {
    pub conversation: usize,
    pub peer: Option<Name>,
    pub weight: u32,
}

#[derive(Clone)]
pub struct Group {
    pub conversation: Name,
    pub members: Vec<Name>,
}

impl Plan {
    pub fn new(run: &str, users: usize, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let names: Vec<Name> = (1..=users).map(|n| Name::from(format!("u{n}-{run}"))).collect();
        let mut conversations: Vec<ConversationInfo> = Vec::new();
        let mut targets: Vec<Vec<Target>> = vec![Vec::new(); users];
        for (user, name) in names.iter().enumerate() {
            // A ring, so that everybody talks, and one more by chance.
            for other in [(user + 1) % users, random.usize(..users)] {
                let id = ConversationId::direct(&UserId::trusted(name), &UserId::trusted(&names[other]));
                if other == user || conversations.iter().any(|known| *known.id == *id) {
                    continue;
                }
                let conversation = conversations.len();
                let members = vec![name.clone(), names[other].clone()];
                conversations.push(ConversationInfo { id: id.as_str().into(), members });
                let target = |peer: &Name| Target { conversation, peer: Some(peer.clone()), weight: 6 };
                targets[user].push(target(&names[other]));
                targets[other].push(target(name));
            }
        }
        let mut groups = Vec::new();
        for number in 0..users.div_ceil(6) {
            let wanted = match number {
                0 => users.min(MEMBERS_OF_LARGE_MAX),
                _ => random.usize(3.min(users)..=MEMBERS_MAX.min(users)),
            };
            let mut members: Vec<usize> = (0..users).collect();
            random.shuffle(&mut members);
            members.truncate(wanted);
            let conversation = conversations.len();
            for member in &members {
                targets[*member].push(Target {
                    conversation,
                    peer: None,
                    weight: if number == 0 { 1 } else { 3 },
                });
            }
            let id = Name::from(format!("g:check{number}-{run}"));
            let members: Vec<Name> = members.into_iter().map(|member| names[member].clone()).collect();
            conversations.push(ConversationInfo { id: id.clone(), members: members.clone() });
            groups.push(Group { conversation: id, members });
        }
        let mut devices = Vec::new();
        for (user, name) in names.iter().enumerate() {
            let count = 1 + usize::from(user % 2 == 0) + usize::from(user % 10 == 0);
            for device_id in ["a", "b", "c"].into_iter().take(count) {
                devices.push(DevicePlan {
                    name: format!("{name}/{device_id}").into(),
                    user: name.clone(),
                    device_id: device_id.to_owned(),
                    is_lazy: devices.len() % 7 == 3,
                    is_steady: devices.len() % 4 == 1,
                    targets: targets[user].clone(),
                    seed: random.u64(..),
                });
            }
        }
        let infos = devices.iter().map(|d| DeviceInfo { name: d.name.clone(), user: d.user.clone() });
        let world = World { seed, devices: infos.collect(), conversations };
        Self { world, devices, groups }
    }
}

/// What a message with this id says. Whoever receives it can tell whether it is what was sent, and nothing need be
/// remembered.
#[derive(Debug, PartialEq, Eq)]
pub enum Content {
    Json(String),
    Binary(Vec<u8>),
}

impl Content {
    pub fn of(user: &str, id: &str) -> Self {
        // Any function of both will do that spreads well and stays what it is.
        let hash = user.bytes().chain(id.bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut random = fastrand::Rng::with_seed(hash);
        let most = if random.u8(..100) == 0 { BODY_BYTES_LARGE } else { BODY_BYTES };
        let bytes = random.u64(..most) as usize;
        if random.u8(..8) == 0 {
            return Self::Binary(std::iter::repeat_with(|| random.u8(..)).take(bytes + 1).collect());
        }
        let mut text = format!(r#"{{"of":"{id}","n":{},"text":""#, random.u32(..));
        for _ in 0..bytes / 8 {
            let _ = write!(text, "{:08x}", random.u32(..));
        }
        text.push_str("\"}");
        Self::Json(text)
    }

    /// Whether a body is this content. `base64` tells that bytes came as text. JSON is the same however it is written:
    /// the server does not touch it, but what stands between may.
    pub fn is_in(&self, json: Option<&str>, bytes: Option<&[u8]>, base64: bool) -> bool {
        match (self, json, bytes) {
            (Self::Json(sent), Some(got), None) => !base64 && (sent == got || is_same_json(sent, got)),
            (Self::Binary(sent), _, Some(got)) => sent == got,
            (Self::Binary(sent), Some(got), None) if base64 => {
                use base64::Engine;
                let engine = base64::engine::general_purpose::STANDARD;
                engine.decode(got.trim_matches('"')).is_ok_and(|got| *sent == got)
            }
            _ => false,
        }
    }
}

fn is_same_json(one: &str, other: &str) -> bool {
    let parse = serde_json::from_str::<serde_json::Value>;
    matches!((parse(one), parse(other)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_follows_from_its_seed() {
        let plan = Plan::new("r", 20, 7);
        assert_eq!(plan.world, Plan::new("r", 20, 7).world);
        assert_ne!(plan.world, Plan::new("r", 20, 8).world);
        assert_eq!(plan.devices.len(), 32);
        assert!(plan.devices.iter().all(|device| device.targets.iter().any(|target| target.peer.is_some())));
        assert_eq!(plan.groups[0].members.len(), 20);
        let small = Plan::new("r", 2, 7);
        assert!(small.devices.iter().all(|device| device.targets.len() == 2), "each other, and the group");
    }

    #[test]
    fn contents_are_told_apart() {
        for n in 0..200 {
            let content = Content::of("u", &format!("a{n}"));
            let other = Content::of("u", &format!("b{n}"));
            match &content {
                Content::Json(text) => {
                    let parsed: serde_json::Value = serde_json::from_str(text).unwrap();
                    assert!(content.is_in(Some(&format!("{parsed:#}")), None, false));
                    assert!(content.is_in(Some(text), None, false) && !other.is_in(Some(text), None, false));
                }
                Content::Binary(bytes) => {
                    use base64::Engine;
                    let text = base64::engine::general_purpose::STANDARD.encode(bytes);
                    assert!(
                        content.is_in(None, Some(bytes), false) && !other.is_in(None, Some(bytes), false)
                    );
                    assert!(content.is_in(Some(&format!("\"{text}\"")), None, true));
                }
            }
        }
    }
}
