//! Addresses and topology of a Redis.

use std::fmt;
use std::path::PathBuf;

use super::login::Login;

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A host and a port.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Topology of a Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server.
    Single(Address),
    /// A master that sentinels name.
    Sentinel {
        /// Its name.
        master: String,
        /// The sentinels.
        sentinels: Vec<Address>,
        /// Login for the sentinels.
        login: Login,
    },
    /// The masters of a cluster; these are some of its nodes.
    Cluster(Vec<Address>),
}
