//! Versions, protocols, keys and chains.

use std::fs;

use rcgen::{KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519};
use rustls::{HandshakeKind, ProtocolVersion, version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{Client, decide};
use super::{Secured, of_file};
use crate::redis::certificates::{Authority, Issued};
use crate::support::in_time;

#[tokio::test]
async fn a_call_over_tls_is_decided_and_sessions_are_resumed() {
    let server = Secured::start(&[]).await;
    let (at, client) = (server.tidegate.grpc, server.client());
    decide(&client.channel(at)).await.expect("it is answered");
    let first = client.call(at).await.expect("it is answered");
    assert_eq!((first.version, first.kind), (ProtocolVersion::TLSv1_3, HandshakeKind::Resumed));
    let old = Client::of_versions(&server.authority, &[&version::TLS12]);
    assert_eq!(old.call(at).await.expect("it is answered").version, ProtocolVersion::TLSv1_2);
    assert_eq!(old.call(at).await.expect("it is answered").kind, HandshakeKind::Resumed);
    server.counts("full", 2).await;
    server.counts("resumed", 2).await;
}

#[tokio::test]
async fn clients_below_the_lowest_version_are_refused() {
    let server = Secured::start(&[("GRPC_SERVER_TLS_MIN_VERSION", "1.3")]).await;
    let old = Client::of_versions(&server.authority, &[&version::TLS12]);
    let refused = old.call(server.tidegate.grpc).await.expect_err("it is refused");
    assert!(refused.contains("ProtocolVersion"), "{refused}");
    server.client().call(server.tidegate.grpc).await.expect("it is answered");
    server.counts("version", 1).await;
    server.logs("tls.refused").await;
}

#[tokio::test]
async fn a_client_must_offer_h2() {
    let server = Secured::start(&[]).await;
    let at = server.tidegate.grpc;
    let refused = server.client().speaking(&["http/1.1"]).call(at).await.expect_err("it is refused");
    assert!(refused.contains("NoApplicationProtocol"), "{refused}");
    server.client().speaking(&[]).call(at).await.expect_err("it is refused");
    server.client().speaking(&["http/1.1", "h2"]).call(at).await.expect("it is answered");
    server.counts("alpn", 2).await;
    // A client without TLS.
    let mut plain = TcpStream::connect(at).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let _ = in_time("it is closed", plain.read_to_end(&mut Vec::new())).await;
    server.counts("not_tls", 1).await;
    server.logs("UpstreamTlsContext").await;
    assert_eq!(server.metric("tidegate_connections_ended_total{listener=\"gRPC\",how=\"handshake\"}").await, 3);
}

#[tokio::test]
async fn keys_of_each_form_and_kind_are_served() {
    for case in ["rsa.pkcs1", "rsa.pkcs8", "p256.sec1", "p256.pkcs8", "p384", "ed25519"] {
        let authority = Authority::new();
        let own = match case {
            "p384" | "ed25519" => {
                let kind = if case == "p384" { &PKCS_ECDSA_P384_SHA384 } else { &PKCS_ED25519 };
                let key = KeyPair::generate_for(kind).expect("a key");
                authority.issue_for(&key, &key.serialize_pem(), "127.0.0.1", |_| {})
            }
            file => {
                let (kind, _) = file.split_once('.').expect("a kind");
                of_file(&authority, &format!("{kind}.pkcs8.pem"), &format!("{file}.pem"), "127.0.0.1", |_| {})
            }
        };
        let server = Secured::start_as(authority, &own, &[]).await;
        for versions in [&version::TLS12, &version::TLS13] {
            let client = Client::of_versions(&server.authority, &[versions]);
            client.call(server.tidegate.grpc).await.unwrap_or_else(|error| panic!("{case} {versions:?}: {error}"));
        }
    }
}

#[tokio::test]
async fn a_chain_is_sent_whole_and_a_client_may_send_one() {
    let root = Authority::new();
    let middle = root.below();
    let chained = |issued: Issued| {
        let chain =
            [&issued.certificate, &middle.certificate()].map(|file| fs::read_to_string(file).expect("it reads"));
        fs::write(&issued.certificate, chain.concat()).expect("it is written");
        issued
    };
    let (own, of_client) = (chained(middle.issue("127.0.0.1")), chained(middle.issue("client")));
    let server = Secured::start_as(root, &own, &[super::MUTUAL]).await;
    server.client().with(&of_client).call(server.tidegate.grpc).await.expect("it is answered");
}
