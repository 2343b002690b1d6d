//! The last refusals of each rule, for the question who is refused and why.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::FixedState;
use lru::LruCache;
use parking_lot::Mutex;

use super::decision_id::DigestPart;
use super::escape::{cut, word};
use super::sample::is_too_soon;
use crate::model::{
    Clock, Deciding, Decision, Descriptor, Finding, Micros, Origin, Path, Quota, Request, RuleId, ShadowRefusal,
    Verdict,
};

/// Maximum number of refused descriptors of one rule: 128. One client that is refused all the time is one of them.
pub const MOST_OF_RULE: usize = 128;
/// Maximum size of all refusals: 16 MiB.
const MOST_BYTES: usize = 16 << 20;
/// Maximum text of one refusal: 1 KiB. Keys and values beyond it are left out.
const MOST_TEXT: usize = 1 << 10;
/// Maximum number of entries of one refusal: 32.
const MOST_ENTRIES: usize = 32;
/// Size of a refusal and its places in the maps, without text and entries: an estimate from above.
const BYTES_OF_REFUSAL: usize = 512;
/// Size of a rule's ring without refusals: its two maps, their tables and what the allocator adds.
const BYTES_OF_RING: usize = 1 << 10;
/// Size of an entry without its text: two strings, and what the allocator adds.
const BYTES_OF_ENTRY: usize = 96;
/// Least time between two copies of the descriptors of refusals that are one: 1 s, so that a flood of them costs little more.
const DESCRIBED_EVERY: Micros = Micros::from_secs(1);
/// Longest wait of a decision for a reader: 50 us. After that its refusal is not kept.
const LOCK_TIMEOUT: Duration = Duration::from_micros(50);

/// The last refusals of each rule. Refusals of the same descriptor by the same rule are one.
pub struct RecentRefusals {
    clock: Arc<dyn Clock>,
    /// Time for which a refusal is kept after it was made last.
    keep: Micros,
    hasher: foldhash::fast::RandomState,
    rings: Mutex<Rings>,
    /// Refusals that are not kept: a reader was in the way, or a rule refused too many descriptors.
    missed: AtomicU64,
}

/// Refusals by rule. The first to go are those of the rule that has refused nothing for the longest time.
struct Rings {
    rules: LruCache<RuleOfLoad, Ring, FixedState>,
    bytes: usize,
}

/// Refusals of one rule by the digest of the descriptor. The first to go is the one that was not repeated for the longest time.
struct Ring {
    refusals: LruCache<u64, Refusal, FixedState>,
    /// Time of the last new descriptor.
    new_at: Micros,
}

/// Number of a load of the rules, and of a rule in it, or `None` for refusals that no rule made; and true for shadow refusals, so that they push
/// no others out.
type RuleOfLoad = (u64, Option<RuleId>, bool);

/// Refusals of one descriptor by one rule.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Name of the domain; empty if no rule file has it.
    pub domain: Box<str>,
    /// Path of the rule, if one refused.
    pub rule: Option<Arc<Path>>,
    /// Name of the limit that refused, if it has one.
    pub limit: Option<Box<str>>,
    /// Quota of the limit that refused, if one did.
    pub quota: Option<Quota>,
    /// True if the request sent the limit that refused.
    pub is_sent: bool,
    /// True if the limit would have delayed the request, and there was no room to hold it.
    pub is_without_room: bool,
    /// True if a shadow mode keeps the refusal from the request.
    pub is_shadow: bool,
    /// Index in `descriptors` of the one that was refused; `None` if the whole request was.
    pub refused: Option<usize>,
    /// Descriptors of one of the last requests, as far as they are kept.
    pub descriptors: Vec<ShownDescriptor>,
    /// True if not all of the descriptors are kept.
    pub is_cut: bool,
    /// Time of the request that has the descriptors.
    pub described: Micros,
    /// Time of the first of the refusals.
    pub first: Micros,
    /// Number of the refusals.
    pub count: u64,
    /// The last of them.
    pub last: LastRefusal,
    /// Number of the load of the rules.
    pub generation: u64,
}

/// The last of several refusals of a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct LastRefusal {
    /// Time of the refusal.
    pub at: Micros,
    /// Hits that it asked for.
    pub hits: u64,
    /// Hits that were left just before it.
    pub room: u32,
    /// Hits that remained after it.
    pub remaining: u32,
    /// Time after it until this limit would have admitted it, if waiting helps.
    pub retry: Option<Micros>,
    /// Origin of the answer.
    pub origin: Origin,
}

/// Keys and values of a descriptor as they may be shown: sensitive values as their digests, long texts cut.
pub type ShownDescriptor = Vec<(Box<str>, Box<str>)>;

