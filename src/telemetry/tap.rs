//! Decisions as they are made, for those who listen.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::escape::{cut, word};
use crate::model::{
    Answered, Clock, Deciding, Decision, Entry, Finding, Micros, Outcome, Override, Request, ShadowRefusal,
};

/// Maximum number of listeners: 8.
const MOST_LISTENERS: usize = 8;
/// Maximum number of decisions that wait for a listener: 1,024.
const MOST_WAITING: usize = 1_024;
/// Maximum number of descriptors of a decision that are sent: 32.
const MOST_DESCRIPTORS: usize = 32;
/// Maximum number of entries of a descriptor that are sent: 32.
const MOST_ENTRIES: usize = 32;
/// Maximum number of entries of one key that are compared in a descriptor: 8.
const MOST_OF_KEY: usize = 8;
/// Length of the windows in which the rate of a listener is held: 100 ms.
const WINDOW: Micros = Micros::from_millis(100);
/// Windows of a second.
const WINDOWS: u64 = 10;
/// Interval in which a listener that gets no decision looks whether some were skipped: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Looks without a result after which a listener gets a sign of life: 5, so every 5 s.
const LOOKS: u32 = 5;
/// Maximum text of keys and values in a line: 4 KiB, so that the waiting lines of a listener have about 8 MB at most.
const MOST_TEXT: usize = 4 << 10;

/// The listeners. Without one, a decision costs one look at their number.
pub struct Tap {
    clock: Arc<dyn Clock>,
    number: AtomicUsize,
    listeners: RwLock<Vec<Arc<Listener>>>,
}

/// Selection of decisions: those that have all of it.
#[derive(Clone, Debug, Default)]
pub struct TapFilter {
    /// Domain name as it was sent.
    pub domain: Option<String>,
    /// Path of the deciding rule, such as `edge.user`, or of one that would refuse the request without a shadow mode.
    pub rule: Option<String>,
    /// Outcome of the request.
    pub outcome: Option<Outcome>,
    /// True for requests alone that are admitted and would be refused without a shadow mode.
    pub is_shadow_refusal: bool,
    /// Name of the origin, such as `store`.
    pub provenance: Option<String>,
    /// Entries that one descriptor has, all of them.
    pub entries: Vec<(String, String)>,
}

struct Listener {
    filter: TapFilter,
    /// Maximum number of decisions per second.
    per_second: u64,
    sent: Mutex<Sent>,
    decisions: mpsc::Sender<Bytes>,
    skipped: Mutex<Skipped>,
}

/// Decisions that had room in the present window and in its second.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    /// Number of the window.
    window: u64,
    in_window: u64,
    in_second: u64,
}

/// Selected decisions that were not sent, since the last line about them.
#[derive(Clone, Copy, Debug, Default)]
struct Skipped {
    number: u64,
    /// Time of the first one.
    since: Micros,
}

/// Decisions that one listener gets, each a line of JSON. The listener leaves when it is dropped.
pub struct Listening {
    /// The first line, until it is sent: since when the listener gets decisions, and which.
    start: Option<Bytes>,
    tap: Arc<Tap>,
    listener: Arc<Listener>,
    decisions: mpsc::Receiver<Bytes>,
}

