//! Terms of leases: hits that an instance takes from a counter ahead of the requests that spend them.

use std::fmt;
use std::num::NonZeroU32;

use super::time::Micros;

/// Terms of the leases of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTerms {
    /// Part of the limit that the leases of all instances may hold together, in millionths.
    share: u32,
    ttl: Micros,
}

impl LeaseTerms {
    /// Accepted lengths of a lease, from 50 ms, in which an instance renews it a few times, to 1 min, for which a killed instance wastes it.
    pub const TTL: std::ops::RangeInclusive<Micros> = Micros::from_millis(50)..=Micros::from_secs(60);
    /// Length of a lease if none is set: 1 s.
    pub const DEFAULT_TTL: Micros = Micros::from_secs(1);
    /// Part of the limit if none is set: 5%, in millionths.
    pub const DEFAULT_SHARE: u32 = 50_000;
    /// A whole limit, in millionths.
    const WHOLE: u32 = 1_000_000;

    /// Returns terms with this part of the limit, in millionths from 1 to 1,000,000. `None` if the share or `ttl` is out of range.
    pub fn new(share: u32, ttl: Micros) -> Option<Self> {
        ((1..=Self::WHOLE).contains(&share) && Self::TTL.contains(&ttl)).then_some(Self { share, ttl })
    }

    /// Parses a share such as `5%` or `0.25%`: from 0.0001% to 100%. Returns millionths.
    pub fn parse_share(text: &str) -> Option<u32> {
        let (whole, part) = text.strip_suffix('%')?.split_once('.').unwrap_or((text.strip_suffix('%')?, ""));
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || whole.len() > 3 || part.len() > 4 || !is_number(whole) || !is_number(part) {
            return None;
        }
        let part: u32 = format!("{part:0<4}").parse().ok()?;
        let share = whole.parse::<u32>().ok()? * 10_000 + part;
        (1..=Self::WHOLE).contains(&share).then_some(share)
    }

    /// Returns the most hits that the leases of one instance may hold, of a limit of `limit` that `replicas` instances share.
    pub fn most(self, limit: u32, replicas: NonZeroU32) -> u64 {
        u64::from(limit) * u64::from(self.share) / u64::from(Self::WHOLE) / u64::from(replicas.get())
    }

    /// Returns the time for which a lease may be spent.
    pub const fn ttl(self) -> Micros {
        self.ttl
    }
}

impl Default for LeaseTerms {
    fn default() -> Self {
        Self { share: Self::DEFAULT_SHARE, ttl: Self::DEFAULT_TTL }
    }
}

/// Writes the share and the length: `5% for 1s`.
impl fmt::Display for LeaseTerms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.share / 10_000, self.share % 10_000);
        match part {
            0 => write!(f, "{whole}%")?,
            _ => write!(f, "{whole}.{}%", format!("{part:04}").trim_end_matches('0'))?,
        }
        write!(f, " for {}", self.ttl)
    }
}

/// Choice whether a limit has leases, and their terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leasing {
    /// The store decides each charge.
    #[default]
    Off,
    /// Leases pay for charges.
    On(LeaseTerms),
}

impl Leasing {
    /// Returns the terms if there are leases.
    pub const fn terms(self) -> Option<LeaseTerms> {
        match self {
            Self::Off => None,
            Self::On(terms) => Some(terms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage_with_up_to_four_decimals() {
        let shares = ["5%", "0.25%", "100%", "0.0001%", "100.0%"].map(LeaseTerms::parse_share);
        assert_eq!(shares, [Some(50_000), Some(2_500), Some(1_000_000), Some(1), Some(1_000_000)]);
        for wrong in
            ["", "%", "5", "0%", "0.0%", "100.0001%", "101%", "-5%", "+5%", "5.%%", ".5%", "5.00001%", "5 %", "1e1%"]
        {
            assert_eq!(LeaseTerms::parse_share(wrong), None, "{wrong:?}");
        }
        assert_eq!(LeaseTerms::default().to_string(), "5% for 1s");
        assert_eq!(LeaseTerms::new(2_500, Micros::from_millis(250)).unwrap().to_string(), "0.25% for 250ms");
    }

    #[test]
    fn an_instance_holds_its_part_of_the_share_rounded_down() {
        let most = |limit, replicas| LeaseTerms::default().most(limit, NonZeroU32::new(replicas).unwrap());
        assert_eq!([most(1_000, 1), most(1_000, 3), most(19, 1), most(20, 1), most(20, 2)], [50, 16, 0, 1, 0]);
        assert_eq!(most(u32::MAX, 1), 214_748_364);
    }
}
