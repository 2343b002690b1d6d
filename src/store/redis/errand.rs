//! Sends scripts to the nodes that have their slots. A script that was provably not executed is sent again, to another node if the slot
//! has moved; one that may have been executed is not.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, Value, cmd};
use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use super::backoff::Quiet;
use super::concurrency::{Permit, Turn};
use super::node::Node;
use super::script::{self, Mode, Reply, Rows};
use super::servers::Servers;
use crate::model::Micros;
use crate::store::StoreError;
use crate::telemetry::traces;

/// The most repetitions of a command that was provably not executed: 3, enough for a slot that moves while its script
/// is loaded.
const MOST_REPEATS: usize = 3;
/// Pause before a command is sent again to a slot that is being moved: 1 ms.
const TRY_AGAIN: Duration = Duration::from_millis(1);

/// A run of the script.
pub(super) struct Errand<'a> {
    /// Returns its command; the argument is the deadline by the node's clock.
    pub(super) command: &'a (dyn Fn(Micros) -> Cmd + Sync),
    /// Number of charges in the reply and their mode; `None` for an undo, whose reply has none.
    pub(super) expects: Option<(usize, Mode)>,
}

impl Errand<'_> {
    /// Returns true if it gives hits back. An undo is tried again while a server takes no calls.
    const fn is_undo(&self) -> bool {
        self.expects.is_none()
    }

    const fn turn(&self) -> Turn {
        match self.expects {
            None => Turn::First,
            Some((_, Mode::Later)) => Turn::Spare,
            Some(_) => Turn::InOrder,
        }
    }
}

/// The result of a run: its time by the node's clock and a row for each charge.
pub(super) type Outcome = Result<(Micros, Rows), StoreError>;

/// A node's reply to an errand.
enum Heard {
    Done(Micros, Rows),
    /// It was not executed: the deadline had passed.
    TooLate,
    /// It was not executed: the script is not there.
    NoScript,
    /// It was not executed: another node has the slot.
    Moved(String),
    /// It was not executed: another node is about to have the slot, and has the counter.
    Ask(String),
    /// It was not executed: the slot is being moved, and its keys are on two nodes.
    TryAgain,
    /// It was not executed: no node has the slot, or this node is cut off from the majority.
    ClusterDown,
    Failed(StoreError),
}

/// Additions to a command.
#[derive(Clone, Copy, Default)]
struct Manner {
    /// True if `ASKING` precedes it: the node does not have the slot yet.
    is_asking: bool,
    /// True if the script is loaded first.
    with_script: bool,
}

