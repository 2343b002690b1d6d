//! Rights of callers: each caller by domain, limit of its own, hits given back, and interface.

use std::path::PathBuf;

use tempfile::TempDir;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::client::Client;
use super::{MUTUAL, Secured};
use crate::grpc;
use crate::http;
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, directory, eventually, in_time, output, repository, rule_file};

/// Limits that no cell uses up.
const RULES: &str = "domain: edge
descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 10 } }]
";

/// These limits in the domains `edge` and `other`.
fn rules() -> TempDir {
    directory(["edge", "other"].map(|domain| (format!("{domain}.yaml"), RULES.replace("edge", domain))))
}

const CALLERS: &str = "callers:
  - { names: [all.example], domains: [\"*\"], rights: [override, refund] }
  - { names: [\"*.wild.example\"], domains: [edge], rights: [override] }
  - { names: [spiffe://cluster.local/ns/edge/sa/envoy], domains: [edge, other], rights: [refund] }
  - { names: [10.1.2.3, two.example], domains: [edge] }
  - { names: [two.example], domains: [other], rights: [override] }
  - { names: [anonymous], domains: [other], rights: [refund] }
";

/// A right that holds, or not.
const YES: bool = true;
const NO: bool = false;

/// For each certificate, what it may do in `edge` and in `other`: `None`, or a limit of its own and hits given back.
type Cells = [Option<(bool, bool)>; 2];
const TABLE: [(&[&str], Cells); 9] = [
    (&["all.example"], [Some((YES, YES)), Some((YES, YES))]),
    (&["a.wild.example"], [Some((YES, NO)), None]),
    (&["a.b.wild.example"], [None, None]),
    (&["wild.example"], [None, None]),
    (&["spiffe://cluster.local/ns/edge/sa/envoy"], [Some((NO, YES)), Some((NO, YES))]),
    (&["spiffe://cluster.local/ns/edge/sa/envoy-evil"], [None, None]),
    (&["10.1.2.3"], [Some((NO, NO)), None]),
    // A right in one domain does not spread to another, and names add up.
    (&["two.example"], [Some((NO, NO)), Some((YES, NO))]),
    (&["two.example", "a.wild.example", "anonymous"], [Some((YES, NO)), Some((YES, NO))]),
];
/// What every caller without a certificate may do.
const ANONYMOUS: Cells = [None, Some((NO, YES))];

/// A file of callers in a directory of its own.
struct File {
    directory: TempDir,
}

impl File {
    fn new(text: &str) -> Self {
        let file = Self { directory: tempfile::tempdir().expect("a directory") };
        file.write(text);
        file
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("callers.yaml")
    }

    fn variable(&self) -> (&'static str, String) {
        ("CALLERS_FILE", self.path().to_str().expect("a path of text").to_owned())
    }

    fn write(&self, text: &str) {
        let new = self.directory.path().join("new");
        std::fs::write(&new, text).expect("it is written");
        std::fs::rename(new, self.path()).expect("it takes its place");
    }
}

async fn secured(file: &File) -> Secured {
    let (name, path) = file.variable();
    let authority = Authority::new();
    let own = authority.issue("127.0.0.1");
    Secured::start_of(rules(), authority, &own, &[MUTUAL, (name, &path)]).await
}

fn certified(server: &Secured, names: &[&str]) -> Client {
    let issued = server.authority.issue_as("client", |params| {
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.parse() {
                Ok(address) => rcgen::SanType::IpAddress(address),
                Err(_) if name.contains("://") => rcgen::SanType::URI((*name).try_into().expect("a URI")),
                Err(_) => rcgen::SanType::DnsName((*name).try_into().expect("a name")),
            })
            .collect();
    });
    server.client().with(&issued)
}

fn descriptor(user: &str) -> RateLimitDescriptor {
    grpc::descriptor(&[("user", user)])
}

/// A limit of 5 a day.
fn own_limit() -> Option<RateLimitOverride> {
    Some(RateLimitOverride { requests_per_unit: 5, unit: 4, unit_multiplier: None })
}

/// What the caller may do in `domain`: `None` if it may not ask, else whether its own limit counts, and whether its hits are
/// given back. `ask` returns the limit and the remaining hits.
async fn cell(
    domain: &str,
    user: &str,
    ask: impl AsyncFn(RateLimitRequest) -> Option<(u32, u32)>,
) -> Option<(bool, bool)> {
    let own = RateLimitDescriptor { limit: own_limit(), ..descriptor(&format!("{user}-own")) };
    let (limit, _) = ask(grpc::request(domain, [own])).await?;
    let refunded = format!("{user}-refunded");
    let hits = |hits, is_negative_hits| RateLimitDescriptor {
        hits_addend: Some(hits),
        is_negative_hits,
        ..descriptor(&refunded)
    };
    ask(grpc::request(domain, [hits(4, false)])).await.expect("it may ask");
    ask(grpc::request(domain, [hits(3, true)])).await.expect("a refund is no reason for an error");
    let (_, remaining) = ask(grpc::request(domain, [hits(0, false)])).await.expect("it may ask");
    assert!([5, 10].contains(&limit) && [6, 9].contains(&remaining), "{limit}, {remaining}");
    Some((limit == 5, remaining == 9))
}

async fn call(channel: &Channel, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
    let mut client = RateLimitServiceClient::new(channel.clone());
    Ok(in_time("it is answered", client.should_rate_limit(request)).await?.into_inner())
}

/// Asks over gRPC: the limit and the remaining hits, or nothing if permission is denied.
async fn over_grpc(channel: &Channel, request: RateLimitRequest) -> Option<(u32, u32)> {
    match call(channel, request).await {
        Ok(answer) => {
            let status = &answer.statuses[0];
            Some((status.current_limit.as_ref().expect("a limit").requests_per_unit, status.limit_remaining))
        }
        Err(status) => {
            assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
            assert!(status.message().contains("CALLERS_FILE"), "{status:?}");
            None
        }
    }
}

/// Asks over `/json`.
async fn over_json(server: &Tidegate, request: RateLimitRequest) -> Option<(u32, u32)> {
    let RateLimitDescriptor { entries, limit, hits_addend, is_negative_hits } = &request.descriptors[0];
    let mut descriptor = serde_json::json!({
        "entries": [{ "key": "user", "value": String::from_utf8_lossy(&entries[0].value) }],
        "isNegativeHits": is_negative_hits,
    });
    if let Some(hits) = hits_addend {
        descriptor["hitsAddend"] = (*hits).into();
    }
    if let Some(limit) = limit {
        descriptor["limit"] = serde_json::json!({ "requestsPerUnit": limit.requests_per_unit, "unit": "DAY" });
    }
    let body = serde_json::json!({ "domain": request.domain, "descriptors": [descriptor] }).to_string();
    let answer = http::post(server.http, "/json", body).await;
    if answer.status == 403 {
        assert!(answer.contains("CALLERS_FILE"), "{answer}");
        return None;
    }
    let answer = answer.json();
    let number = |value: &serde_json::Value| value.as_u64().and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
    let status = &answer["statuses"][0];
    Some((number(&status["currentLimit"]["requestsPerUnit"]), number(&status["limitRemaining"])))
}

#[tokio::test]
async fn each_caller_may_do_what_it_is_granted_in_each_domain_by_each_interface() {
    let file = File::new(CALLERS);
    let server = secured(&file).await;
    for (number, (names, expected)) in TABLE.iter().enumerate() {
        let channel = certified(&server, names).channel(server.tidegate.grpc);
        for (domain, expected) in ["edge", "other"].iter().zip(expected) {
            let found =
                cell(domain, &format!("grpc-{number}"), async |request| over_grpc(&channel, request).await).await;
            assert_eq!(found, *expected, "{names:?} in {domain}");
        }
    }
    for (domain, expected) in ["edge", "other"].iter().zip(ANONYMOUS) {
        let found = cell(domain, "json", async |request| over_json(&server.tidegate, request).await).await;
        assert_eq!(found, expected, "/json in {domain}");
    }
    // A domain that no rule has needs a grant as well.
    let unknown = || grpc::request("unknown", [descriptor("a")]);
    let all = certified(&server, &["all.example"]).channel(server.tidegate.grpc);
    assert!(call(&all, unknown()).await.is_ok());
    let other = certified(&server, &["10.1.2.3"]).channel(server.tidegate.grpc);
    assert_eq!(call(&other, unknown()).await.expect_err("it is denied").code(), Code::PermissionDenied);
    for what in ["domain", "override", "refund"] {
        assert!(server.metric(&format!("tidegate_caller_denials_total{{what=\"{what}\"}}")).await > 0, "{what}");
        server.logs(&format!("what=\"{what}\"")).await;
    }
    server.logs("caller=\"a.wild.example\" last_domain=\"other\"").await;
    let client = server.client().call(server.tidegate.grpc).await;
    client.expect_err("a client without a certificate does not get so far");
}

#[tokio::test]
async fn callers_without_tls_are_anonymous() {
    let (file, rules) = (File::new(CALLERS), rules());
    let (name, path) = file.variable();
    let server = Tidegate::start(rules.path(), &[(name, &path)]).await;
    let channel = Channel::from_shared(format!("http://{}", server.grpc)).expect("an address").connect_lazy();
    for (domain, expected) in ["edge", "other"].iter().zip(ANONYMOUS) {
        let found = cell(domain, "grpc", async |request| over_grpc(&channel, request).await).await;
        assert_eq!(found, expected, "gRPC in {domain}");
        let found = cell(domain, "json", async |request| over_json(&server, request).await).await;
        assert_eq!(found, expected, "/json in {domain}");
    }
    assert!(server.log().contains("callers.without_certificates"), "{}", server.log());
}

#[tokio::test]
async fn json_is_closed_unless_anonymous_is_granted_something() {
    let file = File::new("callers: [{ names: [a.example], domains: [edge] }]\n");
    let server = secured(&file).await;
    let answer = http::get(server.tidegate.http, "/json").await;
    assert!(answer.status == 403 && answer.contains("grants nothing to `anonymous`"), "{answer}");
    for path in ["/healthcheck", "/metrics"] {
        let answer = http::get(server.tidegate.http, path).await;
        assert!(answer.status == 200, "{path}: {answer}");
    }
    let channel = certified(&server, &["a.example"]).channel(server.tidegate.grpc);
    call(&channel, grpc::request("edge", [descriptor("a")])).await.expect("it is granted");
}

#[tokio::test]
async fn rights_hold_for_a_large_request_too() {
    let file = File::new(CALLERS);
    let server = secured(&file).await;
    let many = |domain: &str| RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: (0..1_000)
            .map(|number| RateLimitDescriptor { limit: own_limit(), ..descriptor(&format!("{domain}{number}")) })
            .collect(),
        hits_addend: 0,
    };
    let limits = |answer: &RateLimitResponse| -> Vec<u32> {
        answer.statuses.iter().map(|status| status.current_limit.as_ref().expect("a limit").requests_per_unit).collect()
    };
    let spiffe = certified(&server, &["spiffe://cluster.local/ns/edge/sa/envoy"]).channel(server.tidegate.grpc);
    let answer = call(&spiffe, many("edge")).await.expect("it is granted");
    assert_eq!(limits(&answer), [10; 1_000], "the limits of the request are ignored");
    assert_eq!(server.metric("tidegate_caller_denials_total{what=\"override\"}").await, 1, "once for the request");
    let all = certified(&server, &["all.example"]).channel(server.tidegate.grpc);
    assert_eq!(limits(&call(&all, many("other")).await.expect("it is granted")), [5; 1_000]);
    let wild = certified(&server, &["a.wild.example"]).channel(server.tidegate.grpc);
    assert_eq!(call(&wild, many("other")).await.expect_err("it is denied").code(), Code::PermissionDenied);
}

#[tokio::test]
async fn a_right_that_is_removed_ends_on_open_connections_and_a_broken_file_changes_nothing() {
    let file = File::new(CALLERS);
    let server = secured(&file).await;
    let channel = certified(&server, &["all.example"]).channel(server.tidegate.grpc);
    let asked = async || {
        over_grpc(&channel, grpc::request("edge", [RateLimitDescriptor { limit: own_limit(), ..descriptor("a") }]))
            .await
    };
    assert_eq!(asked().await.map(|(limit, _)| limit), Some(5));

    file.write(&CALLERS.replace("rights: [override, refund]", "rights: [refund]"));
    let changed = Instant::now();
    eventually("the right is gone", async || (asked().await.map(|(limit, _)| limit) == Some(10)).then_some(())).await;
    println!("a removed right ended after {:?}", changed.elapsed());
    file.write("callers: [{ names: [b.example], domains: [edge] }]\n");
    let changed = Instant::now();
    eventually("the domain is gone", async || asked().await.is_none().then_some(())).await;
    println!("a removed domain ended after {:?}", changed.elapsed());

    for (broken, told) in [("callers: [{ nam: [a] }]\n", "did you mean `names`?"), ("", "must be a mapping")] {
        file.write(CALLERS);
        eventually("it may ask again", async || asked().await.map(drop)).await;
        file.write(broken);
        server.logs(told).await;
        assert_eq!(server.metric("tidegate_callers_rejected").await, 1);
        assert!(asked().await.is_some(), "the last valid content stays in force");
    }
    std::fs::remove_file(file.path()).expect("it was there");
    server.logs("callers.unreadable").await;
    assert!(asked().await.is_some());
    file.write(CALLERS);
    eventually("it is in force again", async || (server.metric("tidegate_callers_rejected").await == 0).then_some(()))
        .await;
    // In place, as an editor does.
    std::fs::write(file.path(), "callers: [{ names: [b.example], domains: [edge] }]\n").expect("it is written");
    eventually("the domain is gone", async || asked().await.is_none().then_some(())).await;
}

#[tokio::test]
async fn a_broken_file_stops_the_start_and_check_tells_the_same() {
    let (file, rules) = (File::new("callers:\n  - names: [a]\n    domain: [edge]\n"), rule_file(RULES));
    let (name, path) = file.variable();
    let mut serve = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve.arg("serve").arg(rules.path()).env_clear().env(name, &path);
    let (status, _, errors) = output(crate::support::on_free_ports(&mut serve)).await;
    let told = format!("{path}:3:5");
    assert!(status.code() == Some(2) && errors.contains(&told) && errors.contains("CALLERS_FILE"), "{errors}");
    let check_with = async |path: &str, rules: Option<&std::path::Path>| {
        let mut check = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
        output(check.arg("check").arg("--callers").arg(path).args(rules).env_clear()).await
    };
    let check = async |path: &str| check_with(path, None).await;
    let (status, _, errors) = check(&path).await;
    assert!(
        status.code() == Some(1) && errors.contains(&told) && errors.contains("did you mean `domains`?"),
        "{errors}"
    );
    file.write(CALLERS);
    let (status, printed, errors) = check(&path).await;
    assert!(status.success() && printed == format!("ok: 6 items of callers in {path}\n"), "{printed}{errors}");
    let (status, _, errors) = check_with(&path, Some(rules.path())).await;
    let unknown = format!("{path}: warning: The domain `other` is granted, and no rule is for it.\n");
    assert!(status.success() && errors == unknown, "{errors}");
    file.write("callers: []\n");
    assert!(check(&path).await.2.contains("The file grants nothing, so every call is answered with PERMISSION_DENIED"));
    let (status, printed, errors) = check(repository("examples/callers.yaml").to_str().expect("text")).await;
    assert!(status.success() && printed.starts_with("ok: 4 items"), "{printed}{errors}");
}

#[tokio::test]
async fn the_names_of_a_certificate_beyond_the_first_hundred_give_no_right() {
    let file = File::new(CALLERS);
    let server = secured(&file).await;
    for (others, expected) in [(99, Some((10, 9))), (100, None)] {
        let mut names: Vec<_> = (0..others).map(|number| format!("n{number}.example")).collect();
        names.push("all.example".to_owned());
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let channel = certified(&server, &names).channel(server.tidegate.grpc);
        assert_eq!(over_grpc(&channel, grpc::request("edge", [descriptor("many")])).await, expected, "{others}");
    }
}
