//! Spans: what a request did here, for those who follow it through many services.
//!
//! Whether a request is recorded is decided from its headers, before anything is made for it. What is recorded goes into a
//! bounded queue that nobody waits for: where it is full, spans are dropped and counted.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use self::incoming::CALLER_HEADERS;
use self::incoming::Incoming;
use super::deciding::Deciding;
use crate::model::{Clock, Decision, Outcome};

mod incoming;

tokio::task_local! {
    /// Whose children the spans are that a task makes; unset where nothing is recorded.
    static PARENT: Parent;
}

/// What becomes of requests whose headers leave it open, and whether headers are listened to at all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// The share of requests that is recorded, from 0 to 1.
    pub ratio: f64,
    /// Whether a caller that says whether its own part is recorded decides for this one, too.
    pub follows_caller: bool,
}

/// Makes spans.
pub struct Traces {
    sampler: Sampler,
    clock: Arc<dyn Clock>,
    spans: mpsc::Sender<SpanData>,
    dropped: Arc<AtomicU64>,
    scope: InstrumentationScope,
    ids: RandomIdGenerator,
}

/// Something that is recorded. It ends when this is dropped.
pub struct Span(Box<Recording>);

struct Recording {
    traces: Arc<Traces>,
    began: Instant,
    /// Taken when it ends.
    data: Option<SpanData>,
    /// Whether it came to its end: who asked may have gone away before.
    is_done: bool,
}

#[derive(Clone)]
struct Parent {
    traces: Arc<Traces>,
    context: SpanContext,
}

/// How requests come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// `ShouldRateLimit` over gRPC.
    Grpc,
    /// `/json` over HTTP, by POST or otherwise.
    Json {
        /// Whether it is by POST.
        is_post: bool,
    },
}

/// The method as `rpc.method` has it, and the name of its spans.
const RPC: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

impl Sampler {
    /// Whether the trace of this number is recorded: the same for all who ask with the same share, for it is computed as in
    /// the SDKs of OpenTelemetry.
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
    /// Records what `sampler` takes into `spans`, and counts in `dropped` what finds no room there.
    pub fn new(
        sampler: Sampler,
        clock: Arc<dyn Clock>,
        spans: mpsc::Sender<SpanData>,
        dropped: Arc<AtomicU64>,
    ) -> Self {
        let scope = InstrumentationScope::builder("tidegate").with_version(env!("CARGO_PKG_VERSION")).build();
        Self { sampler, clock, spans, dropped, scope, ids: RandomIdGenerator::default() }
    }

    /// A request has come in this way; `None` when it is not recorded.
    pub(super) fn request(self: &Arc<Self>, way: Way, headers: &HeaderMap) -> Option<Span> {
        let caller = Incoming::read(headers);
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
            Way::Grpc => (RPC, [("rpc.system.name", "grpc"), ("rpc.method", RPC)]),
            Way::Json { is_post } => {
                let (name, method) = if is_post { ("POST /json", "POST") } else { ("HTTP /json", "_OTHER") };
                (name, [("http.request.method", method), ("http.route", "/json")])
            }
        };
        let mut span = self.begin(name.into(), SpanKind::Server, trace, parent, state);
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
    /// Runs what serves this request: the spans it makes are this one's children.
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

    /// What was decided. Names of rules come from rule files; nothing here comes from the request but how many descriptors
    /// it has.
    pub(super) fn decided(&mut self, descriptors: usize, decision: &Decision<'_>, deciding: Deciding<'_, '_>) {
        self.set("tidegate.descriptors", count(descriptors));
        self.set("tidegate.generation", i64::try_from(decision.generation).unwrap_or(i64::MAX));
        self.set(
            "tidegate.outcome",
            match decision.outcome {
                Outcome::Admitted => "admitted",
                Outcome::Refused => "refused",
                Outcome::Failed => "failed",
            },
        );
        self.set("tidegate.provenance", deciding.origin.name());
        if let Some(domain) = decision.domain {
            self.set("tidegate.domain", domain.to_owned());
        }
        if let Some(rule) = deciding.rule {
            self.set("tidegate.rule", rule.path.to_string());
        }
    }

    /// With which status a call of gRPC was answered, and whether that is our fault.
    pub fn answered(&mut self, status: &'static str, is_failed: bool) {
        self.done();
        self.set("rpc.response.status_code", status);
        if is_failed {
            self.failed(status);
        }
    }

    /// With which status a request over HTTP was answered.
    pub fn answered_http(&mut self, status: u16) {
        self.done();
        self.set("http.response.status_code", i64::from(status));
        if status >= 500 {
            self.failed(status.to_string());
        }
    }

    /// It came to its end.
    pub fn done(&mut self) {
        self.0.is_done = true;
    }

    /// It is not recorded after all.
    pub fn forget(&mut self) {
        self.0.data = None;
    }

    /// What a server of the store answered instead of doing what it was asked, by its code.
    pub fn replied(&mut self, code: &'static str) {
        self.set("db.response.status_code", code);
    }

    /// It did not do what it was to do.
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

/// A server of the store is asked to run the script so often in one write; `None` where nothing is recorded.
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

/// Starts a task whose spans belong to the same request as those of the task that starts it.
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
