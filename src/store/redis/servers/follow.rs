//! Follows a server that can move: the single server at a name, or the master that sentinels name.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::lookup::Lookup;
use super::sentinels::Sentinels;
use super::{Servers, Shape};
use crate::dial;
use crate::store::redis::address::Address;
use crate::store::redis::manager::{Followed, Locate, Place, report_failure};
use crate::store::redis::node::Node;
use crate::store::redis::stream::TIMEOUTS;
use crate::telemetry::throttle::LogThrottle;

/// Interval between two questions for the place of a server: 1 s.
const EVERY: Duration = Duration::from_secs(1);
/// The same while its place is not known: 500 ms.
const EVERY_UNKNOWN: Duration = Duration::from_millis(500);
/// Minimum time between two questions when attempts to connect fail: 50 ms.
const AGAIN: Duration = Duration::from_millis(50);
/// Time for the answers to one question: 300 ms.
const ANSWER: Duration = Duration::from_millis(300);

impl Servers {
    /// Asks once a second where the server is. When it has moved, a new node takes the place of the old one, whose connections end
    /// with their calls. Returns at once if the server cannot move.
    pub(super) async fn follow(&self) {
        let Shape::One(shown) = &self.shape else { return };
        let Locate::Followed { of, .. } = shown.load().locate().clone() else { return };
        let mut sentinels = match &of {
            Followed::Name(_) => None,
            Followed::Master { name, sentinels, login } => {
                let metrics = self.access.metrics.named(&shown.load().locate().to_string());
                Some(Sentinels::new(name, sentinels, login, self.access.clone(), metrics))
            }
        };
        let mut lookup = None;
        let (failures, moves) = (LogThrottle::new(), LogThrottle::every(EVERY));
        loop {
            let (node, began) = (shown.load_full(), Instant::now());
            let failure = node.failure();
            let present = node.locate().place();
            let is_connected = self.access.alive.load(Ordering::Acquire) > 0;
            let address = match (&of, &mut sentinels) {
                (Followed::Name(address), _) => Some(address.clone()),
                (Followed::Master { .. }, Some(sentinels)) => {
                    let present = present.map(|place| &place.address);
                    sentinels.master(present, is_connected, began + ANSWER).await
                }
                (Followed::Master { .. }, None) => None,
            };
            if let Some(address) = address {
                let until = began.max(Instant::now()) + ANSWER;
                match place(&address, &mut lookup, present, is_connected, until).await {
                    Ok(place) if present != Some(&place) => {
                        if let Some(from) = present.filter(|_| moves.is_due()) {
                            tracing::warn!(
                                event = "store.moved",
                                server = %node.locate(),
                                from = %from.at,
                                to = %place.at,
                                "Redis has moved to another address: all its connections are made anew there; counters that are not there begin anew"
                            );
                        }
                        let locate = Locate::Followed { of: of.clone(), place: Some(place) };
                        let attention = Arc::clone(&self.attention);
                        shown.store(Arc::new(Node::new(locate, self.access.clone(), self.lanes, attention)));
                        self.attention.notify_one();
                        // The old connections end now.
                        drop(failure);
                        drop(node);
                        // Not at once: where the answers change all the time, each node lasts for a second.
                        sleep_until(began + EVERY).await;
                        continue;
                    }
                    Ok(_) => {}
                    Err(error) if !is_connected && failures.is_due() => {
                        report_failure(&address.to_string(), &error.to_string(), "REDIS_AUTH");
                    }
                    Err(_) => {}
                }
            }
            let every = if present.is_some() { EVERY } else { EVERY_UNKNOWN };
            tokio::select! {
                () = sleep_until(began + every) => {}
                () = failure => sleep_until(began + AGAIN).await,
            }
        }
    }
}

impl Locate {
    /// Returns the present place of a server that can move, if it is known.
    fn place(&self) -> Option<&Place> {
        match self {
            Self::Followed { place, .. } => place.as_ref(),
            Self::At(_) => None,
        }
    }
}

/// Returns the place of the server at `address`. `present` is its present place, which it keeps while the name lists that address and
/// there is a connection to it.
async fn place(
    address: &Address,
    lookup: &mut Option<Lookup>,
    present: Option<&Place>,
    is_connected: bool,
    until: Instant,
) -> io::Result<Place> {
    let Address::Tcp(host, port) = address else { return Err(io::ErrorKind::Unsupported.into()) };
    let lookup = match lookup {
        Some(known) if known.is_for(host, *port) => known,
        other => other.insert(Lookup::new(host, *port)),
    };
    let addresses = lookup.addresses(until).await?;
    let listed =
        present.filter(|place| place.address == *address && addresses.contains(&place.at)).map(|place| place.at);
    let at = match (listed, addresses.as_slice()) {
        (Some(at), _) if is_connected => Some(at),
        (_, [only]) => Some(*only),
        (listed, several) => chosen(several, listed, until).await,
    };
    let at = at.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"))?;
    Ok(Place { address: address.clone(), at })
}

/// Returns the first of `addresses` that accepts a connection, or `listed` if it accepts one too. If none does: `listed`, or the first.
async fn chosen(addresses: &[SocketAddr], listed: Option<SocketAddr>, until: Instant) -> Option<SocketAddr> {
    let accepts = async |at| dial::tcp_at(at, TIMEOUTS).await.map(|_| at);
    if let Some(at) = listed
        && matches!(timeout_at(until, accepts(at)).await, Ok(Ok(_)))
    {
        return Some(at);
    }
    let first = timeout_at(until, dial::first(addresses.iter().copied(), accepts)).await;
    first.ok().and_then(Result::ok).or(listed).or(addresses.first().copied())
}
