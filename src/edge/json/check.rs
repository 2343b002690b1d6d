//! `/check/DOMAIN`: the HTTP check, for gateways that ask by a subrequest. The status is the answer.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{HttpEdge, UnreadBody, bad_request, caller, caller_time, end_span, failed, peer};
use crate::edge::answer::{Answers, HttpAnswer};
use crate::edge::grpc::rights;
use crate::limiter::CallerTime;
use crate::model::{Descriptor, Request};
use crate::telemetry::interface::HttpInterface;
use crate::telemetry::traces::{Span, Way};

/// Beginning of the path of each check.
pub(super) const PREFIX: &str = "/check/";

/// Question of a check, and what the rule file says about its answer.
struct Asked {
    /// Status of a refusal.
    refusal: StatusCode,
    /// Longest time that the request may wait.
    longest_wait: Duration,
    /// Longest delay of an admitted request.
    longest_delay: Duration,
    /// Descriptors of the original request; `None` if they are in the body.
    descriptors: Option<Vec<Descriptor>>,
}

impl Asked {
    /// Returns the time of the caller.
    fn time(&self, head: &Parts) -> CallerTime {
        CallerTime { longest_delay: Some(self.longest_delay), ..caller_time(head, Some(self.longest_wait)) }
    }
}

pub(super) async fn check(edge: Arc<HttpEdge>, request: HttpRequest) -> Result<Response, Infallible> {
    let (head, body) = request.into_parts();
    let telemetry = edge.edge.telemetry();
    telemetry.arrived(HttpInterface::Check);
    let mut span =
        telemetry.request(Way::Http { interface: HttpInterface::Check, method: &head.method }, &head.headers);
    let mut response = edge.check(head, body, &mut span).await.unwrap_or_else(std::convert::identity);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(end_span(span, response))
}

impl HttpEdge {
    async fn check(&self, head: Parts, body: Body, span: &mut Option<Span>) -> Result<Response, Response> {
        let caller = caller(&head).cloned();
        if caller.as_ref().is_some_and(|caller| caller.is_granted_nothing()) {
            return Err(refused(
                StatusCode::FORBIDDEN,
                "CALLERS_FILE grants nothing to `anonymous`, so /check is closed",
            ));
        }
        let (domain, path) = target(&head);
        let asked = self.asked(&head, domain, path).map_err(|response| *response)?;
        let Ok(_in_flight) = self.in_flight.try_acquire() else { return Err(self.crowded(asked.refusal)) };
        let (domain, time) = (domain.to_owned(), asked.time(&head));
        let refusal = asked.refusal;
        let decided = match asked.descriptors {
            Some(descriptors) if descriptors.is_empty() => return Ok(StatusCode::OK.into_response()),
            Some(descriptors) => {
                rights(caller.as_deref(), &domain).map_err(|undecided| failed(&undecided))?;
                if descriptors.iter().any(|descriptor| descriptor.proxy_entry.is_some()) {
                    self.edge.telemetry().unknown_client(&domain);
                }
                let request = Request::new(domain, descriptors, 0).map_err(|error| failed(&error.into()))?;
                // What else the client sent would be kept while the decision waits for the store.
                drop(head);
                let held = self.edge.decide_request(request, (time, Answers::http), span.as_mut()).await;
                held.map_err(|undecided| failed(&undecided))?.over().await
            }
            None => {
                let decided = self.decide_body(&head, body, Some(&domain), (time, Answers::http), span).await;
                match decided {
                    Ok(response) => response,
                    Err(UnreadBody::TooLarge(rest)) => return Err(self.too_large(&head, rest).await),
                    Err(UnreadBody::NoMemory) => return Err(self.crowded(refusal)),
                    Err(UnreadBody::Broken) => return Err(bad_request(&"the body did not arrive whole")),
                    Err(UnreadBody::Undecided(response)) => return Err(response),
                }
            }
        };
        Ok(answer(decided, refusal))
    }

    /// Returns what is asked about `domain`.
    fn asked(&self, head: &Parts, domain: &str, path: &str) -> Result<Asked, Box<Response>> {
        let refused = |status, why: &str| Box::new(refused(status, why));
        let peer = peer(head);
        let rules = self.edge.limiter().rules();
        let Some(requests) = rules.requests(domain) else {
            let why = "no rule file with `requests` has this domain: the path is /check/DOMAIN";
            return Err(refused(StatusCode::NOT_FOUND, why));
        };
        if !requests.trusts(peer) {
            return Err(refused(StatusCode::FORBIDDEN, "`trusted_proxies` of the domain does not name this peer"));
        }
        let refusal = StatusCode::from_u16(requests.refusal_status()).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let (longest_wait, longest_delay) = (requests.longest_wait(), requests.longest_delay());
        let asked = |descriptors| Asked { refusal, longest_wait, longest_delay, descriptors };
        if requests.are_in_body() {
            if head.method != Method::POST {
                return Err(refused(StatusCode::METHOD_NOT_ALLOWED, "the descriptors are sent by POST, as JSON"));
            }
            // The headers of an original request, which a gateway passes on, may be those of a page. Here a script asks. It may pass them on
            // too, so the status is that of a refusal: any client can write them.
            self.pages.admit(&head.headers).map_err(|sign| refused(refusal, &sign.to_string()))?;
            return Ok(asked(None));
        }
        let descriptors = requests.read(peer, &head.method, path, &head.headers).map_err(|unreadable| {
            self.edge.telemetry().invalid();
            refused(refusal, &unreadable.to_string())
        })?;
        Ok(asked(Some(descriptors)))
    }
}

/// Returns the domain, and the path and query behind it.
fn target(head: &Parts) -> (&str, &str) {
    let target = head.uri.path_and_query().map_or("", |target| target.as_str());
    let behind = target.strip_prefix(PREFIX).unwrap_or_default();
    let (domain, path) = behind.split_at(behind.find(['/', '?']).unwrap_or(behind.len()));
    (domain, if path.starts_with('/') { path } else { "/" })
}

/// Returns the answer to a check that was decided.
fn answer(HttpAnswer { is_refused, headers, body }: HttpAnswer, refusal: StatusCode) -> Response {
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = if is_refused { refusal } else { StatusCode::OK };
    for header in headers {
        let name = HeaderName::from_bytes(header.key.as_bytes());
        if let Ok((name, value)) = name.map_err(drop).and_then(|name| Ok((name, header.value.parse().map_err(drop)?))) {
            answer.headers_mut().insert(name, value);
        }
    }
    answer
}

/// Returns the answer to a check that no limit decides, with the reason. It is a refusal.
fn refused(status: StatusCode, why: &str) -> Response {
    (status, format!("The request was not decided: {why}.\n")).into_response()
}
