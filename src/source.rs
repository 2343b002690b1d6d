//! Sources of rules. A source offers documents to a sink whenever they change; the sink compiles them and puts them in force.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::rulefile::{Documents, InvalidRules};
use crate::rules::Generation;

pub mod file;

/// A source of rules.
pub trait RuleSource {
    /// Offers documents to `sink` whenever they change. Never returns.
    fn follow(self, sink: Arc<dyn RuleSink>) -> impl Future<Output = ()> + Send;
}

/// Receiver of the rules of a source.
pub trait RuleSink: Send + Sync {
    /// Compiles `documents` and puts them in force as a whole. Returns the number of the load.
    ///
    /// # Errors
    /// All errors in the documents. The rules in force stay.
    fn offer(&self, documents: Documents) -> Result<Generation, InvalidRules>;

    /// Reports that the source cannot be read. The rules in force stay.
    fn unreadable(&self, error: &str);

    /// Reports that the source again has the rules in force, after it had others that were rejected.
    fn restored(&self);

    /// Reports that a load has taken `passed` and continues.
    fn is_slow(&self, passed: Duration);

    /// Reports the end of a load that was reported as slow. `error`: the load ended with a panic.
    fn ended(&self, error: Option<&str>);
}
