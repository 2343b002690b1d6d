//! A rate limit request: a domain, and descriptors made of entries.

use bytes::Bytes;
use thiserror::Error;

use super::quota::{InvalidQuota, Quota, Unit, Window};

/// A rate limit request, valid once made.
#[derive(Clone, Debug)]
pub struct Request {
    domain: String,
    descriptors: Vec<Descriptor>,
    hits_addend: u32,
}

impl Request {
    /// Returns a request as the caller sent it. `hits_addend` is the request's own number, 0 if the caller sent none.
    ///
    /// # Errors
    /// [`InvalidRequest::EmptyDomain`] and [`InvalidRequest::NoDescriptors`], checked in this order.
    pub fn new(domain: String, descriptors: Vec<Descriptor>, hits_addend: u32) -> Result<Self, InvalidRequest> {
        if domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        if descriptors.is_empty() {
            return Err(InvalidRequest::NoDescriptors);
        }
        Ok(Self { domain, descriptors, hits_addend })
    }

    /// Returns a request of which only the domain was read, because its message is too large.
    ///
    /// # Errors
    /// [`InvalidRequest::EmptyDomain`].
    pub fn unread(domain: String) -> Result<Self, InvalidRequest> {
        if domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        Ok(Self { domain, descriptors: Vec::new(), hits_addend: 0 })
    }

    /// Returns the same request with other descriptors: a part of it. `descriptors` has at least one.
    #[must_use]
    pub fn with(&self, descriptors: Vec<Descriptor>) -> Self {
        Self { domain: self.domain.clone(), descriptors, hits_addend: self.hits_addend }
    }

    /// Returns the domain, never empty.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Returns the descriptors in the order sent: at least one, unless the request is unread.
    pub fn descriptors(&self) -> &[Descriptor] {
        &self.descriptors
    }

    /// Returns the request's own addend as sent; 0 means none.
    pub fn hits_addend(&self) -> u32 {
        self.hits_addend
    }

    /// Returns the cost of a descriptor of this request: its own addend, 0 included, else the request's, at least 1.
    pub fn hits(&self, descriptor: &Descriptor) -> Hits {
        let hits = descriptor.hits_addend.unwrap_or_else(|| u64::from(self.hits_addend.max(1)));
        if descriptor.is_negative_hits { Hits::give_back(hits) } else { Hits::take(hits) }
    }
}

/// One thing to limit: entries from the outside in, and the caller's settings for it.
#[derive(Clone, Debug, Default)]
pub struct Descriptor {
    /// Keys and values, matched in this order.
    pub entries: Vec<Entry>,
    /// Limit sent with the request, in place of the rule's.
    pub limit: Option<Override>,
    /// Addend of the descriptor; a present 0 looks without spending.
    pub hits_addend: Option<u64>,
    /// True if the hits are given back instead of taken.
    pub is_negative_hits: bool,
    /// Index of the entry whose value is the address of a trusted proxy, because that of the client behind it is unknown. At this entry
    /// and after it, rules that are `exempt` or `unlimited` do not match.
    pub proxy_entry: Option<usize>,
}

impl Descriptor {
    /// Parses entries as people write them: `key=value,key=value`. In a value, `\,` is a comma and `\\` a backslash.
    ///
    /// # Errors
    /// [`InvalidEntry`], with the part of `text` that is no entry.
    ///
    /// ```
    /// use tidegate::model::Descriptor;
    ///
    /// let descriptor = Descriptor::parse(r"user=a\,b,path=/x=y,empty=")?;
    /// let entries: Vec<_> = descriptor.entries.iter().map(|entry| (&entry.key[..], &entry.value[..])).collect();
    /// assert_eq!(entries, [(&b"user"[..], &b"a,b"[..]), (b"path", b"/x=y"), (b"empty", b"")]);
    /// # Ok::<(), tidegate::model::InvalidEntry>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, InvalidEntry> {
        let entries = split(text).into_iter().map(|entry| match entry.split_once('=') {
            None => Err(InvalidEntry::NoValue(entry)),
            Some(("", _)) => Err(InvalidEntry::NoKey(entry)),
            Some((key, value)) => Ok(Entry::new(key.to_owned(), value.to_owned())),
        });
        Ok(Self { entries: entries.collect::<Result<_, _>>()?, ..Self::default() })
    }
}

/// A part of a text that is no entry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidEntry {
    /// There is no `=`.
    #[error("'{0}' is not an entry: write KEY=VALUE")]
    NoValue(String),
    /// Nothing is in front of the `=`.
    #[error("'{0}' has no key: write KEY=VALUE")]
    NoKey(String),
}

/// Splits `text` at the commas, except at commas after a backslash, and removes the backslashes.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            ',' => parts.push(String::new()),
            other => {
                let plain = if other == '\\' { characters.next().unwrap_or('\\') } else { other };
                if let Some(part) = parts.last_mut() {
                    part.push(plain);
                }
            }
        }
    }
    parts
}

/// A key and a value. Both are bytes, because a client's header may hold any bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Name of the entry, for instance `remote_address`.
    pub key: Bytes,
    /// Value, possibly empty.
    pub value: Bytes,
}

impl Entry {
    /// Returns an entry with this key and value.
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
    /// Returns an override of `limit` hits per `multiplier` units. `unit` is the unit's number in the protocol (7 is a week).
    ///
    /// # Errors
    /// [`InvalidRequest::OverrideUnit`] for a number that is no unit, [`InvalidRequest::OverrideWindow`] for a window that cannot
    /// be counted.
    pub fn new(limit: u32, unit: i32, multiplier: u32) -> Result<Self, InvalidRequest> {
        let named = unit_of_number(unit).ok_or(InvalidRequest::OverrideUnit { found: unit })?;
        let window = Window::of_units(named, multiplier)?;
        Ok(Self { quota: Quota::new(limit, window) })
    }

