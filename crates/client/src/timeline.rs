//! One conversation as a client holds it: messages come in order, each once, and gaps are fetched.

use crate::core::Message;
use std::collections::BTreeMap;

/// What a conversation needs next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Nothing,
    /// History after this number.
    After(u64),
    /// The newest page: nothing is known of what was there before.
    Newest,
}

/// Numbers of own messages that are remembered while nothing is known of the others.
const OWN_KEPT: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// Up to here everything was handed out; none before anything is known.
    position: Option<u64>,
    /// What came ahead of its turn; none for an own message, which the sender has.
    ahead: BTreeMap<u64, Option<Message>>,
    /// The newest number that was heard of.
    newest: u64,
    asked: bool,
    /// It was refused for now.
    refused: bool,
    /// The position that was last told to the server.
    told: u64,
}

impl Timeline {
    pub fn at(position: u64) -> Self {
        Self { position: Some(position), told: position, ..Self::default() }
    }

    /// A push, or the number of an own message.
    pub fn on_message(&mut self, seq: u64, message: Option<Message>) {
        if self.position.is_none() {
            if message.is_none() && seq > 1 {
                // An acknowledgement may come before the notice of what lies below it.
                self.ahead.insert(seq, None);
                if self.ahead.len() > OWN_KEPT {
                    self.ahead.pop_first();
                }
                return;
            }
            if self.newest == 0 {
                // Pushes come behind the notices, and nothing was announced: the device had everything before.
                self.begin_at(seq - 1);
            }
        }
        self.newest = self.newest.max(seq);
        if Some(seq) > self.position {
            self.ahead.entry(seq).or_insert(message);
        }
    }

    fn begin_at(&mut self, position: u64) {
        self.position = Some(position);
        self.ahead = self.ahead.split_off(&(position + 1));
        self.newest = self.newest.max(self.ahead.keys().next_back().copied().unwrap_or(0));
    }

    /// Something up to `last` waits; numbers below `first` are not for this user.
    pub fn on_notice(&mut self, first: u64, last: u64) {
        self.newest = self.newest.max(last);
        self.skip_below(first);
        // The server does not know how far this device is, although it may have said so: it is told again.
        self.told = 0;
    }

    pub fn on_page(&mut self, first: u64, messages: Vec<Message>, more: bool) {
        (self.asked, self.refused) = (false, false);
        let newest_page = self.position.is_none();
        if newest_page && messages.is_empty() && first <= self.newest {
            // As below: it is asked again.
            (self.asked, self.refused) = (true, true);
            return;
        }
        if newest_page {
            self.begin_at(messages.first().map_or(first.max(1), |m| m.seq) - 1);
        }
        self.skip_below(first);
        if messages.is_empty() && !more && self.position < Some(self.newest) && !newest_page {
            // What was announced is not there, and not hidden either: whoever answered is behind. It is asked again.
            (self.asked, self.refused) = (true, true);
        }
        for message in messages {
            self.newest = self.newest.max(message.seq);
            if Some(message.seq) > self.position {
                self.ahead.entry(message.seq).or_insert(Some(message));
            }
        }
    }

    fn skip_below(&mut self, first: u64) {
        if let Some(position) = &mut self.position
            && *position + 1 < first
        {
            *position = first - 1;
            self.ahead = self.ahead.split_off(&first);
        }
    }

    /// Takes what is in order now.
    pub fn take(&mut self) -> Vec<Message> {
        let mut taken = Vec::new();
        while let Some(position) = self.position
            && let Some(message) = self.ahead.remove(&(position + 1))
        {
            self.position = Some(position + 1);
            taken.extend(message);
        }
        taken
    }

    /// What is to be fetched; asked once until the page comes.
    pub fn need(&mut self) -> Need {
        if self.asked {
            return Need::Nothing;
        }
        match self.position {
            None if self.newest > 0 => {
                self.asked = true;
                Need::Newest
            }
            Some(position) if position < self.newest => {
                self.asked = true;
                Need::After(position)
            }
            _ => Need::Nothing,
        }
    }

    /// The position, when the server has to be told.
    pub fn take_news(&mut self) -> Option<u64> {
        let position = self.position.filter(|position| *position > self.told)?;
        self.told = position;
        Some(position)
    }

    /// What was asked was refused for now: it is asked again when somebody says so.
    pub fn on_refused(&mut self) {
        self.refused = true;
    }

    /// It is waiting to be asked again.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// It was refused for good: what is missing will not come, what is there is handed out.
    pub fn give_up(&mut self) {
        self.asked = false;
        let next = self.ahead.keys().next().map_or(self.newest, |seq| seq - 1);
        self.position = self.position.max(Some(next));
    }

    /// It is time to ask again.
    pub fn ask_again(&mut self) {
        if std::mem::take(&mut self.refused) {
            self.asked = false;
        }
    }

    /// The connection ended: what was asked will not be answered, and what was told may not have arrived.
    pub fn on_disconnected(&mut self) {
        (self.asked, self.refused) = (false, false);
        self.told = 0;
    }

