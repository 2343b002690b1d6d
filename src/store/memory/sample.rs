//! The choice of the counter that a full shard evicts.
//!
//! A flood of made-up counters must not evict a counter whose loss admits hits. While at most half of the counters of a shard are
//! more than half used, such a counter is evicted only if all counters drawn with it are more than half used too. The 56 draws of
//! the second step are independent, so the chance is at most 2^-55 per evicted counter. It is below 1 in 1,000,000 for 10^10
//! evictions in one shard: with 64 shards, a million new counters a second for a week.

use hashbrown::HashTable;

use super::standing::Rank;

/// Counters compared in every choice: 8. They are adjacent, so that most choices read one place in memory.
const FIRST: usize = 8;
/// Maximum counters compared while all so far are more than half used: 64. Each after the first eight is drawn at a position of
/// its own. Adjacent counters would not be independent: evictions in one place leave the used ones together.
const MOST: usize = 64;

/// Maximum buckets tried for one draw: 64. A table that grows and shrinks is at least 7/32 full, so all of them are empty once in
/// 7 million draws. Such a draw takes the first counter of the table.
const MOST_TRIES: usize = 64;

/// Pseudo-random draws in one shard.
#[derive(Default)]
pub struct Sample {
    drawn: usize,
}

impl Sample {
    /// Returns the bucket of the lowest-ranked counter among those drawn; of equal ones, the first drawn. Returns `None` if there
    /// is no counter.
    pub fn least<T>(&mut self, table: &HashTable<T>, rank: impl Fn(&T) -> Rank) -> Option<usize> {
        let ranked = |bucket| table.get_bucket(bucket).map(|slot| (rank(slot), bucket));
        let first = self.draw(table).filter_map(ranked).take(FIRST);
        let mut least = first.min_by_key(|(rank, _)| *rank)?;
        for _ in FIRST..MOST {
            if !least.0.is_more_than_half_used() {
                break;
            }
            let other = self.draw(table).find_map(ranked)?;
            if other.0 < least.0 {
                least = other;
            }
        }
        Some(least.1)
    }

    /// Draws a counter; all have the same probability. Returns every bucket of the table, starting with that of the counter.
    fn draw<T>(&mut self, table: &HashTable<T>) -> impl Iterator<Item = usize> + use<T> {
        let buckets = table.num_buckets();
        // An empty bucket is drawn again. Taking the next counter after it would favour the neighbours of evicted counters.
        let mut drawn = std::iter::repeat_with(|| self.step(buckets)).take(MOST_TRIES);
        let begin = drawn.find(|&bucket| table.get_bucket(bucket).is_some()).unwrap_or(0);
        (begin..buckets).chain(0..begin)
    }

    fn step(&mut self, buckets: usize) -> usize {
        // A linear congruential step (Knuth's MMIX constants). The high bits are used: the lower ones repeat sooner.
        self.drawn = self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.drawn >> 32) * buckets) >> 32
    }
}

#[cfg(test)]
mod tests {
    use hashbrown::HashTable;

    use super::{FIRST, MOST, Sample};
    use crate::model::Micros;
    use crate::store::memory::standing::{Rank, Share, Standing};

    fn rank(remaining: u32) -> Rank {
        Standing::new(Micros::from_secs(1), Share::in_use(remaining, 100)).rank(Micros::ZERO)
    }

    /// Returns a table of `counters` little used counters, each at a position of its own.
    fn table(counters: u64) -> HashTable<Rank> {
        let mut table = HashTable::with_capacity(1_000);
        for number in 0..counters {
            table.insert_unique(number.wrapping_mul(0x9E37_79B9_7F4A_7C15), rank(99), |_| 0);
        }
        table
    }

    /// Each of 10^10 choices evicts one given counter that is more than half used only if it is drawn and all others drawn are
    /// more than half used too. The first eight are adjacent and do not count, and one draw is that counter's.
    #[test]
    fn the_chance_of_forgetting_a_used_counter_is_below_one_in_a_million() {
        let others = i32::try_from(MOST - FIRST - 1).expect("it is small");
        assert!(1e10 * 0.5_f64.powi(others) < 1e-6);
    }

    #[test]
    fn used_counters_that_lie_side_by_side_hide_none_of_the_others() {
        let mut table = table(900);
        let half = table.num_buckets() / 2;
        for bucket in 0..half {
            table.get_bucket_mut(bucket).into_iter().for_each(|slot| *slot = rank(0));
        }
        let mut sample = Sample::default();
        for choice in 0..100_000 {
            let least = sample.least(&table, |slot| *slot).expect("there are counters");
            assert!(least >= half, "choice {choice} is bucket {least}, which is fully used");
        }
    }

    #[test]
    fn every_counter_is_drawn_as_often_as_the_others() {
        let table = table(900);
        let mut drawn = vec![0_u32; table.num_buckets()];
        let mut sample = Sample::default();
        for _ in 0..900_000 {
            drawn[sample.draw(&table).next().expect("a bucket")] += 1;
        }
        for (bucket, &count) in drawn.iter().enumerate() {
            // 1,000 is the mean, and five standard deviations are 158.
            let expected = if table.get_bucket(bucket).is_some() { 842..1_158 } else { 0..1 };
            assert!(expected.contains(&count), "bucket {bucket} was drawn {count} times");
        }
    }

    #[test]
    fn a_table_of_few_counters_is_looked_through_and_an_empty_one_has_none() {
        let mut sample = Sample::default();
        assert_eq!(sample.least(&HashTable::<Rank>::new(), |slot| *slot), None);
        let mut table = table(3);
        let used = table.find_bucket_index(0, |_| true).expect("the first of them");
        table.get_bucket_mut(used).into_iter().for_each(|slot| *slot = rank(100));
        assert_eq!(sample.least(&table, |slot| *slot), Some(used));
    }
}
