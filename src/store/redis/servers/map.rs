//! The map of a cluster, as one of its nodes sends it.

use std::time::Duration;

use redis::{Cmd, Value, cmd, from_redis_value_ref};
use tokio::time::Instant;

use crate::store::redis::address::Address;
use crate::store::redis::node::Node;

/// Map of the cluster that a node sent.
pub(super) struct MapReply {
    pub(super) epoch: u64,
    pub(super) ranges: Vec<Range>,
}

/// The reason for which a node sent no map of a cluster.
pub(super) enum NoMap {
    /// It refuses the request, like a server that is not in cluster mode.
    NoCluster,
    /// It did not answer in time, or has no map at present.
    Silent,
}

pub(super) fn complain_of_no_map(is_no_cluster: bool, waited: Duration) {
    if is_no_cluster {
        tracing::warn!(
            event = "store.cluster.no_map",
            "no server returns the slots of the Redis cluster: check that these servers are in cluster mode"
        );
    } else {
        tracing::warn!(
            event = "store.cluster.late_map",
            ?waited,
            "no server returned the slots of the Redis cluster in time; trying again"
        );
    }
}

/// Slots, and the nodes that have them, the master first.
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) nodes: Vec<Address>,
}

pub(super) async fn ask_for_map(node: &Node, until: Instant) -> Result<MapReply, NoMap> {
    let question = |of: &str| {
        let mut command: Cmd = cmd("CLUSTER");
        command.arg(of);
        command
    };
    let replies = node.ask(vec![question("INFO"), question("SLOTS")], until).await.ok_or(NoMap::Silent)?;
    // Redis answers "ERR This instance has cluster support disabled".
    if replies.iter().any(|reply| matches!(reply, Value::ServerError(error) if error.code() == "ERR")) {
        return Err(NoMap::NoCluster);
    }
    read_map(&replies, node).ok_or(NoMap::Silent)
}

fn read_map(replies: &[Value], node: &Node) -> Option<MapReply> {
    let [info, slots] = replies else { return None };
    let info: String = from_redis_value_ref(info).ok()?;
    let epoch = info.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:"))?.trim().parse().ok()?;
    let Value::Array(ranges) = slots else { return None };
    let ranges = ranges.iter().filter_map(|range| read_range(range, node)).collect();
    Some(MapReply { epoch, ranges })
}

/// Parses one entry of `CLUSTER SLOTS`. A node without a name is left out; one without a host is on the host of `asked`.
fn read_range(range: &Value, asked: &Node) -> Option<Range> {
    let Value::Array(items) = range else { return None };
    let [first, last, nodes @ ..] = items.as_slice() else { return None };
    let address = |node: &Value| {
        let Value::Array(fields) = node else { return None };
        let host: Option<String> = from_redis_value_ref(fields.first()?).ok()?;
        let port: u16 = from_redis_value_ref(fields.get(1)?).ok()?;
        match host.as_deref() {
            Some("?") => None,
            None | Some("") => {
                let host = asked.name().rsplit_once(':')?.0.trim_matches(['[', ']']);
                Some(Address::Tcp(host.to_owned(), port))
            }
            Some(host) => Some(Address::Tcp(host.to_owned(), port)),
        }
    };
    let master = address(nodes.first()?)?;
    let nodes = std::iter::once(master).chain(nodes.iter().skip(1).filter_map(address)).collect();
    Some(Range { first: from_redis_value_ref(first).ok()?, last: from_redis_value_ref(last).ok()?, nodes })
}
