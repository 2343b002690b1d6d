//! Sources of rules. A source offers documents to a sink whenever they change; the sink compiles them and puts them in force.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;

use self::file::FileSource;
use self::file::find::Location;
use self::file::load::NotLoaded;
use self::xds::XdsSource;
use self::xds::connect::NotConnected;
use self::xds::plane::ControlPlane;
use self::xds::state::UnusableState;
use self::xds::status::XdsStatus;
use crate::rulefile::{Documents, InvalidRules};
use crate::rules::Generation;

pub mod file;
pub mod xds;

/// The choice of a rule source, and what it needs to be opened.
#[derive(Clone, Debug)]
pub enum SourceChoice {
    /// Rule files.
    Files(Location),
    /// A control plane.
    Xds(Box<ControlPlane>),
}

/// The rule source of this process.
#[derive(Debug)]
pub enum Source {
    /// Rule files.
    Files(Box<FileSource>),
    /// A control plane.
    Xds(Box<XdsSource>),
}

impl Source {
    /// Opens the chosen source. Returns it with its first documents, which the caller puts in force; `None` if it offers even the
    /// first ones later. Lists of rule files may be below `values_root`.
    ///
    /// # Errors
    /// The reasons why there are no documents.
    pub fn open(choice: SourceChoice, values_root: Option<PathBuf>) -> Result<(Self, Option<Documents>), NotOpened> {
        match choice {
            SourceChoice::Files(location) => {
                let (source, documents) = FileSource::open(location, values_root)?;
                Ok((Self::Files(Box::new(source)), Some(documents)))
            }
            SourceChoice::Xds(plane) => Ok((Self::Xds(Box::new(XdsSource::open(*plane)?)), None)),
        }
    }

    /// Returns the state of the stream to the control plane, if that is the source.
    pub fn xds_status(&self) -> Option<Arc<XdsStatus>> {
        match self {
            Self::Files(_) => None,
            Self::Xds(xds) => Some(xds.status()),
        }
    }

    /// Returns a receiver that turns true once the source has answered for the first time; `None` if it has already.
    pub fn answered(&self) -> Option<watch::Receiver<bool>> {
        match self {
            Self::Files(_) => None,
            Self::Xds(xds) => Some(xds.answered()),
        }
    }
}

/// Reason why a source cannot be opened.
#[derive(Debug, Error)]
pub enum NotOpened {
    /// Rule files cannot be read.
    #[error(transparent)]
    Files(#[from] NotLoaded),
    /// The certificates for the control plane cannot be used.
    #[error(transparent)]
    Xds(#[from] NotConnected),
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] UnusableState),
}

impl RuleSource for Source {
    async fn follow(self, sink: Arc<dyn RuleSink>) {
        match self {
            Self::Files(files) => files.follow(sink).await,
            Self::Xds(xds) => xds.follow(sink).await,
        }
    }
}

/// A source of rules.
pub trait RuleSource {
    /// Offers documents to `sink` whenever they change. Never returns: a source that never changes waits for ever.
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

    /// Returns a receiver that changes when another input of the load has changed, so that rejected documents may be valid now.
    fn other_inputs(&self) -> watch::Receiver<()>;

    /// Reports the end of a load that was reported as slow. `error`: the load ended with a panic.
    fn ended(&self, error: Option<&str>);
}
