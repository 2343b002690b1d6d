//! Connections of the HTTP listener: HTTP/1.1, and where it is switched on HTTP/2 for a peer that begins with its preface (prior
//! knowledge, RFC 9113, 3.3).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

use super::activity::Activity;
use super::callers::ConnectionCaller;
use super::frames::PREFACE;
use super::protocol::{Answering, Connection, Http1, Http2, Protocol};
use super::socket::Socket;
use super::tls::Peer;

/// HTTP/1.1, or HTTP/2 with prior knowledge.
#[derive(Clone, Debug)]
pub struct Http<S> {
    http1: Http1<S>,
    http2: Http2<S>,
    /// False if only HTTP/1.1 is served.
    has_http2: bool,
}

/// Connection of either version of HTTP.
pub enum HttpConnection<S: Answering> {
    /// The first bytes have not arrived. `None` if the connection has to end before.
    Opening(Option<Box<Opening<S>>>),
    /// HTTP/1.1.
    Http1(Pin<Box<<Http1<S> as Protocol>::Connection>>),
    /// HTTP/2.
    Http2(Pin<Box<<Http2<S> as Protocol>::Connection>>),
}

/// Connection before its version is known.
pub struct Opening<S> {
    http: Http<S>,
    socket: Socket,
    activity: Activity,
    caller: Option<Arc<ConnectionCaller>>,
    /// First bytes of the peer, as many as `bytes`.
    begun: [u8; PREFACE.len()],
    bytes: usize,
}

impl<S: Answering> Http<S> {
    /// Serves what `http2` serves, over HTTP/1.1 and, with `has_http2`, over HTTP/2, within the same limits.
    pub fn new(http2: Http2<S>, has_http2: bool) -> Self {
        Self { http1: http2.as_http1(), http2, has_http2 }
    }
}

impl<S: Answering> Protocol for Http<S> {
    type Connection = HttpConnection<S>;

    /// Returns as many as HTTP/2 has, where it is served. A connection is open as soon as it turns out to speak HTTP/1.
    fn opening_bytes(&self) -> usize {
        if self.has_http2 { self.http2.opening_bytes() } else { self.http1.opening_bytes() }
    }

    fn connect(&self, socket: Socket, activity: &Activity, peer: &Peer) -> Self::Connection {
        if !self.has_http2 {
            return HttpConnection::Http1(Box::pin(self.http1.connect(socket, activity, peer)));
        }
        let (http, activity, caller) = (self.clone(), activity.clone(), self.http2.caller(peer));
        let begun = [0; PREFACE.len()];
        HttpConnection::Opening(Some(Box::new(Opening { http, socket, activity, caller, begun, bytes: 0 })))
    }
}

impl<S: Answering> Opening<S> {
    /// Reads until the first bytes are the preface of HTTP/2, which returns true, or differ from it.
    fn poll_is_http2(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        loop {
            let mut buffer = ReadBuf::new(self.begun.get_mut(self.bytes..).unwrap_or_default());
            let read = ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer));
            let bytes = buffer.filled().len();
            self.bytes += bytes;
            // HTTP/1 reads the same end or error again.
            if read.is_err() || bytes == 0 || !PREFACE.starts_with(self.begun()) {
                return Poll::Ready(false);
            }
            if self.bytes == PREFACE.len() {
                return Poll::Ready(true);
            }
        }
    }

    fn begun(&self) -> &[u8] {
        self.begun.get(..self.bytes).unwrap_or_default()
    }

    /// Returns the connection of a version, which reads the first bytes again.
    fn connect(self, is_http2: bool) -> HttpConnection<S> {
        let begun = Bytes::copy_from_slice(self.begun());
        let Self { http, socket, activity, caller, .. } = self;
        let mut socket = socket.with_begun(begun);
        if is_http2 {
            return HttpConnection::Http2(Box::pin(http.http2.serve_http(socket, &activity, caller)));
        }
        socket.open();
        HttpConnection::Http1(Box::pin(http.http1.serve(socket, &activity, caller)))
    }
}

impl<S: Answering> Future for HttpConnection<S> {
    type Output = hyper::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        let connection = &mut *self;
        if let Self::Opening(opening) = connection {
            let Some(begun) = opening else { return Poll::Ready(Ok(())) };
            let is_http2 = ready!(begun.poll_is_http2(cx));
            if let Some(opening) = opening.take() {
                *connection = opening.connect(is_http2);
            }
        }
        match connection {
            Self::Opening(_) => Poll::Ready(Ok(())),
            Self::Http1(connection) => connection.as_mut().poll(cx),
            Self::Http2(connection) => connection.as_mut().poll(cx),
        }
    }
}

impl<S: Answering> Connection for HttpConnection<S> {
    fn finish(mut self: Pin<&mut Self>) {
        match &mut *self {
            Self::Opening(opening) => *opening = None,
            Self::Http1(connection) => Connection::finish(connection.as_mut()),
            Self::Http2(connection) => Connection::finish(connection.as_mut()),
        }
    }

    fn can_announce_end(&self) -> bool {
        matches!(self, Self::Http1(_))
    }
}
