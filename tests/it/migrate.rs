//! Two services behind one Envoy, of which one decides and the other is compared.

use crate::envoy::proxy::{Proxy, get};
use crate::support::{Tidegate, eventually, repository, rule_file};

/// Two services: one with the rules of the example in the place of the reference, and one with another limit, so that it is seen which
/// of them decides.
struct Pair {
    reference: Tidegate,
    tidegate: Tidegate,
    envoy: Proxy,
}

impl Pair {
    async fn start(limit: u32, more: &[(&str, &str)]) -> Self {
        let text = std::fs::read_to_string(repository("examples/migrate/rules.yaml")).expect("it reads");
        let rules = text.replace("unit: hour", "unit: week");
        let serve = async |rules: String| {
            let file = rule_file(&rules);
            Tidegate::start(file.path(), &[]).await
        };
        let other = rules.replace("requests_per_unit: 3", &format!("requests_per_unit: {limit}"));
        let (reference, tidegate) = (serve(rules).await, serve(other).await);
        let at = format!("port_value: {} ", tidegate.grpc.port());
        let changes = [&[("port_value: 9081 ", &*at)], more].concat();
        let envoy = Proxy::start("migrate/envoy.yaml", reference.grpc, &changes).await;
        Self { reference, tidegate, envoy }
    }

    /// The statuses of so many requests of a user.
    async fn ask(&self, user: &str, requests: usize) -> Vec<u16> {
        let edge = self.envoy.listener("edge").await;
        let mut statuses = Vec::new();
        for _ in 0..requests {
            statuses.push(get(edge, "/", user).await.status);
        }
        statuses
    }

    /// Waits until Envoy has counted this for one of the filters.
    async fn counts(&self, counter: &str, expected: u32) {
        let line = format!("cluster.upstream.ratelimit.{counter}: {expected}\n");
        eventually(&line, async || self.envoy.stats("ratelimit").await.contains(&line).then_some(())).await;
    }
}

#[tokio::test]
async fn both_services_are_asked_and_only_one_decides_until_the_runtime_says_otherwise() {
    let pair = Pair::start(4, &[]).await;
    assert_eq!(pair.ask("alice", 5).await, [200, 200, 200, 429, 429], "the reference decides");
    for (counter, expected) in
        [("reference.ok", 3), ("reference.over_limit", 2), ("tidegate.ok", 4), ("tidegate.over_limit", 1)]
    {
        pair.counts(counter, expected).await;
    }
    let edge = pair.envoy.listener("edge").await;
    let answer = get(edge, "/", "bob").await;
    assert_eq!(answer.header("x-ratelimit-limit"), "3, 3;w=604800", "the headers of the one that decides alone");
    assert_eq!(pair.ask("bob", 3).await, [200, 200, 429]);
    let answer = get(edge, "/", "bob").await;
    assert_eq!(
        (answer.status, answer.header("x-envoy-ratelimited")),
        (429, "true"),
        "the compared refusal adds nothing"
    );

    pair.envoy.modify_runtime("tidegate.enforced=100&reference.enforced=0").await;
    assert_eq!(pair.ask("carol", 5).await, [200, 200, 200, 200, 429], "Tidegate decides");
    pair.envoy.modify_runtime("tidegate.enforced=0&reference.enforced=100").await;
    assert_eq!(pair.ask("dave", 4).await, [200, 200, 200, 429], "and back");

    pair.envoy.modify_runtime("tidegate.enabled=0").await;
    let before = pair.envoy.stats("ratelimit.tidegate").await;
    assert_eq!(pair.ask("erin", 4).await, [200, 200, 200, 429]);
    assert_eq!(pair.envoy.stats("ratelimit.tidegate").await, before, "it is not asked any more");
}

#[tokio::test]
async fn a_compared_service_that_is_away_changes_no_answer_and_is_counted() {
    let mut pair = Pair::start(1, &[]).await;
    assert_eq!(pair.ask("alice", 1).await, [200]);
    pair.tidegate.kill();
    pair.tidegate.ended().await;
    assert_eq!(pair.ask("alice", 3).await, [200, 200, 429]);
    pair.counts("tidegate.failure_mode_allowed", 3).await;
    pair.reference.kill();
    pair.reference.ended().await;
    assert_eq!(pair.ask("alice", 1).await, [200], "the one that decides is away, and its filter fails open");
    pair.counts("reference.failure_mode_allowed", 1).await;
}

#[tokio::test]
async fn the_failure_mode_of_a_filter_counts_even_where_its_refusals_do_not() {
    let closed = ("failure_mode_deny: false               #", "failure_mode_deny: true                #");
    let mut pair = Pair::start(1, &[closed]).await;
    assert_eq!(pair.ask("alice", 2).await, [200, 200], "the compared refusal does not count");
    pair.tidegate.kill();
    pair.tidegate.ended().await;
    assert_eq!(pair.ask("alice", 1).await, [500], "but the failed call does");
}

#[test]
fn the_filter_on_the_page_is_that_of_the_example() {
    let read = |path: &str| std::fs::read_to_string(repository(path)).expect("it reads");
    let (page, example) = (read("docs/migrate.md"), read("examples/migrate/envoy.yaml"));
    let block = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block");
    let indented: String = block.lines().map(|line| format!("          {line}\n")).collect();
    assert!(example.contains(&indented), "examples/migrate/envoy.yaml does not have this:\n{indented}");
}
