//! The source for rules of a control plane: Envoy's aggregated discovery service, state of the world.
//!
//! Each response is the complete set of rules. It is acknowledged once its rules are in force, or refused with all reasons; then, and
//! while there is no stream, the last good rules stay.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use prost_types::value::Kind;
use prost_types::{Any, Struct};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use self::plane::ControlPlane;
use self::resource::{TYPE_URL, documents};
use self::state::{Restored, StateDirectory, Unsaved, save};
use self::status::{Answered, XdsStatus};
use self::stream::{Event, StreamEnd, next, open};
use self::weight::Received;
use super::{NotOpened, RuleSink, RuleSource};
use crate::file::blocking;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::google::rpc;

pub mod connect;
pub mod plane;
mod resource;
pub mod state;
pub mod status;
mod stream;
mod weight;

/// Maximum bytes of the reasons in a refusal: 64 KiB. A server of grpc-go takes messages of at most 4 MiB.
const LONGEST_REASONS: usize = 64 << 10;
/// Requests that may wait to be sent: 4. Each response is answered by at most one.
const MOST_REQUESTS: usize = 4;
/// Wait before the second refusal in a row: 1 s. A control plane answers a refusal at once with the same rules.
const REFUSE_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait before a refusal: 8 s. A control plane may wait for the refusal before it sends corrected rules.
const REFUSE_AGAIN_MOST: Duration = Duration::from_secs(8);

/// Pause before the third response in a row of which none changes a rule: 100 ms. It doubles up to 1 s, so that a control plane that sends the same
/// again at once takes little of the processor.
const REST: Duration = Duration::from_millis(100);
/// Longest such pause: 1 s. The next response may have other rules.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// Such a pause in multiples of the time that the response took: 9, so that this takes a tenth of one processor core.
const REST_SHARE: u32 = 9;

/// The rules of one control plane.
#[derive(Debug)]
pub struct XdsSource {
    plane: ControlPlane,
    state: Option<StateDirectory>,
    /// True after the first response that could be decoded, or once rules of the state directory are in force.
    answered: watch::Sender<bool>,
    status: Arc<XdsStatus>,
    /// Number of responses that were refused in a row.
    refused: u32,
    /// Number of responses in a row that changed nothing.
    unchanged: u32,
    /// Last set that the compiler refused: it may be valid once another input of the load has changed.
    refused_set: Option<RefusedSet>,
    /// True while the rules that arrived last are rejected.
    is_rejected: bool,
    /// Digest of the resources in force; `None` if there are none.
    in_force: Option<blake3::Hash>,
    /// Time at which an empty set, which is already acknowledged, comes into force.
    held_until: Option<Instant>,
    /// Acknowledged rules that the state directory does not have yet.
    unsaved: watch::Sender<Unsaved>,
}

/// A set of rules that the compiler refused.
#[derive(Debug)]
struct RefusedSet {
    version: String,
    resources: Vec<Any>,
}

impl XdsSource {
    /// Creates the source. It connects when it is followed.
    ///
    /// # Errors
    /// If a file of TLS or the state directory cannot be used.
    pub fn open(plane: ControlPlane) -> Result<Self, NotOpened> {
        if let Some(tls) = &plane.tls {
            connect::config(tls)?;
        }
        let state = plane.state.clone().map(|(path, max_age)| StateDirectory::open(path, max_age)).transpose()?;
        Ok(Self {
            plane,
            state,
            answered: watch::Sender::new(false),
            status: Arc::default(),
            refused: 0,
            unchanged: 0,
            refused_set: None,
            is_rejected: false,
            in_force: None,
            held_until: None,
            unsaved: watch::Sender::new(None),
        })
    }

    /// Returns a receiver that turns true once the listeners may open: after the first response that could be decoded, or once rules of
    /// the state directory are in force.
    pub fn answered(&self) -> watch::Receiver<bool> {
        self.answered.subscribe()
    }

    /// Returns the state of the stream.
    pub fn status(&self) -> Arc<XdsStatus> {
        Arc::clone(&self.status)
    }

    fn node(&self) -> Node {
        let text = |(name, value): &(String, String)| {
            (name.clone(), prost_types::Value { kind: Some(Kind::StringValue(value.clone())) })
        };
        let metadata = Struct { fields: self.plane.node_metadata.iter().map(text).collect() };
        Node { id: self.plane.node_id.clone(), metadata: Some(metadata), ..Node::default() }
    }

