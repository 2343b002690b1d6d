//! Body for a refused client.

use serde_json::{Map, Value};

use super::headers::refusing;
use super::{TOO_LARGE, UNAVAILABLE};
use crate::model::{About, Decision, Tightest};

/// Format of the body of a refusal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefusalBody {
    /// Message of the rule that refuses, if it has one. A JSON object if the store is unavailable.
    #[default]
    Own,
    /// JSON object on one line.
    Json,
    /// Sentence. Envoy uses it as the message for gRPC clients.
    Text,
}

/// Body and its `content-type`.
pub(super) struct Body {
    pub(super) content_type: &'static str,
    pub(super) text: String,
}

/// Reason for a refusal, as far as the client may know it.
enum RefusalReason<'d, 'a> {
    /// The store is unavailable.
    Unavailable,
    /// The message was too large to be read.
    TooLarge,
    /// A rule refuses all such requests.
    Denied,
    /// This limit refuses the request.
    Limit(&'d Tightest<'a>),
    /// The reason is not exposed.
    Untold,
}

/// Reason for a refusal, seconds until a retry can pass, and the message of the rule that refuses.
struct RefusalText<'d, 'a> {
    reason: RefusalReason<'d, 'a>,
    retry: Option<u64>,
    own: Option<String>,
}

impl RefusalBody {
    /// Returns the body for the client of `decision`, if it has one. A JSON object has `id`, if there is one.
    pub(super) fn of(self, decision: &Decision<'_>, id: Option<&str>) -> Option<Body> {
        if !decision.outcome.is_refused() {
            return None;
        }
        let refusal = RefusalText::of(decision);
        Some(match (self, &refusal) {
            (Self::Own, RefusalText { reason: RefusalReason::Unavailable, .. }) => {
                Body::json(format!("{}\n", Value::Object(fields(UNAVAILABLE, id))))
            }
            (Self::Own, RefusalText { own, .. }) => Body::text(own.clone()?),
            (Self::Text, _) => Body::text(refusal.message()),
            (Self::Json, _) => Body::json(refusal.json(id)),
        })
    }
}

impl Body {
    fn json(text: String) -> Self {
        // Envoy replaces its own `text/plain` by it.
        Self { content_type: "application/json", text }
    }

    fn text(text: String) -> Self {
        Self { content_type: "text/plain; charset=utf-8", text }
    }
}

impl<'d, 'a> RefusalText<'d, 'a> {
    fn of(decision: &'d Decision<'a>) -> Self {
        let untold = || {
            let mut refused = decision.parts.iter().filter(|part| part.outcome().is_refused());
            (RefusalReason::Untold, refused.find(|part| !part.is_exposed()).and_then(|part| part.rule))
        };
        let (reason, rule) = match (decision.unavailable_for, decision.ruling) {
            _ if decision.is_too_large => (RefusalReason::TooLarge, None),
            (Some(_), _) => (RefusalReason::Unavailable, None),
            (None, Some(ruling)) if ruling.rule.is_exposed => (RefusalReason::Denied, Some(ruling.rule)),
            (None, Some(ruling)) => (RefusalReason::Untold, Some(ruling.rule)),
            (None, None) => {
                refusing(decision).map_or_else(untold, |(part, tightest)| (RefusalReason::Limit(tightest), part.rule))
            }
        };
        let retry = decision.unavailable_for.or(decision.retry).map(|wait| wait.ceil_secs().max(1));
        Self { reason, retry, own: rule.and_then(own) }
    }

    /// Returns the rule's own message, or else a sentence.
    fn message(&self) -> String {
        if let Some(own) = &self.own {
            return own.clone();
        }
        let why = match self.reason {
            RefusalReason::Unavailable => "The rate limiter is unavailable.".to_owned(),
            RefusalReason::TooLarge => "This request is too large.".to_owned(),
            RefusalReason::Denied => "This request is not allowed.".to_owned(),
            RefusalReason::Limit(Tightest { quota, verdict, .. }) => {
                let are = if quota.limit() == 1 && quota.burst() == 1 { "is" } else { "are" };
                let is_too_large = verdict.never_fits() && quota.limit() > 0;
                let what = if is_too_large { "This request is too large for its limit" } else { "Too many requests" };
                format!("{what}: {quota:#} {are} allowed.")
            }
            RefusalReason::Untold => "Too many requests.".to_owned(),
        };
        match (&self.reason, self.retry) {
            (RefusalReason::Unavailable | RefusalReason::Limit(_), Some(1)) => format!("{why} Try again in 1 second."),
            (RefusalReason::Unavailable | RefusalReason::Limit(_), Some(secs)) => {
                format!("{why} Try again in {secs} seconds.")
            }
            _ => why,
        }
    }

    fn json(&self, id: Option<&str>) -> String {
        let error = match self.reason {
            RefusalReason::Unavailable => UNAVAILABLE,
            RefusalReason::TooLarge => TOO_LARGE,
            RefusalReason::Denied => "denied",
            RefusalReason::Limit(_) | RefusalReason::Untold => "rate_limited",
        };
        let mut fields = fields(error, id);
        fields.insert("message".to_owned(), self.message().into());
        if let RefusalReason::Limit(Tightest { quota, .. }) = self.reason {
            fields.insert("limit".to_owned(), quota.limit().into());
            fields.insert("window".to_owned(), quota.window().length().to_string().into());
        }
        if let (RefusalReason::Unavailable | RefusalReason::Limit(_), Some(secs)) = (&self.reason, self.retry) {
            fields.insert("retry_after".to_owned(), secs.into());
        }
        Value::Object(fields).to_string()
    }
}

/// Returns the fields of every JSON body: the error, and the `id` of the decision, if there is one.
fn fields(error: &str, id: Option<&str>) -> Map<String, Value> {
    let id = id.map(|id| ("decision_id".to_owned(), id.into()));
    [("error".to_owned(), error.into())].into_iter().chain(id).collect()
}

/// Returns the rule's own message on one line, because Envoy makes a header of it for gRPC clients.
fn own(rule: &About) -> Option<String> {
    rule.message.as_deref().filter(|own| !own.is_empty()).map(|own| own.replace(char::is_control, " "))
}
