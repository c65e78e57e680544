//! JSON objects that become structs.
//!
//! The code that serde derives takes an array for a struct as well, its elements for the fields in their order. On the
//! wire an object is an object: whatever others send is read with [`object`], and a struct in a field as [`Object`].

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};
use std::{fmt, marker::PhantomData};

/// Reads a text that is one JSON object.
pub fn object<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, serde_json::Error> {
    match text.trim_ascii_start().first() {
        Some(b'{') => serde_json::from_slice(text),
        _ => Err(serde_json::Error::custom("it is no JSON object")),
    }
}

/// A struct that is read from an object, and from nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }

        deserializer.deserialize_map(Fields(PhantomData)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Pair<'a> {
        name: &'a str,
        number: Option<u64>,
    }

    #[test]
    fn an_object_is_taken_and_an_array_is_not() {
        let rows = [
            (r#"{"name":"a","number":7}"#, Some(Pair { name: "a", number: Some(7) })),
            (" \n{\"name\":\"a\",\"more\":[1]}", Some(Pair { name: "a", number: None })),
            (r#"["a",7]"#, None),
            (r#"{"number":7}"#, None),
            ("7", None),
            ("", None),
        ];
        for (text, expected) in rows {
            assert_eq!(object::<Pair<'_>>(text.as_bytes()).ok(), expected, "{text}");
            let nested = serde_json::from_str::<Object<Pair<'_>>>(text);
            assert_eq!(nested.ok().map(|object| object.0), expected, "{text}");
        }
        let error = serde_json::from_str::<Object<Pair<'_>>>("[]").unwrap_err().to_string();
        assert!(error.contains("expected an object"), "{error}");
    }
}
