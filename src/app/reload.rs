//! Reload of the rules at run time: waits for changed files, compiles them and replaces the rules in force.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::summary::counted;
use super::watched;
use crate::file;
use crate::rules::live::Live;
use crate::rules::{self, RuleSet};
use crate::source::load::{Loader, Look};
use crate::source::watch::{Watch, Why};
use crate::telemetry::Telemetry;
use crate::transport::admin::Loaded;

/// Target of the log lines about reloads. They are written at every log level: a reload is as rare as a start, and an
/// operator waits for its result.
pub(super) const TARGET: &str = module_path!();
/// Maximum number of replaced rule sets that are kept until no request uses them: 8. A rule set beyond that is dropped
/// by its last user.
const MOST_RETIRED: usize = 8;

/// Reloads the rules whenever their files change. Never returns.
pub(super) async fn follow(loader: Loader, live: Arc<Live>, tell: watch::Sender<Loaded>, telemetry: Arc<Telemetry>) {
    let (watch, error) = Watch::new();
    if let Some(error) = error {
        tracing::warn!("changes of rule files are seen only every 10 seconds, for nothing tells of them: {error}");
    }
    let (watch, told) = (Arc::new(watch), tell.clone());
    let reload = Arc::new(Mutex::new(Reload {
        loader,
        live,
        tell,
        telemetry: Arc::clone(&telemetry),
        watch: Arc::clone(&watch),
        retired: Vec::new(),
        complaint: None,
    }));
    let mut why = Why::Told;
    loop {
        // The time of a load grows with the number of rules, and a file system may not answer at all.
        let once = {
            let reload = Arc::clone(&reload);
            move || reload.lock().once(why)
        };
        let began = Instant::now();
        let slow = |passed: Duration| {
            told.send_modify(|loaded| loaded.slow_since = Some(began));
            tracing::warn!(
                "loading the rule files has taken {} s and goes on: their file system may not answer; the rules in force stay, and no other change is seen meanwhile",
                passed.as_secs()
            );
        };
        let loaded = file::apart(once, slow).await;
        told.send_if_modified(|loaded| loaded.slow_since.take().is_some());
        if let Err(error) = loaded {
            let why = format!("loading them did not end well, which is a bug in this program: {error}");
            telemetry.rules_rejected();
            told.send_modify(|loaded| loaded.rejected = Some(why.clone()));
            tracing::error!("the rules in force stay: {why}");
        }
        why = watch.changed().await;
    }
}

struct Reload {
    loader: Loader,
    live: Arc<Live>,
    tell: watch::Sender<Loaded>,
    telemetry: Arc<Telemetry>,
    watch: Arc<Watch>,
    /// Replaced rule sets that requests may still use.
    retired: Vec<Arc<RuleSet>>,
    /// Last warning about directories that cannot be watched.
    complaint: Option<String>,
}

impl Reload {
    fn once(&mut self, why: Why) {
        let look = self.loader.look();
        if why == Why::Unasked && !matches!(look, Look::Same) {
            tracing::info!("nothing told of this change, so it was seen only by the look of every 10 seconds");
        }
        match look {
            Look::Same => tracing::debug!("the rule files were read again and say the same"),
            Look::Loaded { loaded: rules::Loaded { rules, warnings }, files } => {
                warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
                let what = counted(&rules, files);
                let load = self.live.next_generation();
                // Before the rules are in force, so that their first decision finds its counts.
                watched::rules_loaded(&self.telemetry, &rules, load);
                self.retired.push(self.live.replace(rules));
                self.tell.send_modify(|loaded| {
                    *loaded = Loaded {
                        since: Instant::now(),
                        what: what.clone(),
                        rejected: None,
                        slow_since: loaded.slow_since,
                    };
                });
                tracing::info!(load, "other rules are in force: {what}");
            }
            Look::Refused(why) => {
                self.telemetry.rules_rejected();
                self.tell.send_modify(|loaded| loaded.rejected = Some(why.to_string()));
                tracing::error!("the rules in force stay, for the files cannot be loaded as they are now:\n{why}");
            }
            Look::Restored => {
                self.telemetry.rules_restored();
                self.tell.send_modify(|loaded| loaded.rejected = None);
                tracing::info!("the rule files say again what is in force");
            }
        }
        // No request can acquire these any more, so a rule set that only this thread holds can be dropped here.
        self.retired.retain(|rules| Arc::strong_count(rules) > 1);
        let surplus = self.retired.len().saturating_sub(MOST_RETIRED);
        self.retired.drain(..surplus);
        let complaint = self.watch.follow(&self.loader.places()).err().map(|error| error.to_string());
        if let Some(complaint) = complaint.as_ref().filter(|_| complaint != self.complaint) {
            tracing::warn!("changes of some rule files are seen only every 10 seconds: {complaint}");
        }
        self.complaint = complaint;
    }
}
