//! Receiver of new rules: compiles them, puts them in force, and reports them to metrics, log and debug page.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::inputs::{Inputs, OverlayState};
use super::summary::counted;
use super::{failure, metrics};
use crate::admin::RulesStatus;
use crate::rulefile::{CompiledRules, Documents, InvalidRules, Options, Overlay};
use crate::rules::live::LiveRules;
use crate::rules::{Generation, RuleSet};
use crate::source::RuleSink;
use crate::telemetry::Telemetry;
use crate::telemetry::throttle::LogThrottle;

/// Target of the log lines about reloads. They are written at every log level: a reload is as rare as a start, and an
/// operator waits for its result.
pub(super) const TARGET: &str = module_path!();
/// Maximum number of replaced rule sets that are kept until no request uses them: 8. A rule set beyond that is dropped
/// by its last user.
const MOST_RETIRED: usize = 8;
/// Interval between two log lines about rejected rules of a control plane: 1 minute. A control plane sends rejected rules again at once.
const REJECTED_EVERY: Duration = Duration::from_secs(60);

/// The receiver of new rules.
pub(super) struct Intake {
    options: Options,
    live: Arc<LiveRules>,
    /// State of the rules for the debug page.
    page: watch::Sender<RulesStatus>,
    telemetry: Arc<Telemetry>,
    /// Replaced rule sets that requests may still use. Its lock also orders offers of several sources.
    retired: Mutex<Vec<Arc<RuleSet>>>,
    /// Changes when documents of the source, or an overlay, come into force.
    accepted: Accepted,
    /// Inputs of the load in force. Its lock orders loads of the source and of the overlay.
    inputs: Mutex<Inputs>,
    overlay: Arc<OverlayState>,
    /// Limits the log lines about rejected rules, of a source that may send them again and again.
    rejections: Option<LogThrottle>,
}

/// Signals of accepted inputs, each for the source of the other input.
#[derive(Debug, Default)]
pub(super) struct Accepted {
    pub(super) documents: watch::Sender<()>,
    pub(super) overlay: watch::Sender<()>,
}

impl Intake {
    /// Creates the receiver for the rules in `live`. `options` apply to every load.
    pub(super) fn new(
        options: Options,
        live: Arc<LiveRules>,
        page: watch::Sender<RulesStatus>,
        telemetry: Arc<Telemetry>,
        inputs: Inputs,
        overlay: Arc<OverlayState>,
    ) -> Self {
        Self {
            options,
            live,
            page,
            telemetry,
            retired: Mutex::default(),
            accepted: Accepted::default(),
            inputs: Mutex::new(inputs),
            overlay,
            rejections: None,
        }
    }

    /// Writes at most one log line a minute about rejected rules: the source sends them again and again.
    pub(super) fn with_few_lines(self) -> Self {
        Self { rejections: Some(LogThrottle::every(REJECTED_EVERY)), ..self }
    }

    /// Returns the state of the overlay.
    pub(super) fn overlay_state(&self) -> Arc<OverlayState> {
        Arc::clone(&self.overlay)
    }

    /// Puts a new overlay in force, laid over the last valid documents of the source.
    ///
    /// # Errors
    /// All errors in the overlay. The rules in force stay.
    pub(super) fn offer_overlay(&self, documents: Documents) -> Result<Generation, InvalidRules> {
        let overlay = Overlay::new(documents, &self.options)?;
        let mut inputs = self.inputs.lock();
        let source = inputs.source.clone();
        let files = source.as_ref().map_or(0, Documents::len);
        let (compiled, effect) = overlay.compile(source, &self.options)?;
        inputs.overlay = Some(overlay);
        *self.overlay.effect.lock() = effect;
        // The source may have newer documents that are invalid. They stay rejected until the source offers them again.
        let rejected = self.page.borrow().rejected.clone();
        let load = self.warn_and_put_in_force(compiled, files);
        if rejected.is_some() {
            self.telemetry.rules_still_rejected();
            self.page.send_modify(|loaded| loaded.rejected = rejected);
        }
        self.accepted.overlay.send_replace(());
        Ok(load)
    }

