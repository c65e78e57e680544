//! How values stand in columns.

use bowline_delivery::persist::Member;
use bowline_protocol::{Body, DeviceId, Seq, frame::Role, ids::DeviceClass};
use bytes::Bytes;
use rusqlite::{
    Result, Row, ToSql,
    types::{FromSqlError, ToSqlOutput, ValueRef},
};

/// An id chosen by a client. A UUID in its canonical lower-case form takes 16 bytes instead of 36, in the row and
/// in its index; the column's type tells which form it is, so that two different ids are never equal.
pub(super) enum Packed<'a> {
    Text(&'a str),
    Uuid([u8; 16]),
}

/// Where the dashes of a UUID are.
const DASHES: [usize; 4] = [8, 13, 18, 23];

impl<'a> Packed<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self::uuid(text.as_bytes()).map_or(Self::Text(text), Self::Uuid)
    }

    fn uuid(text: &[u8]) -> Option<[u8; 16]> {
        if text.len() != 36 {
            return None;
        }
        let (mut bytes, mut digits) = ([0; 16], 0);
        for (at, byte) in text.iter().enumerate() {
            let digit = match byte {
                b'-' if DASHES.contains(&at) => continue,
                _ if DASHES.contains(&at) => return None,
                b'0'..=b'9' => byte - b'0',
                b'a'..=b'f' => byte - b'a' + 10,
                _ => return None,
            };
            bytes[digits / 2] = bytes[digits / 2] << 4 | digit;
            digits += 1;
        }
        Some(bytes)
    }
}

impl ToSql for Packed<'_> {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Uuid(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

/// The id of a [`Packed`] column.
pub(super) fn unpack<T>(value: ValueRef<'_>, parse: impl FnOnce(&str) -> T) -> Result<T> {
    let ValueRef::Blob(bytes) = value else { return Ok(parse(value.as_str()?)) };
    let bytes: [u8; 16] = bytes
        .try_into()
        .map_err(|_| FromSqlError::InvalidBlobSize { expected_size: 16, blob_size: bytes.len() })?;
    let mut text = [b'-'; 36];
    let mut at = 0;
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            while DASHES.contains(&at) {
                at += 1;
            }
            text[at] = b"0123456789abcdef"[usize::from(digit)];
            at += 1;
        }
    }
    Ok(parse(std::str::from_utf8(&text).expect("hexadecimal digits are UTF-8")))
}

/// [`unpack`] of a column that may be NULL.
pub(super) fn unpack_optional<T>(value: ValueRef<'_>, parse: impl FnOnce(&str) -> T) -> Result<Option<T>> {
    match value {
        ValueRef::Null => Ok(None),
        value => unpack(value, parse).map(Some),
    }
}

pub(super) fn role_code(role: Role) -> i64 {
    match role {
        Role::Member => 0,
        Role::Admin => 1,
        Role::Owner => 2,
    }
}

fn role(code: i64) -> Result<Role> {
    match code {
        0 => Ok(Role::Member),
        1 => Ok(Role::Admin),
        2 => Ok(Role::Owner),
        other => Err(FromSqlError::OutOfRange(other).into()),
    }
}

pub(super) fn body_kind(body: &Body) -> i64 {
    match body {
        Body::Json(_) => 0,
        Body::Binary(_) => 1,
    }
}

pub(super) fn body(kind: i64, bytes: Bytes) -> Result<Body> {
    match kind {
        0 => Ok(Body::Json(bytes)),
        1 => Ok(Body::Binary(bytes)),
        other => Err(FromSqlError::OutOfRange(other).into()),
    }
}

/// A class that a later version knows and this one does not reads as none.
pub(super) fn class(value: ValueRef<'_>) -> Result<Option<DeviceClass>> {
    Ok(value.as_str_or_null()?.and_then(DeviceClass::parse))
}

