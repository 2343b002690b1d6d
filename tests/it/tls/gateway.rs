//! A real Envoy over TLS, with a certificate as Envoy Gateway makes it.

use rcgen::DnType;

use super::{MUTUAL, Secured, of_file};
use crate::envoy::proxy::{Proxy, get};
use crate::redis::certificates::Issued;
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
    let text = std::fs::read_to_string(repository("examples/rules.yaml")).expect("it reads");
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
