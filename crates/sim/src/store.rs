//! The store: the naive one of `bowline_store`, with what a disk does to it. A transaction is carried out at the moment
//! at which it would be on disk, and its outcome is told later; what a crash finds before that moment is there
//! afterwards or is not.

use crate::{
    plants::Plant,
    rng::Rng,
    world::{Event, World},
};
use bowline_delivery::persist::{Batch, Found, LedgerDelta, Outcome, PARTITION_COUNT, Query, Write};
use bowline_protocol::MessageId;
use bowline_store::{Reader, Writer, model::Model};
use std::collections::BTreeMap;

#[derive(Default)]
pub struct Store {
    model: Model,
    epoch: u64,
    /// Transactions that are not on disk yet, and who gave them.
    pending: BTreeMap<u64, (usize, Batch)>,
    next_ticket: u64,
    fails_until: u64,
    reads_fail_until: u64,
    /// It was restarted, or its router was.
    has_restarted: bool,
    /// The state before the last transaction; kept for the faults that need it.
    before: Option<Model>,
}

impl Store {
    /// Another owner: what comes under an older epoch is refused from now on.
    pub fn take_over(&mut self, epoch: u64) {
        self.has_restarted |= epoch > 1;
        self.epoch = epoch;
        for partition in 0..PARTITION_COUNT {
            self.model.take_over(partition, epoch);
        }
    }

    pub fn heal(&mut self, now: u64) {
        self.fails_until = self.fails_until.min(now);
        self.reads_fail_until = self.reads_fail_until.min(now);
    }

    pub fn fail_until(&mut self, until: u64, reads_too: bool) {
        self.fails_until = self.fails_until.max(until);
        if reads_too {
            self.reads_fail_until = self.reads_fail_until.max(until);
        }
    }

    /// Carries a transaction out. Returns what the store says, and what is durable then.
    fn carry_out(
        &mut self,
        mut batch: Batch,
        plant: Option<Plant>,
        rng: &mut Rng,
    ) -> (Outcome, Option<Batch>) {
        if matches!(plant, Some(Plant::SyncIgnored | Plant::ReadsOldState)) {
            self.before = Some(self.model.fork());
        }
        match plant {
            Some(Plant::StaleOwner) => {
                // Neither the epoch nor the index over the numbers is looked at.
                batch.fences.iter_mut().for_each(|fence| fence.epoch = self.epoch);
                return self.without_index(batch);
            }
            Some(Plant::SeqReused) if self.has_restarted => return self.without_index(batch),
            Some(Plant::DedupeForgotten) if self.has_restarted => {
                let mut renamed = batch.clone();
                rename(&mut renamed, &mut self.next_ticket);
                let outcome = self.model.commit(&renamed);
                let durable = (outcome == Outcome::Committed).then_some(batch);
                return (outcome, durable);
            }
            Some(plant) => spoil(&mut batch, plant, rng),
            None => {}
        }
        let mut written = batch.clone();
        if plant == Some(Plant::RemovedMemberStays) {
            written.writes.retain(|write| !matches!(write, Write::RemoveMember { .. }));
        }
        let outcome = self.model.commit(&written);
        let durable = (outcome == Outcome::Committed).then_some(batch);
        (outcome, durable)
    }

    /// A store that takes whatever number comes.
    fn without_index(&mut self, batch: Batch) -> (Outcome, Option<Batch>) {
        match self.model.commit(&batch) {
            Outcome::Refused(faults)
                if faults.iter().all(|(_, fault)| {
                    matches!(fault, bowline_delivery::persist::Refused::SeqTaken { .. })
                }) =>
            {
                (Outcome::Committed, Some(batch))
            }
            Outcome::Committed => (Outcome::Committed, Some(batch)),
            other => (other, None),
        }
    }

    fn read(&mut self, query: &Query, plant: Option<Plant>) -> Found {
        let model = match (plant, query, &mut self.before) {
            (Some(Plant::ReadsOldState), Query::Waiting { .. }, Some(before)) => before,
            _ => &mut self.model,
        };
        let mut found = model.read(query);
        match (plant, &mut found) {
            (Some(Plant::SeqReused), Found::Conversation(Some(state)))
                if self.has_restarted && state.last > 1 =>
            {
                state.last -= 1;
                state.tail.pop();
            }
            (Some(Plant::DedupeForgotten), Found::Conversation(Some(state))) => {
                state.tail.iter_mut().for_each(|message| message.id = named_before(&message.id));
            }
            (Some(Plant::DedupeForgotten), Found::Messages(messages)) => {
                messages.iter_mut().for_each(|message| message.id = named_before(&message.id));
            }
            _ => {}
        }
        found
    }
}

