//! The descriptors that are refused or asked about most, by rule.
//!
//! A Space-Saving sketch in buckets of eight places. A new descriptor replaces the one with the lowest count in its bucket. It may have had a
//! place before, so it starts with the highest counts that were ever replaced there. These are its possible error: a count is never too
//! small, and too large by at most its error.
//!
//! The path of the rule and the entries are the identity of a descriptor, so its counts stay when the rules are reloaded.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::escape::{MOST_WORD, word};
use super::sample::SAMPLE;
use crate::model::{Clock, Decision, Entry, Micros, Path, Request};

/// Number of locks: 64, so that threads rarely meet.
const STRIPES: usize = 64;
/// Buckets of a lock: 16.
const BUCKETS: usize = 16;
/// Places of a bucket: 8. With all of them, 8,192 places.
const PLACES: usize = 8;
/// Maximum text of a descriptor: that of its first entry at least. Keys and values beyond it are left out.
const MOST_TEXT: usize = 2 * (MOST_WORD + 5);
/// Maximum memory of the sketch: 4 MiB, with texts of which an allocator makes up to a quarter more.
const MOST_BYTES: usize = 4 << 20;
const _: () = assert!(
    STRIPES * size_of::<Mutex<Stripe>>() + STRIPES * BUCKETS * PLACES * (MOST_TEXT + MOST_TEXT / 4) <= MOST_BYTES
);
/// Length of the windows of the counts.
pub const WINDOW: Micros = Micros::from_secs(60);

/// The sketch.
pub struct Top {
    clock: Arc<dyn Clock>,
    hasher: foldhash::fast::RandomState,
    stripes: Box<[Mutex<Stripe>]>,
    /// Counts that are missing because another thread was in the way.
    missed: AtomicU64,
}

type Stripe = [Bucket; BUCKETS];

/// A request, its decision, and the index of the descriptor that is counted.
type Asked<'r, 'a> = (&'r Request, &'r Decision<'a>, usize);

#[derive(Default)]
struct Bucket {
    /// Number of the window of the counts.
    window: u64,
    places: [Place; PLACES],
    /// The highest counts that were replaced.
    lost_refused: Count,
    lost_asked: Count,
}

/// A descriptor under a rule, and its counts.
#[derive(Default)]
struct Place {
    digest: u64,
    rule: Option<Arc<Path>>,
    /// Its entries: key and value of each, behind their lengths in a byte.
    text: Vec<u8>,
    is_cut: bool,
    refused: Count,
    asked: Count,
    /// Counts that may not be its own.
    refused_error: Count,
    asked_error: Count,
}

/// Events in the present window and in the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    now: u32,
    before: u32,
}

/// One of the descriptors with the highest counts.
#[derive(Clone, Debug)]
pub struct Heavy {
    /// Path of the rule.
    pub rule: Arc<Path>,
    /// Keys and values as they may be shown.
    pub entries: Vec<(Box<str>, Box<str>)>,
    /// True if some of its text is missing.
    pub is_cut: bool,
    /// Refusals in the last minute.
    pub refused: Estimate,
    /// Requests in the last minute, admitted or not.
    pub asked: Sampled,
}

/// The descriptors that are kept, and the bound of all others.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Descriptors, in no order.
    pub heavy: Vec<Heavy>,
    /// Most refusals in the last minute of a descriptor that is not among them.
    pub unlisted: u64,
}

/// A number of which one event in 16 is counted. It has no upper bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// Lower bound: the events that are counted, or are known otherwise.
    pub least: u64,
    /// 16 for each event that is counted, and at least the lower bound.
    pub estimate: u64,
}

/// A number that is at most `most`, and at least `most` less `error`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Upper bound.
    pub most: u64,
    /// Most by which it is too large.
    pub error: u64,
}

