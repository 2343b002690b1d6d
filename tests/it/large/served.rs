//! Large requests to the real binary: what they take, and what others notice.

use std::time::Duration;

use bytes::Bytes;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::time::Instant;

use crate::grpc;
use crate::redis::Single;
use crate::support::{Tidegate, directory, in_time, rule_file};

/// What a request may take beside its message: 32 MB.
const MOST: u64 = 32_000_000;
/// The largest message: 1 MiB.
const MESSAGE: usize = 1 << 20;

/// What is asked, and the number of statuses of the answer; `None` if the domain alone refuses.
struct Kind {
    name: &'static str,
    domain: &'static str,
    descriptors: Vec<RateLimitDescriptor>,
    statuses: Option<usize>,
}

fn descriptor(entries: Vec<Entry>) -> RateLimitDescriptor {
    RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }
}

fn entry(key: &'static str) -> Entry {
    Entry { key: Bytes::from_static(key.as_bytes()), value: Bytes::new() }
}

fn kinds() -> Vec<Kind> {
    let kind = |name, domain, descriptors, statuses| Kind { name, domain, descriptors, statuses };
    let limit = RateLimitOverride { requests_per_unit: 1_000, unit: 3, unit_multiplier: None };
    let long = RateLimitDescriptor { limit: Some(limit), ..descriptor(vec![Entry::default(); 2_000]) };
    let matched = |count| vec![descriptor(vec![entry("k")]); count];
    vec![
        kind("as many empty descriptors as fit", "e", vec![descriptor(Vec::new()); MESSAGE / 2 - 9], None),
        kind("10,000 empty descriptors", "e", vec![descriptor(Vec::new()); 10_000], Some(10_000)),
        kind("1,000 charges, each", "e", matched(1_000), Some(1_000)),
        kind("1,000 charges, all or nothing", "a", matched(1_000), Some(1_000)),
        kind("1,001 charges", "a", matched(1_001), None),
        kind("10,000 charges", "a", matched(10_000), None),
        kind("long descriptors", "e", vec![long; 5], Some(5)),
    ]
}

async fn server() -> (Tidegate, tempfile::TempDir) {
    let directory = directory([("e", "each"), ("a", "all_or_nothing")].map(|(domain, charging)| {
        let rules = format!(
            "domain: {domain}\ncharging: {charging}\ndescriptors:\n  \
             - {{ key: k, rate_limit: {{ unit: year, requests_per_unit: 4000000000 }} }}\n  \
             - {{ key: f, rate_limit: {{ unit: year, requests_per_unit: 500000 }} }}\n"
        );
        (format!("{domain}.yaml"), rules)
    }));
    let server = Tidegate::start(directory.path(), &[("WORKERS", "1"), ("LOG_LEVEL", "warn")]).await;
    (server, directory)
}

async fn client(server: &Tidegate) -> grpc::Client {
    grpc::client(server.grpc).await.max_decoding_message_size(usize::MAX)
}

/// Asks for a kind, and says whether the answer is right.
async fn ask(client: &mut grpc::Client, kind: &Kind) {
    let request =
        RateLimitRequest { domain: kind.domain.to_owned(), descriptors: kind.descriptors.clone(), hits_addend: 0 };
    let answer = in_time("it is answered", client.should_rate_limit(request)).await.expect("no error").into_inner();
    let overall = if kind.statuses.is_some() { Code::Ok } else { Code::OverLimit };
    assert_eq!((answer.overall_code(), answer.statuses.len()), (overall, kind.statuses.unwrap_or(0)), "{}", kind.name);
}

#[tokio::test]
async fn a_large_request_takes_little_more_than_its_message_whatever_is_in_it() {
    let (server, _rules) = server().await;
    let mut client = client(&server).await;
    let before = server.peak_memory();
    for kind in kinds() {
        ask(&mut client, &kind).await;
        let grown = server.peak_memory() - before;
        println!("{}: {} KB", kind.name, grown / 1_000);
        assert!(grown <= MOST + MESSAGE as u64, "{}: {} MB", kind.name, grown / 1_000_000);
    }
}

/// Figures for people: how long small requests on the same worker wait while large ones are decided.
#[tokio::test]
#[ignore = "prints how long others wait; run it by its name with --nocapture"]
async fn how_long_others_wait_while_large_requests_are_decided() {
    let (server, _rules) = server().await;
    for kind in kinds() {
        let (mut large, mut small) = (client(&server).await, client(&server).await);
        let (name, until) = (kind.name, Instant::now() + Duration::from_secs(1));
        let busy = tokio::spawn(async move {
            let mut calls = 0;
            while Instant::now() < until {
                ask(&mut large, &kind).await;
                calls += 1;
            }
            calls
        });
        let mut waits = Vec::new();
        while !busy.is_finished() {
            let began = Instant::now();
            in_time("it is answered", small.should_rate_limit(grpc::one("e", "k", ""))).await.expect("no error");
            waits.push(began.elapsed());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let calls = busy.await.expect("it is answered");
        waits.sort_unstable();
        let at = |share: usize| waits[(waits.len() - 1) * share / 100];
        println!("{name:<45} {calls} calls; others: median {:?}, p99 {:?}, most {:?}", at(50), at(99), at(100));
    }
}

#[tokio::test]
async fn a_request_of_many_charges_that_is_refused_leaves_nothing_in_redis() {
    let redis = Single::start(&[]).await;
    let text = "domain: a\ncharging: all_or_nothing\ndescriptors:\n  \
                - { key: k, rate_limit: { unit: year, requests_per_unit: 100000 } }\n  \
                - { key: f, rate_limit: { unit: year, requests_per_unit: 500 } }\n";
    let rules = rule_file(text);
    let address = redis.address().to_string();
    let variables = [("REDIS_URL", &*address), ("ON_STORE_FAILURE", "open"), ("STORE_DEADLINE", "5s")];
    let server = Tidegate::start(rules.path(), &variables).await;
    let mut client = client(&server).await;
    let mut ask = async |descriptors: Vec<RateLimitDescriptor>| {
        let request = RateLimitRequest { domain: "a".to_owned(), descriptors, hits_addend: 0 };
        in_time("it is answered", client.should_rate_limit(request)).await.expect("no error").into_inner()
    };
    let left = |answer: &RateLimitResponse| answer.statuses.iter().map(|it| it.limit_remaining).collect::<Vec<_>>();
    let many = |key, times| vec![descriptor(vec![entry(key)]); times];

    let admitted = ask([many("k", 500), many("f", 400)].concat()).await;
    assert_eq!(admitted.overall_code(), Code::Ok, "{}", server.log());
    let refused = ask([many("k", 500), many("f", 400)].concat()).await;
    assert_eq!(refused.overall_code(), Code::OverLimit);
    let after = ask([many("k", 1), many("f", 1)].concat()).await;
    assert_eq!((after.overall_code(), left(&after)), (Code::Ok, vec![99_499, 99]));
}