    /// Runs one stream to its end. Sets `is_answered` once a response has arrived.
    async fn stream(&mut self, sink: &Arc<dyn RuleSink>, is_answered: &mut bool) -> StreamEnd {
        // A set of an earlier stream cannot be acknowledged on this one, and the control plane sends it again.
        self.refused_set = None;
        let (requests, queue) = mpsc::channel(MOST_REQUESTS);
        // A version of an earlier stream means nothing to a control plane that has started again.
        let mut request =
            DiscoveryRequest { node: Some(self.node()), type_url: TYPE_URL.to_owned(), ..DiscoveryRequest::default() };
        let plane = self.plane.clone();
        let status = Arc::clone(&self.status);
        let opening = open((&plane, &status), &requests, &request, queue);
        let mut responses = match self.unless_held(sink, opening).await {
            Ok(responses) => responses,
            Err(end) => return end,
        };
        tracing::info!(event = "xds.connected", "the control plane {} answers", plane.authority());
        self.status.set(|state| (state.is_connected, state.next_attempt) = (true, None));
        // A refusal that waits, and the time at which it is sent.
        let mut refusal: Option<(Instant, DiscoveryRequest)> = None;
        let mut other_inputs = sink.other_inputs();
        // A new stream is no way round the pause.
        let mut rest = Instant::now() + self.rest(Duration::ZERO);
        loop {
            let due = refusal.as_ref().map(|(due, _)| *due);
            let other_input = self.refused_set.is_some().then_some(&mut other_inputs);
            let answer = match self.unless_held(sink, next(&mut responses, rest, due, other_input)).await {
                Event::RefusalDue => refusal.take().map(|(_, request)| request),
                Event::OtherInput => match self.take_again(sink).await {
                    Err(end) => return end,
                    Ok(None) => None,
                    Ok(Some(version)) => {
                        refusal = None;
                        self.answer(&mut request, version, Ok(()));
                        Some(request.clone())
                    }
                },
                Event::Received(Err(status)) => return StreamEnd::of(status, plane.max_message),
                Event::Received(Ok(None)) => return StreamEnd::Closed,
                Event::Received(Ok(Some(Received { response, refused }))) => {
                    *is_answered = true;
                    request.response_nonce.clone_from(&response.nonce);
                    let version = response.version_info.clone();
                    let (began, before) = (Instant::now(), self.in_force);
                    let taken = match refused {
                        Some(reason) => Err(self.refuse(reason, sink)),
                        None => match self.take(response, sink).await {
                            Ok(taken) => taken,
                            Err(end) => return end,
                        },
                    };
                    self.unchanged = if self.in_force == before { self.unchanged.saturating_add(1) } else { 0 };
                    rest = Instant::now() + self.rest(began.elapsed());
                    // A later response replaces one whose refusal still waits.
                    refusal = None;
                    let wait = self.answer(&mut request, version, taken);
                    if wait.is_zero() {
                        Some(request.clone())
                    } else {
                        refusal = Some((Instant::now() + wait, request.clone()));
                        None
                    }
                }
            };
            if let Some(answer) = answer
                && requests.send(answer).await.is_err()
            {
                return StreamEnd::Closed;
            }
        }
    }

    /// Completes `request`, the answer to the response with `version`. Returns the time to wait before it is sent.
    fn answer(&mut self, request: &mut DiscoveryRequest, version: String, taken: Result<(), String>) -> Duration {
        let at = Instant::now();
        match taken {
            Ok(()) => {
                self.refused = 0;
                request.version_info.clone_from(&version);
                request.error_detail = None;
                tracing::info!(event = "xds.acknowledged", version, "the rules of the control plane are acknowledged");
                self.status.set(|state| {
                    state.acknowledged += 1;
                    state.last_acknowledged = Some(Answered { version, at, reasons: String::new() });
                });
                Duration::ZERO
            }
            Err(reasons) => {
                let wait = self.wait_to_refuse();
                self.status.set(|state| {
                    state.refused += 1;
                    state.last_refused = Some(Answered { version, at, reasons: reasons.clone() });
                });
                request.error_detail = Some(rpc::Status { message: reasons, ..rpc::Status::default() });
                wait
            }
        }
    }

