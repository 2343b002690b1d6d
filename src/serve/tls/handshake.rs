//! One TLS handshake, on a thread for handshakes.

use std::future::{Future, poll_fn};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::super::activity::Activity;
use super::super::ending::Ending;
use super::super::limits::ConnectionLimits;
use super::super::net::AcceptedStream;
use super::super::stop::StopNotice;
use super::super::stream::{Link, Stream};
use super::super::tally::EndCause;
use super::super::turn::State;
use super::outcome::Failure;
use super::waiting::{HandshakePermit, Waiting};
use super::{Alpn, Current, HANDSHAKE_BYTES, HandshakeOutcome, LONGEST_QUEUE, ListenerTls, Peer, UNREAD_BYTES};

/// A connection after its handshake.
pub(in crate::serve) struct Accepted {
    /// The stream over TLS.
    pub(in crate::serve) stream: Stream,
    /// The client.
    pub(in crate::serve) peer: Peer,
}

/// Handshake that ends when this is dropped.
struct HandshakeTask(JoinHandle<Result<TlsStream<Link>, Failure>>);

impl Drop for HandshakeTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ListenerTls {
    /// Does the handshake of the connection `accepted` from `client`, within the limit for opening it. The stream belongs to the
    /// runtime of the caller afterwards.
    ///
    /// # Errors
    /// The end of the connection, if there is no handshake.
    pub(in crate::serve) async fn accept(
        &self,
        (accepted, client): (AcceptedStream, Option<IpAddr>),
        state: &State,
        activity: &Activity,
        limits: &ConnectionLimits,
        stop: &mut StopNotice,
    ) -> Result<Accepted, Ending> {
        let (thread, _slot) = self.slots.take();
        // The connection verifies its client again if the verifier is another one than that of its handshake.
        let mut updates = self.current.subscribe();
        let current = updates.borrow_and_update().clone();
        let waiting = Arc::clone(&self.waiting);
        let mut task = HandshakeTask(thread.spawn(handshake(
            accepted,
            self.alpn,
            current.clone(),
            *limits,
            waiting,
            Instant::now(),
        )));
        // The time in the queue of the thread counts too.
        let done = timeout(limits.handshake, &mut task.0);
        let done = tokio::select! {
            biased;
            done = done => match done {
                Ok(done) => done.map_err(|error| Ending::Failed(EndCause::Failed, error.into()))?,
                Err(error) => Err(Failure::from(io::Error::new(io::ErrorKind::TimedOut, error))),
            },
            () = stop.wait() => return Err(Ending::Ended(EndCause::Unopened)),
            () = activity.asked_to_leave() => return Err(Ending::Ended(EndCause::Idle)),
        };
        let done = done.and_then(|mut stream| {
            let (link, session) = stream.get_mut();
            link.settle(state.clone())?;
            session.set_buffer_limit(Some(UNREAD_BYTES));
            let peer = match (current.clients, stream.get_ref().1.peer_certificates()) {
                (None, _) => Peer::anyone(),
                (Some(clients), Some(chain)) => Peer::verified(chain, clients, updates),
                // rustls has refused such a client.
                (Some(_), None) => return Err(failure(HandshakeOutcome::NoCertificate, "there is no certificate")),
            };
            Ok((stream, peer))
        });
        let (stream, peer) = done.map_err(|failure| {
            self.outcomes.refuse(&failure, self.alpn.listener(), client);
            // As in plaintext: a peer that leaves or never says anything has not opened its connection.
            let how = match failure.outcome {
                HandshakeOutcome::Closed | HandshakeOutcome::TimedOut => EndCause::Unopened,
                _ => EndCause::Handshake,
            };
            Ending::Failed(how, failure.error.into())
        })?;
        self.outcomes.add(match stream.get_ref().1.handshake_kind() {
            Some(rustls::HandshakeKind::Resumed) => HandshakeOutcome::Resumed,
            _ => HandshakeOutcome::Full,
        });
        Ok(Accepted { stream: Stream::Tls(Box::new(stream)), peer })
    }
}

async fn handshake(
    accepted: AcceptedStream,
    alpn: Alpn,
    current: Current,
    limits: ConnectionLimits,
    waiting: Arc<Mutex<Waiting>>,
    asked: Instant,
) -> Result<TlsStream<Link>, Failure> {
    let crowded = || failure(HandshakeOutcome::Crowded, "too many handshakes are in progress");
    if asked.elapsed() > LONGEST_QUEUE {
        return Err(crowded());
    }
    let link = Link::for_handshake(accepted.register()?, limits.stall, HANDSHAKE_BYTES);
    let mut handshake = TlsAcceptor::from(current.config).accept(link);
    // Only a handshake that waits for its peer takes a place, so that the queue of this thread ends none.
    let stream = match poll_fn(|cx| Poll::Ready(Pin::new(&mut handshake).poll(cx))).await {
        Poll::Ready(done) => done,
        Poll::Pending => {
            let (_permit, lost) = HandshakePermit::take(&waiting);
            tokio::select! {
                biased;
                _ = lost => return Err(crowded()),
                done = handshake => done,
            }
        }
    }
    .map_err(Failure::from)?;
    // rustls refuses a client that offers other protocols only, but not one that offers none.
    match stream.get_ref().1.alpn_protocol() {
        Some(_) => Ok(stream),
        None if alpn == Alpn::Http1 => Ok(stream),
        None => Err(failure(HandshakeOutcome::Alpn, "the client offers no protocol by ALPN")),
    }
}

fn failure(outcome: HandshakeOutcome, text: &str) -> Failure {
    Failure { outcome, error: io::Error::other(text) }
}
