//! Calls that get no decision, each with its reason, and calls compressed by gzip, which get one.

use std::io::Write;
use std::net::SocketAddr;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::HeaderMap;
use prost::Message;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

use crate::grpc;
use crate::support::{Tidegate, eventually, in_time, rule_file};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const MIB: usize = 1 << 20;
const GZIP: &[(&str, &str)] = &[("grpc-encoding", "gzip")];

const RULES: &str = "
domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 2 } }
  - { key: k, rate_limit: { unit: year, requests_per_unit: 1000 } }
";

async fn server() -> (Tidegate, NamedTempFile) {
    let rules = rule_file(RULES);
    (Tidegate::start(rules.path(), &[]).await, rules)
}

/// What a call was answered.
#[derive(Debug)]
pub struct Answer {
    pub status: i32,
    message: String,
    head: HeaderMap,
    /// The framed message.
    pub body: Vec<u8>,
}

impl Answer {
    fn response(&self) -> RateLimitResponse {
        assert_eq!(self.status, 0, "{self:?}");
        RateLimitResponse::decode(&self.body[5..]).expect("a response")
    }

    fn code(&self) -> Code {
        self.response().overall_code()
    }
}

/// Makes calls on a connection of their own.
pub struct Caller(h2::client::SendRequest<Bytes>);

impl Caller {
    pub async fn connect(server: SocketAddr) -> Self {
        let socket = tokio::net::TcpStream::connect(server).await.expect("a connection");
        let (client, connection) = h2::client::handshake(socket).await.expect("a handshake");
        tokio::spawn(connection);
        Self(client)
    }

