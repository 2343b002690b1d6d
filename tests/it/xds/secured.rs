//! TLS to a control plane, and headers.

use super::plane::{Plane, Secured, answer, limit, response, rlconfig, start};
use crate::redis::certificates::Authority;
use crate::support::eventually;
use tidegate::proto::ratelimit::config::ratelimit::v3::RateLimitUnit;

/// The variables of a client with these files.
fn tls<'a>(authority: &'a str, certificate: &'a str, key: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", authority),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", certificate),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", key),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ]
}

#[tokio::test]
async fn certificates_are_read_for_each_connection_and_a_new_authority_is_trusted_without_a_restart() {
    let (old, new) = (Authority::new(), Authority::new());
    let mut plane = Plane::start_at("127.0.0.1:0".parse().unwrap(), Some(&Secured::by(&old))).await;
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let write = |authority: &Authority| {
        let issued = authority.issue("envoy-ratelimit");
        std::fs::copy(authority.certificate(), file("ca.crt")).unwrap();
        std::fs::copy(issued.certificate, file("tls.crt")).unwrap();
        std::fs::copy(issued.key, file("tls.key")).unwrap();
    };
    write(&old);
    let [authority, certificate, key] = ["ca.crt", "tls.crt", "tls.key"].map(|name| file(name).display().to_string());
    let server = start(&plane.variables(), &tls(&authority, &certificate, &key)).await;
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).unwrap();
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    let page = server.metrics().await;
    assert!(page.contains("\ntidegate_certificate_expiry_seconds{use=\"xds\"} "), "{page}");

    // The control plane comes back with certificates of another authority, which the process does not trust yet.
    let address = plane.address;
    drop((plane, stream));
    let mut plane = Plane::start_at(address, Some(&Secured::by(&new))).await;
    eventually("the reason is in the log", async || server.log().contains("invalid peer certificate").then_some(()))
        .await;
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    // A missing key is no end either.
    std::fs::remove_file(&key).unwrap();
    eventually("the file is named", async || server.log().contains("CONFIG_GRPC_XDS_CLIENT_TLS_KEY is ").then_some(()))
        .await;
    write(&new);
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 6)])).unwrap();
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=6"));
}

#[tokio::test]
async fn the_certificate_must_have_the_host_or_the_given_name() {
    let authority = Authority::new();
    let secured = Secured { own: authority.issue("control-plane"), clients: authority.certificate() };
    let mut plane = Plane::start_at("127.0.0.1:0".parse().unwrap(), Some(&secured)).await;
    let client = authority.issue("client");
    let [trusted, certificate, key] =
        [authority.certificate(), client.certificate, client.key].map(|path| path.display().to_string());
    let mut more = tls(&trusted, &certificate, &key);
    let server = start(&plane.variables(), &more).await;
    eventually("the reason is in the log", async || server.log().contains("not valid for name").then_some(())).await;
    drop(server);
    more.push(("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "control-plane"));
    let _server = start(&plane.variables(), &more).await;
    plane.stream().await;
}

#[tokio::test]
async fn headers_are_sent_with_each_stream() {
    let mut plane = Plane::start().await;
    let headers = "Authorization:Bearer a:b, x-zone : a ";
    let more = [("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", headers), ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")];
    let _server = start(&plane.variables(), &more).await;
    for _ in 0..2 {
        let (headers, stream, _) = plane.stream_with_headers().await;
        let header = |name| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header("authorization").as_deref(), Some("Bearer a:b"));
        assert_eq!(header("x-zone").as_deref(), Some("a"));
        drop(stream);
    }
}
