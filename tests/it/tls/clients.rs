//! Client certificates: which are needed, and which are accepted.

use std::net::IpAddr;

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, SanType};
use rustls::{HandshakeKind, version};

use super::client::Client;
use super::{MUTUAL, Secured};
use crate::redis::certificates::Authority;

/// Calls with a certificate of `authority` after this change. Returns the error.
async fn with(
    server: &Secured,
    authority: &Authority,
    change: impl FnOnce(&mut CertificateParams),
) -> Result<(), String> {
    let issued = authority.issue_as("client", change);
    server.client().with(&issued).call(server.tidegate.grpc).await.map(|_| ())
}

#[tokio::test]
async fn a_certificate_of_the_authority_that_may_be_for_clients_is_accepted_and_no_other() {
    let server = Secured::start(&[MUTUAL]).await;
    let (own, other) = (&server.authority, Authority::new());
    // As those of Envoy Gateway: no extended key usage, and a star as the common name.
    with(&server, own, |params| params.distinguished_name.push(DnType::CommonName, "*")).await.expect("it is accepted");
    with(&server, own, |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth])
        .await
        .expect("it is accepted");
    let usage = vec![ExtendedKeyUsagePurpose::ServerAuth];
    with(&server, own, |params| params.extended_key_usages = usage).await.expect_err("it is refused");
    server.counts("usage", 1).await;
    with(&server, &other, |_| {}).await.expect_err("it is refused");
    server.counts("unknown_authority", 1).await;
    let before = rcgen::date_time_ymd(2020, 1, 1);
    with(&server, own, |params| params.not_after = before).await.expect_err("it is refused");
    let later = rcgen::date_time_ymd(2050, 1, 1);
    with(&server, own, |params| params.not_before = later).await.expect_err("it is refused");
    server.counts("expired", 2).await;
    server.client().call(server.tidegate.grpc).await.expect_err("it is refused");
    server.counts("no_certificate", 1).await;
    server.logs("clients were refused, because they sent no certificate").await;
}

#[tokio::test]
async fn the_certificate_of_a_client_is_verified_on_each_connection() {
    let server = Secured::start(&[MUTUAL]).await;
    for versions in [&version::TLS12, &version::TLS13] {
        let client = Client::of_versions(&server.authority, &[versions]).with(&server.authority.issue("client"));
        for _ in 0..3 {
            let seen = client.call(server.tidegate.grpc).await.expect("it is accepted");
            assert_eq!(seen.kind, HandshakeKind::Full, "a resumed session would not show the certificate");
        }
    }
    server.counts("full", 6).await;
}

#[tokio::test]
async fn only_clients_with_a_name_of_the_list_are_accepted() {
    let names = "envoy.edge,*.gateways.edge,10.1.2.3,spiffe://cluster.local/ns/edge/sa/envoy";
    let server = Secured::start(&[MUTUAL, ("GRPC_CLIENT_TLS_SAN", names)]).await;
    let dns = |name: &str| SanType::DnsName(name.try_into().expect("a name"));
    let uri = |name: &str| SanType::URI(name.try_into().expect("a URI"));
    let address = |text: &str| SanType::IpAddress(text.parse::<IpAddr>().expect("an address"));
    let mut wrong = 0;
    for (names, is_accepted) in [
        (vec![dns("envoy.edge")], true),
        (vec![dns("other"), dns("ENVOY.edge")], true),
        (vec![dns("*.edge")], true),
        (vec![dns("a.gateways.edge")], true),
        (vec![address("10.1.2.3")], true),
        (vec![uri("spiffe://cluster.local/ns/edge/sa/envoy")], true),
        (vec![dns("gateways.edge")], false),
        (vec![dns("a.b.gateways.edge")], false),
        (vec![dns("envoy.edge.evil")], false),
        (vec![address("10.1.2.4")], false),
        (vec![uri("spiffe://cluster.local/ns/edge/sa/envoy-evil")], false),
        (vec![], false),
    ] {
        let shown = format!("{names:?}");
        let answer = with(&server, &server.authority, |params| {
            params.subject_alt_names = names;
            // A common name is not a name.
            params.distinguished_name.push(DnType::CommonName, "envoy.edge");
        })
        .await;
        match is_accepted {
            true => answer.unwrap_or_else(|error| panic!("{shown}: {error}")),
            false => {
                wrong += 1;
                answer.expect_err(&shown);
            }
        }
    }
    server.counts("name", wrong).await;
}

#[tokio::test]
async fn the_authority_of_envoy_gateway_counts_only_where_a_certificate_is_required() {
    let gateway = ("GRPC_SERVER_TLS_CA_CERT", "ca.crt");
    let server = Secured::start(&[gateway]).await;
    server.client().call(server.tidegate.grpc).await.expect("it needs no certificate");
    server.logs("GRPC_SERVER_TLS_CA_CERT is set and has no effect").await;
    let server = Secured::start(&[gateway, ("GRPC_CLIENT_AUTH", "require")]).await;
    server.client().call(server.tidegate.grpc).await.expect_err("it is refused");
    server.counts("no_certificate", 1).await;
    with(&server, &server.authority, |_| {}).await.expect("it is accepted");
}
