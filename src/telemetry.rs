//! Telemetry: metrics, spans, and a log line about refusals.
//!
//! The edge that answers a decision reports it once ([`Telemetry::observe`]); stores and sources report their own events.
//! Nothing here blocks, and no value from a client becomes a label unless a rule asks for it.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::histogram::Histogram;
use self::interface::{HttpInterface, HttpRequests};
use self::known_good::KnownGoodRefusals;
use self::limited::{Cause, LimitedCalls};
use self::metrics::{
    BUILD_INFO, DELAYED, ERRORS, GLOBAL_SHADOW_MODE, LOADS, REJECTED_LOADS, REQUESTS, RESPONSE_TIME, RULES,
    RULES_GENERATION, RULES_LOADED, RULES_REJECTED, START_TIME, TOTAL_REQUESTS, UNKNOWN_CLIENTS, UNKNOWN_DOMAINS,
};
use self::page::Page;
use self::records::Records;
use self::refusals::Refusals;
pub use self::series::NamedHits;
use self::series::Rules;
use self::servers::ServerMetrics;
use self::throttle::LogThrottle;
use self::times::Times;
use self::traces::{Span, Traces, Way};
use self::undecided::{Reason, UndecidedCalls};
use self::value::seconds;
use crate::model::{About, Answered, Deciding, Decision, Micros, Outcome, Request, Wait};

pub mod decision_id;
pub mod escape;
mod headroom;
mod histogram;
pub mod interface;
pub mod json_lines;
mod known_good;
mod label;
pub mod limited;
pub mod lines;
pub mod metrics;
pub mod page;
mod points;
pub mod recent;
pub mod records;
mod refusals;
mod sample;
mod series;
pub mod servers;
mod split;
pub mod statsd;
pub mod tap;
pub mod throttle;
mod times;
pub mod top;
pub mod traces;
pub mod undecided;
pub mod unmatched;
mod value;

/// Method name in the metrics of calls, as in the reference.
const METHOD: &str = "ShouldRateLimit";
/// Interval between two log lines about clients that are known only as proxies: 1 minute. Each request may be one.
const UNKNOWN_CLIENTS_EVERY: Duration = Duration::from_secs(60);

/// Adds the metrics of another component to the page.
type PageWriter = Box<dyn Fn(&mut Page) + Send + Sync>;

/// Collector of all metrics and spans.
pub struct Telemetry {
    is_on: bool,
    traces: Option<Arc<Traces>>,
    started: Micros,
    rules: Rules,
    servers: Arc<ServerMetrics>,
    refusals: Refusals,
    records: Option<Arc<Records>>,
    calls: AtomicU64,
    http_requests: HttpRequests,
    response_time: Histogram,
    /// Times of calls for statsd, if that is on.
    times: Option<Times>,
    invalid: AtomicU64,
    limited: Arc<LimitedCalls>,
    undecided: UndecidedCalls,
    /// Decisions in which a failure policy answered for the store at least once.
    unasked: AtomicU64,
    shadowed_refusals: AtomicU64,
    /// Admitted requests with a delay: by a header to Envoy, and held here.
    delayed: [AtomicU64; 2],
    unknown_domains: AtomicU64,
    unknown_clients: LogThrottle,
    known_good: KnownGoodRefusals,
    loads: Loads,
    page_writers: Mutex<Vec<PageWriter>>,
}

/// Results of loading the rule files.
#[derive(Debug, Default)]
struct Loads {
    succeeded: AtomicU64,
    rejected: AtomicU64,
    is_rejected: AtomicBool,
    rules: AtomicU64,
    generation: AtomicU64,
    loaded_us: AtomicU64,
}

/// A call that is being answered. Dropping it records its duration.
pub struct CallTimer<'a>(Option<(&'a Telemetry, Instant)>);

impl Drop for CallTimer<'_> {
    fn drop(&mut self) {
        if let Some((telemetry, began)) = self.0 {
            let took = began.elapsed();
            telemetry.response_time.record(took);
            if let Some(times) = &telemetry.times {
                times.record(took);
            }
        }
    }
}

impl Telemetry {
    /// Creates telemetry without counts, for a process that started at `started`. Hits beyond `near_ratio` of a limit count
    /// as near it.
    pub fn new(near_ratio: f32, started: Micros) -> Self {
        Self {
            is_on: true,
            traces: None,
            started,
            rules: Rules::new(near_ratio),
            servers: Arc::default(),
            refusals: Refusals::new(),
            records: None,
            calls: AtomicU64::new(0),
            http_requests: HttpRequests::default(),
            response_time: Histogram::default(),
            times: None,
            invalid: AtomicU64::new(0),
            limited: Arc::default(),
            undecided: UndecidedCalls::default(),
            unasked: AtomicU64::new(0),
            shadowed_refusals: AtomicU64::new(0),
            delayed: Default::default(),
            unknown_domains: AtomicU64::new(0),
            unknown_clients: LogThrottle::every(UNKNOWN_CLIENTS_EVERY),
            known_good: KnownGoodRefusals::default(),
            loads: Loads::default(),
            page_writers: Mutex::default(),
        }
    }

