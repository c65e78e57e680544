//! The bodies of the bench: a text that says which message it is and when it was due.

use super::wire;
use memchr::memmem::Finder;

/// Mark, number, a letter and the microsecond.
const MARK: &str = "\"~b";
const NUMBER_DIGITS: usize = 12;
const TIME_DIGITS: usize = 16;
/// Without the quotes.
pub const BODY_BYTES_MIN: usize = MARK.len() - 1 + NUMBER_DIGITS + 1 + TIME_DIGITS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub number: u64,
    /// When it was due, on the monotonic clock.
    pub due_us: u64,
}

impl Stamp {
    /// Appends a JSON text of so many bytes.
    pub fn write(self, out: &mut Vec<u8>, body_bytes: usize) {
        let Self { number, due_us } = self;
        let text = format!("{MARK}{number:0NUMBER_DIGITS$}t{due_us:0TIME_DIGITS$}");
        out.extend_from_slice(text.as_bytes());
        out.resize(out.len() + body_bytes.saturating_sub(BODY_BYTES_MIN), b'x');
        out.push(b'"');
    }
}

/// Finds bodies in frames that carry them.
pub struct Reader {
    mark: Finder<'static>,
}

impl Reader {
    pub fn new() -> Self {
        Self { mark: Finder::new(MARK) }
    }

    /// The first body and where it ends.
    pub fn next(&self, text: &[u8]) -> Option<(Stamp, usize)> {
        let (number, at) = wire::number_behind(text, &self.mark)?;
        let time = text.get(at + 1..at + 1 + TIME_DIGITS)?;
        let due_us = std::str::from_utf8(time).ok()?.parse().ok()?;
        Some((Stamp { number, due_us }, at + 1 + TIME_DIGITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_found_again() {
        let stamp = Stamp { number: 42, due_us: 1_234_567_890_123 };
        for body_bytes in [0, BODY_BYTES_MIN, 200] {
            let mut frame = br#"{"type":"room.push","room":"r","offset":7,"body":"#.to_vec();
            let head = frame.len();
            stamp.write(&mut frame, body_bytes);
            assert_eq!(frame.len() - head, body_bytes.max(BODY_BYTES_MIN) + 2);
            frame.push(b'}');
            assert!(serde_json::from_slice::<serde_json::Value>(&frame).is_ok());
            assert_eq!(Reader::new().next(&frame).map(|(found, _)| found), Some(stamp));
        }
        assert_eq!(Reader::new().next(b"{\"body\":\"~b12\"}"), None);
    }
}
