//! The client over HTTP/1.1: one request on a connection of its own, or bytes as a test writes them.

use std::fmt::{Display, Formatter};
use std::io::{Error, Result};
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpSocket;

use crate::support::in_time;

/// A request. Awaiting it sends it and gives the answer.
pub struct Request {
    at: SocketAddr,
    from: Option<Ipv4Addr>,
    method: String,
    target: String,
    /// Header lines, each with its end.
    head: Vec<u8>,
    body: String,
}

/// A GET request.
pub fn get(at: SocketAddr, target: &str) -> Request {
    request(at, "GET", target)
}

/// A POST request with a body.
pub fn post(at: SocketAddr, target: &str, body: impl Into<String>) -> Request {
    request(at, "POST", target).body(body)
}

/// A request with any method.
pub fn request(at: SocketAddr, method: &str, target: &str) -> Request {
    let (method, target) = (method.to_owned(), target.to_owned());
    Request { at, from: None, method, target, head: Vec::new(), body: String::new() }
}

/// The body of a request over `/json` for one descriptor with these entries.
pub fn descriptor(domain: &str, entries: &[(&str, &str)]) -> String {
    let entries: Vec<_> = entries.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
    json!({ "domain": domain, "descriptors": [{ "entries": entries }] }).to_string()
}

impl Request {
    /// Adds a header. Without a header `host`, the request has the address that it is sent to.
    pub fn header(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.lines([name.as_bytes(), b": ", value.as_ref(), b"\r\n"].concat())
    }

    /// Adds headers.
    pub fn headers(self, headers: &[(&str, &str)]) -> Self {
        headers.iter().fold(self, |request, (name, value)| request.header(name, value))
    }

    /// Adds header lines as they are, each with its end.
    pub fn lines(mut self, lines: impl AsRef<[u8]>) -> Self {
        self.head.extend_from_slice(lines.as_ref());
        self
    }

    /// Sets the body, which is sent with its length.
    pub fn body(mut self, body: impl Into<String>) -> Self {
        self.body = body.into();
        self
    }

    /// Sets the address of the client.
    pub fn from(mut self, client: Ipv4Addr) -> Self {
        self.from = Some(client);
        self
    }

    /// Its bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let has = |name: &str| {
            let mut lines = self.head.split(|byte| *byte == b'\n');
            lines.any(|line| line.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name.as_bytes())))
        };
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        if !has("host:") {
            head += &format!("host: {}\r\n", self.at);
        }
        if matches!(&*self.method, "POST" | "PUT") && !has("content-length:") && !has("transfer-encoding:") {
            head += &format!("content-length: {}\r\n", self.body.len());
        }
        [head.as_bytes(), &self.head, b"connection: close\r\n\r\n", self.body.as_bytes()].concat()
    }

    /// Sends it. The error is that of the connection, or that there was no answer.
    pub async fn sent(self) -> Result<Answer> {
        let answer = bytes_said(self.from, self.at, &self.bytes()).await?;
        Answer::parse(&answer).ok_or_else(|| Error::other(format!("no answer: {answer:?}")))
    }

    /// Sends it on an open connection, which the server has to end well.
    pub async fn sent_on(self, stream: impl AsyncRead + AsyncWrite) -> Result<Answer> {
        let mut answer = Vec::new();
        in_time("there is an answer", exchange(stream, &self.bytes(), &mut answer)).await?;
        let answer = String::from_utf8_lossy(&answer);
        Answer::parse(&answer).ok_or_else(|| Error::other(format!("no answer: {answer:?}")))
    }
}

impl IntoFuture for Request {
    type Output = Answer;
    type IntoFuture = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async { self.sent().await.unwrap_or_else(|error| panic!("{error}")) })
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The status line and the headers, each with a name in lower case and its end.
    pub head: String,
    /// The body, put together if it came in chunks.
    pub body: String,
}

impl Answer {
    /// Reads the answer behind those with a status below 200.
    fn parse(text: &str) -> Option<Self> {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        if status < 200 {
            return Self::parse(body);
        }
        let line = |line: &str| match line.split_once(':') {
            Some((name, value)) => format!("{}:{value}\r\n", name.to_lowercase()),
            None => format!("{line}\r\n"),
        };
        let mut answer = Self { status, head: head.lines().map(line).collect(), body: body.to_owned() };
        if answer.find("transfer-encoding") == Some("chunked") {
            answer.body = unchunked(body)?;
        }
        Some(answer)
    }

    /// The value of a header that must be there; the name is in lower case.
    pub fn header(&self, name: &str) -> &str {
        self.find(name).unwrap_or_else(|| panic!("no {name} in\n{}", self.head))
    }

    /// The value of a header that is there once at most; the name is in lower case.
    pub fn find(&self, name: &str) -> Option<&str> {
        let mut values = self.head.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let value = values.next();
        assert!(values.next().is_none(), "{name} is there twice: {}", self.head);
        value.map(str::trim)
    }

    /// The value of `x-ratelimit-remaining`.
    pub fn remaining(&self) -> u32 {
        self.header("x-ratelimit-remaining").parse().expect("a number")
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// True if the head or the body has this text.
    pub fn contains(&self, text: &str) -> bool {
        self.head.contains(text) || self.body.contains(text)
    }
}

impl Display for Answer {
    fn fmt(&self, to: &mut Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}\r\n{}", self.head, self.body)
    }
}

fn unchunked(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (length, after) = rest.split_once("\r\n")?;
        let (chunk, after) = after.split_at_checked(usize::from_str_radix(length, 16).ok()?)?;
        if chunk.is_empty() {
            return Some(body);
        }
        body += chunk;
        rest = after.strip_prefix("\r\n")?;
    }
}

/// What is answered to these bytes, on a connection of their own, until it ends, well or not.
pub async fn said(at: SocketAddr, bytes: &str) -> String {
    bytes_said(None, at, bytes.as_bytes()).await.expect("it listens")
}

/// As [`said`], from the address `client`.
pub async fn said_as(client: Ipv4Addr, at: SocketAddr, bytes: &str) -> String {
    bytes_said(Some(client), at, bytes.as_bytes()).await.expect("it listens")
}

async fn bytes_said(client: Option<Ipv4Addr>, at: SocketAddr, bytes: &[u8]) -> Result<String> {
    in_time("there is an answer", async {
        let socket = TcpSocket::new_v4()?;
        if let Some(client) = client {
            socket.bind((client, 0).into())?;
        }
        let mut answer = Vec::new();
        let _ = exchange(socket.connect(at).await?, bytes, &mut answer).await;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    })
    .await
}

/// Sends `bytes`, and reads into `answer` until the connection ends. The error is that of the reads.
async fn exchange(stream: impl AsyncRead + AsyncWrite, bytes: &[u8], answer: &mut Vec<u8>) -> Result<()> {
    let (mut answers, mut requests) = tokio::io::split(stream);
    // It may answer, and end, before it has read all.
    let (_, read) = tokio::join!(requests.write_all(bytes), answers.read_to_end(answer));
    read.map(|_| ())
}
