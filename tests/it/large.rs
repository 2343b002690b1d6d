//! Requests too large to be decoded whole are decided in slices, like any others.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;
use tidegate::algorithm::Charge;
use tidegate::limiter::Limiter;
use tidegate::model::{Charging, Micros, Request};
use tidegate::proto::codec::{Incoming, Outgoing};
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::rulefile::{Options, load};
use tidegate::rules::live::LiveRules;
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::replicas::Replicas;
use tidegate::store::{Charged, Store, Taken};
use tidegate::telemetry::Telemetry;
use tidegate::transport::grpc::Edge;
use tidegate::transport::wire::{Answers, HeaderNames, Headers, RefusalBody};
use tokio::sync::Barrier;

use crate::policy::failing::Failing;
use crate::support::in_time;
use crate::world::{HandClock, NOON, file};

mod served;

const RULES: &str = "
descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 4, name: per-user } }
  - { key: gcra, rate_limit: { unit: day, requests_per_unit: 5, algorithm: gcra }, message: slower }
  - { key: log, rate_limit: { unit: minute, requests_per_unit: 3, algorithm: sliding_log } }
  - { key: own, charging: each, rate_limit: { unit: hour, requests_per_unit: 3 } }
  - { key: quota, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 3 } }
  - { key: shadow, shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: shy, expose: false, message: no, rate_limit: { unit: day, requests_per_unit: 6 } }
  - { key: costly, request_cost: 2, rate_limit: { unit: day, requests_per_unit: 9 } }
  - { key: base, rate_limit: { unit: hour, requests_per_unit: 2, name: base } }
  - { key: better, rate_limit: { unit: hour, requests_per_unit: 8, replaces: [{ name: base }] } }
  - { key: wild, value: 'v*', share_threshold: true, rate_limit: { unit: day, requests_per_unit: 8, warn_at: 50% } }
  - { key: waits, rate_limit: { unit: minute, requests_per_unit: 4, algorithm: leaky_bucket, delay: { max: 30s } } }
  - { key: free, rate_limit: { unlimited: true } }
  - { key: closed, value: v1, rate_limit: { unit: day, requests_per_unit: 0 } }
  - { key: deny, value: v1, deny: true }
  - { key: exempt, value: v1, exempt: true }
  - key: two
    rate_limits:
      - { unit: minute, requests_per_unit: 3, algorithm: sliding_window }
      - { unit: day, requests_per_unit: 5, algorithm: token_bucket }
  - { key: quick-quota, quota_mode: true, rate_limit: { unit: hour, requests_per_unit: 2 } }
  - { key: other-quota, quota_mode: true, rate_limit: { unit: hour, requests_per_unit: 5 } }
  - { key: shy-quota, quota_mode: true, expose: false, rate_limit: { unit: day, requests_per_unit: 3 } }
  - { key: held, rate_limit: { unit: minute, requests_per_unit: 4, algorithm: leaky_bucket, delay: { max: 60s, delivery: hold } } }
  - { key: also-held, rate_limit: { unit: minute, requests_per_unit: 4, algorithm: leaky_bucket, delay: { max: 60s, delivery: hold } } }
  - { key: long-held, rate_limit: { unit: minute, requests_per_unit: 2, algorithm: leaky_bucket, delay: { max: 60s, delivery: hold } } }
  - key: shadow-held
    shadow_mode: true
    rate_limit: { unit: minute, requests_per_unit: 2, algorithm: leaky_bucket, delay: { max: 60s, delivery: hold } }
  - { key: warns, rate_limit: { unit: day, requests_per_unit: 1, warn_at: 100% } }
  - { key: shut, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 4 } }
  - { key: shadow-shut, shadow_mode: true, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 4 } }
";

/// The keys of the rules, and one of no rule. The first ones are limits; the last ones are not in random requests.
const KEYS: [&str; 28] = [
    "user",
    "gcra",
    "log",
    "own",
    "quota",
    "shadow",
    "shy",
    "costly",
    "base",
    "better",
    "wild",
    "waits",
    "two",
    "free",
    "none",
    "closed",
    "deny",
    "exempt",
    "quick-quota",
    "other-quota",
    "shy-quota",
    "held",
    "also-held",
    "long-held",
    "shadow-held",
    "warns",
    "shut",
    "shadow-shut",
];

