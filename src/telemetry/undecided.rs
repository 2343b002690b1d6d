//! Counts of gRPC calls that ended before a decision, by reason.

use std::net::IpAddr;
use std::time::Duration;

use super::metrics::CALLS_UNDECIDED;
use super::page::Page;
use super::throttle::LogThrottle;

/// Time between two log lines of one reason: 1 min.
const INTERVAL: Duration = Duration::from_secs(60);
/// Maximum bytes of a method in a log line: 100. The longest method that Envoy calls has 75.
const LONGEST_METHOD: usize = 100;

macro_rules! reasons {
    ($($(#[$about:meta])+ $reason:ident $name:literal, $log:literal;)+) => {
        /// Reason for which a call ended before a decision.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason {
            $($(#[$about])+ $reason,)+
        }

        impl Reason {
            /// All reasons, in the order of the metric's series.
            pub const ALL: [Self; [$(Self::$reason),+].len()] = [$(Self::$reason),+];

            /// Returns the value of the label `reason`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$reason => $name,)+ }
            }

            /// Returns the sentence of the log line.
            const fn log(self) -> &'static str {
                match self { $(Self::$reason => $log,)+ }
            }
        }
    };
}

// One line adds a reason: its name here, the value of the label, and the sentence of the log line.
reasons! {
    /// A method of a version of the API before v3.
    OlderApi "older_api", "they are of an older version of the API: in Envoy set transport_api_version: V3 in rate_limit_service";
    /// A method of the quota API.
    QuotaApi "quota_api", "they ask for rate limit quotas (RLQS), which are not served: use Envoy's filter envoy.filters.http.ratelimit";
    /// A method that is not served.
    UnknownMethod "unknown_method", "their method is not served: /envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit decides";
    /// A message that is compressed by another method than gzip.
    Compression "compression", "their messages are compressed, and not by gzip as grpc-encoding must say";
    /// A message whose gzip stream is broken.
    BrokenGzip "broken_gzip", "their messages are no valid gzip stream";
    /// A message that is no request.
    Malformed "malformed", "their messages are no RateLimitRequest";
    /// A request without a domain.
    NoDomain "no_domain", "they have no domain: set `domain` in the rate limit configuration of the caller";
    /// A request without descriptors.
    NoDescriptors "no_descriptors", "they have no descriptors: the rate limit configuration of the caller must send at least one";
    /// A request with a limit that cannot be counted.
    InvalidLimit "invalid_limit", "they bring a limit that cannot be counted; the answer says why";
    /// A request that came before any rules.
    NoRules "no_rules", "no rules have been loaded yet";
}

/// Counts of calls that ended before a decision, by reason. All threads may count at once.
#[derive(Debug)]
pub(super) struct UndecidedCalls {
    reasons: [LogThrottle; Reason::ALL.len()],
}

impl Default for UndecidedCalls {
    fn default() -> Self {
        Self { reasons: Reason::ALL.map(|_| LogThrottle::every(INTERVAL)) }
    }
}

impl UndecidedCalls {
    /// Counts a call of `peer`, which a Unix socket has not, and writes a log line at most every minute for each reason.
    pub(super) fn count(&self, reason: Reason, peer: Option<IpAddr>, method: Option<&str>) {
        if let Some(count) = self.reasons[reason as usize].due() {
            let last_client = peer.map(tracing::field::display);
            let method = method.map(|method| method.get(..method.floor_char_boundary(LONGEST_METHOD)));
            tracing::warn!(
                event = "calls.undecided",
                reason = reason.name(),
                count,
                last_client,
                method = method.flatten(),
                "calls got an error and no decision, and most callers admit a request then: {}",
                reason.log()
            );
        }
    }

    /// Adds the metric to a page, with a series for each reason.
    pub(super) fn write_to(&self, page: &mut Page) {
        page.family(&CALLS_UNDECIDED, |family| {
            for reason in Reason::ALL {
                family.sample(&[reason.name()], self.reasons[reason as usize].events());
            }
        });
    }
}
