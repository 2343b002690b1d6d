//! One call: its bytes, and the way there and back.

use std::error::Error;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::tls::Server;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ok,
    OverLimit,
    /// Answered with neither.
    Unknown,
    /// A gRPC status other than OK.
    Status,
    Transport,
    TimedOut,
}

impl Outcome {
    /// Every outcome, with its name in the line of numbers.
    pub const ALL: [(&'static str, Self); 6] = [
        ("ok", Self::Ok),
        ("over", Self::OverLimit),
        ("unknown", Self::Unknown),
        ("grpc_err", Self::Status),
        ("transport_err", Self::Transport),
        ("timed_out", Self::TimedOut),
    ];

    /// Whether the server decided.
    pub fn is_decision(self) -> bool {
        matches!(self, Self::Ok | Self::OverLimit | Self::Unknown)
    }
}

/// A connection; clones share it.
#[derive(Clone)]
pub struct Client {
    sender: SendRequest<Bytes>,
    uri: http::Uri,
}

impl Client {
    pub async fn connect(server: &Server) -> Result<Self, Box<dyn Error>> {
        match server.tls(server.tcp().await?).await? {
            Ok(tls) => Self::over(tls, "https", &server.address).await,
            Err(tcp) => Self::over(tcp, "http", &server.address).await,
        }
    }

    async fn over<S>(stream: S, scheme: &str, address: &str) -> Result<Self, Box<dyn Error>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
        let (sender, connection) = builder.handshake(stream).await?;
        tokio::spawn(connection);
        let path = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
        Ok(Self { sender, uri: format!("{scheme}://{address}/{path}").parse()? })
    }

    /// Sends one request and waits for its decision.
    pub async fn call(&mut self, body: Bytes, timeout: Duration) -> Outcome {
        match tokio::time::timeout(timeout, self.answer(body)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Outcome::Transport,
            Err(_) => Outcome::TimedOut,
        }
    }

    /// Whether the connection takes further calls.
    pub async fn is_open(&self) -> bool {
        self.sender.clone().ready().await.is_ok()
    }

    async fn answer(&mut self, body: Bytes) -> Result<Outcome, h2::Error> {
        let mut request = http::Request::post(self.uri.clone()).body(()).expect("the URI is valid");
        request.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
        request.headers_mut().insert("te", http::HeaderValue::from_static("trailers"));
        self.sender = self.sender.clone().ready().await?;
        let (response, mut stream) = self.sender.send_request(request, false)?;
        stream.send_data(body, true)?;

        let response = response.await?;
        let status = |headers: &http::HeaderMap| Some(headers.get("grpc-status")?.as_bytes() == b"0");
        let mut is_ok = status(response.headers());
        let mut body = response.into_body();
        let mut code = 0;
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            let _ = body.flow_control().release_capacity(chunk.len());
            // The answer begins with field 1, `overall_code`, behind the five bytes of gRPC's frame.
            if chunk.len() > 6 && chunk[5] == 1 << 3 {
                code = chunk[6];
            }
        }
        if let Some(trailers) = body.trailers().await? {
            is_ok = status(&trailers).or(is_ok);
        }
        Ok(match (is_ok, code) {
            (Some(true), 1) => Outcome::Ok,
            (Some(true), 2) => Outcome::OverLimit,
            (Some(true), _) => Outcome::Unknown,
            _ => Outcome::Status,
        })
    }
}

/// A `RateLimitRequest` in a gRPC frame.
pub fn body(
    domain: &str,
    descriptors: impl Iterator<Item = impl Iterator<Item = (String, String)>>,
    hits: u64,
) -> Bytes {
    let mut message = Vec::new();
    field(1, domain.as_bytes(), &mut message);
    for entries in descriptors {
        let mut descriptor = Vec::new();
        for (key, value) in entries {
            let mut entry = Vec::new();
            field(1, key.as_bytes(), &mut entry);
            field(2, value.as_bytes(), &mut entry);
            field(1, &entry, &mut descriptor);
        }
        field(2, &descriptor, &mut message);
    }
    if hits != 1 {
        message.push(3 << 3);
        varint(hits, &mut message);
    }
    let mut framed = BytesMut::with_capacity(message.len() + 5);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).expect("a message is small"));
    framed.put_slice(&message);
    framed.freeze()
}

/// A field of bytes: its number and wire type 2, its length, itself.
fn field(number: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