/// How requests are answered, and in slices of how many descriptors.
#[derive(Clone, Debug)]
struct Manner {
    charging: Charging,
    quota_mode: bool,
    shadow_mode: bool,
    headers: u8,
    body: u8,
    slice: usize,
}

/// A descriptor: the key and the value of its entry, its own addend, whether it gives back, and a limit of its own.
type Asked = (usize, u8, Option<u64>, bool, Option<u32>);

const EACH: Manner =
    Manner { charging: Charging::Each, quota_mode: false, shadow_mode: false, headers: 0, body: 0, slice: 3 };

fn manner() -> impl Strategy<Value = Manner> {
    let charging = prop_oneof![Just(Charging::Each), Just(Charging::AllOrNothing)];
    (charging, prop::bool::weighted(0.15), prop::bool::weighted(0.1), 0_u8..4, 0_u8..3, 1_usize..6).prop_map(
        |(charging, quota_mode, shadow_mode, headers, body, slice)| Manner {
            charging,
            quota_mode,
            shadow_mode,
            headers,
            body,
            slice,
        },
    )
}

fn descriptor() -> impl Strategy<Value = Asked> {
    let key = prop_oneof![60 => 0_usize..15, 1 => Just(15_usize), 1 => 16_usize..18];
    let addend = prop_oneof![6 => Just(None), 1 => (0_u64..4).prop_map(Some)];
    let limit = prop_oneof![12 => Just(None), 1 => (0_u32..4).prop_map(Some)];
    (key, 0_u8..3, addend, prop::bool::weighted(0.05), limit)
}

/// The store of some tests fails for the last one.
fn value_of(value: u8) -> String {
    if value == 255 { "down".to_owned() } else { format!("v{value}") }
}

fn message(domain: &str, descriptors: &[Asked], hits_addend: u32) -> RateLimitRequest {
    let descriptor = |&(key, value, hits_addend, is_negative_hits, limit): &Asked| RateLimitDescriptor {
        entries: vec![Entry { key: KEYS[key].into(), value: value_of(value).into() }],
        limit: limit.map(|requests_per_unit| RateLimitOverride { requests_per_unit, unit: 3, unit_multiplier: None }),
        hits_addend,
        is_negative_hits,
    };
    RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: descriptors.iter().map(descriptor).collect(),
        hits_addend,
    }
}

fn edge(manner: &Manner, clock: &Arc<HandClock>) -> Edge {
    edge_with(manner, clock, Arc::new(Memory::new(Arc::clone(clock) as Arc<_>, 10_000)))
}

fn limiter(manner: &Manner, clock: &Arc<HandClock>, store: Arc<dyn Store>) -> Arc<Limiter> {
    let text = format!("domain: d\ncharging: {}\n{RULES}", manner.charging.name());
    let options = Options { quota_mode: manner.quota_mode, shadow_mode: manner.shadow_mode, ..Options::default() };
    let loaded = load(&[file("rules.yaml", &text)], options).unwrap_or_else(|invalid| panic!("{invalid}"));
    let local = Arc::new(Memory::new(Arc::clone(clock) as Arc<_>, 10_000));
    let guard = Guard::new(
        store,
        Deadline::AtOnce,
        local,
        Arc::new(Replicas::set(NonZeroU32::MIN)),
        Arc::clone(clock) as Arc<_>,
    );
    Arc::new(Limiter::new(Arc::new(LiveRules::new(loaded.rules)), Arc::new(guard)))
}

