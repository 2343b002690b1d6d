//! The source for rule files: reads them, watches them, and offers them when they have changed.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use self::find::Location;
use self::load::{Loader, Look, NotLoaded};
use self::watch::{Trigger, Watch};
use super::{RuleSink, RuleSource};
use crate::file::blocking;
use crate::rulefile::Documents;

pub mod find;
pub mod load;
mod watch;

/// The rule files of one location.
#[derive(Debug)]
pub struct FileSource {
    loader: Loader,
}

/// One reload, on a thread for blocking work: the time of a load grows with the number of rules, and a file system may not
/// answer at all.
struct Reload {
    loader: Loader,
    watch: Arc<Watch>,
    sink: Arc<dyn RuleSink>,
    /// Last warning about directories that cannot be watched.
    complaint: Option<String>,
}

impl FileSource {
    /// Reads the rule files of `location` for the first time. Their lists are below `values_root`, or below the directories of the rule files. The caller
    /// puts the returned documents in force.
    ///
    /// # Errors
    /// All files that cannot be read.
    pub fn open(location: Location, values_root: Option<PathBuf>) -> Result<(Self, Documents), NotLoaded> {
        let (loader, documents) = Loader::open(location, values_root)?;
        Ok((Self { loader }, documents))
    }
}

impl RuleSource for FileSource {
    async fn follow(self, sink: Arc<dyn RuleSink>) {
        let (watch, error) = Watch::new();
        if let Some(error) = error {
            tracing::warn!(
                event = "rules.not_watched",
                "file watching is unavailable, so rule files are polled every 10 s: {error}"
            );
        }
        let watch = Arc::new(watch);
        let (loader, complaint) = (self.loader, None);
        let reload = Reload { loader, watch: Arc::clone(&watch), sink: Arc::clone(&sink), complaint };
        let reload = Arc::new(Mutex::new(reload));
        let mut trigger = Trigger::Event;
        let mut other_inputs = sink.other_inputs();
        loop {
            let once = {
                let reload = Arc::clone(&reload);
                move || reload.lock().once(trigger)
            };
            let loaded = blocking(once, |passed| sink.is_slow(passed)).await;
            sink.ended(loaded.err().map(|error| error.to_string()).as_deref());
            trigger = tokio::select! {
                trigger = watch.changed() => trigger,
                // The sender lives as long as `sink`.
                _ = other_inputs.changed() => Trigger::OtherInput,
            };
        }
    }
}

impl Reload {
    fn once(&mut self, trigger: Trigger) {
        if trigger == Trigger::OtherInput {
            self.loader.retry();
        }
        let look = self.loader.look();
        if trigger == Trigger::Poll && !matches!(look, Look::Same) {
            tracing::info!(
                event = "rules.polled",
                "polling found a change of the rule files that file watching did not report"
            );
        }
        match look {
            Look::Same => {
                tracing::debug!(event = "rules.unchanged", "the rule files were read again and have not changed");
            }
            Look::Changed(documents) => {
                if self.sink.offer(documents).is_ok() {
                    self.loader.accepted();
                }
            }
            Look::Unreadable(error) => self.sink.unreadable(&error.to_string()),
            Look::Restored => self.sink.restored(),
        }
        let complaint = self.watch.follow(&self.loader.places()).err().map(|error| error.to_string());
        if let Some(complaint) = complaint.as_ref().filter(|_| complaint != self.complaint) {
            tracing::warn!(event = "rules.partly_watched", "some rule files are only polled every 10 s: {complaint}");
        }
        self.complaint = complaint;
    }
}