impl Tap {
    /// Returns a tap without listeners.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, number: AtomicUsize::new(0), listeners: RwLock::default() }
    }

    /// Adds a listener, which gets at most `per_second` decisions a second. `None` if there are too many listeners.
    pub fn listen(self: &Arc<Self>, filter: TapFilter, per_second: u64) -> Option<Listening> {
        let (sender, decisions) = mpsc::channel(MOST_WAITING);
        let listener = Arc::new(Listener {
            filter,
            per_second,
            sent: Mutex::default(),
            decisions: sender,
            skipped: Mutex::default(),
        });
        let mut listeners = self.listeners.write();
        if listeners.len() >= MOST_LISTENERS {
            return None;
        }
        listeners.push(Arc::clone(&listener));
        self.number.store(listeners.len(), Ordering::Relaxed);
        drop(listeners);
        let start = json!({
            "since_us": self.clock.now().get(),
            "filters": listener.filter.names(),
            "rate": per_second,
            "alive_every_ms": LOOK_EVERY.saturating_mul(LOOKS).as_millis(),
        });
        Some(Listening { start: Some(format!("{start}\n").into()), tap: Arc::clone(self), listener, decisions })
    }

    fn leave(&self, listener: &Arc<Listener>) {
        let mut listeners = self.listeners.write();
        listeners.retain(|other| !Arc::ptr_eq(other, listener));
        self.number.store(listeners.len(), Ordering::Relaxed);
    }

    /// Returns true if somebody listens.
    pub(super) fn is_heard(&self) -> bool {
        self.number.load(Ordering::Relaxed) > 0
    }

    /// Sends a decision of `now` to those who listen to it.
    pub(super) fn send(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>, now: Micros) {
        let mut line: Option<Bytes> = None;
        for listener in self.listeners.read().iter() {
            if !listener.filter.selects(request, decision, deciding) {
                continue;
            }
            let is_sent = listener.has_room(now) && {
                let line = line.get_or_insert_with(|| text(request, decision, deciding, now));
                listener.decisions.try_send(line.clone()).is_ok()
            };
            if !is_sent {
                listener.skip(now);
            }
        }
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Listener {
    fn skip(&self, now: Micros) {
        let mut skipped = self.skipped.lock();
        if skipped.number == 0 {
            skipped.since = now;
        }
        skipped.number += 1;
    }

    /// Returns true if the present window has room for another decision. The first one of each second always has.
    fn has_room(&self, now: Micros) -> bool {
        let mut sent = self.sent.lock();
        let window = now.get() / WINDOW.get();
        if sent.window != window {
            let is_same_second = sent.window / WINDOWS == window / WINDOWS;
            *sent = Sent { window, in_window: 0, in_second: if is_same_second { sent.in_second } else { 0 } };
        }
        // The windows of a second share its number. What one leaves is for the later ones.
        let until = |windows: u64| self.per_second.saturating_mul(windows).div_ceil(WINDOWS);
        let has_room = sent.in_window < until(1) && sent.in_second < until(window % WINDOWS + 1);
        if has_room {
            sent.in_window += 1;
            sent.in_second += 1;
        }
        has_room
    }
}

impl Listening {
    /// Returns the next line of JSON: first the start, then a decision, or the number of decisions that were skipped and the
    /// span of time in which they were. Returns an empty text after each 5 s without a line.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(start) = self.start.take() {
            return Some(start);
        }
        for _ in 0..LOOKS {
            if let Ok(line) = self.decisions.try_recv() {
                return Some(line);
            }
            let Skipped { number, since } = std::mem::take(&mut *self.listener.skipped.lock());
            if number > 0 {
                let until = self.tap.clock.now().get();
                let line = json!({ "skipped": number, "since_us": since.get(), "until_us": until });
                return Some(format!("{line}\n").into());
            }
            if let Ok(line) = timeout(LOOK_EVERY, self.decisions.recv()).await {
                return line;
            }
        }
        Some(Bytes::new())
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.tap.leave(&self.listener);
    }
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").finish_non_exhaustive()
    }
}

impl TapFilter {
    /// Returns the names of what is set.
    fn names(&self) -> Vec<&'static str> {
        let all = [
            ("domain", self.domain.is_some()),
            ("rule", self.rule.is_some()),
            ("outcome", self.outcome.is_some() || self.is_shadow_refusal),
            ("provenance", self.provenance.is_some()),
            ("entry", !self.entries.is_empty()),
        ];
        all.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }

    fn selects(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) -> bool {
        self.domain.as_deref().is_none_or(|domain| request.domain() == domain)
            && self.outcome.is_none_or(|outcome| decision.outcome == outcome)
            && (!self.is_shadow_refusal || is_admitted_by_shadow(decision))
            && self.provenance.as_deref().is_none_or(|provenance| deciding.origin.name() == provenance)
            && self.rule.as_deref().is_none_or(|rule| is_by(rule, decision, deciding))
            && (self.entries.is_empty() || self.has_entries(request, decision))
    }

    /// Returns true if a descriptor has all of the entries.
    fn has_entries(&self, request: &Request, decision: &Decision<'_>) -> bool {
        request.descriptors().iter().enumerate().any(|(index, descriptor)| {
            self.entries.iter().all(|(key, value)| {
                let of_key = descriptor.entries.iter().enumerate().filter(|(_, entry)| *entry.key == *key.as_bytes());
                of_key.take(MOST_OF_KEY).any(|(number, entry)| {
                    let own = decision.digest(index, number).map_or(&*entry.value, str::as_bytes);
                    own == value.as_bytes()
                })
            })
        })
    }
}

/// Returns true if the request passes only because of a shadow mode.
fn is_admitted_by_shadow(decision: &Decision<'_>) -> bool {
    decision.outcome == Outcome::Admitted && decision.is_refused_or_shadowed()
}

/// Returns true if the rule with this path decides, or would refuse the request without a shadow mode.
fn is_by(path: &str, decision: &Decision<'_>, deciding: Deciding<'_>) -> bool {
    let shadow = decision.shadow_refusals().into_iter().map(|(deciding, _)| deciding);
    let mut rules = std::iter::once(deciding).chain(shadow).filter_map(|deciding| deciding.rule);
    rules.any(|rule| rule.path.to_string() == path)
}