    pub fn position(&self) -> Option<u64> {
        self.position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(seq: u64) -> Message {
        Message { seq, ..Message::default() }
    }

    fn taken(timeline: &mut Timeline) -> Vec<u64> {
        timeline.take().iter().map(|m| m.seq).collect()
    }

    #[test]
    fn a_gap_is_fetched_once_and_what_came_meanwhile_keeps_its_place() {
        let mut timeline = Timeline::at(2);
        timeline.on_message(5, Some(message(5)));
        assert_eq!(
            (taken(&mut timeline), timeline.need(), timeline.need()),
            (vec![], Need::After(2), Need::Nothing)
        );
        timeline.on_message(6, Some(message(6)));
        timeline.on_message(5, Some(message(5)));
        timeline.on_page(1, vec![message(3), message(4), message(5)], false);
        assert_eq!(taken(&mut timeline), [3, 4, 5, 6]);
        assert_eq!(
            (timeline.need(), timeline.take_news(), timeline.take_news()),
            (Need::Nothing, Some(6), None)
        );
    }

    #[test]
    fn what_was_announced_is_fetched_although_an_own_message_is_acknowledged_before() {
        for notice_first in [true, false] {
            let mut timeline = Timeline::default();
            if notice_first {
                timeline.on_notice(1, 1);
                assert_eq!(timeline.need(), Need::Newest);
                timeline.on_message(2, None);
            } else {
                timeline.on_message(2, None);
                assert_eq!(timeline.need(), Need::Nothing);
                timeline.on_notice(1, 1);
                assert_eq!(timeline.need(), Need::Newest);
            }
            assert_eq!((taken(&mut timeline), timeline.take_news()), (vec![], None));
            timeline.on_page(1, vec![message(1), message(2)], false);
            assert_eq!((taken(&mut timeline), timeline.position()), (vec![1], Some(2)));
        }
    }

    #[test]
    fn a_push_behind_own_messages_begins_the_conversation() {
        let mut timeline = Timeline::default();
        timeline.on_message(7, None);
        timeline.on_message(8, Some(message(8)));
        timeline.on_message(10, None);
        timeline.on_message(9, Some(message(9)));
        assert_eq!(
            (taken(&mut timeline), timeline.position(), timeline.need()),
            (vec![8, 9], Some(10), Need::Nothing)
        );
    }

    #[test]
    fn own_messages_fill_their_numbers() {
        let mut timeline = Timeline::default();
        timeline.on_message(1, None);
        timeline.on_message(2, Some(message(2)));
        timeline.on_message(3, None);
        timeline.on_message(4, Some(message(4)));
        assert_eq!(taken(&mut timeline), [2, 4]);
        assert_eq!(timeline.position(), Some(4));
    }

    #[test]
    fn an_acknowledgement_hides_nothing_that_is_announced_later() {
        for announced_first in [true, false] {
            let mut timeline = Timeline::default();
            if announced_first {
                timeline.on_notice(1, 3);
            }
            timeline.on_message(4, None);
            if !announced_first {
                timeline.on_notice(1, 3);
            }
            timeline.on_message(5, Some(message(5)));
            assert_eq!((timeline.need(), taken(&mut timeline)), (Need::Newest, vec![]));
            assert_eq!(timeline.take_news(), None);
            timeline.on_page(1, (1..=4).map(message).collect(), false);
            assert_eq!((taken(&mut timeline), timeline.take_news()), (vec![1, 2, 3, 5], Some(5)));
        }
    }

    #[test]
    fn what_is_announced_although_it_is_here_is_acknowledged_again() {
        let mut timeline = Timeline::at(3);
        assert_eq!(timeline.take_news(), None);
        timeline.on_notice(1, 3);
        assert_eq!((timeline.need(), timeline.take_news()), (Need::Nothing, Some(3)));
    }

    #[test]
    fn what_is_not_for_this_user_is_no_gap() {
        let mut timeline = Timeline::at(2);
        timeline.on_notice(7, 8);
        assert_eq!(timeline.need(), Need::After(6));
        timeline.on_page(9, vec![], false);
        assert_eq!((taken(&mut timeline), timeline.need()), (vec![], Need::Nothing));
    }

    #[test]
    fn a_page_that_lacks_what_was_announced_hides_nothing() {
        let mut timeline = Timeline::at(2);
        timeline.on_notice(1, 3);
        assert_eq!(timeline.need(), Need::After(2));
        timeline.on_page(1, vec![], false);
        assert_eq!(
            (timeline.need(), timeline.position(), timeline.is_refused()),
            (Need::Nothing, Some(2), true)
        );
        timeline.ask_again();
        assert_eq!(timeline.need(), Need::After(2));
        timeline.on_page(1, vec![message(3)], false);
        assert_eq!((taken(&mut timeline), timeline.need()), (vec![3], Need::Nothing));

        let mut timeline = Timeline::default();
        timeline.on_notice(1, 3);
        assert_eq!(timeline.need(), Need::Newest);
        timeline.on_page(1, vec![], false);
        assert_eq!((timeline.position(), timeline.is_refused()), (None, true));
        // Cleared meanwhile: there is nothing to come.
        timeline.on_page(4, vec![], false);
        assert_eq!((timeline.position(), timeline.need()), (Some(3), Need::Nothing));
    }

    #[test]
    fn a_client_that_knows_nothing_takes_the_newest_page() {
        let mut timeline = Timeline::default();
        timeline.on_notice(1, 300);
        assert_eq!(timeline.need(), Need::Newest);
        timeline.on_page(1, (101..=300).map(message).collect(), true);
        assert_eq!(timeline.take().len(), 200);
        assert_eq!(timeline.need(), Need::Nothing);
    }
}