impl Top {
    /// Returns an empty sketch.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let stripes = std::iter::repeat_with(|| Mutex::new(Stripe::default())).take(STRIPES).collect();
        let hasher = foldhash::fast::RandomState::default();
        Self { clock, hasher, stripes, missed: AtomicU64::new(0) }
    }

    /// Counts a refusal of `now`. `entries` is the hash of those of the descriptor.
    pub(super) fn refused(&self, asked: Asked<'_, '_>, rule: &Arc<Path>, entries: u64, now: Micros) {
        self.count(asked, rule, entries, now, |place| place.refused.add(1));
    }

    /// Counts a sampled request of `now`.
    pub(super) fn asked(&self, asked: Asked<'_, '_>, rule: &Arc<Path>, entries: u64, now: Micros) {
        self.count(asked, rule, entries, now, |place| place.asked.add(SAMPLE));
    }

    fn count(
        &self,
        (request, decision, descriptor): Asked<'_, '_>,
        rule: &Arc<Path>,
        entries_hash: u64,
        now: Micros,
        add: fn(&mut Place),
    ) {
        let Some(entries) = request.descriptors().get(descriptor).map(|descriptor| &descriptor.entries) else { return };
        let digest = self.hasher.hash_one((rule.digest(), entries_hash));
        let window = now.get() / WINDOW.get();
        let index = usize::try_from(digest % (STRIPES * BUCKETS) as u64).unwrap_or_default();
        let Some(mut stripe) = self.stripes.get(index / BUCKETS).and_then(Mutex::try_lock) else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let Some(bucket) = stripe.get_mut(index % BUCKETS) else { return };
        bucket.move_to(window);
        let known = bucket.places.iter().position(|place| place.digest == digest && place.rule.is_some());
        let index = known.unwrap_or_else(|| bucket.lightest());
        let Some(place) = bucket.places.get_mut(index) else { return };
        if known.is_none() {
            bucket.lost_refused = bucket.lost_refused.max(place.refused);
            bucket.lost_asked = bucket.lost_asked.max(place.asked);
            place.digest = digest;
            (place.refused, place.refused_error) = (bucket.lost_refused, bucket.lost_refused);
            (place.asked, place.asked_error) = (bucket.lost_asked, bucket.lost_asked);
        }
        // After a reload, other values can be sensitive.
        if known.is_none() || !place.rule.as_ref().is_some_and(|own| Arc::ptr_eq(own, rule)) {
            place.rule = Some(Arc::clone(rule));
            place.describe(entries, decision, descriptor);
        }
        add(place);
    }

    /// Erases descriptors that were not counted in the window of `now` and the one before.
    pub(super) fn forget_old(&self, now: Micros) {
        let window = now.get() / WINDOW.get();
        for stripe in &self.stripes {
            for bucket in &mut *stripe.lock() {
                bucket.move_to(window);
                let is_old = |place: &&mut Place| place.rule.is_some() && place.refused.sum() + place.asked.sum() == 0;
                bucket.places.iter_mut().filter(is_old).for_each(|place| *place = Place::default());
            }
        }
    }

    /// Returns the descriptors that `is_selected` selects.
    pub fn select(&self, is_selected: impl Fn(&Path) -> bool) -> Listed {
        let now = self.clock.now().get();
        let (window, passed) = (now / WINDOW.get(), now % WINDOW.get());
        let mut listed = Listed::default();
        for stripe in &self.stripes {
            for bucket in &mut *stripe.lock() {
                bucket.move_to(window);
                let places = bucket.places.iter();
                listed.heavy.extend(places.filter_map(|place| place.heavy(&is_selected, passed)));
                // A descriptor that was replaced had at most these refusals, and was not counted since.
                listed.unlisted = listed.unlisted.max(bucket.lost_refused.last_minute(passed));
            }
        }
        listed
    }

    /// Returns the number of counts that are missing because another thread was in the way.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Top {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = |stripe: &Mutex<Stripe>| -> usize {
            let stripe = stripe.lock();
            stripe.iter().flat_map(|bucket| &bucket.places).filter(|place| place.rule.is_some()).count()
        };
        let kept: usize = self.stripes.iter().map(places).sum();
        f.debug_struct("Top").field("kept", &kept).field("missed", &self.missed).finish_non_exhaustive()
    }
}

