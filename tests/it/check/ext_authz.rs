//! A real Envoy that asks by `ext_authz`, with the files of `examples/`.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use super::CLIENT;
use super::gateways::{forgetful, limits_api_keys};
use super::smuggling::finds_none_admitted;
use crate::envoy::proxy::Proxy;
use crate::http::{self, Answer};
use crate::support::Tidegate;

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
            let Answer { status, head, body } = http::request(edge, "POST", target).headers(&forged).from(CLIENT).await;
            assert!(status == 200 && body.contains("hello"), "{head} {body}");
            assert!(head.contains("\r\nratelimit: \"remote_address\";r="), "{head}");
        }
        // What HTTP/2 would make an error is a refusal over HTTP/1.1.
        for target in ["/login?<", "/login?\""] {
            assert!(http::request(edge, "POST", target).from(CLIENT).await.status >= 400, "{target}");
        }
        for host in ["a:b:c", "[", "@", "a%41"] {
            let answer = http::post(edge, "/login", "").header("host", host).from(CLIENT).await;
            assert!(!answer.contains(" 200 "), "{host}: {answer}");
        }
        for target in ["/login", "//login", "/a/../login", "http://elsewhere/login"] {
            let Answer { status, head, body } = http::request(edge, "POST", target).from(CLIENT).await;
            assert!(status == 429 && body.contains("rate_limited"), "{target}: {head} {body}");
            assert!(head.contains("\r\nretry-after: ") && head.contains("\r\nratelimit: "), "{head}");
        }
        assert_eq!(http::get(edge, "/login").from(CLIENT).await.status, 200, "another method is not limited");
        finds_none_admitted(CLIENT, edge, "POST /login HTTP/1.1\r\nhost: a\r\n").await;
        tidegate.kill();
        tidegate.ended().await;
        assert_eq!(http::get(edge, "/").await.status, without, "{mode}");
    }
}

#[tokio::test]
async fn an_address_is_limited_behind_ext_authz_whatever_it_says_of_itself() {
    let (_tidegate, _envoy, edge) = asking(&[]).await;
    let mut admitted = 0;
    for number in 0..30 {
        let forged = format!("198.51.100.{number}");
        admitted += u32::from(
            http::get(edge, &format!("/{number}")).headers(&[("x-forwarded-for", &forged)]).from(CLIENT).await.status
                == 200,
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
        assert_eq!(http::get(edge, "/").headers(&[("x-api-key", "limited")]).await.status, 200, "it is not handed on");
    }
}

#[tokio::test]
async fn envoy_does_not_repeat_a_check_that_a_closed_connection_lost_and_refuses() {
    let (at, lost) = forgetful().await;
    let envoy = Proxy::start("ext-authz/envoy.yaml", at, &[]).await;
    let edge = envoy.listener("edge").await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(http::get(edge, "/").await.status);
    }
    assert_eq!((statuses, lost.load(Ordering::Relaxed)), (vec![200, 503, 200, 503], 2));
}
