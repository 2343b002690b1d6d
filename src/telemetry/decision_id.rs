//! The id of a decision: a client can quote it, and the instance that made it finds the refusal that it belongs to.
//!
//! An id is one block of 128 bits: the number of the instance, a part of the digest by which the refusal is kept, the second of the
//! decision, and a counter. It is encrypted, so that nobody can read from it how many decisions there are, or which are alike.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::model::Micros;

/// Digits of an id, in the order of their values: base 32 without letters that look like digits.
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Digits of 128 bits.
const LENGTH: usize = 26;
/// Bits of the digest and of the mark of a shadow refusal: 32. Of the 32,768 refusals that are kept at most, another one has the same part once
/// in 65,000 cases.
const PART: u32 = 32;
/// Mark of a shadow refusal: the bit above those of the digest.
const SHADOW: u64 = 1 << (PART - 1);
/// Bits of the second: 24, which is 194 days. Refusals are kept for an hour at most.
const TIME: u32 = 24;
/// Bits of the counter: 24, so that ids of the same second differ.
const COUNTER: u32 = 24;
/// Rounds of the cipher: 4, so that a block looks random to those who see ids and choose what they are about (Luby and Rackoff, 1988).
const ROUNDS: u8 = 4;

/// An id of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionId(u128);

/// Error for a text that is no id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an id of a decision has {LENGTH} digits and letters, such as 3v8k2m9c4q7r1t6x5z0d8f2h4j")]
pub struct NotAnId;

/// The ids that one instance makes.
pub struct DecisionIds {
    key: [u8; 32],
    instance: u64,
    next: AtomicU64,
}

/// A decision of this instance, as its id tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Meaning of the id.
    pub meaning: Meaning,
    /// Time of the decision, in whole seconds.
    pub at: Micros,
}

/// Meaning of an id of this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The request was admitted.
    Admitted,
    /// The request was refused, and its refusal is kept by a digest that ends like this.
    Refused(DigestPart),
    /// The request was admitted because of a shadow mode, and the first refusal that this spared it is kept by a digest that ends like this.
    AdmittedByShadow(DigestPart),
}

/// The part of a digest that an id has; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestPart(u64);

impl DigestPart {
    /// Returns the part of `digest`.
    pub fn of(digest: u64) -> Self {
        Self((digest % SHADOW).max(1))
    }
}

impl DecisionIds {
    /// Returns the ids of an instance with these random bytes.
    pub fn new(key: [u8; 32], instance: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = instance;
        Self { key, instance: u64::from_be_bytes([0, 0, a, b, c, d, e, f]), next: AtomicU64::new(0) }
    }

    /// Returns the next id, for a decision of this meaning at `now`.
    pub fn next(&self, meaning: Meaning, now: Micros) -> DecisionId {
        let counter = self.next.fetch_add(1, Ordering::Relaxed) % (1 << COUNTER);
        let part = match meaning {
            Meaning::Admitted => 0,
            Meaning::Refused(DigestPart(part)) => part,
            Meaning::AdmittedByShadow(DigestPart(part)) => part | SHADOW,
        };
        let of_decision = part << TIME | (seconds(now) % (1 << TIME));
        let block = u128::from(self.instance) << (PART + TIME + COUNTER)
            | u128::from(of_decision) << COUNTER
            | u128::from(counter);
        let [mut left, mut right] = halves(block);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ self.mix(round, right));
        }
        DecisionId(block_of([left, right]))
    }

    /// Returns the decision of an id, which was made before `now`. `None` if another instance made it, or nobody.
    pub fn read(&self, id: DecisionId, now: Micros) -> Option<Made> {
        let [mut left, mut right] = halves(id.0);
        for round in (0..ROUNDS).rev() {
            (left, right) = (right ^ self.mix(round, left), left);
        }
        let block = block_of([left, right]);
        let of_decision = u64::try_from(block >> COUNTER & ((1 << (PART + TIME)) - 1)).ok()?;
        let is_own = block >> (PART + TIME + COUNTER) == u128::from(self.instance);
        let part = of_decision >> TIME;
        let meaning = match (part, part & SHADOW) {
            (0, _) => Meaning::Admitted,
            (_, 0) => Meaning::Refused(DigestPart(part)),
            (_, _) => Meaning::AdmittedByShadow(DigestPart(part & !SHADOW)),
        };
        let ago = seconds(now).wrapping_sub(of_decision) % (1 << TIME);
        is_own.then(|| Made { meaning, at: Micros::from_secs(seconds(now).saturating_sub(ago)) })
    }

    fn mix(&self, round: u8, half: u64) -> u64 {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[round]).update(&half.to_be_bytes());
        let mut first = [0; 8];
        hasher.finalize_xof().fill(&mut first);
        u64::from_be_bytes(first)
    }
}

