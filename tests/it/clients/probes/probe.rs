//! The probe of tonic: a client that a test steers. Its commands are in probe.py.

use std::collections::HashMap;
use std::error::Error;
use std::io::BufRead;
use std::time::{Duration, Instant};

use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, prost::Message)]
struct Request {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<Descriptor>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Entry {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Answer {
    #[prost(int32, tag = "1")]
    code: i32,
}

/// Tonic has no retries of its own, so there is nothing to set.
fn open(target: &str, ca: &str, keepalive_ms: u64) -> Result<Channel, Box<dyn Error>> {
    let scheme = if ca == "-" { "http" } else { "https" };
    let target = if target.starts_with("unix:") { target.to_owned() } else { format!("{scheme}://{target}") };
    let mut endpoint = Endpoint::from_shared(target)?
        .http2_keep_alive_interval(Duration::from_millis(keepalive_ms))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    if ca != "-" {
        endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(std::fs::read(ca)?)))?;
    }
    Ok(endpoint.connect_lazy())
}

async fn call(channel: Channel, entry: Entry, timeout: Duration, compression: &str) -> Result<i32, Status> {
    let mut grpc = Grpc::new(channel);
    if compression == "gzip" {
        grpc = grpc.send_compressed(CompressionEncoding::Gzip);
    }
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let descriptors = vec![Descriptor { entries: vec![entry] }];
    let mut request = tonic::Request::new(Request { domain: "clients".to_owned(), descriptors });
    request.set_timeout(timeout);
    let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    Ok(grpc.unary(request, path, ProstCodec::<Request, Answer>::default()).await?.into_inner().code)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut channels = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["open", name, target, ca, _, keepalive_ms] => {
                channels.insert(name.to_owned(), open(target, ca, keepalive_ms.parse()?)?);
            }
            ["call", id, name, key, value, timeout_ms, compression] => {
                let channel = channels[name].clone();
                let entry = Entry { key: key.to_owned(), value: value.to_owned() };
                let timeout = Duration::from_millis(timeout_ms.parse()?);
                let (id, compression) = (id.to_owned(), compression.to_owned());
                tokio::spawn(async move {
                    let began = Instant::now();
                    let answer = call(channel, entry, timeout, &compression).await;
                    let (status, code) = answer.as_ref().map_or_else(|error| (error.code(), 0), |code| (Code::Ok, *code));
                    let (status, ms) = (status as i32, began.elapsed().as_millis());
                    println!(r#"{{"id":{id},"status":{status},"code":{code},"ms":{ms}}}"#);
                    eprintln!("{id} {answer:?}");
                });
            }
            _ => return Err(line.into()),
        }
    }
    Ok(())
}
