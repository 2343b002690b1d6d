//! Set-up of the metrics: connects the counters of each part of the process to the metrics page.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::watch;

use super::inputs::OverlayState;
use super::listener_tls::{Expiry, Tls as ListenersTls};
use super::process;
use super::store::STORES;
use crate::admin::RulesStatus;
use crate::dial::tls::Tls;
use crate::edge::callers::{CallerGate, Denial};
use crate::edge::pages::{PageGate, PageSign};
use crate::model::Clock;
use crate::rulefile::OverlayEffect;
use crate::rules::{Rule, RuleSet};
use crate::serve::{EndCause, HandshakeOutcome, Tally};
use crate::settings::Settings;
use crate::source::xds::status::{StreamState, XdsStatus};
use crate::store::clock::SystemClock;
use crate::store::guard::Guard;
use crate::store::known::LeaseHits;
use crate::store::memory::Memory;
use crate::store::redis::Redis;
use crate::store::redis::credentials::{Credentials, LoginRead};
use crate::store::replicas::Replicas;
use crate::telemetry::Telemetry;
use crate::telemetry::decision_id::DecisionIds;
use crate::telemetry::lines::Lines;
use crate::telemetry::metrics::{
    ADMIN_TOKENS_REJECTED, CALLER_DENIALS, CALLERS_REJECTED, CERTIFICATE_EXPIRY, CONNECTIONS, CONNECTIONS_ENDED,
    HELD_CALLS, KNOWN_REFUSALS, LATER_BACKLOG, LATER_DROPPED, LEASE_HITS, LEASES, LOG_LINES_DROPPED, MEMORY_COUNTERS,
    MEMORY_EVICTED, OVERLAY_REJECTED, OVERLAY_SKIPPED, OVERLAY_UNMATCHED, PAGES_REFUSED, REPLICAS, RULES_LOADING,
    SPANS_DROPPED, STORE_CONNECTED, STORE_LOGIN_READS, STORE_REACHED, STORE_UNTIMELY, TLS_HANDSHAKES, XDS_CONNECTED,
    XDS_DISCONNECTED, XDS_EMPTY_HELD, XDS_RESPONSES, XDS_RESTORED_AGE,
};
use crate::telemetry::records::Records;
use crate::telemetry::traces::Traces;

/// Creates the telemetry of a process that starts now.
pub(super) fn telemetry(settings: &Settings, traces: Option<Arc<Traces>>) -> Arc<Telemetry> {
    let telemetry = match settings.disable_stats {
        true => Telemetry::off(SystemClock.now()),
        false => Telemetry::new(settings.near_limit_ratio.0, SystemClock.now()),
    };
    let telemetry = if settings.statsd.is_some() { telemetry.with_statsd() } else { telemetry };
    let records = Records::new(Arc::new(SystemClock), settings.refusals_keep.0, decision_ids());
    let telemetry = telemetry.with_traces(traces).with_records(records);
    process::metrics(&telemetry);
    Arc::new(telemetry)
}

/// Returns the ids of decisions of this process. `None` if the system has no random bytes.
fn decision_ids() -> Option<DecisionIds> {
    let (mut key, mut instance) = ([0; 32], [0; 6]);
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut key).and_then(|()| random.fill(&mut instance)).ok()?;
    Some(DecisionIds::new(key, instance))
}

/// Adds the metrics of dropped spans and dropped log lines.
pub(super) fn queues(telemetry: &Telemetry, lines: Arc<Lines>, spans: Option<Arc<AtomicU64>>) {
    telemetry.also(move |page| {
        page.single(&SPANS_DROPPED, spans.as_ref().map_or(0, |dropped| dropped.load(Ordering::Relaxed)));
        page.single(&LOG_LINES_DROPPED, lines.dropped());
    });
}

/// Reports that `rules` come into force, as load number `load`.
pub(super) fn rules_loaded(telemetry: &Telemetry, rules: &RuleSet, load: u64) {
    let all = rules.rules();
    let abouts = all.iter().map(|rule| Rule::about(rule));
    telemetry.rules_loaded(load, &rules.domains(), abouts, SystemClock.now());
}

/// Adds the metric of a slow load of the rules.
pub(super) fn slow_load(telemetry: &Telemetry, loaded: watch::Receiver<RulesStatus>) {
    telemetry.also(move |page| {
        let passed = loaded.borrow().slow_since.map_or(0, |began| began.elapsed().as_secs());
        page.single(&RULES_LOADING, passed);
    });
}