/// Selection of refusals: those that have all of it.
#[derive(Clone, Debug, Default)]
pub struct RefusalFilter {
    /// Domain name.
    pub domain: Option<String>,
    /// Path of the rule, such as `edge.user`.
    pub rule: Option<String>,
    /// Entries of the refused descriptor, or of any descriptor if the whole request was refused.
    pub entries: Vec<(String, String)>,
}

impl RecentRefusals {
    /// Returns an empty collection, which keeps a refusal for `keep` after it was made last.
    pub fn new(clock: Arc<dyn Clock>, keep: Micros) -> Self {
        let rings = Mutex::new(Rings { rules: LruCache::unbounded_with_hasher(FixedState::default()), bytes: 0 });
        Self { clock, keep, hasher: foldhash::fast::RandomState::default(), rings, missed: AtomicU64::new(0) }
    }

    /// Keeps a refusal of `now`. `entries` is the hash of those of the refused descriptor.
    pub(super) fn record(
        &self,
        request: &Request,
        decision: &Decision<'_>,
        deciding: Deciding<'_>,
        refused: &Refused,
        entries: u64,
        now: Micros,
    ) {
        let Refused { descriptor, limit, is_without_room, is_shadow } = *refused;
        let (room, remaining, retry) = match limit {
            Some((_, verdict)) => (verdict.room, verdict.remaining, verdict.retry),
            None => (0, 0, decision.retry.filter(|_| is_without_room)),
        };
        let sent = descriptor.and_then(|index| request.descriptors().get(index));
        let hits = sent.map_or(0, |sent| request.hits(sent).taken());
        let last = LastRefusal { at: now, hits, room, remaining, retry, origin: deciding.origin };
        let digest = self.digest_of(decision, deciding, refused, entries);
        let Some(mut rings) = self.rings.try_lock_for(LOCK_TIMEOUT) else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let rule = (decision.generation, deciding.rule.map(|rule| rule.id), is_shadow);
        let Rings { rules, bytes } = &mut *rings;
        if let Some(ring) = rules.get_mut(&rule) {
            if let Some(known) = ring.refusals.get_mut(&digest) {
                known.count = known.count.saturating_add(1);
                known.last = last;
                if now.saturating_sub(known.described) >= DESCRIBED_EVERY {
                    *bytes -= known.bytes();
                    (known.descriptors, known.refused, known.is_cut) = kept(request, descriptor, decision);
                    known.described = now;
                    *bytes += known.bytes();
                    rings.trim();
                }
                return;
            }
            if ring.refusals.len() >= MOST_OF_RULE && is_too_soon(now, ring.new_at) {
                self.missed.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        let (descriptors, refused, is_cut) = kept(request, descriptor, decision);
        let refusal = Refusal {
            domain: decision.domain.unwrap_or_default().into(),
            rule: deciding.rule.map(|rule| Arc::clone(&rule.path)),
            limit: deciding.limit.map(Into::into),
            quota: limit.map(|(quota, _)| quota),
            is_sent: limit
                .is_some_and(|(quota, _)| sent.and_then(|sent| sent.limit).is_some_and(|limit| limit.quota() == quota)),
            is_without_room,
            is_shadow,
            refused,
            descriptors,
            is_cut,
            described: now,
            first: now,
            count: 1,
            last,
            generation: decision.generation,
        };
        rings.add(rule, digest, refusal);
    }

    /// Returns the digest by which a refusal is kept: refusals of the same descriptor by the same limit have the same.
    pub(super) fn digest(
        &self,
        request: &Request,
        decision: &Decision<'_>,
        deciding: Deciding<'_>,
        refused: &Refused,
    ) -> u64 {
        self.digest_of(decision, deciding, refused, self.hash_entries(request, refused.descriptor))
    }

    fn digest_of(&self, decision: &Decision<'_>, deciding: Deciding<'_>, refused: &Refused, entries: u64) -> u64 {
        // The rule stands for its domain, and numbers for the quota: each refusal of a flood is hashed.
        let place = deciding.rule.map_or_else(|| self.hasher.hash_one(decision.domain), |rule| rule.path.digest());
        let quota = refused.limit.map(|(quota, _)| quota);
        let quota = quota.map_or((0, 0, 0), |quota| (quota.limit(), quota.burst(), quota.window().length().get()));
        self.hasher.hash_one((place, deciding.limit, quota, refused.is_without_room, refused.is_shadow, entries))
    }

    /// Returns a hash of the entries of a descriptor, if there is one.
    pub(super) fn hash_entries(&self, request: &Request, descriptor: Option<usize>) -> u64 {
        let descriptor = descriptor.and_then(|index| request.descriptors().get(index));
        self.hasher.hash_one(descriptor.map(|descriptor| &descriptor.entries))
    }

    /// Returns the refusals that `filter` selects, the latest first, and the time.
    pub fn select(&self, filter: &RefusalFilter) -> (Vec<Refusal>, Micros) {
        self.find(|_, refusal| filter.selects(refusal))
    }

    /// Returns the refusals that are kept by a digest with this part, and the time; none without a part.
    pub fn of_digest(&self, part: Option<DigestPart>) -> (Vec<Refusal>, Micros) {
        self.find(|digest, _| part == Some(DigestPart::of(digest)))
    }

    /// Drops refusals that are kept no longer at `now`.
    pub(super) fn forget_old(&self, now: Micros) {
        self.rings.lock().forget_before(now.saturating_sub(self.keep));
    }

    fn find(&self, is_selected: impl Fn(u64, &Refusal) -> bool) -> (Vec<Refusal>, Micros) {
        let now = self.clock.now();
        let mut found: Vec<Refusal> = {
            let mut rings = self.rings.lock();
            rings.forget_before(now.saturating_sub(self.keep));
            let all = rings.rules.iter().flat_map(|(_, ring)| ring.refusals.iter());
            let selected = all.filter(|(digest, refusal)| is_selected(**digest, refusal));
            selected.map(|(_, refusal)| refusal.clone()).collect()
        };
        found.sort_by_key(|refusal| std::cmp::Reverse(refusal.last.at));
        (found, now)
    }

    /// Returns the time for which a refusal is kept.
    pub fn keep(&self) -> Micros {
        self.keep
    }

    /// Returns the number of refusals that are not kept: a reader was in the way, or a rule refused too many descriptors.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for RecentRefusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept: usize = self.rings.lock().rules.iter().map(|(_, ring)| ring.refusals.len()).sum();
        f.debug_struct("RecentRefusals").field("kept", &kept).field("missed", &self.missed).finish_non_exhaustive()
    }
}

impl Rings {
    /// Adds the first refusal of a descriptor by its rule, and drops the oldest ones beyond the bounds.
    fn add(&mut self, rule: RuleOfLoad, digest: u64, refusal: Refusal) {
        let is_new = !self.rules.contains(&rule);
        self.bytes += refusal.bytes() + if is_new { BYTES_OF_RING } else { 0 };
        let ring = self.rules.get_or_insert_mut(rule, Ring::new);
        ring.new_at = refusal.last.at;
        ring.refusals.put(digest, refusal);
        if ring.refusals.len() > MOST_OF_RULE {
            self.drop_oldest(rule);
        }
        self.trim();
    }

