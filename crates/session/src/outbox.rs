//! Frames that wait for the socket.

use bytes::Bytes;
use std::{collections::VecDeque, io::IoSlice};

/// One frame, framed for its transport.
#[derive(Debug, Clone)]
pub struct Chunk {
    pub bytes: Bytes,
    /// A push, as opposed to an answer to the client's own request or a word of the gateway.
    pub push: bool,
}

/// The queue of one connection. It exists only while something is unsent.
#[derive(Debug, Default)]
pub struct Outbox {
    chunks: VecDeque<Chunk>,
    /// How much of the first chunk is written.
    written: usize,
    bytes: usize,
    push_bytes: usize,
}

impl Outbox {
    pub fn push(&mut self, chunk: Chunk) {
        if chunk.bytes.is_empty() {
            return;
        }
        self.bytes += chunk.bytes.len();
        if chunk.push {
            self.push_bytes += chunk.bytes.len();
        }
        self.chunks.push_back(chunk);
    }

    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Bytes that are not written yet.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Those of them that are pushes.
    pub fn push_bytes(&self) -> usize {
        self.push_bytes
    }

    pub fn frames(&self) -> usize {
        self.chunks.len()
    }

    /// Room for how many chunks is kept.
    pub fn capacity(&self) -> usize {
        self.chunks.capacity()
    }

    /// The first chunk's unwritten bytes.
    pub fn front(&self) -> Option<&[u8]> {
        self.chunks.front().map(|chunk| &chunk.bytes[self.written..])
    }

    /// Fills `slices` from the front and says how many it filled.
    pub fn fill<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut filled = 0;
        for (slice, chunk) in slices.iter_mut().zip(&self.chunks) {
            let skip = if filled == 0 { self.written } else { 0 };
            *slice = IoSlice::new(&chunk.bytes[skip..]);
            filled += 1;
        }
        filled
    }

    /// Notes that so many bytes are written; says how many frames that completed.
    pub fn on_written(&mut self, mut count: usize) -> usize {
        let mut frames = 0;
        self.bytes -= count;
        while let Some(chunk) = self.chunks.front() {
            let left = chunk.bytes.len() - self.written;
            let step = count.min(left);
            if chunk.push {
                self.push_bytes -= step;
            }
            count -= step;
            if step < left {
                self.written += step;
                break;
            }
            self.chunks.pop_front();
            self.written = 0;
            frames += 1;
        }
        frames
    }

    /// Drops all frames but one that was begun; says how many.
    pub fn drop_whole_frames(&mut self) -> usize {
        let keep = usize::from(self.written > 0);
        let dropped = self.chunks.len().saturating_sub(keep);
        self.chunks.truncate(keep);
        self.bytes = self.chunks.iter().map(|chunk| chunk.bytes.len()).sum::<usize>() - self.written;
        self.push_bytes = if self.chunks.iter().any(|chunk| chunk.push) { self.bytes } else { 0 };
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(text: &'static str, push: bool) -> Chunk {
        Chunk { bytes: Bytes::from_static(text.as_bytes()), push }
    }

    fn text(outbox: &Outbox) -> String {
        let mut slices = [IoSlice::new(&[]); 8];
        let filled = outbox.fill(&mut slices);
        slices[..filled].iter().map(|slice| std::str::from_utf8(slice).unwrap()).collect()
    }

    #[test]
    fn frames_leave_in_order_however_they_are_written() {
        for step in 1..12 {
            let mut outbox = Outbox::default();
            for (frame, push) in [("abc", true), ("", true), ("de", false), ("fghi", true)] {
                outbox.push(chunk(frame, push));
            }
            assert_eq!((outbox.bytes(), outbox.push_bytes(), outbox.frames()), (9, 7, 3));
            let (mut seen, mut frames) = (String::new(), 0);
            while !outbox.is_empty() {
                let now = text(&outbox);
                let front = outbox.front().expect("something waits");
                assert!(!front.is_empty() && now.as_bytes().starts_with(front), "{front:?} of {now}");
                let count = step.min(now.len());
                seen.push_str(&now[..count]);
                frames += outbox.on_written(count);
            }
            assert_eq!((seen.as_str(), frames), ("abcdefghi", 3));
            assert_eq!((outbox.bytes(), outbox.push_bytes(), outbox.front()), (0, 0, None));
        }
    }

    #[test]
    fn what_is_kept_after_a_burst_shows_in_the_capacity() {
        let mut outbox = Outbox::default();
        assert_eq!(outbox.capacity(), 0, "nothing before there is something to say");
        (0..100).for_each(|_| outbox.push(chunk("x", true)));
        outbox.on_written(100);
        assert!(outbox.is_empty() && outbox.capacity() >= 100);
    }

    #[test]
    fn a_frame_that_was_begun_is_finished() {
        let mut outbox = Outbox::default();
        for frame in ["abc", "def", "ghi"] {
            outbox.push(chunk(frame, true));
        }
        outbox.on_written(4);
        assert_eq!(outbox.drop_whole_frames(), 1);
        outbox.push(chunk("!", false));
        assert_eq!((text(&outbox).as_str(), outbox.bytes(), outbox.push_bytes()), ("ef!", 3, 2));
        outbox.on_written(2);
        assert_eq!(outbox.drop_whole_frames(), 1);
        assert!(outbox.is_empty() && outbox.bytes() == 0);
    }
}
