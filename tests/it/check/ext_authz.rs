//! A real Envoy that asks by `ext_authz`, with the files of `examples/`.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use super::gateways::{forgetful, limits_api_keys};
use super::smuggling::finds_none_admitted;
use super::{CLIENT, ask, ask_as};
use crate::envoy::proxy::Proxy;
use crate::support::{Tidegate, said_as};

/// A Tidegate, an Envoy that asks it, with these changes to the example, and where Envoy listens.
pub async fn asking(changes: &[(&str, &str)]) -> (Tidegate, Proxy, SocketAddr) {
    let variables = [("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json")];
    let tidegate = Tidegate::start(super::example("ext-authz").path(), &variables).await;
    let envoy = Proxy::start("ext-authz/envoy.yaml", tidegate.http, changes).await;
    let edge = envoy.listener("edge").await;
    (tidegate, envoy, edge)
}

#[tokio::test]
async fn envoy_asks_by_ext_authz_as_its_example_says_and_fails_closed_or_open() {
    for (mode, without) in [("failure_mode_allow: false", 503), ("failure_mode_allow: true", 200)] {
        let (mut tidegate, _envoy, edge) = asking(&[("failure_mode_allow: false", mode)]).await;
        let forged = [("x-forwarded-for", "198.51.100.1"), ("x-original-uri", "/free"), ("x-forwarded-uri", "/free")];
        for target in ["/login", "/login?next=/", "/%6cogin"] {
            let (status, head, body) = ask_as(CLIENT, edge, "POST", target, &forged).await;
            assert!(status == 200 && body.contains("hello"), "{head} {body}");
            assert!(head.contains("\r\nratelimit: \"remote_address\";r="), "{head}");
        }
        // What HTTP/2 would make an error is a refusal over HTTP/1.1.
        for target in ["/login?<", "/login?\""] {
            assert!(ask_as(CLIENT, edge, "POST", target, &[]).await.0 >= 400, "{target}");
        }
        for host in ["a:b:c", "[", "@", "a%41"] {
            let line =
                format!("POST /login HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
            let answer = said_as(CLIENT, edge, &line).await;
            assert!(!answer.contains(" 200 "), "{host}: {answer}");
        }
        for target in ["/login", "//login", "/a/../login", "http://elsewhere/login"] {
            let (status, head, body) = ask_as(CLIENT, edge, "POST", target, &[]).await;
            assert!(status == 429 && body.contains("rate_limited"), "{target}: {head} {body}");
            assert!(head.contains("\r\nretry-after: ") && head.contains("\r\nratelimit: "), "{head}");
        }
        assert_eq!(ask_as(CLIENT, edge, "GET", "/login", &[]).await.0, 200, "another method is not limited");
        finds_none_admitted(CLIENT, edge, "POST /login HTTP/1.1\r\nhost: a\r\n").await;
        tidegate.kill();
        tidegate.ended().await;
        assert_eq!(ask(edge, "GET", "/", &[]).await.0, without, "{mode}");
    }
}

#[tokio::test]
async fn an_address_is_limited_behind_ext_authz_whatever_it_says_of_itself() {
    let (_tidegate, _envoy, edge) = asking(&[]).await;
    let mut admitted = 0;
    for number in 0..30 {
        let forged = format!("198.51.100.{number}");
        admitted += u32::from(
            ask_as(CLIENT, edge, "GET", &format!("/{number}"), &[("x-forwarded-for", &forged)]).await.0 == 200,
        );
    }
    assert_eq!(admitted, 20, "as many as at once");
}

#[tokio::test]
async fn envoy_hands_on_an_api_key_where_allowed_headers_names_it() {
    let headers = "patterns: [{ exact: x-forwarded-for }]";
    let (_tidegate, _envoy, edge) =
        asking(&[(headers, "patterns: [{ exact: x-forwarded-for }, { exact: x-api-key }]")]).await;
    limits_api_keys(edge).await;
    let (_tidegate, _envoy, edge) = asking(&[]).await;
    for _ in 0..3 {
        assert_eq!(ask(edge, "GET", "/", &[("x-api-key", "limited")]).await.0, 200, "it is not handed on");
    }
}

#[tokio::test]
async fn envoy_does_not_repeat_a_check_that_a_closed_connection_lost_and_refuses() {
    let (at, lost) = forgetful().await;
    let envoy = Proxy::start("ext-authz/envoy.yaml", at, &[]).await;
    let edge = envoy.listener("edge").await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(ask(edge, "GET", "/", &[]).await.0);
    }
    assert_eq!((statuses, lost.load(Ordering::Relaxed)), (vec![200, 503, 200, 503], 2));
}
