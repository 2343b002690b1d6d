//! Parameters of the stream to a control plane.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use crate::dial::authority;
use crate::dial::tls::TlsFiles;

/// Parameters of the stream to a control plane.
#[derive(Clone, Debug)]
pub struct ControlPlane {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// TLS; `None` for plaintext.
    pub tls: Option<PlaneTls>,
    /// Headers of each stream.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// ID of this node.
    pub node_id: String,
    /// Metadata of this node.
    pub node_metadata: Vec<(String, String)>,
    /// First wait before a new connection.
    pub backoff_initial: Duration,
    /// Longest wait before a new connection.
    pub backoff_max: Duration,
    /// Factor by which the wait grows.
    pub backoff_growth: f64,
    /// True if the wait varies at random.
    pub has_jitter: bool,
    /// Maximum size of a response in bytes.
    pub max_message: usize,
    /// Time for which the rules in force stay after the control plane has sent an empty set.
    pub hold_empty: Duration,
    /// Directory that keeps the rules over a restart, if there is one, and the age above which its rules are not used; 0: no limit.
    pub state: Option<(PathBuf, Duration)>,
}

/// TLS to a control plane.
#[derive(Clone, Debug)]
pub struct PlaneTls {
    /// Files with authorities and the client certificate. They are read for each connection.
    pub files: TlsFiles,
    /// Name that the certificate must have; `None`: the host.
    pub name: Option<String>,
}

impl ControlPlane {
    /// Returns host and port as in a URL.
    pub fn authority(&self) -> String {
        authority(&self.host, self.port)
    }

    /// Returns the wait before the next connection, after `failures` attempts in a row without a response.
    pub(super) fn wait(&self, failures: i32) -> Duration {
        let growth = self.backoff_growth.max(2.0).powi(failures.saturating_sub(1).max(0));
        let seconds = (self.backoff_initial.as_secs_f64() * growth).min(self.backoff_max.as_secs_f64());
        let wait = Duration::try_from_secs_f64(seconds).unwrap_or(self.backoff_max);
        if !self.has_jitter {
            return wait;
        }
        let half = wait / 2;
        let micros = u64::try_from(half.as_micros()).unwrap_or(u64::MAX).saturating_add(1);
        half + Duration::from_micros(RandomState::new().hash_one(0) % micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_from_the_first_to_the_longest() {
        let plane = ControlPlane {
            host: String::new(),
            port: 1,
            tls: None,
            headers: Vec::new(),
            node_id: String::new(),
            node_metadata: Vec::new(),
            backoff_initial: Duration::from_secs(1),
            backoff_max: Duration::from_secs(10),
            backoff_growth: 0.5,
            has_jitter: false,
            max_message: 1,
            hold_empty: Duration::ZERO,
            state: None,
        };
        assert_eq!(
            [0, 1, 2, 3, 4, 5, i32::MAX].map(|failures| plane.wait(failures).as_secs()),
            [1, 1, 2, 4, 8, 10, 10]
        );
        let plane = ControlPlane { has_jitter: true, ..plane };
        for _ in 0..100 {
            let wait = plane.wait(5);
            assert!(wait >= Duration::from_secs(5) && wait <= Duration::from_secs(10), "{wait:?}");
        }
    }
}
