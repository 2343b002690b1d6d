//! TLS: who is trusted, who must show a certificate, and what is said when it does not come about.

use std::path::Path;

use super::{CANARY, Service};
use crate::redis::Single;
use crate::redis::certificates::Authority;

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}

#[tokio::test]
async fn a_server_is_trusted_for_its_authority_and_its_name_and_a_client_for_its_certificate() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = Single::with_tls(&authority, "localhost", &[]).await;
    let (client, stranger) = (authority.issue(CANARY), other.issue("a stranger"));
    let port = server.tls_address().port();
    let (named, numbered) = (format!("localhost:{port}"), format!("127.0.0.1:{port}"));
    let (ours, theirs) = (authority.certificate(), other.certificate());

    let url = |at: &str| ("REDIS_URL", at.to_owned());
    let ca = |path: &Path| ("REDIS_TLS_CACERT", text(path).to_owned());
    let shows = |issued: &crate::redis::certificates::Issued| {
        [
            ("REDIS_TLS_CLIENT_CERT", text(&issued.certificate).to_owned()),
            ("REDIS_TLS_CLIENT_KEY", text(&issued.key).to_owned()),
        ]
    };
    let any_name = ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true".to_owned());
    let start = async |given: &[&[(&'static str, String)]]| {
        let given = given.concat();
        let mut given: Vec<_> = given.iter().map(|(name, value)| (*name, value.as_str())).collect();
        given.push(("REDIS_TLS", "true"));
        Service::start(&given).await
    };

    for (at, more) in [(&named, None), (&numbered, Some(any_name.clone()))] {
        let service = start(&[&[url(at), ca(&ours)], &shows(&client), more.as_slice()]).await;
        service.counts("in private").await;
        let page = service.tidegate.metrics().await;
        assert!(page.contains("\ntidegate_certificate_expiry_seconds{use=\"redis\"} "), "{page}");
        service.log();
    }
    for (why, given) in [
        ("not valid for name", [&[url(&numbered), ca(&ours)][..], &shows(&client)].concat()),
        ("invalid peer certificate", [&[url(&named), ca(&theirs)][..], &shows(&client)].concat()),
        ("invalid peer certificate", [&[url(&named), ca(&theirs), any_name][..], &shows(&client)].concat()),
        ("UnknownIssuer", [&[url(&named)][..], &shows(&client)].concat()),
        ("CertificateRequired", vec![url(&named), ca(&ours)]),
        ("received fatal alert", [&[url(&named), ca(&ours)][..], &shows(&stranger)].concat()),
    ] {
        let service = start(&[&given]).await;
        let log = service.fails("cannot connect to Redis").await;
        assert!(log.contains(why), "{why}: {log}");
    }
}

#[tokio::test]
async fn plain_and_tls_do_not_understand_each_other() {
    let authority = Authority::new();
    let server = Single::with_tls(&authority, "localhost", &["--tls-auth-clients", "no"]).await;
    let (plain, tls) = (server.address().port(), server.tls_address().port());
    let ca = authority.certificate();
    let ca = ("REDIS_TLS_CACERT", text(&ca));

    let url = format!("rediss://localhost:{tls}");
    let service = Service::start(&[("REDIS_URL", &url), ca]).await;
    service.counts("in private").await;
    for url in [format!("rediss://localhost:{plain}"), format!("redis://localhost:{tls}")] {
        let service = Service::start(&[("REDIS_URL", &url), ca]).await;
        service.fails("cannot connect to Redis").await;
    }
}