    /// Returns the signals of accepted inputs.
    pub(super) fn accepted(&self) -> &Accepted {
        &self.accepted
    }

    /// Compiles documents of the source with the overlay, if one is set, and puts them in force.
    fn load(&self, documents: Documents) -> Result<Generation, InvalidRules> {
        let files = documents.len();
        let mut inputs = self.inputs.lock();
        let (compiled, effect) = inputs.compile(documents, &self.options)?;
        *self.overlay.effect.lock() = effect;
        let load = self.warn_and_put_in_force(compiled, files);
        self.accepted.documents.send_replace(());
        Ok(load)
    }

    fn warn_and_put_in_force(&self, CompiledRules { rules, warnings }: CompiledRules, files: usize) -> Generation {
        warnings.iter().for_each(failure::warning);
        self.put_in_force(rules, files)
    }

    fn rejected(&self, why: &str) {
        self.telemetry.rules_rejected();
        self.page.send_modify(|loaded| loaded.rejected = Some(why.to_owned()));
    }

    fn put_in_force(&self, rules: RuleSet, files: usize) -> Generation {
        let what = counted(&rules, files);
        let mut retired = self.retired.lock();
        let load = self.live.next_generation();
        // Before the rules are in force, so that their first decision finds its counts.
        metrics::rules_loaded(&self.telemetry, &rules, load);
        retired.push(self.live.replace(rules));
        self.page.send_modify(|loaded| {
            *loaded = RulesStatus {
                since: Instant::now(),
                what: what.clone(),
                rejected: None,
                slow_since: loaded.slow_since,
            };
        });
        tracing::info!(event = "rules.loaded", load, "new rules are in force: {what}");
        let surplus = retired.len().saturating_sub(MOST_RETIRED);
        retired.drain(..surplus);
        load
    }

    /// Returns true if there are replaced rule sets that requests may still use. Does not wait for a load that is just put in
    /// force.
    pub(super) fn has_retired(&self) -> bool {
        self.retired.try_lock().is_some_and(|retired| !retired.is_empty())
    }

    /// Drops the replaced rule sets that no request uses any more. No request can acquire them again.
    pub(super) fn drop_unused(&self) {
        let unused: Vec<_> = self.retired.lock().extract_if(.., |rules| Arc::strong_count(rules) == 1).collect();
        // Not while the lock is held: the drop of many rules takes a while.
        drop(unused);
    }
}

impl RuleSink for Intake {
    fn offer(&self, documents: Documents) -> Result<Generation, InvalidRules> {
        self.load(documents).inspect_err(|invalid| self.unreadable(&invalid.to_string()))
    }

    fn unreadable(&self, error: &str) {
        self.rejected(error);
        let count = match &self.rejections {
            None => None,
            Some(rejections) => match rejections.due() {
                None => return,
                count => count,
            },
        };
        let effect = if self.live.snapshot().generation() == 0 {
            "and no rules are in force yet, so each call fails until there are valid ones"
        } else {
            "so the old rules stay in force"
        };
        tracing::error!(event = "rules.rejected", count, "the new rules are invalid, {effect}:\n{error}");
    }

    fn restored(&self) {
        self.telemetry.rules_restored();
        self.page.send_modify(|loaded| loaded.rejected = None);
        tracing::info!(event = "rules.restored", "the rule files have the content of the rules in force again");
    }

    fn other_inputs(&self) -> watch::Receiver<()> {
        self.accepted.overlay.subscribe()
    }

    fn is_slow(&self, passed: Duration) {
        self.page.send_modify(|loaded| {
            loaded.slow_since.get_or_insert_with(|| Instant::now() - passed);
        });
        tracing::warn!(
            event = "rules.slow",
            seconds = passed.as_secs(),
            "still loading the rule files: their file system may be stuck; the old rules stay in force, and no other change is loaded meanwhile"
        );
    }

    fn ended(&self, error: Option<&str>) {
        self.page.send_if_modified(|loaded| loaded.slow_since.take().is_some());
        if let Some(error) = error {
            let why = format!("the load panicked, which is a bug: {error}");
            self.rejected(&why);
            tracing::error!(event = "rules.panicked", "the old rules stay in force: {why}");
        }
    }
}
