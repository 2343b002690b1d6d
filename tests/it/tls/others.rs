//! TLS on the HTTP and debug listeners.

use std::net::SocketAddr;

use tokio::process::Command;

use super::client::Client;
use super::rotation::put;
use super::{MUTUAL, Secured, rules};
use crate::http::{self, Answer, said};
use crate::support::{eventually, in_time, on_free_ports, output};

const BOTH: [(&str, &str); 3] = [("HTTP_SERVER_USE_TLS", "true"), ("DEBUG_SERVER_USE_TLS", "true"), MUTUAL];

/// Gets `path` over TLS, offering `protocols` by ALPN. The error is that of the handshake.
async fn get(client: &Client, protocols: &[&str], at: SocketAddr, path: &str) -> std::io::Result<Answer> {
    let stream = in_time("there is a connection", client.clone().speaking(protocols).connect(at)).await?;
    http::get(at, path).sent_on(stream).await
}

#[tokio::test]
async fn the_http_and_debug_listeners_speak_tls_without_client_certificates() {
    let server = Secured::start(&BOTH).await;
    let (client, http, debug) = (server.client(), server.tidegate.http, server.tidegate.debug);
    for protocols in [&[][..], &["http/1.1"], &["h2", "http/1.1"]] {
        for (at, path) in [(http, "/healthcheck"), (http, "/metrics"), (debug, "/rlconfig")] {
            let answer = get(&client, protocols, at, path).await.expect("a handshake");
            assert!(answer.status == 200, "{path}: {answer}");
        }
    }
    let refused = get(&client, &["h2"], http, "/healthcheck").await.expect_err("it speaks no HTTP/2");
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
    let page = get(&client, &[], http, "/metrics").await.expect("a handshake");
    let counted = |outcome: &str| format!("tidegate_tls_handshakes_total{{outcome=\"{outcome}\"}} ");
    let others = page
        .body
        .lines()
        .find_map(|line| line.strip_prefix(&counted("full")).or(line.strip_prefix(&counted("resumed"))));
    assert!(others.is_some() && page.contains(&format!("{}1", counted("alpn"))), "{page}");
    let plain = said(http, "GET /healthcheck HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(!plain.contains("200"), "{plain}");
    server.logs("http or debug").await;
    let refused = client.call(server.tidegate.grpc).await.expect_err("gRPC needs a certificate of the client");
    assert!(refused.contains("CertificateRequired") || refused.contains("broken pipe"), "{refused}");
}

#[tokio::test]
async fn a_changed_certificate_reaches_all_listeners() {
    let server = Secured::start(&BOTH[..2]).await;
    let next = crate::redis::certificates::Authority::new();
    let changed = next.issue("127.0.0.1");
    put(&changed, server.directory.path(), true);
    let client = Client::of(&next);
    for at in [server.tidegate.http, server.tidegate.debug] {
        eventually("it is in use", async || get(&client, &[], at, "/").await.ok()).await;
    }
    client.call(server.tidegate.grpc).await.expect("it is answered");
}

#[tokio::test]
async fn tls_of_the_others_needs_that_of_grpc() {
    let rules = rules();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules.path()).env_clear().envs(BOTH[..2].iter().copied());
    let (status, _, errors) = output(on_free_ports(&mut command)).await;
    assert_eq!(status.code(), Some(2), "{errors}");
    for variable in ["HTTP_SERVER_USE_TLS", "DEBUG_SERVER_USE_TLS"] {
        let expected = format!("{variable} is \"true\": expected false, because GRPC_SERVER_USE_TLS is false");
        assert!(errors.contains(&expected), "{errors}");
    }
}
