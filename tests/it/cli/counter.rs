//! `tidegate counter`: what is left of limits, without spending.

use std::net::{SocketAddr, TcpListener};

use rustix::process::Signal;

use super::{call_with, over, rule_file};
use crate::redis::Single;
use crate::support::{Tidegate, eventually};

const RULES: &str = "domain: edge
descriptors:
  - key: user
    rate_limits:
      - { unit: year, requests_per_unit: 9, name: yearly }
      - { unit: week, requests_per_unit: 5, name: weekly, algorithm: token_bucket }
  - key: path
    rate_limits:
      - { unit: hour, requests_per_unit: 4 }
      - { unit: hour, requests_per_unit: 1, name: watched, shadow_mode: true }
  - { key: country, value: xx, deny: true }
  - { key: country, value: de, rate_limit: { unlimited: true } }
";

fn counter(instances: &[SocketAddr], domain: &str, descriptor: &str) -> (Option<i32>, String, String) {
    over(instances, &["counter", "--domain", domain, "--descriptor", descriptor])
}

#[tokio::test]
async fn what_is_left_of_each_limit_is_read_at_every_instance_and_nothing_is_spent() {
    let mut redis = Single::start(&[]).await;
    let (rules, url) = (rule_file(RULES), redis.address().to_string());
    let variables = [("REDIS_URL", url.as_str())];
    let one = Tidegate::start(rules.path(), &variables).await;
    let mut other = Tidegate::start(rules.path(), &variables).await;
    let both = [one.debug, other.debug];
    call_with(&one, "edge", "3", &["user=ann"]);
    for _ in 0..3 {
        let (code, told, errors) = counter(&both, "edge", "user=ann");
        assert_eq!(code, Some(0), "{told}{errors}");
        for instance in both {
            let (_, after) = told.split_once(&format!("{instance}\n")).unwrap_or_else(|| panic!("{told}"));
            let own: Vec<&str> = after.lines().take(2).collect();
            assert!(
                own[0].starts_with("  rule edge.user, limit yearly: 3 of 9 used in the last ")
                    && own[0].contains(", 6 left, full again in "),
                "{told}"
            );
            assert!(
                own[1].starts_with("  rule edge.user, limit weekly: 3 of 5 used, 2 left, full again in "),
                "{told}"
            );
        }
    }
    let (_, told, _) = counter(&both[..1], "edge", "user=bob");
    assert!(told.contains("limit yearly: 0 of 9 used, 9 left\n"), "{told}");
    call_with(&one, "edge", "2", &["path=/"]);
    let (_, told, _) = counter(&both[..1], "edge", "path=/");
    assert!(told.contains("  rule edge.path, limit watched (shadow mode: refuses nothing): "), "{told}");
    for (shown, how) in [
        (r"user=\\u{202e}de".to_owned(), "escaped"),
        (format!("user={}…", "x".repeat(128)), "cut"),
        (format!("user={}", "0af9".repeat(8)), "like a digest"),
        ("user=198.51.100.0/24".to_owned(), "like the network of an address"),
    ] {
        let (_, told, errors) = counter(&both[..1], "edge", &shown);
        assert!(told.contains("0 of 9 used") && errors.contains(&format!("user looks {how}")), "{told}{errors}");
    }
    for (domain, descriptor, why) in [
        ("edge", "country=xx", "the rule edge.country_xx denies it"),
        ("edge", "country=de", "the rule edge.country_de does not limit it"),
        ("edge", "usr=ann", "no rule matches"),
        ("egde", "user=ann", "no rule file has this domain"),
    ] {
        let (code, told, errors) = counter(&both[..1], domain, descriptor);
        assert_eq!((code, told.contains(why)), (Some(1), true), "{told}");
        let is_unmatched = told.contains("not limited");
        assert_eq!(errors.matches("tidegate top --unmatched").count(), usize::from(is_unmatched), "{errors}");
    }

    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let with_silent = [one.debug, silent.local_addr().expect("an address")];
    let (code, told, errors) = counter(&with_silent, "edge", "user=ann");
    assert!(code == Some(0) && told.contains("3 of 9 used in the last "), "{told}");
    assert!(errors.contains(&format!("{} is missing below: no answer within 2s", with_silent[1])), "{errors}");

    other.kill();
    other.ended().await;
    let (code, told, errors) = counter(&both, "edge", "user=ann");
    assert!(code == Some(0) && told.contains("3 of 9 used in the last "), "{told}");
    assert!(errors.contains(&format!("{} is missing below", other.debug)), "{errors}");
    redis.signal(Signal::KILL);
    redis.ended().await;
    eventually("the store is away", async || {
        let told = counter(&both[..1], "edge", "user=ann").1;
        told.contains("limit yearly: not read, because the store did not answer").then_some(())
    })
    .await;
}