/// An edge that holds no call: what would be held is refused.
fn edge_with(manner: &Manner, clock: &Arc<HandClock>, store: Arc<dyn Store>) -> Edge {
    let limiter = limiter(manner, clock, store);
    let names = HeaderNames::new("limit".into(), "remaining".into(), "reset".into()).expect("names");
    let headers = match manner.headers {
        0 => Headers::Off,
        1 => Headers::Reference(names),
        2 => Headers::XRateLimit(Arc::clone(clock) as Arc<_>),
        _ => Headers::Ietf,
    };
    let refusal_body = [RefusalBody::Own, RefusalBody::Json, RefusalBody::Text][usize::from(manner.body)];
    let answers = Answers {
        headers,
        refusal_body,
        dynamic_metadata: false,
        decision_metadata: true,
        explains: false,
        decision_id_header: true,
        records: None,
    };
    Edge::new(limiter, Arc::new(answers), Arc::new(Telemetry::new(0.8, Micros::ZERO)), 0).slicing(manner.slice)
}

async fn whole(edge: &Edge, request: RateLimitRequest) -> RateLimitResponse {
    edge.decide(request, None, None).await.expect("it is valid")
}

async fn sliced(edge: &Edge, request: &RateLimitRequest) -> RateLimitResponse {
    let message = Bytes::from(request.encode_to_vec());
    let parts = edge.decide_large(message, None, None, &mut None).await.expect("it is valid");
    RateLimitResponse::decode(Bytes::from(parts.concat())).expect("an answer")
}

