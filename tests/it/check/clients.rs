//! The client of a request: its address, a header, or one of the two.

use std::net::SocketAddr;

use tokio::process::Command;

use crate::http;
use crate::support::{Tidegate, eventually, output, rule_file};

/// Starts a Tidegate behind a gateway on loopback and a proxy in 10.0.0.0/8, with these descriptors and rules.
async fn server(descriptors: &str, rules: &str) -> Tidegate {
    let rules = rule_file(&text(descriptors, rules));
    Tidegate::start(rules.path(), &[]).await
}

fn text(descriptors: &str, rules: &str) -> String {
    format!(
        "domain: edge
charging: all_or_nothing
requests:
  from_gateway: envoy
  trusted_proxies: [127.0.0.0/8, 10.0.0.0/8]
  descriptors:
{descriptors}
descriptors:
{rules}
"
    )
}

/// The number of these requests that are admitted, each given by its headers.
async fn admitted<'a>(at: SocketAddr, requests: impl IntoIterator<Item = Vec<(&'a str, &'a str)>>) -> usize {
    let mut admitted = 0;
    for headers in requests {
        admitted += usize::from(http::get(at, "/check/edge/").headers(&headers).await.status == 200);
    }
    admitted
}

fn from(chain: &str) -> Vec<(&str, &str)> {
    vec![("x-forwarded-for", chain)]
}

const BY_ADDRESS: &str = "    - [{ key: remote_address, from: client_ip }]";

#[tokio::test]
async fn a_client_that_is_known_only_as_a_trusted_proxy_is_counted_and_never_exempt() {
    let limit = "  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 2 } }";
    let unknown = ["unknown, 10.0.0.5", "\"10.0.0.5\", 10.0.0.5", "10.0.0.5", ",10.0.0.5", "198.51.100.7, x, 10.0.0.5"];
    for free in [
        "  - { key: remote_address, cidr: [10.0.0.0/8], exempt: true }",
        "  - { key: remote_address, value: 10.0.0.5, exempt: true }",
        "  - { key: remote_address, values: [10.0.0.5, 192.0.2.1], exempt: true }",
        "  - { key: remote_address, value: \"10.*\", exempt: true }",
        "  - { key: remote_address, value: 10.0.0.5, rate_limit: { unlimited: true } }",
        "  - { key: remote_address, cidr: [10.0.0.0/8], exempt: true }\n  - { key: remote_address, value: 10.0.0.5, exempt: true }",
    ] {
        let tidegate = server(BY_ADDRESS, &format!("{free}\n{limit}")).await;
        assert_eq!(admitted(tidegate.http, unknown.map(from)).await, 2, "{free}");
        let page = tidegate.metrics().await;
        assert!(page.contains("\ntidegate_check_unknown_clients_total 5\n"), "{free}: {page}");
        let said = async || tidegate.log().contains("check.client_unknown").then_some(());
        eventually("the log says so", said).await;
        let other = if free.contains("192.0.2.1") { 5 } else { 2 };
        assert_eq!(admitted(tidegate.http, vec![from("192.0.2.1"); 5]).await, other, "{free}");
    }
    // Neither the smaller network nor the address is passed over where it limits.
    let rules = "  - { key: remote_address, cidr: [10.0.0.0/24], exempt: true }
  - { key: remote_address, cidr: [10.0.0.0/8], rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 4 } }
  - { key: path, value: /health, exempt: true }";
    let tidegate = server(&format!("{BY_ADDRESS}\n    - [{{ key: path, from: path }}]"), rules).await;
    assert_eq!(admitted(tidegate.http, unknown.map(from)).await, 1, "the larger network limits");
    assert_eq!(admitted(tidegate.http, vec![Vec::new(); 5]).await, 4, "without the header it is the peer");
    let health = http::get(tidegate.http, "/check/edge/health").await;
    assert_eq!(health.status, 200, "a path is exempt, whoever asks for it");
    let denied =
        server(BY_ADDRESS, &format!("  - {{ key: remote_address, cidr: [10.0.0.0/8], deny: true }}\n{limit}")).await;
    assert_eq!(admitted(denied.http, unknown.map(from)).await, 0);
}

#[tokio::test]
async fn an_ipv6_client_is_counted_by_its_network_without_entries() {
    let limit = "  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 2 } }";
    let hosts: Vec<String> = (1..=200).map(|host| format!("2001:db8:1:2::{host:x}")).collect();
    let spelled = ["2001:DB8:1:2:0:0:0:1", "[2001:db8:1:2::1]:443", "2001:db8:1:2::1%eth0"];
    for (entries, rules, expected) in [
        ("", limit, 2),
        ("entries: { remote_address: { v6_prefix: 128, as: ip } }\n", limit, 201),
        (
            "",
            "  - { key: remote_address, value: \"2001:db8:1:2::3\", deny: true }\n  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 2 } }",
            2,
        ),
    ] {
        let rules = rule_file(&format!("{entries}{}", text(BY_ADDRESS, rules)));
        let tidegate = Tidegate::start(rules.path(), &[]).await;
        let requests = hosts.iter().map(String::as_str).chain(spelled).map(from);
        assert_eq!(admitted(tidegate.http, requests).await, expected, "{entries}");
        let other = ["2001:db8:1:3::1", "192.0.2.1", "192.0.2.2"];
        assert_eq!(admitted(tidegate.http, other.map(from)).await, 3, "others are counted by themselves");
    }
}