    /// Drops the oldest refusals beyond the maximum size.
    fn trim(&mut self) {
        while self.bytes > MOST_BYTES
            && let Some((&quietest, _)) = self.rules.peek_lru()
        {
            self.drop_oldest(quietest);
        }
    }

    /// Drops the refusal of `rule` that was not repeated for the longest time, and the rule with its last one.
    fn drop_oldest(&mut self, rule: RuleOfLoad) {
        let Some(ring) = self.rules.peek_mut(&rule) else { return };
        self.bytes -= ring.refusals.pop_lru().map_or(0, |(_, oldest)| oldest.bytes());
        if ring.refusals.is_empty() {
            self.rules.pop(&rule);
            self.bytes -= BYTES_OF_RING;
        }
    }

    /// Drops refusals that were last made before `time`.
    fn forget_before(&mut self, time: Micros) {
        let rules: Vec<RuleOfLoad> = self.rules.iter().map(|(rule, _)| *rule).collect();
        for rule in rules {
            let is_old = |ring: &Ring| ring.refusals.peek_lru().is_some_and(|(_, oldest)| oldest.last.at < time);
            while self.rules.peek(&rule).is_some_and(is_old) {
                self.drop_oldest(rule);
            }
        }
    }
}

impl Ring {
    fn new() -> Self {
        Self { refusals: LruCache::unbounded_with_hasher(FixedState::default()), new_at: Micros::ZERO }
    }
}

impl Refusal {
    /// Returns its size in memory, estimated from above.
    fn bytes(&self) -> usize {
        let entries = self.descriptors.iter().flatten();
        let text: usize = entries.map(|(key, value)| key.len() + value.len() + BYTES_OF_ENTRY).sum();
        let names = self.domain.len() + self.limit.as_ref().map_or(0, |limit| limit.len());
        BYTES_OF_REFUSAL + names + self.descriptors.len() * BYTES_OF_ENTRY + text
    }
}

impl RefusalFilter {
    /// Returns true if `refusal` has the entries of this filter. `is_value` compares the value of a key with that of the filter.
    pub fn has_entries(&self, refusal: &Refusal, is_value: impl Fn(&str, &str, &str) -> bool) -> bool {
        let is_of = |descriptor: &ShownDescriptor| {
            self.entries.iter().all(|(key, value)| {
                let (key, value) = (cut(key), cut(value));
                descriptor.iter().any(|(own_key, own)| **own_key == *key && is_value(&key, own, &value))
            })
        };
        match refusal.refused.and_then(|index| refusal.descriptors.get(index)) {
            Some(refused) => is_of(refused),
            None => self.entries.is_empty() || refusal.descriptors.iter().any(is_of),
        }
    }