/// Adds the metrics of the overlay.
pub(super) fn overlay(telemetry: &Telemetry, state: Arc<OverlayState>) {
    telemetry.also(move |page| {
        let OverlayEffect { skipped, unmatched } = *state.effect.lock();
        page.single(&OVERLAY_REJECTED, u64::from(state.is_rejected.load(Ordering::Relaxed)));
        page.single(&OVERLAY_SKIPPED, skipped);
        page.single(&OVERLAY_UNMATCHED, unmatched);
    });
}

/// Adds the metrics of the callers' rights: those of the HTTP listener's `gate`, which is that of all callers if there is a file of callers.
/// `is_rejected` is the flag of a rejected file.
pub(super) fn callers(telemetry: &Telemetry, gate: Arc<CallerGate>, is_rejected: Option<Arc<AtomicBool>>) {
    telemetry.also(move |page| {
        page.family(&CALLER_DENIALS, |family| {
            Denial::ALL.into_iter().for_each(|denial| family.sample(&[denial.name()], gate.count(denial)));
        });
        let is_rejected = is_rejected.as_ref().is_some_and(|is_rejected| is_rejected.load(Ordering::Relaxed));
        page.single(&CALLERS_REJECTED, u64::from(is_rejected));
    });
}

/// Adds the metric of requests of web pages that were refused.
pub(super) fn pages(telemetry: &Telemetry, gate: Arc<PageGate>) {
    telemetry.also(move |page| {
        page.family(&PAGES_REFUSED, |family| {
            PageSign::ALL.into_iter().for_each(|sign| family.sample(&[sign.name()], gate.count(sign)));
        });
    });
}

/// Adds the metrics of the stream to a control plane. Without `status`, the rules are from files.
pub(super) fn xds(telemetry: &Telemetry, status: Option<Arc<XdsStatus>>) {
    telemetry.also(move |page| {
        let is_connected = status.is_none();
        let state = status
            .as_ref()
            .map_or_else(|| StreamState { is_connected, ..StreamState::default() }, |status| status.get());
        page.single(&XDS_CONNECTED, u8::from(state.is_connected));
        page.single(&XDS_DISCONNECTED, state.disconnected);
        page.family(&XDS_RESPONSES, |family| {
            family.sample(&["acknowledged"], state.acknowledged);
            family.sample(&["refused"], state.refused);
        });
        page.single(&XDS_EMPTY_HELD, u8::from(state.held_until.is_some()));
        page.single(&XDS_RESTORED_AGE, state.age_of_restored().map_or(0, |age| age.as_secs()));
    });
}

/// Adds the metrics of the stores.
pub(super) fn stores(telemetry: &Telemetry, memory: &Arc<Memory>, redis: Option<&Redis>) {
    let (memory, redis) = (Arc::clone(memory), redis.cloned());
    telemetry.also(move |page| {
        page.family(&STORE_REACHED, |family| {
            let reached = redis.iter().flat_map(Redis::were_reached);
            STORES.iter().zip(reached).for_each(|(store, is_reached)| family.sample(&[store], u8::from(is_reached)));
        });
        page.single(&STORE_CONNECTED, u8::from(redis.as_ref().is_none_or(Redis::is_connected)));
        page.single(&MEMORY_COUNTERS, memory.counters());
        page.single(&MEMORY_EVICTED, memory.evicted());
    });
}

/// Adds the metrics of the guard: decisions without the store, and the number of instances.
pub(super) fn guard(telemetry: &Telemetry, guard: &Arc<Guard>, replicas: &Arc<Replicas>) {
    let (guard, replicas) = (Arc::clone(guard), Arc::clone(replicas));
    telemetry.also(move |page| {
        let Some(known) = guard.known() else { return };
        page.single(&KNOWN_REFUSALS, known.refused());
        page.single(&STORE_UNTIMELY, guard.untimely_calls());
        page.single(&LATER_BACKLOG, known.backlog());
        page.single(&LATER_DROPPED, known.dropped());
        page.single(&LEASES, known.leases());
        page.family(&LEASE_HITS, |family| {
            LeaseHits::ALL.into_iter().for_each(|kind| family.sample(&[kind.name()], known.lease_hits(kind)));
        });
        page.family(&REPLICAS, |family| family.sample(&[replicas.source().name()], replicas.get()));
    });
}

