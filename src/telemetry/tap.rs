//! Decisions as they are made, for those who listen.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::decision_id::DecisionId;
use super::recent::{cut, word};
use crate::model::{Answered, Clock, Deciding, Decision, Finding, Hidden, Micros, Outcome, Request};

/// Maximum number of listeners: 8.
const MOST_LISTENERS: usize = 8;
/// Maximum number of decisions that wait for a listener: 1,024, about a megabyte.
const MOST_WAITING: usize = 1_024;
/// Maximum number of descriptors of a decision that are sent: 32.
const MOST_DESCRIPTORS: usize = 32;
/// Maximum number of entries of a descriptor that are sent: 32.
const MOST_ENTRIES: usize = 32;
/// Length of the windows in which the rate of a listener is held: 100 ms.
const WINDOW: Micros = Micros::from_millis(100);

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
    /// Maximum number of decisions per window.
    per_window: u64,
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
        let per_window = per_second.saturating_mul(WINDOW.get()).div_ceil(Micros::from_secs(1).get());
        let listener = Arc::new(Listener {
            filter,
            per_window,
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

    /// Sends a decision to those who listen to it. `id` makes its id.
    pub(super) fn send(
        &self,
        request: &Request,
        decision: &Decision<'_>,
        deciding: Deciding<'_>,
        id: impl Fn() -> Option<DecisionId>,
    ) {
        let now = self.clock.now();
        let mut line: Option<Bytes> = None;
        for listener in self.listeners.read().iter() {
            if !listener.filter.selects(request, decision, deciding) {
                continue;
            }
            let is_sent = listener.has_room(now) && {
                let line = line.get_or_insert_with(|| text(request, decision, deciding, id(), now));
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
        window.1 <= self.per_window
    }
}

impl Listening {
    /// Returns the next decision as a line of JSON, or a line with the number of decisions that were skipped.
    pub async fn next(&mut self) -> Option<Bytes> {
        let skipped = self.listener.skipped.swap(0, Ordering::Relaxed);
        if skipped > 0 {
            return Some(format!("{}\n", json!({ "skipped": skipped })).into());
        }
        self.decisions.recv().await
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
            && (self.entries.is_empty() || self.has_entries(request, &decision.hidden))
    }

    /// Returns true if a descriptor has all of the entries.
    fn has_entries(&self, request: &Request, hidden: &[Hidden]) -> bool {
        request.descriptors().iter().take(MOST_DESCRIPTORS).enumerate().any(|(index, descriptor)| {
            self.entries.iter().all(|(key, value)| {
                let mut entries = descriptor.entries.iter().enumerate().take(MOST_ENTRIES);
                entries.any(|(number, entry)| {
                    let digest = hidden.iter().find(|hidden| (hidden.descriptor, hidden.entry) == (index, number));
                    let own = digest.map_or(&*entry.value, |hidden| hidden.digest.as_bytes());
                    *entry.key == *key.as_bytes() && own == value.as_bytes()
                })
            })
        })
    }
}

/// Returns a decision as a line of JSON. Sensitive values are their digests.
fn text(
    request: &Request,
    decision: &Decision<'_>,
    deciding: Deciding<'_>,
    id: Option<DecisionId>,
    now: Micros,
) -> Bytes {
    let descriptors = request.descriptors().iter().take(MOST_DESCRIPTORS).enumerate();
    let shown = descriptors.map(|(index, _)| descriptor(request, decision, index));
    let line = json!({
        "time_us": now.get(),
        "id": id.map(|id| id.to_string()),
        "domain": word(request.domain().as_bytes()),
        "hits_addend": request.hits_addend(),
        "outcome": decision.outcome.name(),
        "provenance": deciding.origin.name(),
        "rule": deciding.rule.map(|rule| rule.path.to_string()),
        "limit": deciding.limit,
        "retry_ms": decision.retry.map(|retry| retry.get().div_ceil(1_000)),
        "generation": decision.generation,
        "descriptors": shown.collect::<Vec<_>>(),
        "is_cut": request.descriptors().len() > MOST_DESCRIPTORS,
    });
    format!("{line}\n").into()
}

fn descriptor(request: &Request, decision: &Decision<'_>, index: usize) -> Value {
    let entries = request.descriptors().get(index).map(|descriptor| &*descriptor.entries).unwrap_or_default();
    let entry = |number: usize| {
        let hidden = decision.hidden.iter().find(|hidden| (hidden.descriptor, hidden.entry) == (index, number));
        let entry = entries.get(number)?;
        let value = hidden.map_or_else(|| word(&entry.value), |hidden| cut(&hidden.digest));
        Some(json!({ "key": word(&entry.key), "value": value }))
    };
    let part = decision.parts.get(index);
    let finding = match part.map(|part| &part.finding) {
        Some(Finding::Limited(_)) => "limited",
        Some(Finding::Unlimited) => "unlimited",
        Some(Finding::Denied) => "denied",
        Some(Finding::Unmatched) | None => "unmatched",
    };
    let answers = decision.answers.iter().filter(|answer| answer.descriptor == index);
    json!({
        "entries": (0..entries.len().min(MOST_ENTRIES)).filter_map(entry).collect::<Vec<_>>(),
        "is_cut": entries.len() > MOST_ENTRIES,
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
