//! What is asked: a domain, and descriptors made of entries.

use bytes::Bytes;
use thiserror::Error;

use super::quota::{InvalidQuota, Quota, Unit, Window};

/// One question: may this pass? Valid once made.
#[derive(Clone, Debug)]
pub struct Request {
    domain: String,
    descriptors: Vec<Descriptor>,
    hits_addend: u32,
}

impl Request {
    /// A request as the caller sent it; `hits_addend` is the caller's own number, 0 when it sent none.
    ///
    /// # Errors
    /// [`InvalidRequest::EmptyDomain`] and [`InvalidRequest::NoDescriptors`], asked in this order.
    pub fn new(domain: String, descriptors: Vec<Descriptor>, hits_addend: u32) -> Result<Self, InvalidRequest> {
        if domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        if descriptors.is_empty() {
            return Err(InvalidRequest::NoDescriptors);
        }
        Ok(Self { domain, descriptors, hits_addend })
    }

    /// A request of which only the domain was read, because its message is too large.
    ///
    /// # Errors
    /// [`InvalidRequest::EmptyDomain`].
    pub fn unread(domain: String) -> Result<Self, InvalidRequest> {
        if domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        Ok(Self { domain, descriptors: Vec::new(), hits_addend: 0 })
    }

    /// The same request with other descriptors, at least one: a part of it.
    #[must_use]
    pub fn with(&self, descriptors: Vec<Descriptor>) -> Self {
        Self { domain: self.domain.clone(), descriptors, hits_addend: self.hits_addend }
    }

    /// The domain, never empty.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// The descriptors in the order sent: at least one, unless the request is unread.
    pub fn descriptors(&self) -> &[Descriptor] {
        &self.descriptors
    }

    /// The request's own addend as sent; 0 stands for none.
    pub fn hits_addend(&self) -> u32 {
        self.hits_addend
    }

    /// What a descriptor of this request costs: its own addend, 0 included, else the request's, at least 1.
    pub fn hits(&self, descriptor: &Descriptor) -> Hits {
        let hits = descriptor.hits_addend.unwrap_or_else(|| u64::from(self.hits_addend.max(1)));
        if descriptor.is_negative_hits { Hits::give_back(hits) } else { Hits::take(hits) }
    }
}

/// One thing to be limited: entries from the outside in, and what the caller says about it.
#[derive(Clone, Debug, Default)]
pub struct Descriptor {
    /// Keys and values, matched in this order.
    pub entries: Vec<Entry>,
    /// A limit sent with the request, in place of the rule's.
    pub limit: Option<Override>,
    /// The descriptor's own addend; a present 0 looks without spending.
    pub hits_addend: Option<u64>,
    /// Whether the hits are given back instead of taken.
    pub is_negative_hits: bool,
}

/// A key and a value: bytes, because a client's header may hold any.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// What is described, for instance `remote_address`.
    pub key: Bytes,
    /// Its value, possibly empty.
    pub value: Bytes,
}

impl Entry {
    /// An entry of text.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { key: key.into(), value: value.into() }
    }
}

/// A limit that the caller sends with a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Override {
    quota: Quota,
}

impl Override {
    /// `limit` hits per `multiplier` units, the unit by its number in the protocol (7 is a week).
    ///
    /// # Errors
    /// [`InvalidRequest::OverrideUnit`] for a number that is no unit, [`InvalidRequest::OverrideWindow`] for a window
    /// that cannot be counted.
    pub fn new(limit: u32, unit: i32, multiplier: u32) -> Result<Self, InvalidRequest> {
        let named = unit_of_number(unit).ok_or(InvalidRequest::OverrideUnit { found: unit })?;
        let window = Window::of_units(named, multiplier)?;
        Ok(Self { quota: Quota::new(limit, window) })
    }

    /// The quota, with a burst of its limit.
    pub fn quota(self) -> Quota {
        self.quota
    }
}

/// The numbers of the protocol: MONTH and YEAR came before WEEK.
fn unit_of_number(number: i32) -> Option<Unit> {
    Some(match number {
        1 => Unit::Second,
        2 => Unit::Minute,
        3 => Unit::Hour,
        4 => Unit::Day,
        5 => Unit::Month,
        6 => Unit::Year,
        7 => Unit::Week,
        _ => return None,
    })
}