/// Returns a decision as a line of JSON. Sensitive values are their digests.
fn text(request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>, now: Micros) -> Bytes {
    // The deciding one comes first, so that it is not cut.
    let others = (0..request.descriptors().len()).filter(|index| Some(*index) != deciding.descriptor);
    let mut room = MOST_TEXT;
    let order = deciding.descriptor.into_iter().chain(others).take(MOST_DESCRIPTORS);
    let shown: Vec<Value> = order.map(|index| descriptor(request, decision, index, &mut room)).collect();
    let line = json!({
        "time_us": now.get(),
        "domain": word(request.domain().as_bytes()),
        "hits_addend": request.hits_addend(),
        "outcome": decision.outcome.name(),
        "provenance": deciding.origin.name(),
        "rule": deciding.rule.map(|rule| rule.path.to_string()),
        "limit": deciding.limit,
        "shadow": decision.shadow_refusals().into_iter().map(shadow_refusal).collect::<Vec<_>>(),
        "retry_ms": decision.retry.map(|retry| retry.get().div_ceil(1_000)),
        "generation": decision.generation,
        "descriptors": shown,
        "is_cut": request.descriptors().len() > MOST_DESCRIPTORS,
        // No limit refused it: too many calls were waiting for their slots.
        "is_hold_full": decision.outcome.is_refused() && decision.wait.hold > Micros::ZERO,
    });
    format!("{line}\n").into()
}

/// Returns a descriptor and the charges of its limits. Its text takes of `room`.
fn descriptor(request: &Request, decision: &Decision<'_>, index: usize, room: &mut usize) -> Value {
    let sent = request.descriptors().get(index);
    let all = sent.map(|descriptor| &*descriptor.entries).unwrap_or_default();
    let mut entries = Vec::new();
    for (number, sent) in all.iter().enumerate().take(MOST_ENTRIES) {
        let Some(entry) = entry(sent, decision.digest(index, number), room) else { break };
        entries.push(entry);
    }
    let part = decision.parts.get(index);
    let finding = match part.map(|part| &part.finding) {
        Some(Finding::Limited(_)) => "limited",
        Some(Finding::Unlimited) => "unlimited",
        Some(Finding::Denied) => "denied",
        Some(Finding::Unmatched) | None => "unmatched",
    };
    let hits = sent.map(|sent| request.hits(sent));
    let answers = decision.answers.iter().filter(|answer| answer.descriptor == index);
    json!({
        "index": index,
        "is_cut": entries.len() < all.len(),
        "entries": entries,
        "hits": hits.map(|hits| if hits.given_back() > 0 { json!(-i128::from(hits.given_back())) } else { json!(hits.taken()) }),
        "sent_limit": sent.and_then(|sent| sent.limit).map(sent_limit),
        "finding": finding,
        "rule": part.and_then(|part| part.rule).map(|rule| rule.path.to_string()),
        "charges": answers.take(MOST_ENTRIES).map(charge).collect::<Vec<_>>(),
    })
}

/// Returns an entry; `None` if its text is larger than `room`. `digest` is shown in place of a sensitive value. Marks what is not
/// as it was sent.
fn entry(sent: &Entry, digest: Option<&str>, room: &mut usize) -> Option<Map<String, Value>> {
    let (key, value) = (word(&sent.key), digest.map_or_else(|| word(&sent.value), cut));
    *room = room.checked_sub(key.len() + value.len())?;
    let is_cut = *key.as_bytes() != *sent.key || (digest.is_none() && *value.as_bytes() != *sent.value);
    let marks = [("is_digest", digest.is_some()), ("is_cut", is_cut)];
    let marks = marks.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| (name.to_owned(), true.into()));
    let texts = [("key", key), ("value", value)].map(|(name, text)| (name.to_owned(), Value::from(&*text)));
    Some(texts.into_iter().chain(marks).collect())
}

/// Returns a limit that the request sent.
fn sent_limit(limit: Override) -> Value {
    let quota = limit.quota();
    let (unit, multiplier) = quota.window().unit().unzip();
    json!({ "requests_per_unit": quota.limit(), "unit": unit.map(|unit| unit.name()), "unit_multiplier": multiplier })
}

/// Returns what would refuse the request without a shadow mode.
fn shadow_refusal((deciding, answer): ShadowRefusal<'_, '_>) -> Value {
    json!({
        "rule": deciding.rule.map(|rule| rule.path.to_string()),
        "limit": deciding.limit,
        "quota": answer.map(|answer| format!("{:#}", answer.quota)),
        "provenance": deciding.origin.name(),
    })
}

fn charge(answer: &Answered<'_>) -> Value {
    json!({
        "limit": answer.limit,
        "algorithm": answer.algorithm,
        "capacity": answer.capacity,
        "window_us": answer.quota.window().length().get(),
        "hits": answer.hits.taken(),
        "outcome": answer.verdict.outcome.name(),
        "provenance": answer.verdict.provenance.name(),
        "remaining": answer.verdict.remaining,
        "reset_ms": answer.verdict.reset.get().div_ceil(1_000),
    })
}
