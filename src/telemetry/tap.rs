//! Decisions as they are made, for those who listen.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::escape::{cut, word};
use crate::model::{Answered, Clock, Deciding, Decision, Finding, Micros, Outcome, Request};

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
    /// Path of the deciding rule, such as `edge.user`.
    pub rule: Option<String>,
    /// Outcome of the request.
    pub outcome: Option<Outcome>,
    /// Name of the origin, such as `store`.
    pub provenance: Option<String>,
    /// Entries that one descriptor has, all of them.
    pub entries: Vec<(String, String)>,
}

struct Listener {
    filter: TapFilter,
    /// Maximum number of decisions per second.
    per_second: u64,
    /// Number of the window, and of its decisions.
    window: Mutex<(u64, u64)>,
    decisions: mpsc::Sender<Bytes>,
    /// Selected decisions that were not sent.
    skipped: AtomicU64,
}

/// Decisions that one listener gets, each a line of JSON. The listener leaves when it is dropped.
pub struct Listening {
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
            window: Mutex::default(),
            decisions: sender,
            skipped: AtomicU64::new(0),
        });
        let mut listeners = self.listeners.write();
        if listeners.len() >= MOST_LISTENERS {
            return None;
        }
        listeners.push(Arc::clone(&listener));
        self.number.store(listeners.len(), Ordering::Relaxed);
        drop(listeners);
        Some(Listening { tap: Arc::clone(self), listener, decisions })
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

    /// Sends a decision to those who listen to it.
    pub(super) fn send(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        let now = self.clock.now();
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
                listener.skipped.fetch_add(1, Ordering::Relaxed);
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
    /// Returns true if the present window has room for another decision.
    fn has_room(&self, now: Micros) -> bool {
        let mut window = self.window.lock();
        let number = now.get() / WINDOW.get();
        if window.0 != number {
            *window = (number, 0);
        }
        window.1 += 1;
        // The windows of a second share its number, to the last one.
        let until = |windows: u64| self.per_second.saturating_mul(windows) / WINDOWS;
        let place = number % WINDOWS;
        window.1 <= until(place + 1) - until(place)
    }
}

impl Listening {
    /// Returns the next decision as a line of JSON, or a line with the number of decisions that were skipped.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Ok(line) = self.decisions.try_recv() {
                return Some(line);
            }
            let skipped = self.listener.skipped.swap(0, Ordering::Relaxed);
            if skipped > 0 {
                return Some(format!("{}\n", json!({ "skipped": skipped })).into());
            }
            if let Ok(line) = timeout(LOOK_EVERY, self.decisions.recv()).await {
                return line;
            }
        }
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
    fn selects(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) -> bool {
        self.domain.as_deref().is_none_or(|domain| request.domain() == domain)
            && self.outcome.is_none_or(|outcome| decision.outcome == outcome)
            && self.provenance.as_deref().is_none_or(|provenance| deciding.origin.name() == provenance)
            && self.rule.as_deref().is_none_or(|rule| deciding.rule.is_some_and(|own| own.path.to_string() == rule))
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
        "retry_ms": decision.retry.map(|retry| retry.get().div_ceil(1_000)),
        "generation": decision.generation,
        "descriptors": shown,
        "is_cut": request.descriptors().len() > MOST_DESCRIPTORS,
    });
    format!("{line}\n").into()
}

/// Returns a descriptor and the charges of its limits. Its text takes of `room`.
fn descriptor(request: &Request, decision: &Decision<'_>, index: usize, room: &mut usize) -> Value {
    let all = request.descriptors().get(index).map(|descriptor| &*descriptor.entries).unwrap_or_default();
    let mut entries = Vec::new();
    for (number, entry) in all.iter().enumerate().take(MOST_ENTRIES) {
        let (key, value) = (word(&entry.key), decision.digest(index, number).map_or_else(|| word(&entry.value), cut));
        let Some(left) = room.checked_sub(key.len() + value.len()) else { break };
        *room = left;
        entries.push(json!({ "key": key, "value": value }));
    }
    let part = decision.parts.get(index);
    let finding = match part.map(|part| &part.finding) {
        Some(Finding::Limited(_)) => "limited",
        Some(Finding::Unlimited) => "unlimited",
        Some(Finding::Denied) => "denied",
        Some(Finding::Unmatched) | None => "unmatched",
    };
    let answers = decision.answers.iter().filter(|answer| answer.descriptor == index);
    json!({
        "index": index,
        "is_cut": entries.len() < all.len(),
        "entries": entries,
        "finding": finding,
        "rule": part.and_then(|part| part.rule).map(|rule| rule.path.to_string()),
        "charges": answers.take(MOST_ENTRIES).map(charge).collect::<Vec<_>>(),
    })
}

/// Returns the charge of one limit.
fn charge(answer: &Answered<'_>) -> Value {
    json!({
        "limit": answer.limit,
        "capacity": answer.capacity,
        "hits": answer.hits.taken(),
        "outcome": answer.verdict.outcome.name(),
        "provenance": answer.verdict.provenance.name(),
        "remaining": answer.verdict.remaining,
        "reset_ms": answer.verdict.reset.get().div_ceil(1_000),
    })
}