/// What a charge costs: hits to take, a look that takes none, or hits to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hits(i64);

impl Hits {
    /// Reads the counter and spends nothing.
    pub const LOOK: Self = Self(0);
    /// The most hits one charge can move: 2^32, one more than the largest limit.
    pub const MOST: u64 = 1 << 32;

    /// Hits to take; what is above [`Hits::MOST`] is as much as that, because no limit holds it.
    pub fn take(hits: u64) -> Self {
        Self(clamped(hits))
    }

    /// Hits to give back.
    pub fn give_back(hits: u64) -> Self {
        Self(-clamped(hits))
    }

    /// So many times as many; a look stays a look.
    #[must_use]
    pub fn times(self, factor: u64) -> Self {
        if self.0 < 0 {
            Self::give_back(self.given_back().saturating_mul(factor))
        } else {
            Self::take(self.taken().saturating_mul(factor))
        }
    }

    /// Hits taken; 0 for a look and for hits given back.
    pub fn taken(self) -> u64 {
        u64::try_from(self.0).unwrap_or(0)
    }

    /// Hits given back; 0 otherwise.
    pub fn given_back(self) -> u64 {
        u64::try_from(-self.0).unwrap_or(0)
    }
}

#[expect(clippy::cast_possible_wrap, reason = "at most 2^32")]
fn clamped(hits: u64) -> i64 {
    hits.min(Hits::MOST) as i64
}

/// What the caller's own configuration got wrong. Nothing that a client of the limited API controls leads here.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidRequest {
    /// No domain.
    #[error("rate limit domain must not be empty: set `domain` in the caller's rate limit configuration")]
    EmptyDomain,
    /// No descriptors.
    #[error(
        "rate limit descriptor list must not be empty: the caller's rate limit configuration must send at least one descriptor"
    )]
    NoDescriptors,
    /// An override with a unit the protocol does not define.
    #[error(
        "the limit override has the undefined unit {found}: send 1 (second), 2 (minute), 3 (hour), 4 (day), 5 (month), 6 (year) or 7 (week)"
    )]
    OverrideUnit {
        /// The number sent.
        found: i32,
    },
    /// An override whose window cannot be counted.
    #[error("the limit override is not one that can be counted: {0}")]
    OverrideWindow(#[from] InvalidQuota),
}

#[cfg(test)]
mod tests {
    use super::{Descriptor, Entry, Hits, InvalidRequest, Override, Request};

    fn request(own: Option<u64>, of_request: u32) -> Hits {
        let descriptor = Descriptor { entries: vec![Entry::new("k", "v")], hits_addend: own, ..Descriptor::default() };
        let request = Request::new("d".into(), vec![descriptor.clone()], of_request).expect("it is valid");
        request.hits(&descriptor)
    }

    #[test]
    fn a_descriptors_addend_wins_over_the_requests() {
        assert_eq!(request(None, 0), Hits::take(1));
        assert_eq!(request(None, 7), Hits::take(7));
        assert_eq!(request(Some(3), 7), Hits::take(3));
        assert_eq!(request(Some(0), 7), Hits::LOOK);
        assert_eq!(request(Some(u64::MAX), 0).taken(), Hits::MOST);
    }

    #[test]
    fn only_the_callers_configuration_can_be_wrong() {
        assert_eq!(Request::new(String::new(), vec![], 0).err(), Some(InvalidRequest::EmptyDomain));
        assert_eq!(Request::new("d".into(), vec![], 0).err(), Some(InvalidRequest::NoDescriptors));
        assert_eq!(Override::new(1, 0, 1).err(), Some(InvalidRequest::OverrideUnit { found: 0 }));
        assert_eq!(Override::new(1, 8, 1).err(), Some(InvalidRequest::OverrideUnit { found: 8 }));
        assert!(matches!(Override::new(1, 1, 0), Err(InvalidRequest::OverrideWindow(_))));
        assert!(matches!(Override::new(1, 6, 2), Err(InvalidRequest::OverrideWindow(_))));
        assert!(Override::new(1, 7, 2).is_ok());
    }
}
