//! Large requests, decided in slices. Between slices the worker serves its other calls. Each worker computes one large
//! request at a time.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::{Edge, Undecided};
use crate::limiter::{CallerTime, Large};
use crate::model::{Descriptor, InvalidRequest, Request, Rights};
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::large::{Head, LARGE_DESCRIPTORS, Slices};
use crate::telemetry::traces::Span;
use crate::transport::budget;
use crate::transport::callers::{ConnectionCaller, Denied};
use crate::transport::hold::{Caller, Held};
use crate::transport::wire::{Answers, encode_statuses};

/// Bytes of one part of an encoded answer: 64 KiB.
const PART_BYTES: usize = 64 << 10;

thread_local! {
    /// Turn of the large requests of a worker, which is a thread: first come, first served.
    static TURN: Arc<Semaphore> = Arc::new(Semaphore::new(1));
    /// Turn of requests with more than [`LARGE_DESCRIPTORS`] descriptors, held to their end: their answers take memory.
    static LONG: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

/// Turn of a large request on its connection, and then on its worker. Other requests have it while this one waits for
/// the store. The connections of a worker take turns, so that one with many large requests does not keep the others
/// waiting.
struct LargeTurn {
    of_connection: Option<Arc<Semaphore>>,
    held: [Option<OwnedSemaphorePermit>; 2],
}

/// Large request that is being decided.
struct Job {
    edge: Edge,
    message: Bytes,
    began: Instant,
    /// Time that the caller waited at most, from `began` on.
    timeout: Option<Duration>,
    rights: Rights,
    span: Option<Span>,
    _long: Option<OwnedSemaphorePermit>,
}

/// Answer to a large request or its error, and its span.
type Done = (Result<(Held, Vec<Bytes>), Undecided>, Option<Span>);

/// Statuses of an answer, encoded slice by slice.
#[derive(Default)]
struct EncodedStatuses {
    parts: Vec<Bytes>,
    last: BytesMut,
}

impl Edge {
    /// Decides a large request. `timeout` is the time that the caller waits. Returns the parts of the encoded answer.
    ///
    /// # Errors
    /// Returns an error if the message is malformed or invalid, or the store is unavailable.
    pub async fn decide_large(
        &self,
        message: Bytes,
        timeout: impl Into<CallerTime>,
        caller: Option<Arc<ConnectionCaller>>,
        span: &mut Option<Span>,
    ) -> Result<Vec<Bytes>, Undecided> {
        let (began, timeout) = (Instant::now(), timeout.into().left());
        // A caller that goes away while it waits gives up its place.
        let mut turn = LargeTurn::take(budget::large()).await;
        let head = read_head(&message).await?;
        let rights = super::rights(caller.as_deref(), &head.domain)?;
        let long = match head.descriptors > LARGE_DESCRIPTORS {
            true => turn.lend(LONG.with(Arc::clone).acquire_owned()).await.ok(),
            false => None,
        };
        let job = Job { edge: self.clone(), message, began, timeout, rights, span: span.take(), _long: long };
        let (answer, answered) = oneshot::channel();
        // A separate task, because the hits it took must be given back if the caller goes away in the middle.
        tokio::spawn(job.run(head, turn, caller, answer));
        let (decided, recorded) =
            answered.await.unwrap_or((Err(Undecided::Unavailable(super::StoreUnavailable)), None));
        *span = recorded;
        let (held, mut parts) = decided?;
        parts.insert(0, Bytes::from(held.over().await.encode_to_vec()));
        Ok(parts)
    }
}

impl LargeTurn {
    async fn take(of_connection: Option<Arc<Semaphore>>) -> Self {
        // The semaphores are never closed.
        let first = match &of_connection {
            Some(turn) => Arc::clone(turn).acquire_owned().await.ok(),
            None => None,
        };
        Self { of_connection, held: [first, TURN.with(Arc::clone).acquire_owned().await.ok()] }
    }

    /// Waits for `other`. If it is not ready at once, other requests have the turn meanwhile.
    async fn lend<F: Future>(&mut self, other: F) -> F::Output {
        let mut other = pin!(other);
        if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(other.as_mut().poll(cx))).await {
            return done;
        }
        self.held = [None, None];
        let done = other.await;
        *self = Self::take(self.of_connection.take()).await;
        done
    }
}

impl Job {
    async fn run(
        mut self,
        head: Head,
        mut turn: LargeTurn,
        caller: Option<Arc<ConnectionCaller>>,
        answer: oneshot::Sender<Done>,
    ) {
        let mut span = self.span.take();
        let decided = self.decide(head, &mut turn, caller, &answer, &mut span).await;
        // The caller may have gone away.
        let _ = answer.send((decided, span));
    }

