//! A map with a bound: two generations, of which the older one is dropped when the younger is full.

use std::{borrow::Borrow, collections::HashMap, hash::Hash};

/// Holds at most `2 × generation` entries; one that was used in the last `generation` insertions is held.
pub(crate) struct Cache<K, V> {
    young: HashMap<K, V, ahash::RandomState>,
    old: HashMap<K, V, ahash::RandomState>,
    generation: usize,
}

impl<K: Hash + Eq + Clone, V: Copy> Cache<K, V> {
    pub(crate) fn new(generation: usize) -> Self {
        Self { young: HashMap::default(), old: HashMap::default(), generation }
    }

    /// The entry, to be read or changed in place.
    pub(crate) fn find<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if !self.young.contains_key(key) {
            let (key, value) = self.old.remove_entry(key)?;
            self.insert(key, value);
        }
        self.young.get_mut(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.young.len() >= self.generation {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    pub(crate) fn forget<Q>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.young.remove(key);
        self.old.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::Cache;

    #[test]
    fn what_is_used_stays_and_the_rest_goes() {
        let mut cache = Cache::<u32, u32>::new(10);
        cache.insert(1, 100);
        for key in 2..1000 {
            cache.insert(key, key);
            assert_eq!(cache.find(&1).copied(), Some(100), "after {key}");
            assert!(cache.young.len() <= 10 && cache.old.len() <= 10);
        }
        assert_eq!(cache.find(&2), None);
        assert_eq!(cache.find(&999).copied(), Some(999));
        cache.forget(&1);
        assert_eq!(cache.find(&1), None);
    }

    #[test]
    fn a_value_inserted_again_hides_the_older_one() {
        let mut cache = Cache::<u32, u32>::new(2);
        cache.insert(1, 1);
        cache.insert(2, 2);
        cache.insert(3, 3);
        cache.insert(1, 10);
        cache.insert(4, 4);
        assert_eq!(cache.find(&1).copied(), Some(10));
    }
}