/// Positions of devices as one blob: length of the id, the id, the number in base 128. NULL when there are none.
pub(super) fn lagging_blob(lagging: &[(DeviceId, Seq)]) -> Option<Vec<u8>> {
    if lagging.is_empty() {
        return None;
    }
    let mut blob = Vec::with_capacity(lagging.len() * 24);
    for (device, seq) in lagging {
        blob.push(u8::try_from(device.len()).expect("ids are at most 64 bytes long"));
        blob.extend_from_slice(device.as_bytes());
        let mut rest = *seq;
        while rest >= 0x80 {
            blob.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        blob.push(rest as u8);
    }
    Some(blob)
}

pub(super) fn lagging(value: ValueRef<'_>) -> Result<Vec<(DeviceId, Seq)>> {
    let Some(mut blob) = value.as_blob_or_null()? else { return Ok(Vec::new()) };
    let mut lagging = Vec::new();
    while let Some((length, rest)) = blob.split_first() {
        let entry = rest.split_at_checked(usize::from(*length)).and_then(|(device, rest)| {
            let (seq, rest) = number(rest)?;
            blob = rest;
            Some((DeviceId::trusted(std::str::from_utf8(device).ok()?), seq))
        });
        lagging.push(entry.ok_or(FromSqlError::InvalidType)?);
    }
    Ok(lagging)
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0;
    for (at, byte) in bytes.iter().enumerate().take(10) {
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some((number, &bytes[at + 1..]));
        }
    }
    None
}

/// Reads a member's columns from `role` to `lagging`, of which the first is column `at`.
pub(super) fn member(row: &Row<'_>, at: usize) -> Result<Member> {
    Ok(Member {
        role: role(row.get(at)?)?,
        joined: unsigned(row, at + 1)?,
        first: unsigned(row, at + 2)?,
        delivered: unsigned(row, at + 3)?,
        read: unsigned(row, at + 4)?,
        own_above_delivered: unsigned(row, at + 5)?,
        own_above_read: unsigned(row, at + 6)?,
        lagging: lagging(row.get_ref(at + 7)?)?,
    })
}

pub(super) fn unsigned(row: &Row<'_>, at: usize) -> Result<u64> {
    row.get::<_, i64>(at).map(|number| number as u64)
}

/// Numbers beyond what the database holds are beyond everything in it.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A hash as it stands in its column.
pub(super) fn hash(value: ValueRef<'_>) -> Result<u128> {
    let bytes = value.as_blob()?;
    let bytes = bytes
        .try_into()
        .map_err(|_| FromSqlError::InvalidBlobSize { expected_size: 16, blob_size: bytes.len() })?;
    Ok(u128::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_read_back_as_they_were_written() {
        let rows = [
            ("8f14e45f-ceea-467f-a0e6-1d4a3c8b9e21", true),
            ("00000000-0000-0000-0000-000000000000", true),
            ("8F14E45F-ceea-467f-a0e6-1d4a3c8b9e21", false),
            ("8f14e45fceea-467f-a0e6-1d4a3c8b9e21a-", false),
            ("8f14e45f-ceea-467f-a0e6-1d4a3c8b9e2", false),
            ("8f14e45f-ceea-467f-a0e6-1d4a3c8b9e2g", false),
            ("8f14e45f-ceea-467f-a0e6-1d4a3c8b9-21", false),
            ("01ARZ3NDEKTSV4RRFFQ69G5FAV", false),
            ("x", false),
        ];
        for (text, short) in rows {
            let packed = Packed::new(text);
            let value = match &packed {
                Packed::Text(text) => ValueRef::Text(text.as_bytes()),
                Packed::Uuid(bytes) => ValueRef::Blob(bytes),
            };
            assert_eq!(matches!(packed, Packed::Uuid(_)), short, "{text}");
            assert_eq!(unpack(value, str::to_owned).unwrap(), text);
        }
    }

    #[test]
    fn positions_of_devices_read_back_and_a_cut_blob_is_an_error() {
        let positions: Vec<_> =
            [("phone", 0), ("p", 127), (&"x".repeat(64), 128), ("tablet", i64::MAX as u64)]
                .map(|(device, seq)| (DeviceId::trusted(device), seq))
                .to_vec();
        let blob = lagging_blob(&positions).unwrap();
        assert_eq!(lagging(ValueRef::Blob(&blob)).unwrap(), positions);
        assert_eq!(lagging(ValueRef::Null).unwrap(), []);
        assert_eq!(lagging_blob(&[]), None);
        assert!(lagging(ValueRef::Blob(&blob[..blob.len() - 1])).is_err());
        assert!(lagging(ValueRef::Blob(&blob[..3])).is_err());
    }
}
