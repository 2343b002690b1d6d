//! Limits with a delay over `/check`, where only Tidegate can hold a request.

use std::time::{Duration, Instant};

use tokio::process::Command;

use crate::http::{self, Answer};
use crate::support::{Tidegate, output, rule_file};

/// A client of each limit: what is held, what would be held for too long, and what is held for longer the more there is.
const RULES: &str = "domain: edge
requests:
  from_gateway: nginx
  trusted_proxies: [127.0.0.1]
  timeout: TIMEOUT
  refusal_status: 403
  descriptors: [[{ key: client, from: header, name: x-client, missing: refuse }]]
descriptors:
  - { key: client, value: fast, rate_limit: { unit: second, requests_per_unit: 2, algorithm: gcra, burst: 1, delay: { max: 4m } } }
  - { key: client, value: slow, rate_limit: { unit: minute, requests_per_unit: 1, algorithm: gcra, burst: 1, delay: { max: 4m } } }
  - { key: client, value: held, rate_limit: { unit: minute, requests_per_unit: 1, algorithm: gcra, burst: 1, delay: { max: 4m, delivery: hold } } }
  - { key: client, value: growing, rate_limit: { unit: year, requests_per_unit: 1, delay: { step: 100ms, max: 1s, beyond: admit } } }
";

async fn server(timeout: &str) -> Tidegate {
    Tidegate::start(rule_file(&RULES.replace("TIMEOUT", timeout)).path(), &[("RESPONSE_HEADERS", "ietf")]).await
}

async fn check(tidegate: &Tidegate, client: &str) -> Answer {
    http::get(tidegate.http, "/check/edge").header("x-client", client).await
}

#[tokio::test]
async fn a_request_waits_for_its_slot_here_whatever_the_delivery_says() {
    let tidegate = server("1m").await;
    let began = Instant::now();
    for slot in 0..3 {
        let Answer { status, head, .. } = check(&tidegate, "fast").await;
        assert_eq!(status, 200, "{head}");
        assert!(began.elapsed() >= slot * Duration::from_millis(500), "slot {slot} after {:?}", began.elapsed());
        assert!(!head.contains("delay"), "{head}");
    }
}

#[tokio::test]
async fn a_delay_beyond_what_the_gateway_waits_is_a_refusal_that_spends_nothing() {
    let tidegate = server("200ms").await;
    for client in ["slow", "held"] {
        assert_eq!(check(&tidegate, client).await.status, 200, "{client}");
        for _ in 0..5 {
            let Answer { status, head, .. } = check(&tidegate, client).await;
            assert_eq!(status, 403, "{client}: {head}");
            let retry = head.split("\r\nretry-after: ").nth(1).and_then(|rest| rest.split("\r\n").next());
            let retry: u32 = retry.and_then(|retry| retry.parse().ok()).unwrap_or_else(|| panic!("{head}"));
            assert!(retry <= 60, "{client}: each refusal would add a minute: {retry}");
        }
    }
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(check(&tidegate, "growing").await.status);
    }
    assert_eq!(statuses, [200, 200, 403, 403], "a second hit waits for 100 ms, and a third would wait for 200 ms");
}

#[tokio::test]
async fn check_names_each_limit_whose_delay_is_longer_than_a_gateway_waits() {
    for (timeout, lines) in
        [("200ms", vec!["9", "10", "11", "12"]), ("2s", vec!["9", "10", "11"]), ("1m", vec!["9", "10", "11"])]
    {
        let rules = rule_file(&RULES.replace("TIMEOUT", timeout));
        let (ended, out, said) =
            output(Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("check").arg(rules.path())).await;
        assert!(ended.success(), "{said}");
        let warning = "warning: over /check a request waits for at most ";
        let named: Vec<_> = format!("{out}{said}")
            .lines()
            .filter(|line| line.contains(warning))
            .filter_map(|line| line.split(':').nth(1).map(str::to_owned))
            .collect();
        assert_eq!(named, lines, "{timeout}: {out}{said}");
    }
    for (timeout, wrong) in [("5ms", true), ("10ms", false), ("1m", false), ("2m", true)] {
        let rules = rule_file(&RULES.replace("TIMEOUT", timeout));
        let (_, _, said) = output(Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("check").arg(rules.path())).await;
        assert_eq!(said.contains("is no time that a gateway waits for a check"), wrong, "{timeout}: {said}");
    }
}
