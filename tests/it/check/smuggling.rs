//! Requests that two servers may read differently, and headers that a server may drop.

use std::net::{Ipv4Addr, SocketAddr};

use super::server;
use crate::http::{self, said_as};

/// Requests that each ask for what `first` (a request line and headers, each with its end) asks for, once or twice, in a form that is no
/// plain HTTP/1.1. The connection ends behind each.
fn attempts(first: &str) -> Vec<String> {
    let last = format!("{first}connection: close\r\ncontent-length: 0\r\n\r\n");
    let length = last.len();
    let mut attempts: Vec<String> = [
        // A second request that one server takes for the body of the first.
        format!("content-length: {}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{last}", length + 5),
        format!("transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n{last}"),
        format!("content-length: 0\r\ncontent-length: {length}\r\n\r\n{last}"),
        format!("content-length: +{length}\r\n\r\n{last}"),
        format!("content-length: 0, {length}\r\n\r\n{last}"),
        format!("transfer-encoding: xchunked\r\nconnection: close\r\n\r\n0\r\n\r\n{last}"),
        format!("transfer-encoding : chunked\r\nconnection: close\r\n\r\n0\r\n\r\n{last}"),
        format!("transfer-encoding: identity, chunked\r\nconnection: close\r\n\r\n0\r\n\r\n{last}"),
        // Headers behind the body, and headers that are to be dropped on the way.
        "transfer-encoding: chunked\r\nconnection: close\r\ntrailer: x-forwarded-for\r\n\r\n0\r\nx-forwarded-for: 198.51.100.1\r\n\r\n"
            .to_owned(),
        "connection: close, x-forwarded-for, x-original-uri, x-forwarded-uri, x-original-method, x-forwarded-method\r\n\r\n"
            .to_owned(),
        // Names and values that a server may take for others.
        "connection: close\r\nx-original-uri : /free\r\nx-forwarded-uri : /free\r\n\r\n".to_owned(),
        "connection: close\r\nx_original_uri: /free\r\nx_forwarded_uri: /free\r\nx_forwarded_for: 198.51.100.1\r\n\r\n".to_owned(),
        "connection: close\r\nx-other: a\r\n x-original-uri: /free\r\n\tx-forwarded-for: 198.51.100.1\r\n\r\n".to_owned(),
        "connection: close\r\nx-other: a\rx-original-uri: /free\r\n\r\n".to_owned(),
        "connection: close\r\nx-other: a\0b\r\n\r\n".to_owned(),
    ]
    .into_iter()
    .map(|rest| format!("{first}{rest}"))
    .collect();
    attempts.push(last.replace("\r\n", "\n"));
    attempts.push(last.replace(" HTTP/1.1", " HTTP/1.0"));
    attempts.push(last.replace(" HTTP/1.1", " HTTP/1.1 HTTP/1.0"));
    attempts.push(last.replacen(' ', "\t", 1));
    attempts
}

/// Asks at `at` from `client`, whose request `first` is refused by now, in every form, and finds none admitted.
pub async fn finds_none_admitted(client: Ipv4Addr, at: SocketAddr, first: &str) {
    for attempt in attempts(first) {
        let answer = said_as(client, at, &attempt).await;
        assert!(!answer.contains(" 200 ") && !answer.contains("hello"), "{attempt}\n{answer}");
    }
}

#[tokio::test]
async fn a_request_that_servers_read_differently_is_refused_as_its_plain_form_is() {
    let tidegate = server("nginx", &[]).await;
    let asked = [("x-forwarded-for", "192.0.2.1"), ("x-original-method", "POST"), ("x-original-uri", "/login")];
    for status in [200, 200, 403] {
        assert_eq!(http::get(tidegate.http, "/check/edge").headers(&asked).await.status, status);
    }
    let headers: String = asked.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    for method in ["GET", "POST"] {
        let first = format!("{method} /check/edge HTTP/1.1\r\nhost: a\r\n{headers}");
        finds_none_admitted(Ipv4Addr::LOCALHOST, tidegate.http, &first).await;
    }
}
