//! What a refused request took of one server is given back, though that server takes no calls when it is due.

use std::collections::HashMap;
use std::time::Duration;

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tokio::time::{Instant, sleep};

use super::{Asker, openings, request, rule_file};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::support::{Tidegate, eventually};
use crate::traces::receiver::Receiver;

/// A weekly and a secondly limit, on a server each. Two hits fit into the week only.
const RULES: &str = "domain: d
descriptors:
  - key: both
    charging: all_or_nothing
    rate_limits: [{ unit: week, requests_per_unit: 1000 }, { unit: second, requests_per_unit: 1 }]
  - { key: week, rate_limit: { unit: week, requests_per_unit: 1000 } }
";
/// The answer that refuses takes so long on its way, and what was taken is due then.
const REFUSAL: Duration = Duration::from_millis(500);
/// Longer than an undo is tried.
const GIVEN_UP: Duration = Duration::from_millis(1_500);
/// More calls than are in flight to one server.
const FULL: usize = 300;
/// How often it is tried, on a machine that may be too slow for what is to happen within a second.
const ATTEMPTS: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// As many calls are in flight as may be.
    Full,
    /// The breaker is open.
    Down,
}

struct Scene {
    server: Tidegate,
    week: Single,
    to_week: Proxy,
    to_second: Proxy,
    asker: Asker,
}

impl Scene {
    async fn new(receiver: &Receiver) -> (Self, Single, tempfile::NamedTempFile) {
        let (week, second, rules) = (Single::start(&[]).await, Single::start(&[]).await, rule_file(RULES));
        let (to_week, to_second) = (Proxy::start(week.address()).await, Proxy::start(second.address()).await);
        let urls = [&to_week, &to_second].map(|proxy| proxy.address().to_string());
        let variables = [
            ("REDIS_URL", &*urls[0]),
            ("REDIS_PERSECOND", "true"),
            ("REDIS_PERSECOND_URL", &*urls[1]),
            ("STORE_DEADLINE", "10s"),
            ("TRACING_ENABLED", "true"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &receiver.url()),
            ("LOG_LEVEL", "warn"),
        ];
        let server = Tidegate::start(rules.path(), &variables).await;
        let asker = Asker::of(&server).await;
        (Self { server, week, to_week, to_second, asker }, second, rules)
    }

    /// The hits that the weekly counter holds: its numbers are the window and they.
    async fn held(&self, value: &str) -> Option<u32> {
        let key = self.week.cli(&["KEYS", &format!("*both={value}}}*")]).await;
        let held = self.week.counter(&key).await;
        held.split_once(' ').map(|(_, hits)| hits.parse().expect("a number"))
    }

    /// Whether a refused request gets back what it took, when there is this trouble with its server.
    async fn is_given_back(&self, trouble: Trouble, value: &str) -> bool {
        self.to_second.set(Faults { to_client: Way { latency: REFUSAL, ..Way::default() }, ..Faults::default() });
        let began = Instant::now();
        let two = RateLimitRequest { hits_addend: 2, ..request("both", value) };
        let mut asker = self.asker.clone();
        let refused = tokio::spawn(async move { asker.request(two).await });
        while self.held(value).await != Some(2) && !refused.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        let mut others = Vec::new();
        match trouble {
            Trouble::Full => {
                self.to_week.set(Faults { to_client: Way::latency_ms(600), ..Faults::default() });
                for call in 0..FULL {
                    let mut asker = self.asker.clone();
                    others.push(tokio::spawn(async move { asker.ask("week", &call.to_string()).await.is_ok() }));
                }
            }
            Trouble::Down => {
                let before = openings(&self.server);
                self.to_week.set(Faults { is_refusing: true, ..Faults::default() });
                self.to_week.reset();
                let mut asker = self.asker.clone();
                while openings(&self.server) == before && began.elapsed() < GIVEN_UP {
                    let _ = asker.ask("week", "v").await;
                }
            }
        }
        let answer = refused.await.expect("it ends");
        let is_refused = answer.is_ok_and(|answer| answer.overall_code() == Outcome::OverLimit);
        if trouble == Trouble::Down {
            self.to_week.heal();
        }
        let refused_at = Instant::now();
        let mut is_given_back = false;
        while !is_given_back && refused_at.elapsed() < GIVEN_UP {
            sleep(Duration::from_millis(20)).await;
            is_given_back = self.held(value).await == Some(0);
        }
        self.to_week.heal();
        self.to_second.heal();
        for other in others {
            other.await.expect("it ends");
        }
        eventually("it is well", async || self.asker.clone().ask("week", "v").await.ok()).await;
        is_refused && is_given_back && refused_at.duration_since(began) >= REFUSAL
    }
}

#[tokio::test]
async fn what_a_refused_request_took_is_given_back_though_its_server_is_full_or_down_when_it_is_due() {
    let _alone = alone().await;
    let receiver = Receiver::http().await;
    let (mut scene, _second, _rules) = Scene::new(&receiver).await;
    for trouble in [Trouble::Full, Trouble::Down] {
        let mut attempt = 0;
        while !scene.is_given_back(trouble, &format!("{trouble:?}{attempt}")).await {
            attempt += 1;
            assert!(attempt < ATTEMPTS, "{trouble:?}: it was never given back");
        }
    }
    scene.server.terminate();
    assert!(scene.server.ended().await.success());
    // Two charges and what is given back; what was tried and never sent is no call.
    let mut calls = HashMap::new();
    for received in receiver.spans() {
        if received.attribute("db.system.name").is_some() {
            *calls.entry(received.span.trace_id).or_insert(0) += 1;
        }
    }
    assert!(calls.values().any(|calls| *calls == 3), "{calls:?}");
    assert!(calls.values().all(|calls| *calls <= 3), "{calls:?}");
}
