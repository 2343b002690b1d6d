//! Decisions in the process that asks, with counters in its memory: no server, no Redis, no runtime.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use thiserror::Error;

use crate::file::{self, MAX_LIST};
use crate::limiter::Limiter;
use crate::model::{Decision, Descriptor, Entry, LimitedPart, Micros, Request};
pub use crate::model::{InvalidRequest, Outcome};
pub use crate::rulefile::InvalidRules;
use crate::rulefile::document::MAX_FILE_BYTES;
use crate::rulefile::{Documents, File, Options, compile};
use crate::rules::RuleSet;
use crate::rules::live::LiveRules;
use crate::store::clock::SystemClock;
use crate::store::guard::Guard;

/// The most counters: 1,000,000, as of the service (`MEMORY_MAX_COUNTERS`). Beyond it, those that matter least are dropped.
const MOST_COUNTERS: usize = 1_000_000;

/// A rate limiter of this process. Threads may share it.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("rules.yaml");
/// # std::fs::write(&path, "domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 1 } }]\n")?;
/// let limiter = tidegate::embedded::RateLimiter::from_files([path])?;
/// assert!(limiter.decide("edge", [[("user", "alice")]])?.is_admitted());
/// let answer = limiter.decide("edge", [[("user", "alice")]])?;
/// assert!(answer.is_refused());
/// assert!(answer.retry_after.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RateLimiter {
    paths: Vec<PathBuf>,
    rules: Arc<LiveRules>,
    limiter: Limiter,
    /// Held while rules are loaded: one load at a time.
    loading: Mutex<()>,
}

/// The answer for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// Outcome for the whole request.
    pub outcome: Outcome,
    /// Time after which the request can be admitted, if it is refused and waiting helps.
    pub retry_after: Option<Duration>,
    /// Time for which an admitted request is to wait before it goes on (`delay` in the rule); zero for most.
    pub wait: Duration,
    /// For each descriptor with a limit, its tightest limit, in the order of the request.
    pub limits: Vec<LimitState>,
}

/// State of one limit after a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitState {
    /// The rule, by its place in the rule file: `edge.user`.
    pub rule: String,
    /// Name of the limit, if it has one.
    pub name: Option<String>,
    /// Hits that the limit admits in its window.
    pub limit: u32,
    /// Hits that remain.
    pub remaining: u32,
    /// Time until the counter is idle again.
    pub reset: Duration,
    /// True if this limit refuses. A limit in shadow mode may refuse in a request that is admitted.
    pub is_refused: bool,
}

/// Reason why rules were not loaded. The rules that were in force stay in force.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotLoaded {
    /// A file cannot be read.
    #[error("{}: {why}", path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The rules are wrong. The text has every error with its file, line and column.
    #[error(transparent)]
    Invalid(#[from] InvalidRules),
}

impl RateLimiter {
    /// Returns a limiter with the rules of these files, and without counters.
    ///
    /// # Errors
    /// If a file cannot be read or its rules are wrong.
    pub fn from_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Result<Self, NotLoaded> {
        let paths: Vec<PathBuf> = paths.into_iter().map(Into::into).collect();
        let rules = Arc::new(LiveRules::new(load(&paths)?));
        let guard = Guard::in_memory(MOST_COUNTERS, Arc::new(SystemClock));
        let limiter = Limiter::new(Arc::clone(&rules), Arc::new(guard));
        Ok(Self { paths, rules, limiter, loading: Mutex::new(()) })
    }

    /// Reads the files again. Counters of limits that stay the same are kept.
    ///
    /// # Errors
    /// If a file cannot be read or its rules are wrong. Then the old rules stay in force.
    pub fn reload(&self) -> Result<(), NotLoaded> {
        let _one = self.loading.lock();
        self.rules.replace(load(&self.paths)?);
        Ok(())
    }