    fn selects(&self, refusal: &Refusal) -> bool {
        self.has_entries(refusal, |_, own, value| own == value)
            && self.domain.as_deref().is_none_or(|domain| *refusal.domain == *domain)
            && self.rule.as_deref().is_none_or(|rule| refusal.rule.as_ref().is_some_and(|own| own.to_string() == rule))
    }
}

/// The refused part of a request.
#[derive(Clone, Copy)]
pub(super) struct Refused {
    /// Index of the descriptor; `None` if the whole request is refused.
    pub(super) descriptor: Option<usize>,
    /// Quota and verdict of the limit that refused it.
    limit: Option<(Quota, Verdict)>,
    is_without_room: bool,
    is_shadow: bool,
}

impl Refused {
    pub(super) fn of(decision: &Decision<'_>, deciding: Deciding<'_>) -> Self {
        let descriptor = deciding.descriptor.or_else(|| denied(decision));
        let is_without_room = decision.wait.hold > Micros::ZERO;
        // A limit that would have delayed the request admits it, so the tightest limit has refused nothing.
        let limit = descriptor.and_then(|index| tightest(decision, index)).filter(|_| !is_without_room);
        Self { descriptor, limit, is_without_room, is_shadow: false }
    }

    /// Returns the part that would be refused without a shadow mode.
    pub(super) fn in_shadow(decision: &Decision<'_>, (deciding, answer): ShadowRefusal<'_, '_>) -> Self {
        let descriptor = deciding.descriptor.or_else(|| denied(decision));
        let limit = answer.map(|answer| (answer.quota, answer.verdict));
        Self { descriptor, limit, is_without_room: false, is_shadow: true }
    }
}

/// Returns the index of the descriptor that a `deny` rule matched.
fn denied(decision: &Decision<'_>) -> Option<usize> {
    decision.parts.iter().position(|part| matches!(part.finding, Finding::Denied))
}

/// Returns the quota and the verdict of a descriptor's tightest limit.
fn tightest(decision: &Decision<'_>, descriptor: usize) -> Option<(Quota, Verdict)> {
    match &decision.parts.get(descriptor)?.finding {
        Finding::Limited(tightest) => Some((tightest.quota, tightest.verdict)),
        Finding::Unmatched | Finding::Unlimited | Finding::Denied => None,
    }
}

/// Returns the descriptors that are kept, the place of the refused one among them, and true if some text is missing. The refused one
/// is kept before all others.
fn kept(
    request: &Request,
    refused: Option<usize>,
    decision: &Decision<'_>,
) -> (Vec<ShownDescriptor>, Option<usize>, bool) {
    let (mut entries, mut text, mut is_cut) = (0, 0, false);
    let mut show = |(index, descriptor): (usize, &Descriptor)| {
        let mut shown = ShownDescriptor::new();
        if entries >= MOST_ENTRIES || text >= MOST_TEXT {
            is_cut |= !descriptor.entries.is_empty();
            return shown;
        }
        for (number, entry) in descriptor.entries.iter().enumerate() {
            let key = word(&entry.key);
            let value = decision.digest(index, number).map_or_else(|| word(&entry.value), cut);
            (entries, text) = (entries + 1, text + key.len() + value.len());
            if entries > MOST_ENTRIES || text > MOST_TEXT {
                is_cut = true;
                break;
            }
            shown.push((key, value));
        }
        shown.shrink_to_fit();
        shown
    };
    let all = || request.descriptors().iter().enumerate();
    let first = refused.and_then(|refused| all().nth(refused)).map(&mut show);
    let place = first.as_ref().map(|_| 0);
    let others = all().filter(|(index, _)| Some(*index) != refused).map(show);
    let kept = first.into_iter().chain(others.filter(|shown| !shown.is_empty())).collect();
    (kept, place, is_cut)
}
