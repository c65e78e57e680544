//! What can be judged only when nothing more will come.

use super::{Judge, Kind, Name, SKIPPED_MAX, Skipped, Verdict, Violation};
use std::collections::HashMap;

impl Judge {
    /// Nothing more will come.
    pub fn finish(mut self, us: u64) -> Verdict {
        for device in 0..self.devices.len() {
            self.on_closed(us, device);
        }
        self.judge_lost(us);
        self.judge_skipped();
        self.judge_numbers(us);
        self.judge_senders(us);
        self.judge_unanswered(us);
        self.verdict
    }

    fn judge_lost(&mut self, us: u64) {
        for message in 0..self.messages.count() {
            let (conversation, seq) = (self.messages[message].conversation, self.messages[message].seq);
            if seq == 0 {
                continue;
            }
            let id = self.messages[message].id.clone();
            let of = self.conversations[conversation].id.clone();
            let acked = if self.messages[message].acked { "acknowledged" } else { "stored" };
            if self.messages.at(conversation, seq) != Some(message) {
                let text =
                    format!("{id} was {acked} as number {seq} of {of}, and another message has that number");
                self.blame(Kind::Lost, us, conversation, seq, Some(id), text);
                continue;
            }
            let mut without = Vec::new();
            let mut forgotten = Vec::new();
            for (index, device) in self.devices.iter().enumerate() {
                let Some(holding) = device.conversations.get(&conversation) else { continue };
                let is_sender = self.messages[message].device == index;
                if !is_sender && !holding.has(seq) {
                    without.push(device.name.clone());
                } else if device.is_reviewed && !holding.review.contains(seq) {
                    forgotten.push(device.name.clone());
                }
            }
            let text = if !without.is_empty() {
                let names = some_of(&without);
                format!(
                    "{id} was {acked} as number {seq} of {of}, and never reached {names}, by push or by history"
                )
            } else if !forgotten.is_empty() {
                let names = some_of(&forgotten);
                format!(
                    "{id} was {acked} as number {seq} of {of}; in the end the history did not have it for {names}"
                )
            } else {
                continue;
            };
            self.blame(Kind::Lost, us, conversation, seq, Some(id), text);
        }
    }

    /// A device sends its own messages on one connection and may be cut off before the ack; those are not pushed to it.
    /// What it never had is lost, and counted there.
    fn judge_skipped(&mut self) {
        for Skipped { us, device, conversation, first, last } in std::mem::take(&mut self.skipped) {
            let holding = &self.devices[device].conversations[&conversation];
            let is_told = |seq: &u64| match self.messages.at(conversation, *seq) {
                Some(message) => self.messages[message].device == device || !holding.has(*seq),
                None => true,
            };
            let mut untold = (first..=last).take(SKIPPED_MAX).filter(|seq| !is_told(seq));
            let Some(seq) = untold.next() else { continue };
            let more = untold.count() as u64;
            let text = format!(
                "{} was neither pushed nor announced number {seq} of {}, although it was connected; only the history \
                 had it",
                self.devices[device].name, self.conversations[conversation].id
            );
            self.blame(Kind::Gap, us, conversation, seq, None, text);
            self.verdict.counts[Kind::Gap as usize] += more;
        }
    }

    fn judge_numbers(&mut self, us: u64) {
        for conversation in 0..self.conversations.len() {
            for (first, last) in self.messages.unused_numbers(conversation) {
                let of = self.conversations[conversation].id.clone();
                let which = if first == last { format!("{first}") } else { format!("{first} to {last}") };
                let newest = self.messages.last(conversation);
                let text =
                    format!("no message of {of} has the number {which}, although its numbers go to {newest}");
                let violation = Violation {
                    kind: Kind::Gap,
                    us,
                    text,
                    conversation: Some(of),
                    seq: Some(first),
                    id: None,
                };
                self.verdict.add(last - first + 1, violation);
            }
        }
    }

    /// Messages are known in the order in which they were first sent.
    fn judge_senders(&mut self, us: u64) {
        let mut newest: HashMap<(usize, usize), usize> = HashMap::new();
        for message in 0..self.messages.count() {
            let sent = &self.messages[message];
            if sent.seq == 0 || sent.was_refused {
                continue;
            }
            let before = newest.insert((sent.device, sent.conversation), message);
            let Some(before) = before.filter(|before| self.messages[*before].seq > sent.seq) else {
                continue;
            };
            let (earlier, conversation, seq) = (&self.messages[before], sent.conversation, sent.seq);
            let text = format!(
                "{} sent {} and then {}, which are numbers {} and {seq} of {}",
                self.devices[sent.device].name,
                earlier.id,
                sent.id,
                earlier.seq,
                self.conversations[conversation].id
            );
            self.blame(Kind::Reordered, us, conversation, seq, None, text);
        }
    }

    fn judge_unanswered(&mut self, us: u64) {
        for message in 0..self.messages.count() {
            let sent = &self.messages[message];
            if !sent.acked && !sent.is_refused {
                let (device, id, to) = (&self.devices[sent.device].name, sent.id.clone(), sent.conversation);
                let text =
                    format!("{device} sent {id} to {} and was never answered", self.conversations[to].id);
                let conversation = Some(self.conversations[to].id.clone());
                let violation =
                    Violation { kind: Kind::Unanswered, us, text, conversation, seq: None, id: Some(id) };
                self.verdict.add(1, violation);
            }
        }
    }
}

fn some_of(names: &[Name]) -> String {
    match names {
        [one] => one.to_string(),
        [one, two] => format!("{one} and {two}"),
        [one, rest @ ..] => format!("{one} and {} other devices", rest.len()),
        [] => String::new(),
    }
}