    /// Reports a response without a readable set of rules. Returns the reason.
    fn refuse(&mut self, reason: String, sink: &Arc<dyn RuleSink>) -> String {
        self.refused_set = None;
        // What arrived is the last word: a held empty set no longer takes over.
        self.hold(None);
        sink.unreadable(&reason);
        self.is_rejected = true;
        reason
    }

    /// Returns the pause before the next response is read, if the last one `took` so long.
    fn rest(&self, took: Duration) -> Duration {
        let Some(doublings) = self.unchanged.checked_sub(2) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        REST.saturating_mul(factor).min(LONGEST_REST).max(took.saturating_mul(REST_SHARE))
    }

    /// Puts the rules of `response` in force. The inner error has all reasons why they are not.
    async fn take(
        &mut self,
        response: DiscoveryResponse,
        sink: &Arc<dyn RuleSink>,
    ) -> Result<Result<(), String>, StreamEnd> {
        let DiscoveryResponse { version_info, resources, type_url, .. } = response;
        self.refused_set = None;
        if resources.is_empty() && !type_url.is_empty() && !resource::is_ours(&type_url) {
            // Taken as an empty set, it would remove all rules.
            let reason = format!("the response has no resources, and is of the type {type_url:?}: expected {TYPE_URL}");
            return Ok(Err(self.refuse(reason, sink)));
        }
        let digest = digest(&resources);
        if self.in_force == Some(digest) {
            // The same content, perhaps under another version: its rules are in force.
            if self.is_rejected {
                sink.restored();
                self.is_rejected = false;
            }
            self.hold(None);
            self.status.set(|state| state.restored = None);
            return Ok(Ok(()));
        }
        if resources.is_empty() && !self.plane.hold_empty.is_zero() && self.in_force.is_some() {
            let wait = self.plane.hold_empty;
            tracing::warn!(
                event = "xds.held",
                seconds = wait.as_secs(),
                "the control plane has sent an empty set; the rules in force stay until XDS_HOLD_EMPTY has passed or rules arrive"
            );
            self.hold(self.held_until.or(Some(Instant::now() + wait)));
            return Ok(Ok(()));
        }
        // Whatever arrives now is the last word of the control plane: if it has an error, the rules in force stay.
        self.hold(None);
        let (is_decoded, taken, resources) = self.load(digest, resources, sink).await?;
        if is_decoded {
            self.answered.send_replace(true);
        }
        if taken.is_ok() {
            self.save(version_info, resources);
        } else if is_decoded {
            self.refused_set = Some(RefusedSet { version: version_info, resources });
        }
        Ok(taken.map_err(|mut reasons| {
            if reasons.len() > LONGEST_REASONS {
                reasons.truncate(reasons.floor_char_boundary(LONGEST_REASONS));
                reasons.push_str("\n(more errors follow; the log has all)");
            }
            reasons
        }))
    }

    /// Compiles the last refused set again. Returns its version if its rules are in force now.
    async fn take_again(&mut self, sink: &Arc<dyn RuleSink>) -> Result<Option<String>, StreamEnd> {
        let Some(RefusedSet { version, resources }) = self.refused_set.take() else { return Ok(None) };
        let (_, taken, resources) = self.load(digest(&resources), resources, sink).await?;
        if taken.is_err() {
            self.refused_set = Some(RefusedSet { version, resources });
            return Ok(None);
        }
        self.save(version.clone(), resources);
        Ok(Some(version))
    }

    /// Passes acknowledged rules to the state directory, if there is one.
    fn save(&self, version: String, resources: Vec<Any>) {
        if self.state.is_some() {
            self.unsaved.send_replace(Some((version, resources)));
        }
    }

    /// Compiles `resources`, which have this digest, and puts them in force. Returns true if they could be decoded, all reasons why they are not in force, and the
    /// resources.
    async fn load(
        &mut self,
        digest: blake3::Hash,
        resources: Vec<Any>,
        sink: &Arc<dyn RuleSink>,
    ) -> Result<(bool, Result<(), String>, Vec<Any>), StreamEnd> {
        let receiver = Arc::clone(sink);
        let load = move || {
            let (is_decoded, taken) = match documents(&resources) {
                Err(undecodable) => {
                    let undecodable = undecodable.to_string();
                    receiver.unreadable(&undecodable);
                    (false, Err(undecodable))
                }
                Ok(documents) => (true, receiver.offer(documents).map(drop).map_err(|invalid| invalid.to_string())),
            };
            (is_decoded, taken, resources)
        };
        let loaded = blocking(load, |passed| sink.is_slow(passed)).await.map_err(|error| {
            sink.ended(Some(&error.to_string()));
            StreamEnd::Panicked(error.to_string())
        })?;
        sink.ended(None);
        let (_, taken, resources) = &loaded;
        self.is_rejected = taken.is_err();
        if taken.is_ok() {
            self.in_force = (!resources.is_empty()).then_some(digest);
            self.status.set(|state| state.restored = None);
        }
        Ok(loaded)
    }