fn codes(answer: &RateLimitResponse) -> (Code, Vec<Code>) {
    (answer.overall_code(), answer.statuses.iter().map(|status| status.code()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(1_000) })]

    #[test]
    fn a_request_in_slices_is_answered_like_a_whole_one_and_leaves_the_same(
        manner in manner(),
        requests in prop::collection::vec((0_u64..40_000_000, prop::collection::vec(descriptor(), 1..25), 0_u32..3), 1..6),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let clock = HandClock::at(NOON);
        let (one, other) = (edge(&manner, &clock), edge(&manner, &clock));
        runtime.block_on(async {
            let mut now = NOON;
            for (after, mut descriptors, hits_addend) in requests {
                now = now.saturating_add(Micros::new(after));
                clock.set(now);
                // An undo does not know whose hits were given back in between.
                if manner.charging == Charging::AllOrNothing {
                    descriptors.iter_mut().for_each(|descriptor| descriptor.3 = false);
                }
                let request = message("d", &descriptors, hits_addend);
                let expected = whole(&one, request.clone()).await;
                let answer = sliced(&other, &request).await;
                prop_assert_eq!(codes(&answer), codes(&expected));
                // What is left is told as of the moment of the charge, before it is given back.
                if manner.charging == Charging::Each || expected.overall_code() == Code::Ok && !manner.shadow_mode {
                    prop_assert_eq!(answer, expected);
                }
            }
            // What is left of every counter.
            let looks: Vec<Asked> = (0..13).flat_map(|key| (0..3).map(move |value| (key, value, Some(0), false, None))).collect();
            let request = message("d", &looks, 0);
            prop_assert_eq!(whole(&one, request.clone()).await, whole(&other, request).await);
            Ok(())
        })?;
        let counted = |edge: &Edge| {
            let page = edge.telemetry().page();
            let lines = page.lines().filter(|line| line.contains("_total{") || line.contains("decisions"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        if manner.charging == Charging::Each {
            prop_assert_eq!(counted(&one), counted(&other), "metrics");
        }
    }
}

/// A descriptor of this key that takes so many hits.
fn takes(key: &str, value: u8, hits: u64) -> Asked {
    let key = KEYS.iter().position(|known| *known == key).expect("it is a key");
    (key, value, Some(hits), false, None)
}

/// As many limits as headers list, all used up.
fn listed() -> Vec<Asked> {
    (100..116).map(|value| takes("user", value, 4)).collect()
}

/// Behind these, a descriptor is kept for no other reason than that under test.
#[tokio::test]
async fn what_decides_behind_sixteen_limits_is_told_of_a_large_request_as_of_a_whole_one() {
    let (used_up, one) = (|key, hits| takes(key, 0, hits), |key| takes(key, 0, 1));
    for (what, before, request) in [
        (
            "the first quota decides, and the quickest is described",
            vec![used_up("quota", 3), used_up("quick-quota", 2)],
            vec![one("quota"), one("quick-quota")],
        ),
        (
            "of two quotas that are as quick, the first is described",
            vec![used_up("quota", 3), used_up("quick-quota", 2), used_up("other-quota", 5)],
            vec![one("quota"), one("quick-quota"), one("other-quota")],
        ),
        (
            "a quota that never fits is described beside one that is not exposed",
            vec![used_up("shy-quota", 3)],
            vec![one("shy-quota"), takes("quota", 0, 4)],
        ),
        (
            "the last of the longest waits decides where there is no room to hold the call, and no shadow does",
            vec![one("held"), one("also-held"), one("shadow-held")],
            vec![one("shadow-held"), one("held"), one("also-held")],
        ),
        (
            "the longest wait decides although a shorter one follows",
            vec![one("long-held"), one("held")],
            vec![one("long-held"), one("held")],
        ),
        (
            "a policy answers for a limit, and not for a shadow",
            vec![],
            vec![takes("shadow-shut", 255, 1), takes("shut", 255, 1)],
        ),
        ("a shadow is over its limit", vec![used_up("shadow", 2)], vec![one("shadow"), one("shadow")]),
    ] {
        for headers in 0..4 {
            let manner = Manner { headers, ..EACH };
            let clock = HandClock::at(NOON);
            let edges = [(); 2].map(|()| edge_with(&manner, &clock, Failing::new(&clock)));
            for edge in edges.iter().filter(|_| !before.is_empty()) {
                whole(edge, message("d", &before, 0)).await;
            }
            let request = message("d", &[listed(), request.clone()].concat(), 0);
            let expected = whole(&edges[0], request.clone()).await;
            assert_eq!(sliced(&edges[1], &request).await, expected, "{what}, headers {headers}");
        }
    }
}

#[tokio::test]
async fn as_many_warnings_of_a_large_request_are_kept_as_a_header_lists() {
    let clock = HandClock::at(NOON);
    let limiter = limiter(&EACH, &clock, Arc::new(Memory::new(Arc::clone(&clock) as Arc<_>, 10_000)));
    let rules = limiter.rules();
    let mut large = limiter.large(&rules, "d");
    let slice = |values: std::ops::Range<u8>| -> Request {
        let asked: Vec<_> = values.map(|value| takes("warns", value, 1)).collect();
        message("d", &asked, 0).try_into().expect("it is valid")
    };
    let slices = [slice(0..10), slice(10..20), slice(20..60)];
    slices.iter().for_each(|slice| large.survey(slice.descriptors()));
    for slice in &slices {
        large.decide(slice, None).await;
    }
    assert_eq!(large.conclude(&slices[0]).1.warnings.len(), 16);
}

#[tokio::test]
async fn what_is_no_valid_request_is_an_error_before_anything_is_charged() {
    let manner = Manner { slice: 2, ..EACH };
    let edge = edge(&manner, &HandClock::at(NOON));
    let user = (0, 0, None, false, None);
    let mut wrong_unit = message("d", &[user; 9], 0);
    wrong_unit.descriptors[8].limit = Some(RateLimitOverride { requests_per_unit: 1, unit: 9, unit_multiplier: None });
    for (request, expected) in [
        (message("", &[user; 9], 0), "domain must not be empty"),
        (message("d", &[], 0), "descriptor list must not be empty"),
        (wrong_unit, "undefined unit 9"),
    ] {
        let error = edge.decide_large(Bytes::from(request.encode_to_vec()), None, None, &mut None).await;
        assert!(error.expect_err("it is invalid").to_string().contains(expected), "{expected}");
    }
    let cut = Bytes::from(message("d", &[user; 9], 0).encode_to_vec()).slice(..40);
    edge.decide_large(cut, None, None, &mut None).await.expect_err("it is no message");
    let left = whole(&edge, message("d", &[(0, 0, Some(0), false, None)], 0)).await.statuses[0].limit_remaining;
    assert_eq!(left, 4);
}

#[tokio::test]
async fn a_caller_that_goes_away_in_the_middle_leaves_nothing_taken_all_or_nothing() {
    let manner = Manner { charging: Charging::AllOrNothing, slice: 1, ..EACH };
    let edge = edge(&manner, &HandClock::at(NOON));
    let gcra = |value| (1, value, None, false, None);
    let request = message("d", &[gcra(0), gcra(1), gcra(2), gcra(0)], 0);
    let bytes = Bytes::from(request.encode_to_vec());
    {
        let mut span = None;
        let mut call = std::pin::pin!(edge.decide_large(bytes, None, None, &mut span));
        // The survey takes five turns, and the caller goes away after some charges.
        for _ in 0..8 {
            tokio::select! {
                biased;
                _ = &mut call => panic!("it is not done yet"),
                () = tokio::task::yield_now() => {}
            }
        }
    }
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let looks: Vec<Asked> = (0..3).map(|value| (1, value, Some(0), false, None)).collect();
    let left = whole(&edge, message("d", &looks, 0)).await;
    assert_eq!(left.statuses.iter().map(|status| status.limit_remaining).collect::<Vec<_>>(), [5, 5, 5]);
}

#[tokio::test]
async fn large_requests_of_a_worker_are_decided_one_after_the_other() {
    let manner = Manner { slice: 1, ..EACH };
    let edge = edge(&manner, &HandClock::at(NOON));
    let wild = (10, 0, None, false, None);
    let request = Bytes::from(message("d", &[wild; 4], 0).encode_to_vec());
    let call = async || {
        let parts = edge.decide_large(request.clone(), None, None, &mut None).await.expect("it is valid");
        let answer = RateLimitResponse::decode(Bytes::from(parts.concat())).expect("an answer");
        answer.statuses.iter().map(|status| status.limit_remaining).collect::<Vec<_>>()
    };
    let (one, other) = tokio::join!(call(), call());
    assert_eq!([one, other], [[7, 6, 5, 4], [3, 2, 1, 0]]);
}

/// A store that answers two requests together.
struct AnswersTwo {
    store: Memory,
    both: Barrier,
}

impl Store for AnswersTwo {
    fn charge<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        Box::pin(async move {
            self.both.wait().await;
            self.store.charge(charges, budget).await
        })
    }

    fn take<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Pin<Box<dyn Future<Output = Taken> + Send + 'a>> {
        self.store.take(charges, budget)
    }

    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.store.give_back(charges, taken)
    }
}

