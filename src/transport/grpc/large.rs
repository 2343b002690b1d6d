//! Large requests: one at a time on each worker, decided in slices between which the worker serves its other calls.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::{Edge, Undecided};
use crate::limiter::Large;
use crate::model::{Descriptor, InvalidRequest, Request};
use crate::proto::large::{Head, Slices};
use crate::telemetry::traces::Span;
use crate::transport::hold::{Caller, Held};
use crate::transport::wire::{Answers, encode_statuses};

/// Bytes of one part of an encoded answer: 64 KiB.
const PART_BYTES: usize = 64 << 10;

thread_local! {
    /// The turn of the large requests of a worker, which is a thread: the first that waits is the next.
    static TURN: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

/// A large request whose turn it is.
struct Job {
    edge: Edge,
    message: Bytes,
    /// Since when the caller waits.
    began: Instant,
    patience: Option<Duration>,
    span: Option<Span>,
    _turn: Option<OwnedSemaphorePermit>,
}

/// The answer to a large request that was decided, or why it was not; and its span.
type Done = (Result<(Held, Vec<Bytes>), Undecided>, Option<Span>);

/// The statuses of an answer, encoded as they come.
#[derive(Default)]
struct Statuses {
    parts: Vec<Bytes>,
    last: BytesMut,
}

impl Edge {
    /// Decides a large request. Returns the parts of the encoded answer.
    ///
    /// # Errors
    /// When the message is no request or is invalid, or the store cannot be asked.
    pub async fn decide_large(
        &self,
        message: Bytes,
        patience: Option<Duration>,
        span: &mut Option<Span>,
    ) -> Result<Vec<Bytes>, Undecided> {
        let began = Instant::now();
        // Who goes away while it waits gives up its place. The semaphore is never closed.
        let turn = TURN.with(Arc::clone).acquire_owned().await.ok();
        let job = Job { edge: self.clone(), message, began, patience, span: span.take(), _turn: turn };
        let (answer, answered) = oneshot::channel();
        // A task of its own, because what it took must be given back where the caller goes away in the middle.
        tokio::spawn(job.run(answer));
        let (decided, recorded) =
            answered.await.unwrap_or((Err(Undecided::Unavailable(super::StoreUnavailable)), None));
        *span = recorded;
        let (held, mut parts) = decided?;
        parts.insert(0, Bytes::from(held.over().await.encode_to_vec()));
        Ok(parts)
    }
}

impl Job {
    async fn run(mut self, answer: oneshot::Sender<Done>) {
        let mut span = self.span.take();
        let decided = self.decide(&answer, &mut span).await;
        // The caller may have gone away.
        let _ = answer.send((decided, span));
    }

    async fn decide(
        &self,
        answer: &oneshot::Sender<Done>,
        span: &mut Option<Span>,
    ) -> Result<(Held, Vec<Bytes>), Undecided> {
        let Edge { limiter, telemetry, seats, .. } = &self.edge;
        let caller = Caller::who_waits(self.left());
        let head = self.head().await?;
        let invalid = |error: InvalidRequest| {
            telemetry.invalid();
            Undecided::Invalid(error)
        };
        let descriptors = head.descriptors;
        let first = Request::new(head.domain, vec![Descriptor::default(); descriptors.min(1)], head.hits_addend);
        let request = first.map_err(invalid)?;

        let rules = limiter.rules();
        let mut large = limiter.large(&rules, request.domain());
        let mut slices = Slices::of(&self.message, self.edge.slice);
        while let Some(slice) = slices.read()? {
            large.survey(&read(slice).map_err(invalid)?);
            yield_now().await;
        }
        let statuses = self.charge(&mut large, &request, answer).await?;
        if large.is_taken() && (large.is_refused() || answer.is_closed()) {
            self.give_back(&mut large, &request).await?;
        }

        let (request, mut decision) = large.conclude(&request);
        let hold = caller.hold(&mut decision, seats);
        telemetry.observe_large(descriptors, &request, &decision, span.as_mut());
        // As metadata a request of many descriptors would take many times its bytes.
        let mut answers = Answers::clone(&self.edge.answers);
        answers.dynamic_metadata &= request.descriptors().len() == descriptors;
        let mut response = answers.respond(&request, &decision)?;
        response.statuses.clear();
        Ok((Held { response, hold }, statuses.into_parts()))
    }

    /// Reads what stands beside the descriptors.
    async fn head(&self) -> Result<Head, Undecided> {
        let (mut head, mut slices) = (Head::default(), Slices::new(&self.message));
        while head.read(&mut slices)? {
            yield_now().await;
        }
        Ok(head)
    }

    /// Charges slice by slice, as long as the caller waits. Returns the statuses.
    async fn charge(
        &self,
        large: &mut Large<'_>,
        request: &Request,
        answer: &oneshot::Sender<Done>,
    ) -> Result<Statuses, Undecided> {
        let mut statuses = Statuses::default();
        let mut slices = Slices::of(&self.message, self.edge.slice);
        while let Some(slice) = slices.read()? {
            if answer.is_closed() {
                break;
            }
            let descriptors = read(slice)?;
            if descriptors.is_empty() {
                continue;
            }
            let slice = request.with(descriptors);
            let decision = large.decide(&slice, self.left()).await;
            self.edge.telemetry.observe_slice(&slice, &decision);
            statuses.add(&decision);
            yield_now().await;
        }
        Ok(statuses)
    }

    /// Gives back what was charged.
    async fn give_back(&self, large: &mut Large<'_>, request: &Request) -> Result<(), Undecided> {
        let mut slices = Slices::of(&self.message, self.edge.slice);
        while let Some(slice) = slices.read()? {
            let descriptors = read(slice)?;
            if descriptors.is_empty() {
                continue;
            }
            if large.is_given_back() {
                break;
            }
            large.give_back(&request.with(descriptors)).await;
            yield_now().await;
        }
        Ok(())
    }

    /// How long the caller still waits.
    fn left(&self) -> Option<Duration> {
        self.patience.map(|patience| patience.saturating_sub(self.began.elapsed()))
    }
}

impl Statuses {
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

fn read(
    slice: Vec<crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor>,
) -> Result<Vec<Descriptor>, InvalidRequest> {
    slice.into_iter().map(Descriptor::try_from).collect()
}
