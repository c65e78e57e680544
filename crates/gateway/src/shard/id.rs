//! The number of a connection: 8 bits for its shard, 24 for the generation of its slot, 32 for the slot. Never 0.

use crate::slots::GENERATION_BITS;

pub fn encode(shard: usize, generation: u32, index: u32) -> u64 {
    (shard as u64) << 56 | u64::from(generation) << 32 | u64::from(index)
}

pub fn shard(connection: u64) -> usize {
    (connection >> 56) as usize
}

/// Slot and generation.
pub fn place(connection: u64) -> (u32, u32) {
    (connection as u32, (connection >> 32) as u32 & ((1 << GENERATION_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_where_a_connection_is() {
        for (s, g, i) in [(0, 1, 0), (255, (1 << 24) - 1, u32::MAX), (3, 77, 12_345)] {
            let connection = encode(s, g, i);
            assert_eq!((shard(connection), place(connection)), (s, (i, g)));
            assert_ne!(connection, 0);
        }
    }
}