/// Runs errands on `node`, which should have their slots, in one write. Runs those again that were not executed, on the node that has
/// the slot. `permit` is for the first write, if the caller has one.
pub(super) async fn run(
    servers: &Servers,
    node: &Arc<Node>,
    permit: Option<Permit>,
    errands: &[Errand<'_>],
    until: Instant,
) -> SmallVec<[Outcome; 1]> {
    let outcomes = attempt(servers, node, permit, errands, until).await;
    for (errand, outcome) in errands.iter().zip(&outcomes) {
        // The caller of an undo tries it again, and counts it when it gives up.
        if let (Some((charges, _)), Err(error)) = (errand.expects, outcome)
            && let Some(reason) = error.reason()
        {
            node.watched().failed(reason, charges);
        }
    }
    outcomes
}

async fn attempt(
    servers: &Servers,
    node: &Arc<Node>,
    permit: Option<Permit>,
    errands: &[Errand<'_>],
    until: Instant,
) -> SmallVec<[Outcome; 1]> {
    let loads = node.loads();
    let heard = match exchange(node, permit, errands, Manner::default(), until).await {
        Ok(heard) => heard,
        Err(error) => {
            if matches!(error, StoreError::TimedOut | StoreError::Late | StoreError::Unreachable) {
                // A node that has taken its place is in the new map.
                servers.doubt_map();
            }
            return errands.iter().map(|_| Err(error)).collect();
        }
    };
    if heard.iter().any(|heard| matches!(heard, Heard::ClusterDown)) {
        servers.doubt_map();
    }
    if heard.iter().all(|heard| matches!(heard, Heard::Done(..) | Heard::ClusterDown | Heard::Failed(_))) {
        return heard.into_iter().map(Heard::outcome).collect();
    }
    let followed = errands
        .iter()
        .zip(heard)
        .map(|(errand, heard)| async move { follow(servers, Arc::clone(node), loads, errand, heard, until).await });
    join_all(followed).await.into()
}

/// Runs an errand again as `heard` says, until it is executed or may have been.
async fn follow(
    servers: &Servers,
    mut node: Arc<Node>,
    mut loads: usize,
    errand: &Errand<'_>,
    mut heard: Heard,
    until: Instant,
) -> Outcome {
    let mut is_asking = false;
    for _ in 0..MOST_REPEATS {
        let with_script = matches!(heard, Heard::NoScript);
        match &heard {
            Heard::Done(..) | Heard::ClusterDown | Heard::Failed(_) => break,
            Heard::TooLate | Heard::NoScript => {}
            Heard::TryAgain => sleep(TRY_AGAIN).await,
            Heard::Moved(name) | Heard::Ask(name) => {
                is_asking = matches!(heard, Heard::Ask(_));
                let Some(named) = servers.named(name, &node, until).await else {
                    complain("MOVED");
                    return Err(StoreError::Unreachable);
                };
                node = named;
                loads = node.loads();
            }
        }
        let manner = Manner { is_asking, with_script };
        let errands = std::slice::from_ref(errand);
        let mut again = if manner.with_script {
            // One call loads the script for all.
            let load = async || exchange(&node, None, errands, manner, until).await;
            match node.load_once(loads, until, load).await {
                Some(again) => {
                    loads = node.loads();
                    again?
                }
                None => {
                    loads = node.loads();
                    exchange(&node, None, errands, Manner { is_asking, with_script: false }, until).await?
                }
            }
        } else {
            exchange(&node, None, errands, manner, until).await?
        };
        heard = again.pop().unwrap_or(Heard::Failed(StoreError::Rejected));
    }
    heard.outcome()
}

/// Sends errands to one node in one write and returns its reply to each.
///
/// # Errors
/// If no reply comes.
async fn exchange(
    node: &Arc<Node>,
    permit: Option<Permit>,
    errands: &[Errand<'_>],
    manner: Manner,
    until: Instant,
) -> Result<SmallVec<[Heard; 1]>, StoreError> {
    let (server, port) = node.place();
    let span = traces::store_call(server, port, errands.len());
    let heard = exchange_unrecorded(node, permit, errands, manner, until).await;
    if let Some(mut span) = span {
        span.done();
        // Nothing was sent.
        let is_undo = errands.iter().all(Errand::is_undo);
        if is_undo && matches!(heard, Err(StoreError::Overloaded | StoreError::Down { .. })) {
            span.forget();
        }
        let codes = heard.iter().flatten().filter_map(Heard::code);
        codes.take(1).for_each(|code| span.replied(code));
        let failure = heard.as_ref().map_or_else(|error| Some(*error), |heard| heard.iter().find_map(Heard::failure));
        if let Some(reason) = failure.and_then(StoreError::reason) {
            span.failed(reason.name());
        }
    }
    heard
}

async fn exchange_unrecorded(
    node: &Arc<Node>,
    permit: Option<Permit>,
    errands: &[Errand<'_>],
    manner: Manner,
    until: Instant,
) -> Result<SmallVec<[Heard; 1]>, StoreError> {
    if until <= Instant::now() {
        return Err(StoreError::Late);
    }
    let permit = match permit {
        Some(permit) => permit,
        None => {
            let turn = errands.first().map_or(Turn::InOrder, Errand::turn);
            node.permit(errands.len(), until, turn).await?
        }
    };
    let mut checkout = node.checkout(permit, until).await?;
    let deadline = checkout.time_at(until);
    let mut commands: SmallVec<[Cmd; 1]> = SmallVec::with_capacity(errands.len());
    if manner.with_script {
        commands.push(script::load());
    }
    for errand in errands {
        if manner.is_asking {
            commands.push(cmd("ASKING"));
        }
        commands.push((errand.command)(deadline));
    }
    let replies = checkout.send(commands, until).await?;
    // The replies to SCRIPT LOAD and ASKING come before the errand's own.
    let own = if manner.is_asking { 2 } else { 1 };
    let skipped = usize::from(manner.with_script);
    let replies = replies.into_iter().skip(skipped).skip(own - 1).step_by(own);
    let heard: SmallVec<[Heard; 1]> =
        errands.iter().zip(replies).map(|(errand, reply)| Heard::new(reply, errand.expects)).collect();
    if heard.len() < errands.len() {
        return Err(StoreError::Rejected);
    }
    if heard.iter().any(|heard| matches!(heard, Heard::Failed(StoreError::Unreachable))) {
        checkout.demoted();
    }
    Ok(heard)
}

impl Heard {
    fn new(reply: Value, expects: Option<(usize, Mode)>) -> Self {
        let Value::ServerError(error) = &reply else {
            let (charges, mode) = expects.unwrap_or((0, Mode::Each));
            return match script::read(reply, charges, mode) {
                Some(Reply::Done { now, rows }) => Self::Done(now, rows),
                // The reply to an undo is the time alone.
                Some(Reply::TooLate { now }) if expects.is_none() => Self::Done(now, Rows::default()),
                Some(Reply::TooLate { .. }) => Self::TooLate,
                None => Self::Failed(StoreError::Rejected),
            };
        };
        let named = || error.details().and_then(|details| details.split_ascii_whitespace().nth(1)).map(str::to_owned);
        match error.code() {
            "NOSCRIPT" => Self::NoScript,
            "TRYAGAIN" => Self::TryAgain,
            "MOVED" => named().map_or(Self::Failed(StoreError::Rejected), Self::Moved),
            "ASK" => named().map_or(Self::Failed(StoreError::Rejected), Self::Ask),
            // The node was a master and is a replica now.
            "READONLY" => Self::Failed(StoreError::Unreachable),
            code @ "CLUSTERDOWN" => {
                complain(code);
                Self::ClusterDown
            }
            code => {
                complain(code);
                Self::Failed(StoreError::Rejected)
            }
        }
    }

    /// Returns the error if it will not be executed.
    const fn failure(&self) -> Option<StoreError> {
        match self {
            Self::Failed(error) => Some(*error),
            Self::ClusterDown => Some(StoreError::Rejected),
            _ => None,
        }
    }

    /// Returns the server's error code if it was not executed at this node.
    const fn code(&self) -> Option<&'static str> {
        match self {
            Self::NoScript => Some("NOSCRIPT"),
            Self::Moved(_) => Some("MOVED"),
            Self::Ask(_) => Some("ASK"),
            Self::TryAgain => Some("TRYAGAIN"),
            Self::ClusterDown => Some("CLUSTERDOWN"),
            Self::Done(..) | Self::TooLate | Self::Failed(_) => None,
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Self::Done(at, rows) => Ok((at, rows)),
            Self::Failed(error) => Err(error),
            // No repetition or no time is left.
            Self::TooLate => Err(StoreError::Late),
            Self::NoScript | Self::Moved(_) | Self::Ask(_) | Self::TryAgain | Self::ClusterDown => {
                Err(StoreError::Rejected)
            }
        }
    }
}

/// Logs that a server refuses to count, with the error code only: the rest of the message may contain a key.
fn complain(code: &str) {
    static QUIET: Quiet = Quiet::new();
    if QUIET.is_over() {
        tracing::warn!(
            event = "store.script.refused",
            code,
            "Redis rejects the script that counts, so the failure policy decides for these counters"
        );
    }
}
