//! Sends scripts to the nodes that have their slots. A script that was provably not executed is sent again, to another node if the slot
//! has moved; one that may have been executed is not.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, Value, cmd};
use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use super::concurrency::{CallPriority, Permit};
use super::dialect::{Dialect, said};
use super::node::Node;
use super::script::{self, By, ChargeRows, Mode, Requests, ScriptReply, UNREAD};
use super::servers::Servers;
use crate::model::Micros;
use crate::store::StoreError;
use crate::telemetry::servers::FailureReason;
use crate::telemetry::throttle::LogThrottle;
use crate::telemetry::traces;

/// The most repetitions of a command that was provably not executed: 3, enough for a slot that moves while its script
/// is loaded.
const MOST_REPEATS: usize = 3;
/// Pause before a command is sent again to a slot that is being moved: 1 ms.
const TRY_AGAIN: Duration = Duration::from_millis(1);

/// A run of the script.
pub(super) struct ScriptCall<'a> {
    /// Adds its request; the first argument is the deadline by the node's clock.
    pub(super) request: &'a (dyn Fn(Micros, &mut Requests) + Sync),
    /// Its longest time, as a multiple of that of one charge of a fixed window.
    pub(super) cost: usize,
    /// Number of charges in the reply and their mode; `None` for an undo, whose reply has none.
    pub(super) expects: Option<(usize, Mode)>,
}

impl ScriptCall<'_> {
    /// Returns true if it gives hits back. An undo is tried again while a server takes no calls.
    const fn is_undo(&self) -> bool {
        self.expects.is_none()
    }

    const fn turn(&self) -> CallPriority {
        match self.expects {
            None => CallPriority::First,
            Some((_, Mode::Later)) => CallPriority::Spare,
            Some(_) => CallPriority::InOrder,
        }
    }
}

/// The result of a run: its time by the node's clock and a row for each charge.
pub(super) type CallResult = Result<(Micros, ChargeRows), StoreError>;

/// A node's reply to a call.
enum NodeReply {
    Done(Micros, ChargeRows),
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
    /// It was not executed: the calls that shared the script have counters in several slots, and the node does not have all of them, or
    /// was not known to be one of a cluster.
    NotTogether,
    /// It was not executed: no node has the slot, or this node is cut off from the majority.
    ClusterDown,
    Failed(StoreError),
}

/// Additions to a command.
#[derive(Clone, Copy, Default)]
struct SendMode {
    /// True if `ASKING` precedes it: the node does not have the slot yet.
    is_asking: bool,
    /// True if the script is loaded first.
    with_script: bool,
    /// True in a cluster, whose nodes refuse a script with counters that are elsewhere.
    is_cluster: bool,
    /// Way in which it shares a call of the script with others; `None` if it goes alone.
    shares: Option<Shares>,
}

/// Way in which calls share a call of the script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shares {
    /// Their counters are declared as keys: a single server.
    Declared,
    /// They are in any slots of one node of a cluster.
    OverSlots,
}