    async fn decide(
        &self,
        head: Head,
        turn: &mut LargeTurn,
        of: Option<Arc<ConnectionCaller>>,
        answer: &oneshot::Sender<Done>,
        span: &mut Option<Span>,
    ) -> Result<(Held, Vec<Bytes>), Undecided> {
        let Edge { limiter, telemetry, permits, .. } = &self.edge;
        let caller = Caller::who_waits(self.left());
        let invalid = |error: InvalidRequest| {
            telemetry.invalid();
            Undecided::Invalid(error)
        };
        let descriptors = head.descriptors;
        let first = Request::new(head.domain, vec![Descriptor::default(); descriptors.min(1)], head.hits_addend);
        let request = first.map_err(invalid)?;

        let rules = limiter.rules();
        if !rules.can_decide(request.domain()) {
            telemetry.invalid();
            return Err(Undecided::NoRules);
        }
        let mut large = limiter.large(&rules, request.domain());
        let mut slices = Slices::of(&self.message, self.edge.slice);
        let mut denied = Denied::default();
        while let Some(slice) = slices.read()? {
            large.survey(&self.read(slice, &mut denied).map_err(invalid)?);
            yield_now().await;
        }
        if let Some(of) = of {
            of.note(denied, request.domain());
        }
        let statuses = self.charge(&mut large, &request, turn, answer).await?;
        if large.is_taken() && (large.is_refused() || answer.is_closed()) {
            self.give_back(&mut large, &request, turn).await?;
        }

        let (request, mut decision) = large.conclude(&request);
        let hold = caller.hold(&mut decision, permits);
        telemetry.observe_large(descriptors, &request, &decision, span.as_mut());
        // As metadata, a request with many descriptors would take many times its size.
        let mut answers = Answers::clone(&self.edge.answers);
        let is_whole = request.descriptors().len() == descriptors;
        answers.dynamic_metadata &= is_whole;
        answers.explains &= is_whole;
        let mut response = answers.respond(&request, &decision)?;
        response.statuses.clear();
        Ok((Held { response, hold }, statuses.into_parts()))
    }

    /// Charges slice by slice, while the caller waits. Returns the statuses.
    async fn charge(
        &self,
        large: &mut Large<'_>,
        request: &Request,
        turn: &mut LargeTurn,
        answer: &oneshot::Sender<Done>,
    ) -> Result<EncodedStatuses, Undecided> {
        let mut statuses = EncodedStatuses::default();
        let mut slices = Slices::of(&self.message, self.edge.slice);
        while let Some(slice) = slices.read()? {
            if answer.is_closed() {
                break;
            }
            let descriptors = self.read(slice, &mut Denied::default())?;
            if descriptors.is_empty() {
                continue;
            }
            let slice = request.with(descriptors);
            let left = self.left();
            let decision = turn.lend(large.decide(&slice, left)).await;
            self.edge.telemetry.observe_slice(&slice, &decision);
            statuses.add(&decision);
            yield_now().await;
        }
        Ok(statuses)
    }

    /// Gives back the hits that were charged.
    async fn give_back(&self, large: &mut Large<'_>, request: &Request, turn: &mut LargeTurn) -> Result<(), Undecided> {
        let mut slices = Slices::of(&self.message, self.edge.slice);
        while let Some(slice) = slices.read()? {
            let descriptors = self.read(slice, &mut Denied::default())?;
            if descriptors.is_empty() {
                continue;
            }
            if large.is_given_back() {
                break;
            }
            let slice = request.with(descriptors);
            turn.lend(large.give_back(&slice)).await;
            yield_now().await;
        }
        Ok(())
    }

    /// Reads a slice without what the caller has no right to.
    fn read(
        &self,
        mut slice: Vec<RateLimitDescriptor>,
        denied: &mut Denied,
    ) -> Result<Vec<Descriptor>, InvalidRequest> {
        ConnectionCaller::restrict(self.rights, &mut slice, denied);
        slice.into_iter().map(Descriptor::try_from).collect()
    }

    /// Returns the time for which the caller still waits.
    fn left(&self) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(self.began.elapsed()))
    }
}

impl EncodedStatuses {
    fn add(&mut self, decision: &crate::model::Decision<'_>) {
        encode_statuses(decision, &mut self.last);
        if self.last.len() >= PART_BYTES {
            self.parts.push(mem::take(&mut self.last).freeze());
        }
    }

    fn into_parts(mut self) -> Vec<Bytes> {
        self.parts.push(self.last.freeze());
        self.parts
    }
}

/// Reads the fields beside the descriptors.
async fn read_head(message: &Bytes) -> Result<Head, Undecided> {
    let (mut head, mut slices) = (Head::default(), Slices::new(message));
    while head.read(&mut slices)? {
        yield_now().await;
    }
    Ok(head)
}
