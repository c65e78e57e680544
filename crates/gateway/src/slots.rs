//! Where a shard keeps its connections: pages that never move, and indices that tell a new tenant from the old.

/// Slots of one page.
const PAGE: usize = 256;
/// Generations have so many bits; they are part of a connection's number.
pub const GENERATION_BITS: u32 = 24;

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// A growing table with stable places. An index is used again, with another generation.
pub struct Slots<T> {
    pages: Vec<Vec<Slot<T>>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.pages.iter().flatten().filter(|slot| slot.value.is_some()).count()
    }

    /// One more than the largest index in use, now or earlier.
    pub fn end(&self) -> u32 {
        self.pages.last().map_or(0, |page| ((self.pages.len() - 1) * PAGE + page.len()) as u32)
    }

    /// Puts a value into a free slot; says where, and which generation this is (never 0).
    pub fn insert(&mut self, value: T) -> (u32, u32) {
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slot(index)
        {
            slot.generation = (slot.generation + 1) & ((1 << GENERATION_BITS) - 1);
            slot.generation = slot.generation.max(1);
            slot.value = Some(value);
            return (index, slot.generation);
        }
        if self.pages.last().is_none_or(|page| page.len() == PAGE) {
            self.pages.push(Vec::with_capacity(PAGE));
        }
        let index = self.end();
        if let Some(page) = self.pages.last_mut() {
            page.push(Slot { generation: 1, value: Some(value) });
        }
        (index, 1)
    }

    fn slot(&mut self, index: u32) -> Option<&mut Slot<T>> {
        self.pages.get_mut(index as usize / PAGE)?.get_mut(index as usize % PAGE)
    }

    pub fn at(&mut self, index: u32) -> Option<&mut T> {
        self.slot(index)?.value.as_mut()
    }

    /// The value at `index`, if it is still that generation's.
    pub fn of(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        let slot = self.slot(index)?;
        slot.value.as_mut().filter(|_| slot.generation == generation)
    }

    pub fn generation(&mut self, index: u32) -> u32 {
        self.slot(index).map_or(0, |slot| slot.generation)
    }

    pub fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.slot(index)?.value.take()?;
        self.free.push(index);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_used_again_by_another_generation() {
        let mut slots = Slots::default();
        let places: Vec<_> = (0..600).map(|n| slots.insert(n)).collect();
        assert_eq!((slots.len(), slots.end()), (600, 600));
        assert_eq!(places[599], (599, 1));
        assert_eq!(slots.remove(300), Some(300));
        assert_eq!(slots.remove(300), None);
        assert_eq!(slots.of(300, 1), None);
        assert_eq!(slots.insert(7), (300, 2));
        assert_eq!(slots.of(300, 1), None);
        assert_eq!(slots.of(300, 2), Some(&mut 7));
        assert_eq!(slots.at(300), Some(&mut 7));
        assert_eq!(slots.at(600), None);
        assert_eq!(slots.len(), 600);
    }
}