    /// Decides a request of one hit, and charges its counters: a domain, and descriptors of keys and values from the outside in.
    /// A descriptor that no rule matches is admitted.
    ///
    /// # Errors
    /// If the domain is empty or in no rule file, or if there is no descriptor.
    pub fn decide<'a, D>(
        &self,
        domain: &str,
        descriptors: impl IntoIterator<Item = D>,
    ) -> Result<Answer, InvalidRequest>
    where
        D: IntoIterator<Item = (&'a str, &'a str)>,
    {
        self.decide_hits(domain, descriptors, 1)
    }

    /// Decides a request of `hits` hits. 0 hits look at the counters without spending.
    ///
    /// # Errors
    /// As [`RateLimiter::decide`].
    pub fn decide_hits<'a, D>(
        &self,
        domain: &str,
        descriptors: impl IntoIterator<Item = D>,
        hits: u32,
    ) -> Result<Answer, InvalidRequest>
    where
        D: IntoIterator<Item = (&'a str, &'a str)>,
    {
        let entry = |(key, value): (&str, &str)| Entry::new(key.to_owned(), value.to_owned());
        let descriptor = |entries: D| Descriptor {
            entries: entries.into_iter().map(entry).collect(),
            hits_addend: Some(hits.into()),
            ..Descriptor::default()
        };
        let request = Request::new(domain.to_owned(), descriptors.into_iter().map(descriptor).collect(), 0)?;
        let rules = self.limiter.rules();
        // The embedded store answers at once, so this never waits.
        match self.limiter.decide(&rules, &request, None).now_or_never() {
            Some(decision) if decision.domain.is_none() => {
                Err(InvalidRequest::UnknownDomain { domain: domain.to_owned() })
            }
            Some(decision) => Ok(Answer::new(&decision)),
            None => Ok(Answer::unknown()),
        }
    }
}

impl std::fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimiter").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl Answer {
    /// Returns true if the request may go on.
    pub fn is_admitted(&self) -> bool {
        self.outcome == Outcome::Admitted
    }

    /// Returns true if the request must not go on.
    pub fn is_refused(&self) -> bool {
        self.outcome.is_refused()
    }

    fn new(decision: &Decision<'_>) -> Self {
        Self {
            outcome: decision.outcome,
            retry_after: decision.retry.map(duration),
            wait: duration(decision.wait.header.saturating_add(decision.wait.hold)),
            limits: decision.limited().map(LimitState::new).collect(),
        }
    }

    fn unknown() -> Self {
        Self { outcome: Outcome::Failed, retry_after: None, wait: Duration::ZERO, limits: Vec::new() }
    }
}

impl LimitState {
    fn new((part, tightest): LimitedPart<'_, '_>) -> Self {
        Self {
            rule: part.rule.map(|rule| rule.path.to_string()).unwrap_or_default(),
            name: tightest.name.map(str::to_owned),
            limit: tightest.quota.limit(),
            remaining: tightest.verdict.remaining_for_client(),
            reset: duration(tightest.verdict.reset),
            is_refused: tightest.verdict.outcome.is_refused(),
        }
    }
}

fn duration(length: Micros) -> Duration {
    Duration::from_micros(length.get())
}

/// Reads and compiles rule files and the lists that they name.
fn load(paths: &[PathBuf]) -> Result<RuleSet, NotLoaded> {
    let read = |path: &PathBuf| {
        let unreadable = |error: file::Unreadable| NotLoaded::Unreadable { path: path.clone(), why: error.to_string() };
        let bytes = file::read(path, MAX_FILE_BYTES).map_err(unreadable)?;
        Ok(File { name: path.to_string_lossy().into(), bytes })
    };
    let files = paths.iter().map(read).collect::<Result<_, NotLoaded>>()?;
    let mut documents = Documents::parse(files);
    documents.read_lists(|path| file::read(path, MAX_LIST).map_err(|error| error.to_string()));
    let options = Options { needs_secret: true, ..Options::default() };
    Ok(compile(documents, &options)?.rules)
}