    /// Creates telemetry that counts no calls and no decisions.
    pub fn off(started: Micros) -> Self {
        Self { is_on: false, ..Self::new(1.0, started) }
    }

    /// Records requests as spans in `traces`, if that is set.
    pub fn with_traces(self, traces: Option<Arc<Traces>>) -> Self {
        Self { traces, ..self }
    }

    /// Keeps records of decisions, even if these are not counted.
    pub fn with_records(self, records: Records) -> Self {
        Self { records: Some(Arc::new(records)), ..self }
    }

    /// Returns the records of decisions, if they are kept.
    pub fn records(&self) -> Option<Arc<Records>> {
        self.records.clone()
    }

    /// Also counts what statsd needs: the hits of each rule under its full name, and the time of each call.
    pub fn with_statsd(self) -> Self {
        Self { times: Some(Times::default()), rules: self.rules.with_names(), ..self }
    }

    /// Returns the counters that belong to no rule, by their names in statsd.
    pub fn process_counts(&self) -> [(&'static str, u64); 6] {
        [
            ("ratelimit_server.ShouldRateLimit.total_requests", &self.calls),
            ("ratelimit.service.call.should_rate_limit.redis_error", &self.unasked),
            ("ratelimit.service.call.should_rate_limit.service_error", &self.invalid),
            ("ratelimit.service.config_load_success", &self.loads.succeeded),
            ("ratelimit.service.config_load_error", &self.loads.rejected),
            ("ratelimit.service.global_shadow_mode", &self.shadowed_refusals),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }

    /// Returns the hits of the rules under their full names, to be taken one by one. Empty unless statsd is on.
    pub fn named_hits(&self) -> Vec<NamedHits> {
        self.rules.named_hits()
    }

    /// Returns the milliseconds and the number of calls that took them since the last time.
    pub fn take_times(&self) -> Vec<(u64, u64)> {
        self.times.as_ref().map(Times::take).unwrap_or_default()
    }

    /// Returns true if calls and decisions are counted.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Counts a call that has arrived, and starts to measure its duration.
    pub fn call(&self) -> CallTimer<'_> {
        if !self.is_on {
            return CallTimer(None);
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        CallTimer(Some((self, Instant::now())))
    }

    /// Counts a request that has arrived at `interface`.
    pub fn arrived(&self, interface: HttpInterface) {
        if self.is_on {
            self.http_requests.count(interface);
        }
    }

    /// Starts the span of a request that arrived by `way` with these headers. Returns `None` if the request is not recorded.
    pub fn request(&self, way: Way<'_>, headers: &HeaderMap) -> Option<Span> {
        self.traces.as_ref()?.request(way, headers)
    }

    /// Counts a request that was answered as invalid.
    pub fn invalid(&self) {
        if !self.is_on {
            return;
        }
        self.invalid.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a check of `domain` whose client is known only as a trusted proxy.
    pub fn unknown_client(&self, domain: &str) {
        if let Some(count) = self.unknown_clients.due() {
            tracing::warn!(
                event = "check.client_unknown",
                domain,
                count,
                "the client of checks is known only as one of trusted_proxies, and all such clients share its counters: the gateway has to add its peer to X-Forwarded-For, and trusted_proxies must not name clients"
            );
        }
    }

    /// Counts a gRPC call of `peer` that ended before a decision, even if other calls are not counted.
    pub fn undecided(&self, reason: Reason, peer: Option<IpAddr>, method: Option<&str>) {
        self.undecided.count(reason, peer, method);
    }

    /// Counts a call that hit a bound of this process, even if other calls are not counted.
    pub fn call_limited(&self, cause: Cause) {
        self.limited.count(cause);
    }

    /// Returns the counts of calls that hit a bound, for components that have no telemetry.
    pub fn limited_calls(&self) -> Arc<LimitedCalls> {
        Arc::clone(&self.limited)
    }

    /// Counts a decided request, and records it, in `span` too.
    pub fn observe(&self, request: &Request, decision: &Decision<'_>, span: Option<&mut Span>) {
        if !self.is_on && span.is_none() && self.records.is_none() {
            return;
        }
        let deciding = decision.deciding();
        if let Some(span) = span {
            span.decided(request.descriptors().len(), decision, deciding);
        }
        if let Some(records) = &self.records {
            records.decided(request, decision, deciding);
        }
        if !self.is_on {
            return;
        }
        self.rules.count(request, decision, deciding);
        self.count(decision, deciding);
    }

    fn count(&self, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if decision.domain.is_none() {
            self.unknown_domains.fetch_add(1, Ordering::Relaxed);
        }
        let is_unasked = |answer: &Answered<'_>| answer.verdict.provenance.is_policy();
        if decision.answers.iter().any(is_unasked) {
            self.unasked.fetch_add(1, Ordering::Relaxed);
        }
        self.known_good.count(decision);
        if decision.is_refusal_shadowed {
            self.shadowed_refusals.fetch_add(1, Ordering::Relaxed);
        }
        let Wait { header, hold } = decision.wait;
        for (count, wait) in self.delayed.iter().zip([header, hold]) {
            if decision.outcome == Outcome::Admitted && wait > Micros::ZERO {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        if decision.outcome.is_refused() {
            self.refusals.count(decision, deciding);
        }
    }

    /// Reports that other rules are in force since `now`.
    pub fn rules_loaded<'a>(
        &self,
        generation: u64,
        domains: &[&str],
        rules: impl ExactSizeIterator<Item = &'a About> + Clone,
        now: Micros,
    ) {
        let Loads { succeeded, is_rejected, rules: count, generation: last, loaded_us, .. } = &self.loads;
        succeeded.fetch_add(1, Ordering::Relaxed);
        is_rejected.store(false, Ordering::Relaxed);
        count.store(rules.len() as u64, Ordering::Relaxed);
        last.store(generation, Ordering::Relaxed);
        loaded_us.store(now.get(), Ordering::Relaxed);
        if let Some(records) = &self.records {
            records.unmatched.replace(generation, rules.clone(), now);
        }
        self.rules.replace(generation, domains, rules);
    }

    /// Reports that the rule files were read and rejected.
    pub fn rules_rejected(&self) {
        self.loads.rejected.fetch_add(1, Ordering::Relaxed);
        self.loads.is_rejected.store(true, Ordering::Relaxed);
    }

    /// Reports that other rules came into force while the newest rules stay rejected.
    pub fn rules_still_rejected(&self) {
        self.loads.is_rejected.store(true, Ordering::Relaxed);
    }

    /// Reports that the rule files again have the content of the rules in force.
    pub fn rules_restored(&self) {
        self.loads.is_rejected.store(false, Ordering::Relaxed);
    }

    /// Returns the metrics of the store's servers, for the stores to fill.
    pub fn servers(&self) -> Arc<ServerMetrics> {
        Arc::clone(&self.servers)
    }

    /// Registers `writer`, which adds the metrics of another component to every page.
    pub fn also(&self, writer: impl Fn(&mut Page) + Send + Sync + 'static) {
        self.page_writers.lock().push(Box::new(writer));
    }

    /// Returns the present metrics in Prometheus' text format.
    pub fn page(&self) -> String {
        let mut page = Page::default();
        self.write_to(&mut page);
        page.into_text()
    }

    /// Returns the metrics of `now` as requests of OpenTelemetry's protocol, of a process that `resource` describes.
    pub fn points(&self, now: Micros, resource: &Resource) -> Vec<ExportMetricsServiceRequest> {
        let mut page = Page::points(self.started, now);
        self.write_to(&mut page);
        page.into_requests(resource)
    }

    fn write_to(&self, page: &mut Page) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.rules.write_to(page);
        page.single(&UNKNOWN_DOMAINS, read(&self.unknown_domains));
        page.single(&UNKNOWN_CLIENTS, self.unknown_clients.events());
        self.known_good.write_to(page);
        if let Some(records) = &self.records {
            records.write_to(page);
        }
        page.single(&GLOBAL_SHADOW_MODE, read(&self.shadowed_refusals));
        page.family(&DELAYED, |family| {
            let [header, hold] = &self.delayed;
            family.sample(&["header"], read(header));
            family.sample(&["hold"], read(hold));
        });
        page.family(&ERRORS, |family| {
            family.sample(&["redis_error"], read(&self.unasked));
            family.sample(&["service_error"], read(&self.invalid));
        });
        page.family(&TOTAL_REQUESTS, |family| family.sample(&[METHOD], read(&self.calls)));
        page.family(&REQUESTS, |family| {
            family.sample(&["grpc"], read(&self.calls));
            HttpInterface::ALL
                .into_iter()
                .for_each(|interface| family.sample(&[interface.name()], self.http_requests.of(interface)));
        });
        self.limited.write_to(page);
        self.undecided.write_to(page);
        page.family(&RESPONSE_TIME, |family| family.histogram(&[METHOD], &self.response_time));
        let Loads { succeeded, rejected, is_rejected, rules, generation, loaded_us } = &self.loads;
        page.single(&LOADS, read(succeeded));
        page.single(&REJECTED_LOADS, read(rejected));
        page.single(&RULES, read(rules));
        page.single(&RULES_GENERATION, read(generation));
        page.single(&RULES_LOADED, seconds(read(loaded_us)));
        page.single(&RULES_REJECTED, u8::from(is_rejected.load(Ordering::Relaxed)));
        self.servers.write_to(page);
        self.page_writers.lock().iter().for_each(|writer| writer(page));
        page.family(&BUILD_INFO, |family| family.sample(&[env!("CARGO_PKG_VERSION")], 1_u8));
        page.single(&START_TIME, seconds(self.started.get()));
    }
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