#[tokio::test]
async fn a_large_request_that_waits_for_the_store_lets_another_one_go_on() {
    let manner = Manner { slice: 2, ..EACH };
    let clock = HandClock::at(NOON);
    let store = Memory::new(Arc::clone(&clock) as Arc<_>, 10_000);
    let edge = edge_with(&manner, &clock, Arc::new(AnswersTwo { store, both: Barrier::new(2) }));
    let request = Bytes::from(message("d", &[(10, 0, None, false, None); 4], 0).encode_to_vec());
    let call = async || edge.decide_large(request.clone(), None, None, &mut None).await.expect("it is valid").len();
    let both = async { tokio::join!(call(), call()) };
    let (one, other) = in_time("each goes on while the other waits", both).await;
    assert_eq!(one, other);
}

#[tokio::test]
async fn a_message_is_taken_for_a_large_one_by_its_size_alone() {
    let manner = Manner { slice: 256, ..EACH };
    let edge = edge(&manner, &HandClock::at(NOON));
    let request = message("d", &[(14, 0, None, false, None); 5], 0);
    let call = tonic::Request::new(Incoming::Large(Bytes::from(request.encode_to_vec())));
    let answer = edge.should_rate_limit(call).await.expect("it is valid").into_inner();
    let Outgoing::Large(parts) = answer else { panic!("its answer is in parts") };
    let answer = RateLimitResponse::decode(Bytes::from(parts.concat())).expect("an answer");
    assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok; 5]));
}