/// What a planted fault makes of a transaction.
fn spoil(batch: &mut Batch, plant: Plant, rng: &mut Rng) {
    if plant == Plant::LedgerApart && rng.chance(100) {
        batch.ledger = LedgerDelta::default();
    }
    for write in &mut batch.writes {
        let Write::PutMember { member, .. } = write else { continue };
        match plant {
            Plant::CursorEarly if rng.chance(100) => member.delivered += 1,
            Plant::CursorBack if member.read > 0 && rng.chance(100) => member.read -= 1,
            Plant::UnreadCountsOwn => member.own_above_read = 0,
            _ => {}
        }
    }
}

/// Makes the ids of messages new, so that no index knows them; [`named_before`] gives the old ones back.
fn rename(batch: &mut Batch, number: &mut u64) {
    for write in &mut batch.writes {
        if let Write::Message(message) = write {
            *number += 1;
            message.id = MessageId::trusted(&format!("{}~{number}", message.id));
        }
    }
}

fn named_before(id: &MessageId) -> MessageId {
    MessageId::trusted(id.split('~').next().unwrap_or_default())
}

impl World {
    /// A router gives a transaction to the store.
    pub fn commit(&mut self, router: usize, batch: Batch) {
        let delay = self.rng.range(0, self.plan.network.commit_ms);
        if self.now < self.store.fails_until {
            let outcome = Outcome::Failed("the disk is full".into());
            return self.after(delay, tell(router, outcome));
        }
        let has_messages = batch.writes.iter().any(|write| matches!(write, Write::Message(_)));
        let is_early = match self.plant {
            Some(Plant::AckBeforeSync) => true,
            Some(Plant::ReceiptEarly) => !has_messages,
            _ => false,
        };
        self.store.next_ticket += 1;
        let ticket = self.store.next_ticket;
        self.store.pending.insert(ticket, (router, batch));
        if is_early {
            self.after(delay, tell(router, Outcome::Committed));
            return self.after(delay + 150, Event::Sync { ticket });
        }
        self.after(delay, Event::Sync { ticket });
    }

    /// The transaction is on disk; its outcome is on the way.
    pub fn on_sync(&mut self, ticket: u64) {
        let Some((router, batch)) = self.store.pending.remove(&ticket) else { return };
        let outcome = self.store_batch(router, batch);
        let delay = self.rng.range(0, self.plan.network.commit_ms);
        self.after(delay, tell(router, outcome));
    }

    fn store_batch(&mut self, router: usize, batch: Batch) -> Outcome {
        let (outcome, durable) = self.store.carry_out(batch, self.plant, &mut self.rng);
        if let Some(batch) = &durable {
            self.note(|| format!("router {router} stored {}", brief(batch)));
            let checked = self.model.on_durable(batch, self.owner.is_none_or(|owner| owner == router));
            self.check(checked);
        } else {
            self.note(|| format!("router {router} could not store: {outcome:?}"));
        }
        outcome
    }

    /// The store ends and comes again. What was under way is on disk or is not; routers that live are told which.
    pub fn crash_store(&mut self) {
        self.store.has_restarted = true;
        let all = std::mem::take(&mut self.store.pending);
        if self.plant == Some(Plant::SyncIgnored)
            && let Some(before) = self.store.before.take()
        {
            self.store.model = before;
        }
        for (_, (router, batch)) in all {
            let outcome = match self.rng.chance(500) {
                true => self.store_batch(router, batch),
                false => Outcome::Failed("the store was restarted".into()),
            };
            let delay = self.rng.range(0, 50);
            self.after(delay, tell(router, outcome));
        }
    }

    pub fn on_read(&mut self, router: usize, read: u64, query: &Query, answer_at: u64) {
        let found = match self.now < self.store.reads_fail_until {
            true => Found::Failed("the disk fails".into()),
            false => self.store.read(query, self.plant),
        };
        let event = Box::new(bowline_delivery::Event::Found { read, found });
        self.at(answer_at, Event::Tell { router, event });
    }
}

fn tell(router: usize, outcome: Outcome) -> Event {
    Event::Tell { router, event: Box::new(bowline_delivery::Event::Outcome(outcome)) }
}

/// A transaction in one line.
fn brief(batch: &Batch) -> String {
    let line = |write: &Write| match write {
        Write::CreateConversation { conversation, .. } => format!("new {conversation}"),
        Write::Message(m) => format!("{} {} = {}", m.conversation, m.seq, m.id),
        Write::PutMember { conversation, user, member: m } => {
            let lagging: Vec<String> = m.lagging.iter().map(|(d, n)| format!(" {d}:{n}")).collect();
            let lagging = lagging.concat();
            format!("{user} in {conversation} first {} has {} read {}{lagging}", m.first, m.delivered, m.read)
        }
        Write::RemoveMember { conversation, user } => format!("{user} out of {conversation}"),
        Write::PutDevice { user, device, .. } => format!("device {user}/{device}"),
        other => format!("{other:?}"),
    };
    batch.writes.iter().map(line).collect::<Vec<_>>().join(", ")
}