/// Adds the metrics of connections, labelled with the name of their listener.
pub(super) fn connections(telemetry: &Telemetry, tallies: Vec<(&'static str, Arc<Tally>)>) {
    telemetry.also(move |page| {
        let counts: Vec<_> = tallies.iter().map(|(listener, tally)| (*listener, tally.counts())).collect();
        page.family(&CONNECTIONS, |family| {
            for (name, counts) in &counts {
                family.sample(&[name], counts.open);
            }
        });
        page.family(&CONNECTIONS_ENDED, |family| {
            for (name, counts) in &counts {
                EndCause::ALL.into_iter().for_each(|how| family.sample(&[name, how.name()], counts.ended(how)));
            }
        });
    });
}

/// Adds the connections that spoke HTTP/1 to the gRPC port to what met no rule.
pub(super) fn http1_peers(telemetry: &Telemetry, grpc: Arc<Tally>) {
    if let Some(records) = telemetry.records() {
        records.unmatched.set_http1(move || grpc.counts().ended(EndCause::Http1));
    }
}

/// Adds the metric of TLS handshakes. Without `tls`, there are none.
pub(super) fn handshakes(telemetry: &Telemetry, tls: Option<ListenersTls>) {
    telemetry.also(move |page| {
        page.family(&TLS_HANDSHAKES, |family| match &tls {
            Some(tls) => HandshakeOutcome::ALL.into_iter().for_each(|outcome| {
                let counts = std::iter::once(&tls.grpc).chain(&tls.others).map(|tls| tls.count(outcome));
                family.sample(&[outcome.name()], counts.sum::<u64>());
            }),
            None => HandshakeOutcome::ALL.into_iter().for_each(|outcome| family.sample(&[outcome.name()], 0_u8)),
        });
    });
}

/// Adds the metric of the reads of `logins`, of those that can change.
pub(super) fn login_reads(telemetry: &Telemetry, logins: Vec<(&'static str, Arc<Credentials>)>) {
    telemetry.also(move |page| {
        page.family(&STORE_LOGIN_READS, |family| {
            for (store, login) in &logins {
                for outcome in LoginRead::ALL {
                    if let Some(count) = login.count(outcome) {
                        family.sample(&[store, outcome.name()], count);
                    }
                }
            }
        });
    });
}

/// Adds the metric of the certificates in use: those of the gRPC `listener`, and the client certificates for `redis` and for
/// the control plane.
pub(super) fn certificates(
    telemetry: &Telemetry,
    listener: Option<Arc<Expiry>>,
    redis: Vec<(&'static str, Arc<Tls>)>,
    xds: Option<Arc<XdsStatus>>,
) {
    telemetry.also(move |page| {
        page.family(&CERTIFICATE_EXPIRY, |family| {
            let mut sample = |of, ends_at: Option<u64>| {
                if let Some(ends_at) = ends_at.filter(|ends_at| *ends_at > 0) {
                    family.sample(&[of], ends_at);
                }
            };
            let of_listener = |expiry: fn(&Expiry) -> &AtomicU64| {
                listener.as_ref().map(|listener| expiry(listener).load(Ordering::Relaxed))
            };
            sample("grpc_server", of_listener(|expiry| &expiry.certificate));
            sample("grpc_client_ca", of_listener(|expiry| &expiry.authorities));
            redis.iter().for_each(|(of, tls)| sample(of, tls.client_expiry()));
            sample("xds", xds.as_ref().and_then(|status| status.get().client_expiry));
        });
    });
}

/// Adds the metric of a rejected file of tokens, which is 0 without a file: its flag.
pub(super) fn admin_tokens(telemetry: &Telemetry, is_rejected: Option<Arc<AtomicBool>>) {
    telemetry.also(move |page| {
        let is_rejected = is_rejected.as_ref().is_some_and(|is_rejected| is_rejected.load(Ordering::Relaxed));
        page.single(&ADMIN_TOKENS_REJECTED, u64::from(is_rejected));
    });
}

/// Adds the metric of delayed calls.
pub(super) fn held_calls(telemetry: &Telemetry, held: impl Fn() -> usize + Send + Sync + 'static) {
    telemetry.also(move |page| page.single(&HELD_CALLS, held()));
}
