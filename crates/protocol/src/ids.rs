//! Identifiers, parsed once at the edge: 1–64 bytes of UTF-8 without `:` and control characters.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

/// Milliseconds since the Unix epoch, or a span of them.
pub type Millis = u64;
/// The number of a message in its conversation; the first is 1.
pub type Seq = u64;

/// The longest user, device, group and message id, in bytes.
pub const ID_BYTES_MAX: usize = 64;
/// The longest name of a room, in bytes.
pub const ROOM_BYTES_MAX: usize = 128;
/// The longest `channel` label, in bytes.
pub const CHANNEL_BYTES_MAX: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{what} is {bytes} bytes long; it takes 1 to {max}")]
    Length { what: &'static str, bytes: usize, max: usize },
    #[error("{what} contains {found:?}; ids hold no ':' and no control characters")]
    Character { what: &'static str, found: char },
    #[error("{what} contains the control character {found:?}")]
    Control { what: &'static str, found: char },
    #[error("{0:?} is no conversation id; write d:<user>:<user>, users in byte order, or g:<group id>")]
    Conversation(String),
}

fn check(what: &'static str, text: &str) -> Result<(), Error> {
    if text.is_empty() || text.len() > ID_BYTES_MAX {
        return Err(Error::Length { what, bytes: text.len(), max: ID_BYTES_MAX });
    }
    match text.chars().find(|c| *c == ':' || c.is_control()) {
        Some(found) => Err(Error::Character { what, found }),
        None => Ok(()),
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $parse:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn parse(text: &str) -> Result<Self, Error> {
                let check: fn(&'static str, &str) -> Result<(), Error> = $parse;
                check($what, text)?;
                Ok(Self(Arc::from(text)))
            }

            /// Takes a text that was checked before, such as one read back from the store.
            pub fn trusted(text: &str) -> Self {
                Self(Arc::from(text))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
                Self::parse(&text).map_err(de::Error::custom)
            }
        }
    };
}

text_id!(
    /// A person, a program, or (with a leading `@`) an agent.
    UserId, "a user id", check
);
text_id!(
    /// One of a user's devices.
    DeviceId, "a device id", check
);
text_id!(
    /// A group, without the `g:` of its conversation.
    GroupId, "a group id", check
);
text_id!(
    /// Chosen by the sending client; unique among all that this user ever sends.
    MessageId, "a message id", |what, text| {
        if text.is_empty() || text.len() > ID_BYTES_MAX {
            return Err(Error::Length { what, bytes: text.len(), max: ID_BYTES_MAX });
        }
        Ok(())
    }
);
text_id!(
    /// A room; 1 to 128 bytes without control characters.
    RoomName, "a room name", |what, text| {
        if text.is_empty() || text.len() > ROOM_BYTES_MAX {
            return Err(Error::Length { what, bytes: text.len(), max: ROOM_BYTES_MAX });
        }
        match text.chars().find(|c| c.is_control()) {
            Some(found) => Err(Error::Control { what, found }),
            None => Ok(()),
        }
    }
);
text_id!(
    /// `d:<a>:<b>` with the users in byte order, or `g:<group id>`.
    ConversationId, "a conversation id", |_, text| match Shape::of(text) {
        Some(_) => Ok(()),
        None => Err(Error::Conversation(text.chars().take(160).collect())),
    }
);

enum Shape<'a> {
    Direct(&'a str, &'a str),
    Group,
}

impl<'a> Shape<'a> {
    fn of(text: &'a str) -> Option<Self> {
        if let Some(group) = text.strip_prefix("g:") {
            return check("", group).ok().map(|()| Self::Group);
        }
        let (a, b) = text.strip_prefix("d:")?.split_once(':')?;
        check("", a).ok()?;
        check("", b).ok()?;
        (a.as_bytes() <= b.as_bytes()).then_some(Self::Direct(a, b))
    }
}

impl ConversationId {
    /// The direct conversation of two users; one with oneself is allowed.
    pub fn direct(one: &UserId, other: &UserId) -> Self {
        let (a, b) = if one.as_bytes() <= other.as_bytes() { (one, other) } else { (other, one) };
        Self(Arc::from(format!("d:{a}:{b}")))
    }

    pub fn group(id: &GroupId) -> Self {
        Self(Arc::from(format!("g:{id}")))
    }

    /// The two users of a direct conversation.
    pub fn peers(&self) -> Option<(UserId, UserId)> {
        match Shape::of(self)? {
            Shape::Direct(a, b) => Some((UserId::trusted(a), UserId::trusted(b))),
            Shape::Group => None,
        }
    }

    pub fn is_group(&self) -> bool {
        self.starts_with("g:")
    }
}

/// What a device is, for the choice of push channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    Web,
    Ios,
    Android,
    Desktop,
    Iot,
}

impl DeviceClass {
    pub const ALL: [Self; 5] = [Self::Web, Self::Ios, Self::Android, Self::Desktop, Self::Iot];

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.as_str() == text)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Web => "web",
            Self::Ios => "ios",
            Self::Android => "android",
            Self::Desktop => "desktop",
            Self::Iot => "iot",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversation_ids_name_two_sorted_users_or_a_group() {
        let rows = [
            ("d:a:b", true),
            ("d:a:a", true),
            ("d:b:a", false),
            ("d:a", false),
            ("d::b", false),
            ("d:a:b:c", false),
            ("g:team", true),
            ("g:", false),
            ("g:a:b", false),
            ("x:team", false),
            ("", false),
        ];
        for (text, valid) in rows {
            assert_eq!(ConversationId::parse(text).is_ok(), valid, "{text}");
        }
        let (a, b) = (UserId::trusted("bob"), UserId::trusted("alice"));
        assert_eq!(ConversationId::direct(&a, &b).as_str(), "d:alice:bob");
        assert_eq!(ConversationId::direct(&a, &b).peers(), Some((b, a)));
    }

    #[test]
    fn ids_are_bounded_and_hold_no_separators() {
        assert!(UserId::parse(&"x".repeat(64)).is_ok());
        assert!(UserId::parse(&"x".repeat(65)).is_err());
        assert!(UserId::parse("").is_err());
        assert!(UserId::parse("a:b").is_err());
        assert!(UserId::parse("a\nb").is_err());
        assert!(RoomName::parse("a:b c").is_ok() && RoomName::parse(&"x".repeat(128)).is_ok());
        for room in ["", "a\nb", &"x".repeat(129)] {
            assert!(RoomName::parse(room).is_err(), "{room:?}");
        }
        assert!(MessageId::parse("a:b").is_ok());
        assert!(MessageId::parse(&"x".repeat(65)).is_err());
    }
}
