//! Spans of requests and store calls, for distributed tracing.
//!
//! The request's headers decide whether it is recorded, before anything is allocated for it. Spans go into a bounded queue
//! that nothing waits for: if it is full, they are dropped and counted.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, Method};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use self::incoming::CALLER_HEADERS;
use self::incoming::CallerTrace;
use super::interface::HttpInterface;
use crate::model::{Clock, Deciding, Decision};

mod incoming;

tokio::task_local! {
    /// Parent of the spans that a task creates; unset if the request is not recorded.
    static PARENT: Parent;
}

/// Sampling of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Share of requests to record if the headers do not decide, from 0 to 1.
    pub ratio: f64,
    /// True if the caller's sampling flag also decides for this service.
    pub follows_caller: bool,
}

/// Factory of spans.
pub struct Traces {
    sampler: Sampler,
    clock: Arc<dyn Clock>,
    spans: mpsc::Sender<SpanData>,
    dropped: Arc<AtomicU64>,
    scope: InstrumentationScope,
    ids: RandomIdGenerator,
}

/// A span being recorded. It ends when this is dropped.
pub struct Span(Box<Recording>);

struct Recording {
    traces: Arc<Traces>,
    began: Instant,
    /// Taken when the span ends.
    data: Option<SpanData>,
    /// True if the work was completed; false if the caller went away before.
    is_done: bool,
}

#[derive(Clone)]
struct Parent {
    traces: Arc<Traces>,
    context: SpanContext,
}

/// Way by which a request arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way<'a> {
    /// `ShouldRateLimit` over gRPC.
    Grpc,
    /// An interface of the HTTP listener.
    Http {
        /// Interface at which the request arrived.
        interface: HttpInterface,
        /// Method of the request.
        method: &'a Method,
    },
}

/// Methods whose names are recorded (RFC 9110, 9.3, and PATCH). The others are any text of a client.
static KNOWN_METHODS: [Method; 9] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::DELETE,
    Method::CONNECT,
    Method::OPTIONS,
    Method::TRACE,
    Method::PATCH,
];

/// Value of `rpc.method`, and name of the spans of calls.
const RPC: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

impl Sampler {
    /// Returns true if the trace is recorded. Every service with the same share decides the same, because the computation is
    /// that of OpenTelemetry's SDKs.
    fn takes(self, trace: TraceId) -> bool {
        if self.ratio >= 1.0 {
            return true;
        }
        let [.., a, b, c, d, e, f, g, h] = trace.to_bytes();
        let drawn = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            clippy::cast_sign_loss,
            reason = "the SDKs' own arithmetic; the share is from 0 to 1"
        )]
        let bound = (self.ratio * (1_u64 << 63) as f64) as u64;
        drawn < bound
    }
}

impl Traces {
    /// Creates a factory that puts the spans that `sampler` selects into `spans`, and counts those without room in `dropped`.
    pub fn new(
        sampler: Sampler,
        clock: Arc<dyn Clock>,
        spans: mpsc::Sender<SpanData>,
        dropped: Arc<AtomicU64>,
    ) -> Self {
        let scope = InstrumentationScope::builder("tidegate").with_version(env!("CARGO_PKG_VERSION")).build();
        Self { sampler, clock, spans, dropped, scope, ids: RandomIdGenerator::default() }
    }

    /// Starts the span of a request. Returns `None` if the request is not recorded.
    pub(super) fn request(self: &Arc<Self>, way: Way<'_>, headers: &HeaderMap) -> Option<Span> {
        let caller = CallerTrace::read(headers);
        let is_wanted = caller.is_sampled.filter(|_| self.sampler.follows_caller);
        if is_wanted == Some(false) || (is_wanted.is_none() && self.sampler.ratio <= 0.0) {
            return None;
        }
        let (trace, parent) =
            caller.ids.map_or_else(|| (self.ids.new_trace_id(), None), |(trace, span)| (trace, Some(span)));
        if is_wanted.is_none() && !self.sampler.takes(trace) {
            return None;
        }
        let state = parent.map(|_| incoming::state(headers)).unwrap_or_default();
        let (name, attributes) = match way {
            Way::Grpc => (RPC.into(), [("rpc.system.name", "grpc"), ("rpc.method", RPC)]),
            Way::Http { interface, method } => {
                let route = interface.route();
                let known = KNOWN_METHODS.iter().find(|known| *known == method).map(Method::as_str);
                let name = format!("{} {route}", known.unwrap_or("HTTP"));
                (name.into(), [("http.request.method", known.unwrap_or("_OTHER")), ("http.route", route)])
            }
        };
        let mut span = self.begin(name, SpanKind::Server, trace, parent, state);
        attributes.into_iter().for_each(|(key, value)| span.set(key, value));
        Some(span)
    }