    /// Parses a limit such as `5/minute`. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let (number, unit) = text.split_once('/')?;
        Some(Self { quota: Quota::new(number.parse().ok()?, Window::of_unit(Unit::parse(unit)?)) })
    }

    /// Returns an override of `limit` hits per `multiplier` of `unit`; `None` for a window that cannot be counted.
    pub fn of_units(limit: u32, unit: Unit, multiplier: u32) -> Option<Self> {
        Window::of_units(unit, multiplier).ok().map(|window| Self { quota: Quota::new(limit, window) })
    }

    /// Returns the quota. Its burst equals its limit.
    pub fn quota(self) -> Quota {
        self.quota
    }
}

/// Returns the unit with this number in the protocol, in which MONTH and YEAR came before WEEK.
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

/// Cost of a charge: hits to take, a look that takes none, or hits to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hits(i64);

impl Hits {
    /// A look: reads the counter and spends nothing.
    pub const LOOK: Self = Self(0);
    /// Maximum number of hits that one charge can move: 2^32, one more than the largest limit.
    pub const MOST: u64 = 1 << 32;

    /// Returns hits to take. A number above [`Hits::MOST`] counts as `MOST`, because no limit holds more.
    pub fn take(hits: u64) -> Self {
        Self(clamped(hits))
    }

    /// Returns hits to give back, at most [`Hits::MOST`].
    pub fn give_back(hits: u64) -> Self {
        Self(-clamped(hits))
    }

    /// Returns `factor` times these hits; a look stays a look.
    #[must_use]
    pub fn times(self, factor: u64) -> Self {
        if self.0 < 0 {
            Self::give_back(self.given_back().saturating_mul(factor))
        } else {
            Self::take(self.taken().saturating_mul(factor))
        }
    }

    /// Returns the hits taken; 0 for a look and for hits given back.
    pub fn taken(self) -> u64 {
        u64::try_from(self.0).unwrap_or(0)
    }

    /// Returns the hits given back; 0 otherwise.
    pub fn given_back(self) -> u64 {
        u64::try_from(-self.0).unwrap_or(0)
    }
}

#[expect(clippy::cast_possible_wrap, reason = "at most 2^32")]
fn clamped(hits: u64) -> i64 {
    hits.min(Hits::MOST) as i64
}

/// Error in the caller's own configuration. A client of the limited API cannot cause it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidRequest {
    /// The domain is empty.
    #[error("rate limit domain must not be empty: set `domain` in the caller's rate limit configuration")]
    EmptyDomain,
    /// There are no descriptors.
    #[error(
        "rate limit descriptor list must not be empty: the caller's rate limit configuration must send at least one descriptor"
    )]
    NoDescriptors,
    /// No rule file has the domain. Only the [library](crate::embedded) takes it for an error: the service admits such a request and counts it.
    #[error("no rule file has the domain '{}': correct it, or add a rule file with this domain", readable(domain.as_bytes()))]
    UnknownDomain {
        /// Domain of the request.
        domain: String,
    },
    /// An override has a unit that the protocol does not define.
    #[error(
        "the limit override has the undefined unit {found}: send 1 (second), 2 (minute), 3 (hour), 4 (day), 5 (month), 6 (year) or 7 (week)"
    )]
    OverrideUnit {
        /// Number sent.
        found: i32,
    },
    /// The window of an override cannot be counted.
    #[error("the limit override cannot be counted: {0}")]
    OverrideWindow(#[from] InvalidQuota),
}

/// Returns a key or value for a terminal: UTF-8 as it is, and control characters, backslashes, characters that change how others are shown
/// and invalid bytes escaped.
pub fn readable(bytes: &[u8]) -> String {
    let mut shown = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '"' | '\'' => shown.push(c),
                c => shown.extend(c.escape_debug()),
            }
        }
        shown.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn entries_need_a_key_and_an_equals_sign() {
        assert_eq!(Descriptor::parse("user").err(), Some(InvalidEntry::NoValue("user".into())));
        assert_eq!(Descriptor::parse("a=b,=x").err(), Some(InvalidEntry::NoKey("=x".into())));
    }

    #[test]
    fn a_limit_is_a_number_per_unit() {
        let per_minute = Override::new(5, 2, 1).ok();
        assert_eq!((Override::parse("5/minute"), Override::of_units(5, Unit::Minute, 1)), (per_minute, per_minute));
        for wrong in ["5", "5/", "/minute", "-5/minute", "5/fortnight", "5/minute/2"] {
            assert_eq!(Override::parse(wrong), None, "{wrong}");
        }
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

    #[test]
    fn a_value_is_shown_as_people_read_it_and_what_would_change_the_line_is_escaped() {
        for (value, shown) in [
            ("zoë@例え.jp 'a' \"b\"".as_bytes(), "zoë@例え.jp 'a' \"b\""),
            (b"a\nb\x1b[31m\0", r"a\nb\u{1b}[31m\0"),
            ("a\u{202e}b\u{85}".as_bytes(), r"a\u{202e}b\u{85}"),
            (b"\xff\xc3(", r"\xff\xc3("),
            (br"\n", r"\\n"),
        ] {
            assert_eq!(readable(value), shown);
        }
    }
}