/// Runs calls on `node`, which should have their slots, in one write. Runs those again that were not executed, on the node that has
/// the slot. `permit` is for the first write, if the caller has one.
pub(super) async fn run(
    servers: &Servers,
    node: &Arc<Node>,
    permit: Option<Permit>,
    calls: &[ScriptCall<'_>],
    until: Instant,
) -> SmallVec<[CallResult; 1]> {
    let loads = node.loads();
    let shares = if servers.is_cluster() { Shares::OverSlots } else { Shares::Declared };
    let is_cluster = servers.is_cluster();
    let mode = SendMode { shares: Some(shares).filter(|_| node.may_share()), is_cluster, ..SendMode::default() };
    let outcomes: SmallVec<[CallResult; 1]> = match exchange(node, permit, calls, mode, until).await {
        Ok(replies) => {
            if replies.iter().any(|reply| matches!(reply, NodeReply::ClusterDown)) {
                servers.doubt_map();
            }
            if replies.iter().all(NodeReply::is_final) {
                replies.into_iter().map(NodeReply::outcome).collect()
            } else {
                let followed = calls.iter().zip(replies).map(|(call, reply)| async move {
                    follow(servers, Arc::clone(node), loads, call, reply, until).await
                });
                join_all(followed).await.into()
            }
        }
        Err(error) => {
            if matches!(error, StoreError::TimedOut | StoreError::Late | StoreError::Unreachable) {
                // A node that has taken its place is in the new map.
                servers.doubt_map();
            }
            calls.iter().map(|_| Err(error)).collect()
        }
    };
    for (call, outcome) in calls.iter().zip(&outcomes) {
        // The caller of an undo tries it again, and counts it when it gives up.
        let Some((charges, _)) = call.expects else { continue };
        match outcome {
            Ok((_, rows)) if rows.unsaved == 0 => {}
            Ok((_, rows)) => full(node, rows.unsaved),
            Err(StoreError::OutOfMemory) => full(node, charges),
            Err(error) => {
                if let Some(reason) = error.reason() {
                    node.metrics().failed(reason, charges);
                }
            }
        }
    }
    outcomes
}

/// Runs a call again as `reply` says, until it is executed or may have been.
async fn follow(
    servers: &Servers,
    mut node: Arc<Node>,
    mut loads: usize,
    call: &ScriptCall<'_>,
    mut reply: NodeReply,
    until: Instant,
) -> CallResult {
    let mut is_asking = false;
    // A call that must go alone has not been tried yet.
    let repeats = MOST_REPEATS + usize::from(matches!(reply, NodeReply::NotTogether));
    for _ in 0..repeats {
        let with_script = matches!(reply, NodeReply::NoScript);
        match &reply {
            NodeReply::Done(..) | NodeReply::ClusterDown | NodeReply::Failed(_) => break,
            NodeReply::TooLate | NodeReply::NoScript | NodeReply::NotTogether => {}
            NodeReply::TryAgain => sleep(TRY_AGAIN).await,
            NodeReply::Moved(name) | NodeReply::Ask(name) => {
                is_asking = matches!(reply, NodeReply::Ask(_));
                let Some(named) = servers.named(name, &node, until).await else {
                    complain("MOVED", "");
                    return Err(StoreError::Unreachable);
                };
                node = named;
            }
        }
        let calls = std::slice::from_ref(call);
        let send = async |with_script| {
            exchange(
                &node,
                None,
                calls,
                SendMode { is_asking, with_script, is_cluster: servers.is_cluster(), shares: None },
                until,
            )
            .await
        };
        // One call loads the script for all.
        let loaded = if !with_script {
            None
        } else if node.loads_by_eval() {
            // At this server, which is not the only one behind a proxy.
            Some(send(true).await)
        } else {
            node.load_once(loads, until, async || send(true).await).await
        };
        loads = node.loads();
        let mut again = match loaded {
            Some(again) => again?,
            None => send(false).await?,
        };
        reply = again.pop().unwrap_or(NodeReply::Failed(StoreError::Rejected));
    }
    reply.outcome()
}

/// Sends calls to one node in one write and returns its reply to each.
///
/// # Errors
/// If no reply comes.
async fn exchange(
    node: &Arc<Node>,
    permit: Option<Permit>,
    calls: &[ScriptCall<'_>],
    mode: SendMode,
    until: Instant,
) -> Result<SmallVec<[NodeReply; 1]>, StoreError> {
    let (server, port) = node.place();
    let span = traces::store_call(server, port, calls.len());
    let reply = exchange_unrecorded(node, permit, calls, mode, until).await;
    if let Some(mut span) = span {
        span.done();
        // Nothing was sent.
        let is_undo = calls.iter().all(ScriptCall::is_undo);
        if is_undo && matches!(reply, Err(StoreError::Overloaded | StoreError::Down { .. })) {
            span.forget();
        }
        let codes = reply.iter().flatten().filter_map(NodeReply::code);
        codes.take(1).for_each(|code| span.replied(code));
        let failure =
            reply.as_ref().map_or_else(|error| Some(*error), |reply| reply.iter().find_map(NodeReply::failure));
        if let Some(reason) = failure.and_then(StoreError::reason) {
            span.failed(reason.name());
        }
    }
    reply
}

async fn exchange_unrecorded(
    node: &Arc<Node>,
    permit: Option<Permit>,
    calls: &[ScriptCall<'_>],
    mut mode: SendMode,
    until: Instant,
) -> Result<SmallVec<[NodeReply; 1]>, StoreError> {
    let asked = Instant::now();
    if until <= asked {
        return Err(StoreError::Late);
    }
    let permit = match permit {
        Some(permit) => permit,
        None => {
            let turn = if mode.with_script {
                // It had its turn, and nobody is decided before the script is there: a pause after its first reply must not shed it.
                CallPriority::First
            } else {
                calls.first().map_or(CallPriority::InOrder, ScriptCall::turn)
            };
            node.permit(asked, calls.len(), until, turn).await?
        }
    };
    let mut checkout = node.checkout(permit, asked, until).await?;
    let (deadline, dialect) = (checkout.time_at(until), checkout.dialect());
    // It may be another server than when the call was made.
    mode.shares = mode.shares.filter(|_| dialect.is_together());
    mode.with_script &= !dialect.lacks_evalsha;
    match mode.shares {
        Some(shares) => {
            let adds = calls.iter().map(|call| {
                let request = call.request;
                (call.cost, move |requests: &mut Requests| request(deadline, requests))
            });
            checkout.send_shared(adds, shares == Shares::OverSlots, until);
        }
        None => checkout.send(commands(calls, mode, deadline, dialect)?, until),
    }
    let replies = checkout.replies(until).await?;
    // The replies to SCRIPT LOAD and ASKING come before the call's own.
    let own = if mode.is_asking { 2 } else { 1 };
    let skipped = usize::from(mode.with_script && !dialect.loads_by_eval());
    let replies = replies.into_iter().skip(skipped).skip(own - 1).step_by(own);
    let reply: SmallVec<[NodeReply; 1]> =
        calls.iter().zip(replies).map(|(call, reply)| NodeReply::new(reply, call.expects, mode.shares, node)).collect();
    if reply.len() < calls.len() {
        return Err(StoreError::Rejected);
    }
    if reply.iter().any(|reply| matches!(reply, NodeReply::Failed(StoreError::Unreachable))) {
        checkout.demoted();
    }
    Ok(reply)
}

/// Returns the commands of `calls`; the node's clock says `deadline` when their time is over.
///
/// # Errors
/// If a call has several counters, and a proxy may keep them at several servers.
fn commands(
    calls: &[ScriptCall<'_>],
    mode: SendMode,
    deadline: Micros,
    dialect: Dialect,
) -> Result<SmallVec<[Cmd; 1]>, StoreError> {
    let mut commands = SmallVec::with_capacity(calls.len());
    let by = if mode.with_script && dialect.loads_by_eval() { By::Text } else { dialect.by() };
    if mode.with_script && !dialect.loads_by_eval() {
        commands.push(script::load());
    }
    for call in calls {
        if mode.is_asking {
            commands.push(cmd("ASKING"));
        }
        let mut requests = Requests::default();
        (call.request)(deadline, &mut requests);
        if requests.has_several_keys() && !mode.is_cluster && !dialect.is_together() {
            return Err(StoreError::Unreachable);
        }
        commands.push(requests.command(by));
    }
    Ok(commands)
}

impl NodeReply {
    fn new(reply: Value, expects: Option<(usize, Mode)>, shares: Option<Shares>, node: &Node) -> Self {
        let reply = script::unframed(reply);
        let Value::ServerError(error) = &reply else {
            let (charges, mode) = expects.unwrap_or((0, Mode::Each));
            return match script::read(reply, charges, mode) {
                Some(ScriptReply::Done { now, rows }) => Self::Done(now, rows),
                // The reply to an undo is the time alone.
                Some(ScriptReply::TooLate { now }) if expects.is_none() => Self::Done(now, ChargeRows::default()),
                Some(ScriptReply::TooLate { .. }) => Self::TooLate,
                None => Self::Failed(StoreError::Rejected),
            };
        };
        let named = || error.details().and_then(|details| details.split_ascii_whitespace().nth(1)).map(str::to_owned);
        match error.code() {
            "NOSCRIPT" => Self::NoScript,
            "TRYAGAIN" => Self::TryAgain,
            // A node of a cluster that was named as a single server. Only the call of another request may have met a slot that is down.
            "CROSSSLOT" | "CLUSTERDOWN" if shares == Some(Shares::Declared) => {
                node.share_no_more();
                Self::NotTogether
            }
            UNREAD => {
                // A slot is moving, or the cluster has lost some.
                let is_of_slots = |said: &&str| said.contains("non local key") || said.contains("cluster is down");
                if error.details().filter(is_of_slots).is_none() {
                    node.share_no_more();
                }
                Self::NotTogether
            }
            "MOVED" => named().map_or(Self::Failed(StoreError::Rejected), Self::Moved),
            "ASK" => named().map_or(Self::Failed(StoreError::Rejected), Self::Ask),
            "OOM" => Self::Failed(StoreError::OutOfMemory),
            // The node was a master and is a replica now.
            "READONLY" => Self::Failed(StoreError::Unreachable),
            "CLUSTERDOWN" => {
                complain(error.code(), &said(error));
                Self::ClusterDown
            }
            code => {
                complain(code, &said(error));
                Self::Failed(StoreError::Rejected)
            }
        }
    }

    /// Returns true if the call is not sent again.
    const fn is_final(&self) -> bool {
        matches!(self, Self::Done(..) | Self::ClusterDown | Self::Failed(_))
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
            Self::NotTogether => Some("CROSSSLOT"),
            Self::ClusterDown => Some("CLUSTERDOWN"),
            Self::Done(..) | Self::TooLate | Self::Failed(_) => None,
        }
    }

    fn outcome(self) -> CallResult {
        match self {
            Self::Done(at, rows) => Ok((at, rows)),
            Self::Failed(error) => Err(error),
            // No repetition or no time is left.
            Self::TooLate => Err(StoreError::Late),
            Self::NoScript | Self::Moved(_) | Self::Ask(_) | Self::TryAgain | Self::NotTogether | Self::ClusterDown => {
                Err(StoreError::Rejected)
            }
        }
    }
}

/// Logs that a server refuses to count. Only of a general error the text is logged, as far as it cannot contain a key.
fn complain(code: &str, said: &str) {
    static THROTTLE: LogThrottle = LogThrottle::new();
    if THROTTLE.is_due() {
        tracing::warn!(
            event = "store.script.refused",
            code,
            said = if code == "ERR" { said } else { "" },
            advice = if said.contains("nknown") {
                "Redis has to know TIME, GET and SET, and for a sliding_log those of docs/redis.md"
            } else {
                ""
            },
            "Redis rejects the script that counts, so the failure policy decides for these counters"
        );
    }
}

/// Counts and logs charges that a server has no memory for.
fn full(node: &Node, charges: usize) {
    static THROTTLE: LogThrottle = LogThrottle::new();
    node.metrics().failed(FailureReason::OutOfMemory, charges);
    if THROTTLE.is_due() {
        tracing::warn!(
            event = "store.out_of_memory",
            server = node.name(),
            "Redis has no memory for new counters, so the overload policy decides for these"
        );
    }
}