    fn begin(
        self: &Arc<Self>,
        name: Cow<'static, str>,
        span_kind: SpanKind,
        trace: TraceId,
        parent: Option<SpanId>,
        state: TraceState,
    ) -> Span {
        let start_time = SystemTime::UNIX_EPOCH + Duration::from_micros(self.clock.now().get());
        let is_ours = span_kind == SpanKind::Client;
        let data = SpanData {
            span_context: SpanContext::new(trace, self.ids.new_span_id(), TraceFlags::SAMPLED, false, state),
            parent_span_id: parent.unwrap_or(SpanId::INVALID),
            parent_span_is_remote: parent.is_some() && !is_ours,
            span_kind,
            name,
            start_time,
            end_time: start_time,
            attributes: Vec::with_capacity(12),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        };
        Span(Box::new(Recording { traces: Arc::clone(self), began: Instant::now(), data: Some(data), is_done: false }))
    }
}

impl Span {
    /// Runs `future`, which serves this request. Spans that it creates become children of this one.
    pub async fn around<F: Future>(&self, future: F) -> F::Output {
        let parent = self
            .0
            .data
            .as_ref()
            .map(|data| Parent { traces: Arc::clone(&self.0.traces), context: data.span_context.clone() });
        match parent {
            Some(parent) => PARENT.scope(parent, future).await,
            None => future.await,
        }
    }

    /// Adds the decision. Names of rules come from rule files; only the number of descriptors comes from the request.
    pub(super) fn decided(&mut self, descriptors: usize, decision: &Decision<'_>, deciding: Deciding<'_>) {
        self.set("tidegate.descriptors", count(descriptors));
        self.set("tidegate.generation", i64::try_from(decision.generation).unwrap_or(i64::MAX));
        self.set("tidegate.outcome", decision.outcome.name());
        self.set("tidegate.provenance", deciding.origin.name());
        if let Some(domain) = decision.domain {
            self.set("tidegate.domain", domain.to_owned());
        }
        if let Some(rule) = deciding.rule {
            self.set("tidegate.rule", rule.path.to_string());
        }
    }

    /// Adds the status of an answered gRPC call. `is_failed` is true if this service is at fault.
    pub fn answered(&mut self, status: &'static str, is_failed: bool) {
        self.done();
        self.set("rpc.response.status_code", status);
        if is_failed {
            self.failed(status);
        }
    }

    /// Adds the status of an answered HTTP request.
    pub fn answered_http(&mut self, status: u16) {
        self.done();
        self.set("http.response.status_code", i64::from(status));
        if status >= 500 {
            self.failed(status.to_string());
        }
    }

    /// Marks the work as completed.
    pub fn done(&mut self) {
        self.0.is_done = true;
    }

    /// Discards the span.
    pub fn forget(&mut self) {
        self.0.data = None;
    }

    /// Adds the error code that a server of the store replied with.
    pub fn replied(&mut self, code: &'static str) {
        self.set("db.response.status_code", code);
    }

    /// Marks the span as failed, with the reason `why`.
    pub fn failed(&mut self, why: impl Into<Value>) {
        self.set("error.type", why);
        if let Some(data) = &mut self.0.data {
            data.status = Status::error("");
        }
    }

    fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.0.data {
            data.attributes.push(KeyValue::new(key, value));
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(mut data) = self.data.take() else { return };
        if !self.is_done {
            data.attributes.push(KeyValue::new("error.type", "cancelled"));
            data.status = Status::error("");
        }
        data.end_time = data.start_time + self.began.elapsed();
        if self.traces.spans.try_send(data).is_err() {
            self.traces.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Starts the span of one write to `server` that runs `scripts` scripts. Returns `None` if the request is not recorded.
pub fn store_call(server: &str, port: Option<u16>, scripts: usize) -> Option<Span> {
    let begin = |parent: &Parent| {
        let (context, is_one) = (&parent.context, scripts == 1);
        let name = if is_one { "EVALSHA" } else { "PIPELINE EVALSHA" };
        let (above, state) = (Some(context.span_id()), context.trace_state().clone());
        let mut span = parent.traces.begin(name.into(), SpanKind::Client, context.trace_id(), above, state);
        span.set("db.system.name", "redis");
        span.set("db.operation.name", name);
        if !is_one {
            span.set("db.operation.batch.size", count(scripts));
        }
        span.set("server.address", server.to_owned());
        if let Some(port) = port {
            span.set("server.port", i64::from(port));
        }
        span
    };
    PARENT.try_with(begin).ok()
}

/// Spawns a task whose spans belong to the same request as those of the calling task.
pub fn spawn<F>(future: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    match PARENT.try_with(Parent::clone) {
        Ok(parent) => tokio::spawn(PARENT.scope(parent, future)),
        Err(_) => tokio::spawn(future),
    };
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