fn seconds(time: Micros) -> u64 {
    time.get() / 1_000_000
}

fn halves(block: u128) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = block.to_be_bytes();
    [u64::from_be_bytes([a, b, c, d, e, f, g, h]), u64::from_be_bytes([i, j, k, l, m, n, o, p])]
}

fn block_of([left, right]: [u64; 2]) -> u128 {
    u128::from(left) << 64 | u128::from(right)
}

impl fmt::Debug for DecisionIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecisionIds").finish_non_exhaustive()
    }
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digit = |place: usize| {
            let value = usize::try_from(self.0 >> (5 * (LENGTH - 1 - place)) & 31).unwrap_or_default();
            char::from(DIGITS.get(value).copied().unwrap_or(b'0'))
        };
        f.write_str(&(0..LENGTH).map(digit).collect::<String>())
    }
}

impl FromStr for DecisionId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let text = text.trim();
        if text.len() != LENGTH {
            return Err(NotAnId);
        }
        let mut block: u128 = 0;
        for letter in text.bytes() {
            let value = (0_u8..32).zip(DIGITS).find(|(_, digit)| **digit == letter.to_ascii_lowercase());
            let (value, _) = value.ok_or(NotAnId)?;
            // The first digit has three bits.
            block = block.checked_mul(32).ok_or(NotAnId)? | u128::from(value);
        }
        Ok(Self(block))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_id_means_what_it_was_made_for_at_its_own_instance_only(
            key: [u8; 32], instance: [u8; 6], other: [u8; 6], digest: u64, made in 0..1_u64 << 40, ago in 0..1_u64 << TIME,
        ) {
            prop_assume!(instance != other);
            let (at, now) = (Micros::from_secs(made), Micros::from_secs(made + ago));
            let ids = DecisionIds::new(key, instance);
            let part = DigestPart::of(digest);
            for meaning in [Meaning::Admitted, Meaning::Refused(part), Meaning::AdmittedByShadow(part)] {
                let id = ids.next(meaning, at);
                let read: DecisionId = id.to_string().parse().expect("it is one");
                prop_assert_eq!(ids.read(read, now), Some(Made { meaning, at }));
                prop_assert_eq!(DecisionIds::new(key, other).read(id, now), None);
            }
        }

        #[test]
        fn a_text_that_is_no_id_is_refused(text in "[0-9a-z]{0,30}") {
            let read = text.parse::<DecisionId>();
            prop_assert!(read.is_err() || read.is_ok_and(|id| id.to_string() == text));
        }
    }

    #[test]
    fn ids_of_the_same_meaning_differ_and_show_nothing_of_it() {
        let ids = DecisionIds::new([7; 32], [1; 6]);
        let made: std::collections::BTreeSet<String> =
            (0..1_000).map(|_| ids.next(Meaning::Admitted, Micros::ZERO).to_string()).collect();
        assert_eq!(made.len(), 1_000);
        let first: std::collections::BTreeSet<&str> = made.iter().map(|id| &id[..4]).collect();
        assert!(first.len() > 990, "ids in a row begin differently: {}", first.len());
    }
}