    async fn call(&self, path: &str, headers: &[(&'static str, &str)], body: impl Into<Bytes>) -> Answer {
        let mut call = http::Request::post(format!("http://t{path}")).header("content-type", "application/grpc");
        for (name, value) in headers {
            call = call.header(*name, *value);
        }
        let mut client = self.0.clone().ready().await.expect("room for a call");
        let (response, mut sending) = client.send_request(call.body(()).expect("a call"), false).expect("it is sent");
        let mut body = body.into();
        let sent = async {
            while !body.is_empty() {
                sending.reserve_capacity(body.len().min(MIB));
                let Some(Ok(room)) = std::future::poll_fn(|cx| sending.poll_capacity(cx)).await else { return };
                let part = body.split_to(room.min(body.len()));
                let _ = sending.send_data(part, false);
            }
            let _ = sending.send_data(Bytes::new(), true);
        };
        let answered = async {
            let (head, mut body) = response.await.expect("an answer").into_parts();
            let mut content = Vec::new();
            while let Some(data) = body.data().await {
                let data = data.expect("the rest of the answer");
                let _ = body.flow_control().release_capacity(data.len());
                content.extend(data);
            }
            let trailers = body.trailers().await.expect("the end of the answer").unwrap_or_default();
            let field = |name| {
                let found = head.headers.get(name).or_else(|| trailers.get(name));
                found.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
            };
            let (status, message) = (field("grpc-status").parse().expect("a code"), field("grpc-message"));
            Answer { status, message, head: head.headers, body: content }
        };
        in_time("the call is answered", async { tokio::join!(answered, sent).0 }).await
    }

    pub async fn ask(&self, headers: &[(&'static str, &str)], body: impl Into<Bytes>) -> Answer {
        self.call(SHOULD_RATE_LIMIT, headers, body).await
    }
}

/// A message as gRPC frames it.
pub fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("it fits").to_be_bytes();
    [&[flag][..], &length, message].concat()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).expect("it compresses");
    encoder.finish().expect("it compresses")
}

fn compressed(message: &[u8]) -> Vec<u8> {
    framed(1, &gzip(message))
}

fn encoded(domain: &str, key: &str, value: impl AsRef<[u8]>) -> Vec<u8> {
    grpc::one(domain, key, value).encode_to_vec()
}

/// A request of a gibibyte of zeros in a mebibyte: a value after `before`.
fn bomb(before: &[u8]) -> Vec<u8> {
    let (whole, part) = (1_u64 << 30, gzip(&vec![0; MIB]));
    let mut length = Vec::new();
    prost::encoding::encode_varint(whole, &mut length);
    [gzip(&[before, &[0x12], &length].concat()), part.repeat(1_024)].concat()
}

async fn undecided(server: &Tidegate) -> Vec<(String, u64)> {
    let page = server.metrics().await;
    let counts = page.lines().filter_map(|line| line.strip_prefix("tidegate_calls_undecided_total{reason=\""));
    let counts = counts.filter_map(|line| line.split_once("\"} "));
    let counts = counts.map(|(reason, count)| (reason.to_owned(), count.parse().expect("a number")));
    counts.filter(|(_, count)| *count > 0).collect()
}

#[tokio::test]
async fn a_call_compressed_by_gzip_is_decided_and_counted_like_others() {
    let (server, _rules) = server().await;
    let caller = Caller::connect(server.grpc).await;
    let message = encoded("edge", "user", "a");
    let mut codes = Vec::new();
    for (headers, body) in [
        (GZIP, compressed(&message)),
        (GZIP, framed(1, &[gzip(&message[..5]), gzip(b""), gzip(&message[5..])].concat())),
        (GZIP, compressed(&message)),
        (&[], framed(0, &message)),
        (GZIP, framed(0, &message)),
        (&[("grpc-encoding", "identity")], framed(0, &message)),
        (&[("grpc-encoding", "zstd")], framed(0, &message)),
    ] {
        codes.push(caller.ask(headers, body).await.code());
    }
    assert_eq!(codes[..2], [Code::Ok; 2]);
    assert_eq!(codes[2..], [Code::OverLimit; 5]);
    let answer = caller.ask(GZIP, compressed(&message)).await;
    assert_eq!((answer.head.get("grpc-encoding"), answer.body[0]), (None, 0), "an answer is not compressed");

    // Of every size: at once, in steps, large, with incompressible values.
    for bytes in [1_000, 10_000, 70_000, 300_000, (1 << 20) - 5_000] {
        let noise: Vec<u8> =
            (0..bytes / 8).flat_map(|n: usize| (n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).collect();
        for value in [vec![b'v'; bytes], noise] {
            let value = Bytes::from(value);
            let large = encoded("edge", "k", value.clone());
            let remaining = |answer: Answer| answer.response().statuses[0].limit_remaining;
            assert_eq!(remaining(caller.ask(GZIP, compressed(&large)).await), 999, "{bytes}");
            assert_eq!(remaining(caller.ask(&[], framed(0, &large)).await), 998, "{bytes}: the same counter");
        }
    }
    let health = caller.call("/grpc.health.v1.Health/Check", GZIP, compressed(b"")).await;
    assert_eq!((health.status, &health.body[5..]), (0, &[8, 1][..]));
    assert_eq!(undecided(&server).await, []);
}

#[tokio::test]
async fn a_compressed_message_above_the_bound_is_decided_by_the_domain_that_was_read() {
    let (server, _rules) = server().await;
    let caller = Caller::connect(server.grpc).await;
    let domain = b"\x0a\x04edge";
    let noise: Vec<u8> =
        (0..2 * MIB as u64 / 8).flat_map(|n| n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).collect();
    let noisy = gzip(&encoded("edge", "k", noise));
    assert!(noisy.len() > MIB, "the compressed message is above the bound too");
    let around = encoded("edge", "k", vec![0; MIB / 2]).len() - MIB / 2;
    let beyond = gzip(&encoded("edge", "k", vec![b'v'; MIB - around + 1]));
    let other = [&gzip(domain)[..], &bomb(b"\x0a\x05other")].concat();
    let broken_later = [&bomb(domain)[..], b"no gzip"].concat();
    for (what, message, expected) in [
        ("a bomb", bomb(domain), Code::OverLimit),
        ("noise", noisy, Code::OverLimit),
        ("one byte", beyond, Code::OverLimit),
        ("the last domain", other, Code::Ok),
        ("what follows the bound", broken_later, Code::OverLimit),
    ] {
        let answer = caller.ask(GZIP, framed(1, &message)).await;
        assert_eq!(answer.code(), expected, "{what}");
        assert_eq!(answer.response().statuses, [], "{what}");
    }
    for without in
        [bomb(b""), bomb(b"\x0a\x04edge\x0a\x00"), gzip(&[b"\x12\xff\xff\xff\x03", &vec![0; 2 * MIB][..]].concat())]
    {
        let answer = caller.ask(GZIP, framed(1, &without)).await;
        assert_eq!(answer.status, tonic::Code::InvalidArgument as i32, "{answer:?}");
    }
    assert_eq!(undecided(&server).await, [("no_domain".to_owned(), 3)]);
    assert!(server.metrics().await.contains("tidegate_calls_limited_total{cause=\"too_large\"} 8"));
}

#[tokio::test]
async fn compressed_messages_take_bounded_memory_and_others_are_answered_meanwhile() {
    let (server, _rules) = server().await;
    let (ordinary, domain) = (compressed(&encoded("edge", "user", "a")), b"\x0a\x04edge");
    let honest = Caller::connect(server.grpc).await;
    honest.ask(GZIP, ordinary.clone()).await.code();
    let before = server.peak_memory();
    let bomb = Bytes::from(framed(1, &bomb(domain)));
    let small = Bytes::from(framed(
        1,
        &[gzip(&[&domain[..], b"\x12\x80\x80\x80\x02"].concat()), gzip(&vec![0; MIB]).repeat(4)].concat(),
    ));
    let empty = Bytes::from(framed(1, &gzip(b"").repeat(50_000)));
    let many = Bytes::from(compressed(&encoded("edge", "k", vec![0; 60_000])).repeat(2_000));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let caller = std::sync::Arc::new(Caller::connect(server.grpc).await);
        for (body, times) in [(&bomb, 2), (&small, 20), (&empty, 1), (&many, 1)] {
            for _ in 0..times {
                let (caller, body) = (std::sync::Arc::clone(&caller), body.clone());
                calls.spawn(async move { caller.ask(GZIP, body).await.status });
            }
        }
    }
    let mut slowest = std::time::Duration::ZERO;
    let mut statuses = Vec::new();
    while !calls.is_empty() {
        let began = std::time::Instant::now();
        honest.ask(GZIP, ordinary.clone()).await.code();
        slowest = slowest.max(began.elapsed());
        while let Some(ended) = calls.try_join_next() {
            statuses.push(ended.expect("it ends"));
        }
    }
    let grown = (server.peak_memory() - before) / MIB as u64;
    println!("{grown} MiB more; the slowest of the others took {slowest:?}");
    assert!(grown < 128, "{grown} MiB");
    // Fifty thousand streams without content are no request. Of several messages the first is decided.
    assert_eq!(statuses.iter().filter(|status| **status == 0).count(), 8 * 23, "{statuses:?}");
}

/// A call: the reason as which it is counted, its path, headers and body, and the status of its answer.
type Undecided = (&'static str, &'static str, &'static [(&'static str, &'static str)], Vec<u8>, i32);

fn calls_without_a_decision() -> Vec<Undecided> {
    let whole = gzip(&encoded("edge", "user", "a"));
    let mut override_of_nothing = grpc::one("edge", "k", "v");
    override_of_nothing.descriptors[0].limit =
        Some(RateLimitOverride { requests_per_unit: 9, unit: 99, unit_multiplier: None });
    let no_descriptors = RateLimitRequest { descriptors: vec![], ..grpc::one("edge", "k", "v") };
    let (unimplemented, internal, invalid) = (12, 13, 3);
    let plain = framed(0, &encoded("edge", "user", "a"));
    vec![
        (
            "older_api",
            "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
            &[][..],
            plain.clone(),
            unimplemented,
        ),
        ("older_api", "/pb.lyft.ratelimit.RateLimitService/ShouldRateLimit", &[], plain.clone(), unimplemented),
        (
            "quota_api",
            "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas",
            &[],
            plain.clone(),
            unimplemented,
        ),
        ("unknown_method", "/envoy.service.ratelimit.v3.RateLimitService/Other", &[], plain.clone(), unimplemented),
        ("unknown_method", "/a.Service/Call", GZIP, plain, unimplemented),
        ("unknown_method", "/", &[], vec![], unimplemented),
        ("unknown_method", "/grpc.health.v1.Health/Other", GZIP, compressed(b""), unimplemented),
        ("compression", SHOULD_RATE_LIMIT, &[("grpc-encoding", "deflate")], framed(1, &whole), unimplemented),
        ("compression", SHOULD_RATE_LIMIT, &[("grpc-encoding", "snappy")], framed(1, &whole), unimplemented),
        ("compression", SHOULD_RATE_LIMIT, &[], framed(1, &whole), unimplemented),
        ("compression", SHOULD_RATE_LIMIT, &[("grpc-encoding", "identity")], framed(1, &whole), unimplemented),
        ("compression", "/grpc.health.v1.Health/Check", &[("grpc-encoding", "zstd")], framed(1, b""), unimplemented),
        (
            "compression",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            GZIP,
            compressed(b""),
            unimplemented,
        ),
        ("broken_gzip", SHOULD_RATE_LIMIT, GZIP, framed(1, &whole[..whole.len() - 1]), internal),
        ("broken_gzip", SHOULD_RATE_LIMIT, GZIP, framed(1, b"no gzip"), internal),
        ("broken_gzip", SHOULD_RATE_LIMIT, GZIP, framed(1, b""), internal),
        ("broken_gzip", SHOULD_RATE_LIMIT, GZIP, framed(1, &vec![7; 5 * MIB]), internal),
        ("malformed", SHOULD_RATE_LIMIT, &[], framed(0, b"\xff\xff\xff"), internal),
        ("malformed", SHOULD_RATE_LIMIT, GZIP, compressed(b"\xff\xff\xff"), internal),
        ("malformed", SHOULD_RATE_LIMIT, &[], framed(0, &[0xff; 70_000]), internal),
        ("malformed", SHOULD_RATE_LIMIT, &[], framed(0, &whole)[..20].to_vec(), internal),
        ("malformed", SHOULD_RATE_LIMIT, &[], vec![], internal),
        ("malformed", SHOULD_RATE_LIMIT, &[], framed(7, &whole), internal),
        ("no_domain", SHOULD_RATE_LIMIT, &[], framed(0, &encoded("", "k", "v")), invalid),
        ("no_domain", SHOULD_RATE_LIMIT, &[], framed(0, b""), invalid),
        ("no_domain", SHOULD_RATE_LIMIT, GZIP, compressed(b""), invalid),
        ("no_descriptors", SHOULD_RATE_LIMIT, &[], framed(0, &no_descriptors.encode_to_vec()), invalid),
        ("invalid_limit", SHOULD_RATE_LIMIT, &[], framed(0, &override_of_nothing.encode_to_vec()), invalid),
    ]
}

#[tokio::test]
async fn calls_without_a_decision_are_counted_by_reason_and_named_with_their_peer() {
    let (server, _rules) = server().await;
    let caller = Caller::connect(server.grpc).await;
    let unimplemented = 12;
    for (expected, path, headers, body, status) in calls_without_a_decision() {
        let before = undecided(&server).await;
        let answer = caller.call(path, headers, body).await;
        assert_eq!(answer.status, status, "{expected} {path}: {answer:?}");
        let after = undecided(&server).await;
        let counted: Vec<_> =
            after.iter().filter(|counted| !before.contains(counted)).map(|(reason, _)| &**reason).collect();
        assert_eq!(counted, [expected], "{path}: {answer:?}");
        if expected == "compression" && path == SHOULD_RATE_LIMIT {
            assert_eq!(answer.head["grpc-accept-encoding"], "identity,gzip");
        } else if status == unimplemented && expected != "compression" {
            assert!(answer.message.contains(SHOULD_RATE_LIMIT), "{answer:?}");
        }
    }
    let lines = eventually("each reason is logged", async || {
        let log = server.log();
        let lines: Vec<_> = log.lines().filter(|line| line.contains("calls.undecided")).map(str::to_owned).collect();
        (lines.len() >= 9).then_some(lines)
    })
    .await;
    assert_eq!(lines.len(), 9, "one line for each reason: {lines:?}");
    assert!(lines.iter().all(|line| line.contains("last_client=127.0.0.1")), "{lines:?}");
    let older = "method=\"/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit\"";
    assert!(lines.iter().any(|line| line.contains("older_api") && line.contains(older)), "{lines:?}");
}