#[tokio::test]
async fn a_user_or_else_an_address_is_counted_and_neither_can_spend_the_others_hits() {
    let descriptors = "    - [{ key: client, from: [{ header: x-user-id }, client_ip] }]";
    let rules = "  - { key: client, value: \"client_ip:*\", rate_limit: { unit: year, requests_per_unit: 2 } }
  - { key: client, rate_limit: { unit: year, requests_per_unit: 3 } }";
    let tidegate = server(descriptors, rules).await;
    let user = |id| [from("2001:db8:1:2::1"), vec![("x-user-id", id)]].concat();
    for forged in ["client_ip:2001:db8:1:2::/64", "Client_IP:203.0.113.9", "client_ip:203.0.113.9"] {
        admitted(tidegate.http, [user(forged)]).await;
    }
    assert_eq!(admitted(tidegate.http, [from("2001:db8:1:2::7")]).await, 0, "the forger spent its own two");
    assert_eq!(admitted(tidegate.http, vec![from("203.0.113.9"); 4]).await, 2, "and nothing of another address");
    assert_eq!(admitted(tidegate.http, vec![user("203.0.113.9"); 4]).await, 3, "a user may be called like an address");
    assert_eq!(admitted(tidegate.http, vec![user("ann"); 4]).await, 3);
}

#[tokio::test]
async fn a_header_with_an_address_counts_only_from_a_trusted_proxy() {
    let limit = "  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 2 } }";
    for name in ["cf-connecting-ip", "x-real-ip"] {
        let descriptors = format!("    - [{{ key: remote_address, from: [{{ header: {name} }}, client_ip] }}]");
        let tidegate = server(&descriptors, limit).await;
        let forged: Vec<String> = (0..9).map(|host| format!("203.0.113.{host}")).collect();
        let request = |chain, value| [from(chain), vec![(name, value)]].concat();
        let of = |chain| forged.iter().map(move |value| request(chain, value.as_str()));
        assert_eq!(admitted(tidegate.http, of("198.51.100.7")).await, 2, "it is the client's own word");
        assert_eq!(admitted(tidegate.http, of("10.0.0.5, 198.51.100.8")).await, 2);
        assert_eq!(admitted(tidegate.http, forged.iter().map(|value| vec![(name, value.as_str())])).await, 2);
        let of_proxy = vec![request("198.51.100.9, 10.0.0.5", "2001:db8:1:2::1"); 3];
        assert_eq!(admitted(tidegate.http, of_proxy).await, 2, "the proxy wrote it");
        let same = [from("2001:db8:1:2::2"), request("10.0.0.5", "[2001:db8:1:2::3]:443")];
        assert_eq!(admitted(tidegate.http, same).await, 0, "an address is one client, whichever header has it");
    }
    let descriptors = "    - [{ key: remote_address, from: [{ header: x-client, as: ip }], missing: refuse }]";
    let tidegate = server(descriptors, limit).await;
    let request = |chain| [from(chain), vec![("x-client", "192.0.2.1")]].concat();
    assert_eq!(admitted(tidegate.http, [request("10.0.0.5"), request("198.51.100.7")]).await, 1);
}

/// What `tidegate check` says of these descriptors and rules, and true if it finds no error.
async fn checked(descriptors: &str, rules: &str) -> (bool, String) {
    let rules = rule_file(&text(descriptors, rules));
    let (ended, _, said) = output(Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("check").arg(rules.path())).await;
    (ended.success(), said)
}

#[tokio::test]
async fn check_warns_where_a_client_can_make_up_a_header_and_nothing_limits_its_address() {
    let user = "    - [{ key: user, from: [{ header: x-user-id }, client_ip] }]";
    let plain = "    - [{ key: user, from: header, name: x-user-id, missing: refuse }]";
    let nested = "    - [{ key: path, from: path }, { key: user, from: header, name: x-user-id, missing: refuse }]";
    let by_user = "  - { key: user, rate_limit: { unit: day, requests_per_unit: 9 } }";
    let by_login = "  - { key: path, value: /login, descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 9 } }] }";
    let by_address = "  - { key: remote_address, rate_limit: { unit: day, requests_per_unit: 9 } }";
    let of_one = "  - { key: remote_address, value: 192.0.2.1, rate_limit: { unit: day, requests_per_unit: 9 } }";
    let shadow = "  - { key: remote_address, shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 9 } }";
    let deny = "  - { key: user, values: [eve], deny: true }";
    let beside = |descriptor: &str| format!("{descriptor}\n{BY_ADDRESS}");
    let both = |one: &str, other: &str| format!("{one}\n{other}");
    for (descriptors, rules, warns) in [
        (user.to_owned(), by_user.to_owned(), true),
        (plain.to_owned(), by_user.to_owned(), true),
        (nested.to_owned(), by_login.to_owned(), true),
        (beside(user), by_user.to_owned(), true),
        (beside(user), both(by_user, of_one), true),
        (beside(user), both(by_user, shadow), true),
        (user.to_owned(), both(by_user, by_address), true),
        (beside(user), both(by_user, by_address), false),
        (beside(plain), both(by_user, by_address), false),
        (beside(nested), both(by_login, by_address), false),
        (plain.to_owned(), deny.to_owned(), false),
        (BY_ADDRESS.to_owned(), by_address.to_owned(), false),
    ] {
        let (is_valid, said) = checked(&descriptors, &rules).await;
        assert!(is_valid, "{said}");
        assert_eq!(
            said.contains("warning: a client can write any `x-user-id`"),
            warns,
            "{descriptors}\n{rules}\n{said}"
        );
    }
}