impl Bucket {
    /// Begins the window of this number. A clock that steps back a little goes on with the window that is there.
    fn move_to(&mut self, window: u64) {
        if window == self.window || window + 1 == self.window {
            return;
        }
        let is_next = window == self.window + 1;
        self.window = window;
        let moved = |count: Count| Count { now: 0, before: if is_next { count.now } else { 0 } };
        (self.lost_refused, self.lost_asked) = (moved(self.lost_refused), moved(self.lost_asked));
        for place in &mut self.places {
            for count in [&mut place.refused, &mut place.asked, &mut place.refused_error, &mut place.asked_error] {
                *count = moved(*count);
            }
        }
    }

    /// Returns the index of the place with the least weight.
    fn lightest(&self) -> usize {
        let weights = self.places.iter().map(|place| place.refused.sum() + place.asked.sum());
        weights.enumerate().min_by_key(|(_, weight)| *weight).map_or(0, |(index, _)| index)
    }
}

impl Estimate {
    /// Returns the lower bound.
    pub const fn least(self) -> u64 {
        self.most.saturating_sub(self.error)
    }
}

impl Place {
    /// Writes the entries of descriptor number `number`.
    fn describe(&mut self, entries: &[Entry], decision: &Decision<'_>, number: usize) {
        self.text.clear();
        self.text.reserve_exact(MOST_TEXT);
        self.is_cut = false;
        for (index, entry) in entries.iter().enumerate() {
            let value = decision.digest(number, index).map_or(&*entry.value, str::as_bytes);
            // Longer ones are shown with a mark at their end.
            let [key, value] = [&*entry.key, value].map(|word| word.get(..MOST_WORD + 4).unwrap_or(word));
            if self.text.len() + 2 + key.len() + value.len() > MOST_TEXT {
                self.is_cut = true;
                return;
            }
            for kept in [key, value] {
                self.text.push(u8::try_from(kept.len()).unwrap_or(u8::MAX));
                self.text.extend_from_slice(kept);
            }
        }
    }

    fn heavy(&self, is_selected: impl Fn(&Path) -> bool, passed: u64) -> Option<Heavy> {
        let rule = self.rule.as_ref().filter(|rule| is_selected(rule))?;
        let estimate =
            |count: Count, error: Count| Estimate { most: count.last_minute(passed), error: error.last_minute(passed) };
        let (refused, asked) = (estimate(self.refused, self.refused_error), estimate(self.asked, self.asked_error));
        if refused.most == 0 && asked.most == 0 {
            return None;
        }
        // Each refusal is the answer to a request.
        let least = asked.least().div_ceil(u64::from(SAMPLE)).max(refused.least());
        let asked = Sampled { least, estimate: asked.least().max(least) };
        let mut words = self.words();
        let mut entries = Vec::new();
        while let Some(key) = words.next() {
            entries.push((key, words.next().unwrap_or_default()));
        }
        Some(Heavy { rule: Arc::clone(rule), entries, is_cut: self.is_cut, refused, asked })
    }

    /// Returns the keys and values in turn.
    fn words(&self) -> impl Iterator<Item = Box<str>> {
        let mut rest = &*self.text;
        std::iter::from_fn(move || {
            let (length, after) = rest.split_first()?;
            let (own, after) = after.split_at_checked(usize::from(*length))?;
            rest = after;
            Some(word(own))
        })
    }
}

impl Count {
    fn add(&mut self, events: u32) {
        self.now = self.now.saturating_add(events);
    }

    /// Returns the higher of both, in each window.
    fn max(self, other: Self) -> Self {
        Self { now: self.now.max(other.now), before: self.before.max(other.before) }
    }

    fn sum(self) -> u64 {
        u64::from(self.now) + u64::from(self.before)
    }

    /// Returns the events of the last minute, `passed` into the window. Those of the window before count as if they were spread evenly.
    fn last_minute(self, passed: u64) -> u64 {
        let left = WINDOW.get().saturating_sub(passed);
        u64::from(self.now) + (u64::from(self.before) * left).div_ceil(WINDOW.get())
    }
}