    fn hold(&mut self, until: Option<Instant>) {
        self.held_until = until;
        self.status.set(|state| state.held_until = until);
    }

    /// Waits for `event`. Meanwhile, puts an empty set in force whose hold ends.
    async fn unless_held<T>(&mut self, sink: &Arc<dyn RuleSink>, event: impl Future<Output = T>) -> T {
        let mut event = pin!(event);
        while let Some(until) = self.held_until {
            tokio::select! {
                biased;
                value = &mut event => return value,
                () = sleep_until(until) => {}
            }
            // An empty set has no errors. Were it refused, the rules in force would stay.
            if let Ok((_, Ok(()), empty)) = self.load(digest(&[]), Vec::new(), sink).await {
                self.save(String::new(), empty);
            }
            self.hold(None);
        }
        event.await
    }

    /// Counts a refusal. Returns the time to wait before it is sent: none for the first one in a row, then a time that grows.
    fn wait_to_refuse(&mut self) -> Duration {
        let before = self.refused;
        self.refused = before.saturating_add(1);
        match before.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => {
                let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
                REFUSE_AGAIN.saturating_mul(factor).min(REFUSE_AGAIN_MOST)
            }
        }
    }

    /// Puts the rules of the state directory in force.
    async fn restore(&mut self, sink: &Arc<dyn RuleSink>) {
        let Some(state) = self.state.clone() else { return };
        let read = blocking(move || state.read(), |passed| sink.is_slow(passed)).await;
        let restored = match read.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(None) => return,
            // An empty set limits nothing. Without it, the start waits for the control plane.
            Ok(Some(Restored { response, .. })) if response.resources.is_empty() => return,
            Ok(Some(Restored { response, age })) => {
                match self.load(digest(&response.resources), response.resources, sink).await {
                    Ok((_, Ok(()), _)) => Ok(age),
                    Ok((_, Err(reasons), _)) => Err(reasons),
                    Err(end) => Err(end.to_string()),
                }
            }
            Err(why) => Err(why),
        };
        match restored {
            Ok(age) => {
                let seconds = age.as_secs();
                self.status.set(|state| state.restored = Some((Instant::now(), age)));
                self.answered.send_replace(true);
                tracing::warn!(
                    event = "xds.restored",
                    seconds,
                    "rules of STATE_DIR are in force until the control plane sends rules"
                );
            }
            Err(why) => {
                tracing::warn!(event = "xds.not_restored", "the rules of STATE_DIR are not used: {why}");
            }
        }
    }

    async fn run(&mut self, sink: Arc<dyn RuleSink>) {
        self.restore(&sink).await;
        let mut failures = 0_i32;
        loop {
            let mut is_answered = false;
            let end = self.stream(&sink, &mut is_answered).await;
            failures = if is_answered { 0 } else { failures.saturating_add(1) };
            let wait = self.plane.wait(failures);
            let state = match self.in_force {
                Some(_) => "so the rules in force stay",
                None => "and it has sent no rules yet",
            };
            tracing::warn!(
                event = "xds.disconnected",
                "no stream from the control plane {}, {state}; next attempt in {wait:.1?}: {end}",
                self.plane.authority()
            );
            self.status.set(|state| {
                state.is_connected = false;
                state.disconnected += 1;
                state.next_attempt = Some((Instant::now() + wait, end.to_string()));
            });
            self.unless_held(&sink, sleep(wait)).await;
        }
    }
}

impl RuleSource for XdsSource {
    async fn follow(mut self, sink: Arc<dyn RuleSink>) {
        let saved = save(self.state.clone(), self.unsaved.subscribe(), Arc::clone(&self.status));
        tokio::join!(self.run(sink), saved);
    }
}

/// Returns a digest of the resources in the order sent.
fn digest(resources: &[Any]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for resource in resources {
        hasher.update(&resource.encode_length_delimited_to_vec());
    }
    hasher.finalize()
}
