//! Files that stop the start, and an expired certificate, which does not.

use std::fs;

use tokio::net::TcpStream;
use tokio::process::Command;

use super::{MUTUAL, Secured, rules, variables_of};
use crate::redis::certificates::Authority;
use crate::support::{eventually, on_free_ports, output};

#[tokio::test]
async fn files_that_cannot_be_used_stop_the_start_and_are_named_all_at_once() {
    let authority = Authority::new();
    let (own, other) = (authority.issue("127.0.0.1"), authority.issue("127.0.0.1"));
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name);
    let rules = rules();
    let start = async || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve").arg(rules.path()).env_clear().envs(variables_of(&directory, &[MUTUAL]));
        let (status, _, errors) = output(on_free_ports(&mut command)).await;
        assert_eq!(status.code(), Some(2), "{errors}");
        errors
    };
    let errors = start().await;
    for (variable, name) in
        [("GRPC_SERVER_TLS_CERT", "tls.crt"), ("GRPC_SERVER_TLS_KEY", "tls.key"), ("GRPC_CLIENT_TLS_CACERT", "ca.crt")]
    {
        let named = format!("{variable} is {}: it cannot be read: No such file", file(name).display());
        assert!(errors.contains(&named), "{errors}");
    }
    fs::copy(&own.certificate, file("tls.crt")).expect("it is copied");
    fs::copy(&other.key, file("tls.key")).expect("it is copied");
    fs::write(file("ca.crt"), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").expect("it is written");
    let errors = start().await;
    let mismatch =
        "tls.key: it is the key of another certificate: expected that of the first certificate in GRPC_SERVER_TLS_CERT";
    assert!(errors.contains(mismatch), "{errors}");
    assert!(errors.contains("ca.crt: expected CA certificates: "), "{errors}");
    fs::copy(&own.key, file("tls.crt")).expect("it is copied");
    fs::copy(&own.certificate, file("tls.key")).expect("it is copied");
    let errors = start().await;
    assert!(errors.contains("tls.crt: expected at least one certificate as PEM"), "{errors}");
    assert!(errors.contains("tls.key: expected a private key as PEM, without a passphrase"), "{errors}");
}

#[tokio::test]
async fn a_stop_waits_for_no_handshake() {
    let mut server = Secured::start(&[("LOG_LEVEL", "info"), ("DRAIN_TIMEOUT", "1h")]).await;
    let half_open = TcpStream::connect(server.tidegate.grpc).await.expect("it listens");
    let series = "tidegate_connections{listener=\"gRPC\"}";
    eventually("it is accepted", async || (server.metric(series).await == 1).then_some(())).await;
    server.tidegate.terminate();
    assert!(server.tidegate.ended().await.success());
    assert!(server.tidegate.log().contains("unopened=1"), "{}", server.tidegate.log());
    drop(half_open);
}

#[tokio::test]
async fn an_expired_certificate_is_served_with_a_warning() {
    let authority = Authority::new();
    let own = authority.issue_as("127.0.0.1", |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let server = Secured::start_as(authority, &own, &[]).await;
    server.logs("tls.invalid_certificate").await;
    let refused = server.client().call(server.tidegate.grpc).await.expect_err("the client refuses it");
    assert!(refused.contains("expired"), "{refused}");
    server.counts("refused_by_client", 1).await;
    assert_eq!(server.metric("tidegate_certificate_expiry_seconds{use=\"grpc_server\"}").await, 1_577_836_800);
}
