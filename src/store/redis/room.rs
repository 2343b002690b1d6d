//! A Redis with little memory left. There a request that is refused makes no new counter; otherwise a client could fill it with refused
//! requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::script::Mode;
use super::script_call::CallResult;
use super::servers::Servers;
use super::{Redis, advice};
use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::store::{Charged, StoreError};

/// Interval between two looks at the memory of a server: 1 s.
const EVERY: Duration = Duration::from_secs(1);
/// The same where its memory is not bounded: 30 s.
const UNBOUNDED: Duration = Duration::from_secs(30);
/// Timeout of one look: 100 ms.
const TIMEOUT: Duration = Duration::from_millis(100);
/// The time for which a look is believed: 3 s, so that one without a reply changes nothing.
const BELIEVED: Duration = Duration::from_secs(3);
/// The time for which memory is taken to be scarce after a server had none: 10 s.
const AFTER_NONE: Duration = Duration::from_secs(10);

/// Knowledge of the memory of the servers.
pub(super) struct Room {
    began: Instant,
    /// Milliseconds after `began` until which memory is scarce; 0 if it never was.
    scarce_until: AtomicU64,
}

impl Default for Room {
    fn default() -> Self {
        Self { began: Instant::now(), scarce_until: AtomicU64::new(0) }
    }
}

impl Room {
    /// Returns true if a server has used most of its memory, or had none for a counter.
    pub(super) fn is_scarce(&self) -> bool {
        let until = self.scarce_until.load(Ordering::Relaxed);
        until > 0 && self.passed(Duration::ZERO) < until
    }

    /// Notes that a server had no memory for a counter.
    pub(super) fn is_full(&self) {
        self.is_scarce_for(AFTER_NONE);
    }

    fn is_scarce_for(&self, time: Duration) {
        self.scarce_until.fetch_max(self.passed(time), Ordering::Relaxed);
    }

    fn passed(&self, more: Duration) -> u64 {
        u64::try_from((self.began.elapsed() + more).as_millis()).unwrap_or(u64::MAX)
    }

    /// Looks at the memory of `servers`; runs until one does not permit it.
    pub(super) async fn watch(&self, servers: &Servers) {
        loop {
            let nodes = servers.nodes();
            let well = nodes.iter().filter(|node| node.is_well());
            let looks = well.map(|node| node.ask(vec![advice::memory()], Instant::now() + TIMEOUT));
            let looks: Vec<_> = join_all(looks).await.into_iter().flatten().flatten().collect();
            // A node that was replaced meanwhile must not live on for the pause.
            drop(nodes);
            let Some(used) = looks.iter().map(advice::share_used).collect::<Option<Vec<_>>>() else { return };
            if used.iter().flatten().any(|share| *share >= advice::NEARLY_FULL) {
                self.is_scarce_for(BELIEVED);
            }
            let is_unbounded = !used.is_empty() && used.iter().all(Option::is_none);
            sleep(if is_unbounded { UNBOUNDED } else { EVERY }).await;
        }
    }
}

/// Returns true if the server had no memory for a counter.
pub(super) fn is_full(outcome: &CallResult) -> bool {
    match outcome {
        Ok((_, rows)) => rows.unsaved > 0,
        Err(error) => *error == StoreError::OutOfMemory,
    }
}

impl Redis {
    /// Charges a request whose charges are independent, so that it makes no new counter if it is refused, by one of these charges or,
    /// if `is_refused`, by another. No hits are leased beside them.
    pub(super) async fn charge_sparingly(&self, charges: &[Charge], is_refused: bool, until: Instant) -> Charged {
        let charges: Vec<Charge> = charges.iter().map(|charge| Charge { ask: 0, ..charge.clone() }).collect();
        let groups = self.0.groups(&charges, false);
        // One script that has all charges of the request can decide on it.
        let mode = if groups.len() == 1 && !is_refused { Mode::Lean } else { Mode::Existing };
        let outcomes = self.0.ask(&groups, &charges, mode, until).await;
        let mut unmade = Vec::new();
        for (group, (_, rows)) in
            groups.iter().zip(&outcomes).filter_map(|(group, outcome)| Some((group, outcome.as_ref().ok()?)))
        {
            let members = group.members.iter().zip(rows.iter());
            unmade.extend(members.filter(|(_, row)| row.is_unrecorded).map(|(&member, _)| member));
        }
        let mut charged = self.conclude(&groups, &charges, mode, outcomes);
        let answered = charges.iter().zip(&charged.answers);
        let decided =
            answered.filter_map(|(charge, answer)| Some(charge.charge_outcome(answer.as_ref().ok()?.outcome)));
        if mode == Mode::Lean || is_refused || unmade.is_empty() || is_request_refused(decided) {
            return charged;
        }
        // Nothing refuses the request, so its new counters are made.
        let new: Vec<Charge> = unmade.iter().map(|&member| charges[member].clone()).collect();
        let groups = self.0.groups(&new, false);
        let outcomes = self.0.ask(&groups, &new, Mode::Each, until).await;
        let made = self.conclude(&groups, &new, Mode::Each, outcomes);
        for (member, answer) in unmade.into_iter().zip(made.answers) {
            charged.answers[member] = answer;
        }
        charged
    }
}
