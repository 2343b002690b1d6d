//! A real Envoy over TLS: with a certificate as Envoy Gateway makes it, and with files that it follows as the pages say.

use std::fs;
use std::path::Path;

use rcgen::DnType;

use super::rotation::{mount, put, swap_with};
use super::{MUTUAL, Secured, of_file};
use crate::envoy::proxy::{Proxy, get};
use crate::redis::certificates::{Authority, Issued};
use crate::support::{eventually, repository};

/// The part of a cluster that speaks TLS, with this certificate.
fn transport_socket(server: &Secured, own: Option<&Issued>) -> String {
    let own = own.map_or(String::new(), |own| {
        let (certificate, key) = (own.certificate.display(), own.key.display());
        format!(
            "\n          tls_certificates:\n          - certificate_chain: {{ filename: {certificate} }}\n            private_key: {{ filename: {key} }}"
        )
    });
    let authority = server.authority.certificate();
    format!(
        r#"    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context:
          alpn_protocols: [h2]
          validation_context: {{ trusted_ca: {{ filename: {} }} }}{own}
    type: STATIC # in Kubernetes"#,
        authority.display()
    )
}

#[tokio::test]
async fn an_envoy_with_a_certificate_of_envoy_gateways_kind_is_served_and_one_without_is_not() {
    let text = fs::read_to_string(repository("examples/rules.yaml")).expect("it reads");
    let server =
        Secured::start_with(&text.replace("unit: minute", "unit: week"), &[MUTUAL, ("GRPC_CLIENT_AUTH", "require")])
            .await;
    // No extended key usage, a star as the common name, and an RSA key as PKCS#1.
    let own = of_file(&server.authority, "rsa.pkcs8.pem", "rsa.pkcs1.pem", "*.envoy-gateway-system", |params| {
        params.distinguished_name.push(DnType::CommonName, "*");
    });
    let at = server.tidegate.grpc;
    let patient = ("connect_timeout: 0.25s", "connect_timeout: 30s");
    let socket = transport_socket(&server, Some(&own));
    let envoy = Proxy::start("envoy.yaml", at, &[("    type: STATIC # in Kubernetes", &socket), patient]).await;
    let edge = envoy.listener("fail_open").await;
    for left in [4, 3, 2, 1, 0] {
        let answer = get(edge, "/", "alice").await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{answer:?}");
    }
    assert_eq!(get(edge, "/", "alice").await.status, 429);

    let socket = transport_socket(&server, None);
    let stranger = Proxy::start("envoy.yaml", at, &[("    type: STATIC # in Kubernetes", &socket), patient]).await;
    let edge = stranger.listener("fail_open").await;
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.find("x-ratelimit-limit")), (200, None), "{answer:?}");
    let series = "tidegate_tls_handshakes_total{outcome=\"no_certificate\"}";
    eventually("it is counted", async || (server.metric(series).await > 0).then_some(())).await;
}

/// Envoy's part of mutual TLS, as the page and the two files of `examples/tls` have it, with paths in `mounted`.
fn followed(mounted: &Path) -> String {
    let read = |path: &str| fs::read_to_string(repository(path)).expect("it reads");
    let named = "san_type: DNS, matcher: { exact: tidegate.tidegate.svc }";
    for name in ["own.yaml", "ca.yaml"] {
        let text = read(&format!("examples/tls/{name}"));
        let text = text.replace("/certs", &mounted.join("certs").display().to_string());
        let text = text.replace(named, "san_type: IP_ADDRESS, matcher: { exact: 127.0.0.1 }");
        fs::write(mounted.join(name), text).expect("it is written");
    }
    let page = read("docs/settings.md");
    let socket = page.split("```yaml\n").find(|block| block.starts_with("    transport_socket")).expect("a block");
    let socket = socket.split("```").next().expect("a block").replace("        sni: tidegate.tidegate.svc\n", "");
    socket.replace("/etc/envoy", &mounted.display().to_string())
}

#[tokio::test]
async fn an_envoy_with_the_files_of_the_page_follows_changed_certificates_and_authorities() {
    let rules =
        "domain: edge\ndescriptors:\n  - key: tier\n    rate_limit: { unit: week, requests_per_unit: 4000000 }\n";
    let server = Secured::start_with(rules, &[MUTUAL, ("GRPC_CLIENT_AUTH", "require")]).await;
    let (old, new) = (&server.authority, Authority::new());
    let pem = |authority: &Authority| fs::read_to_string(authority.certificate()).expect("it reads");
    let both = pem(old) + &pem(&new);

    let mounted = tempfile::tempdir().expect("a directory");
    let certs = mounted.path().join("certs");
    fs::create_dir(&certs).expect("a directory");
    let swap = |version: &str, own: &Issued, trusted: &str| {
        swap_with(&certs, version, |place| {
            put(own, place, false);
            fs::write(place.join("ca.crt"), trusted).expect("it is written");
        });
    };
    let own = old.issue("edge");
    swap("..1", &own, &pem(old));
    mount(&certs);
    let socket = followed(mounted.path()) + "    type: STATIC # in Kubernetes";
    let changes = [("    type: STATIC # in Kubernetes", &*socket), ("connect_timeout: 0.25s", "connect_timeout: 30s")];
    let envoy = Proxy::start("envoy.yaml", server.tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    let is_decided = async |when: &str| {
        let answer = get(edge, "/", "alice").await;
        assert!(answer.find("x-ratelimit-limit").is_some(), "{when}: {answer:?}");
    };
    // Each exchange of `..data` is an update of the certificate and one of the authorities.
    let follows = async |secret: &str, updates: u32| {
        let line = format!("cluster.tidegate.client_ssl_socket_factory.ssl_context_update_by_sds: {updates}\n");
        eventually(secret, async || envoy.stats("ssl_context_update_by_sds").await.contains(&line).then_some(())).await;
    };
    is_decided("at first").await;
    // Both trust both; then each gets a certificate of the new one; then the old one is gone.
    fs::write(server.file("ca.crt"), &both).expect("it is written");
    let renewed = new.issue("edge");
    swap("..2", &renewed, &both);
    follows("the files are followed", 4).await;
    is_decided("with a certificate of the new authority").await;
    let own = new.issue("127.0.0.1");
    put(&own, server.directory.path(), true);
    fs::write(server.file("ca.crt"), pem(&new)).expect("it is written");
    // The connection of the old certificate ends, and Envoy opens another one.
    let revoked = "tidegate_connections_ended_total{listener=\"gRPC\",how=\"revoked\"}";
    eventually("the old connection ends", async || (server.metric(revoked).await > 0).then_some(())).await;
    is_decided("after the old authority is gone").await;
}
