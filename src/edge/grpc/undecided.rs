//! Calls that end before a decision: what they are counted as, and what their answers say.

use http::Response;
use tonic::body::Body;
use tonic::{Code, Status};

use super::{Edge, SHOULD_RATE_LIMIT, Undecided, Unreadable};
use crate::model::InvalidRequest;
use crate::telemetry::limited::Cause;
use crate::telemetry::undecided::Reason;

/// Paths of the API before v3, and of quotas.
const OLDER: [&str; 2] = ["/envoy.service.ratelimit.v2.", "/pb.lyft.ratelimit."];
const QUOTAS: &str = "/envoy.service.rate_limit_quota.";

impl Undecided {
    /// Returns the reason as which the call is counted. The others have metrics of their own, or are seen in the answer.
    pub(super) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Invalid(InvalidRequest::EmptyDomain) => Some(Reason::NoDomain),
            Self::Invalid(InvalidRequest::NoDescriptors) => Some(Reason::NoDescriptors),
            Self::Invalid(_) => Some(Reason::InvalidLimit),
            Self::NoRules => Some(Reason::NoRules),
            Self::Malformed(_) => Some(Reason::Malformed),
            Self::Unavailable(_) | Self::NotGranted => None,
        }
    }
}

impl Edge {
    /// Counts and answers a call whose message cannot be read.
    pub(super) fn unreadable(&self, Unreadable { reason, status }: Unreadable) -> Response<Body> {
        // No other error of a body has this status: see `RequestBody`.
        if status.code() == Code::DeadlineExceeded {
            self.telemetry.call_limited(Cause::LateBody);
        }
        if let Some(reason) = reason {
            self.undecided(reason, None);
        }
        status.into_http()
    }

    /// Counts the call of this answer if no service has its method, and names the method that decides.
    pub(super) fn named(&self, answer: Response<Body>, path: &str) -> Response<Body> {
        if code(&answer) != Some(Code::Unimplemented) {
            return answer;
        }
        if answer.headers().contains_key("grpc-accept-encoding") {
            self.undecided(Reason::Compression, Some(path));
            return answer;
        }
        let (reason, advice) = of_method(path);
        self.undecided(reason, Some(path));
        Status::unimplemented(format!("this method is not served; {SHOULD_RATE_LIMIT} decides{advice}")).into_http()
    }
}

fn code(answer: &Response<Body>) -> Option<Code> {
    Status::from_header_map(answer.headers()).map(|status| status.code())
}

/// Returns the reason for a method that is not served, and advice about it.
fn of_method(path: &str) -> (Reason, &'static str) {
    if OLDER.iter().any(|older| path.starts_with(older)) {
        return (Reason::OlderApi, ": in Envoy set transport_api_version: V3 in rate_limit_service");
    }
    if path.starts_with(QUOTAS) {
        return (Reason::QuotaApi, ": in Envoy use the filter envoy.filters.http.ratelimit");
    }
    (Reason::UnknownMethod, "")
}
