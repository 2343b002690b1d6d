//! Streams of decisions. After the end of a stream, the name of its instance is resolved again, so that it may have moved.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::anyhow;
use axum::body::Body;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::cli::admin::{self, Instance, Named, number};

/// Maximum size of a line: 1 MiB, more than an instance sends.
const MOST: usize = 1 << 20;
/// Pause before the first attempt to connect again: 1 s. Each further one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause: 10 s, so that an instance that is back is seen soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Time without any address after which a name is given up: a minute, longer than a pod takes to move.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// Reason for the end of a stream that was cut.
const LOST: &str = "its connection was lost, or has reached GRPC_MAX_CONNECTION_AGE";
/// Reason for the end of a stream that the instance closed.
const CLOSED: &str = "it closed the stream, because it stops or the token was removed";

/// Name of an instance, and a line of its stream.
pub(super) type NamedLine = (String, String);

/// An instance at an address, between its streams and during them.
struct Followed {
    address: SocketAddr,
    named: Named,
    pause: Duration,
    /// True if it is tried again when it cannot be reached: it was served before, or its address is new.
    is_expected: bool,
    /// True if the first end of its streams was told.
    is_told: bool,
    /// Time since which its name has no address.
    nameless_since: Option<Instant>,
}

/// Event of an instance.
enum Event {
    /// Its stream has ended.
    Ended(Followed, End),
    /// Its name was resolved.
    Resolved(Followed, anyhow::Result<Vec<(SocketAddr, Named)>>),
}

/// End of a stream.
enum End {
    /// It had a line, and ends for this reason.
    Closed(&'static str),
    /// Nothing was received.
    Failed(anyhow::Error),
    /// Another server answers. True if decisions were received before.
    Foreign(bool),
}

/// The instances, and what is known of all of them.
struct Following {
    /// Addresses that are followed, or were given up although their names have them.
    known: BTreeSet<SocketAddr>,
    /// True if an instance has sent decisions.
    is_served: bool,
}

/// Sends the lines of the instances to `lines`, which `open` connects to, again after each end of a stream, and then at the addresses
/// that `resolve` returns for their names. Returns when none is left: true if one has sent decisions.
pub(super) async fn follow(
    open: impl AsyncFn(Instance, SocketAddr) -> anyhow::Result<Body>,
    resolve: impl AsyncFn(String) -> anyhow::Result<Vec<(SocketAddr, Named)>>,
    lines: mpsc::Sender<NamedLine>,
    instances: BTreeMap<SocketAddr, Named>,
) -> bool {
    let mut following = Following { known: instances.keys().copied().collect(), is_served: false };
    let connect = async |followed: Followed| {
        let end = match open(followed.named.instance.clone(), followed.address).await {
            Ok(body) => forward(body, &followed.named.label, &lines).await,
            Err(why) => End::Failed(why),
        };
        Event::Ended(followed, end)
    };
    let look = async |mut followed: Followed| {
        sleep(followed.pause).await;
        followed.pause = LONGEST_PAUSE.min(followed.pause * 2);
        let found = resolve(followed.named.name.clone()).await;
        Event::Resolved(followed, found)
    };
    let first = instances.into_iter().map(|(address, named)| connect(Followed::new(address, named)).boxed_local());
    let mut events: FuturesUnordered<LocalBoxFuture<'_, Event>> = first.collect();
    while let Some(event) = events.next().await {
        match event {
            Event::Ended(followed, end) => {
                events.extend(following.ended(followed, end).map(|followed| look(followed).boxed_local()));
            }
            Event::Resolved(followed, found) => {
                let next = following.resolved(followed, found);
                events.extend(next.into_iter().map(|followed| connect(followed).boxed_local()));
            }
        }
    }
    following.is_served
}

impl Followed {
    fn new(address: SocketAddr, named: Named) -> Self {
        Self { address, named, pause: SHORTEST_PAUSE, is_expected: false, is_told: false, nameless_since: None }
    }
}

impl Following {
    /// Returns the instance if it is tried again.
    fn ended(&mut self, followed: Followed, end: End) -> Option<Followed> {
        let label = &followed.named.label;
        let why = match end {
            End::Closed(why) => {
                if !followed.is_told {
                    eprintln!(
                        "{label}: {why}. Connecting again, now and after each later end; decisions in between are missing"
                    );
                }
                self.is_served = true;
                let next = Followed {
                    pause: SHORTEST_PAUSE,
                    is_expected: true,
                    is_told: true,
                    nameless_since: None,
                    ..followed
                };
                return Some(next);
            }
            // It restarts, or all places for listeners are taken.
            End::Failed(why) if followed.is_expected && !admin::is_declined(&why) => return Some(followed),
            End::Failed(why) => why,
            End::Foreign(is_begun) => {
                self.is_served |= is_begun;
                anyhow!(admin::FOREIGN)
            }
        };
        eprintln!("{label}: no more decisions from here on: {why:#}");
        None
    }

    /// Returns the instances to connect to after the name of `followed` was resolved.
    fn resolved(&mut self, mut followed: Followed, found: anyhow::Result<Vec<(SocketAddr, Named)>>) -> Vec<Followed> {
        let Followed { address, named: Named { name, .. }, nameless_since, .. } = &mut followed;
        let found = found.unwrap_or_default();
        if found.is_empty() {
            let since = *nameless_since.get_or_insert_with(Instant::now);
            if since.elapsed() < GONE_AFTER {
                // The name server may be away, and the instance still there.
                return vec![followed];
            }
            eprintln!("{name} has had no address for {GONE_AFTER:?}: no more decisions from {address}");
            self.known.remove(address);
            return Vec::new();
        }
        let mut next = Vec::new();
        if found.iter().any(|(own, _)| *own == *address) {
            next.push(Followed { nameless_since: None, ..followed });
        } else {
            eprintln!("{name} no longer has the address {address}: no more decisions from there");
            self.known.remove(address);
        }
        for (address, named) in found {
            if self.known.insert(address) {
                eprintln!("{} has a new address, {address}: connecting", named.name);
                next.push(Followed { is_expected: true, ..Followed::new(address, named) });
            }
        }
        next
    }
}

/// Sends the lines of a stream until its end.
async fn forward(body: Body, label: &str, lines: &mpsc::Sender<NamedLine>) -> End {
    let (mut data, mut rest, mut is_begun) = (body.into_data_stream(), Vec::new(), false);
    let end = |is_begun: bool, why| match is_begun {
        true => End::Closed(why),
        false => End::Failed(anyhow!("its stream ended before the first line")),
    };
    while let Some(some) = data.next().await {
        let Ok(some) = some else { return end(is_begun, LOST) };
        rest.extend_from_slice(&some);
        while let Some(line_end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=line_end).collect();
            if !is_begun && !is_start(&line) {
                return End::Foreign(false);
            }
            is_begun = true;
            let line = admin::printable(String::from_utf8_lossy(&line).trim_end());
            // Without a reader, the command ends.
            let _ = lines.send((label.to_owned(), line)).await;
        }
        if rest.len() > MOST {
            return End::Foreign(is_begun);
        }
    }
    end(is_begun, CLOSED)
}

/// Returns true for the first line of a stream, which says since when it has decisions.
fn is_start(line: &[u8]) -> bool {
    serde_json::from_slice::<Value>(line).is_ok_and(|line| number(&line, "since_us").is_some())
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// First line of a stream.
    const START: &str = "{\"since_us\":1}\n";
    const NAME: &str = "tidegate:6070";

    fn at(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, number], 6070))
    }

    fn named(number: u8) -> (SocketAddr, Named) {
        let instance = Instance::parse(NAME).expect("a name");
        (at(number), Named { instance, name: NAME.to_owned(), label: format!("pod{number}") })
    }

    /// Follows pod 1. `answer` returns the body of an address for the number of its attempt; `addresses` those of the name by attempt.
    /// Returns the lines, and the result.
    async fn followed(
        answer: impl Fn(u8, u32) -> anyhow::Result<String>,
        addresses: impl Fn(u32) -> anyhow::Result<Vec<u8>>,
    ) -> (Vec<String>, bool) {
        let (sender, mut received) = mpsc::channel(100);
        let (opened, resolved) = (RefCell::new(BTreeMap::<SocketAddr, u32>::new()), Cell::new(0));
        let open = async |_: Instance, address: SocketAddr| {
            let attempt = *opened.borrow_mut().entry(address).and_modify(|attempt| *attempt += 1).or_insert(1);
            let SocketAddr::V4(address) = address else { unreachable!("all are of IPv4") };
            answer(address.ip().octets()[3], attempt).map(Body::from)
        };
        let resolve = async |name: String| {
            assert_eq!(name, NAME);
            resolved.set(resolved.get() + 1);
            addresses(resolved.get()).map(|found| found.into_iter().map(named).collect())
        };
        let is_served = follow(open, resolve, sender, BTreeMap::from([named(1)])).await;
        let mut lines = Vec::new();
        while let Some((label, line)) = received.recv().await {
            lines.push(format!("{label} {line}"));
        }
        (lines.into_iter().filter(|line| !line.contains("since_us")).collect(), is_served)
    }

    fn decision(user: &str) -> anyhow::Result<String> {
        Ok(format!("{START}{user}\n"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_moves_is_followed_to_its_new_address() {
        let began = Instant::now();
        let answer = |pod: u8, attempt: u32| match (pod, attempt) {
            (1, 1) => decision("before"),
            // The new pod is not ready at once.
            (2, 1..=3) | (1, _) => Err(anyhow!("refused")),
            (2, 4) => decision("after"),
            _ => Ok("<html>\n".to_owned()),
        };
        // The name server still has the old address for a while, and then none.
        let addresses = |lookup: u32| match lookup {
            1 | 2 => Ok(vec![1]),
            3 => Err(anyhow!("no such name")),
            4 => Ok(vec![]),
            _ => Ok(vec![2]),
        };
        let (lines, is_served) = followed(answer, addresses).await;
        assert_eq!((lines, is_served), (vec!["pod1 before".into(), "pod2 after".into()], true));
        assert!(began.elapsed() < GONE_AFTER, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_has_no_address_for_a_minute_is_given_up() {
        let began = Instant::now();
        let answer = |_: u8, attempt: u32| if attempt == 1 { decision("one") } else { Err(anyhow!("refused")) };
        let (lines, is_served) = followed(answer, |_| Err(anyhow!("no such name"))).await;
        assert_eq!((lines, is_served), (vec!["pod1 one".into()], true));
        assert!((GONE_AFTER..GONE_AFTER * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn another_server_is_given_up_and_does_not_undo_what_was_served() {
        let foreign = |text: &str| Ok(text.to_owned());
        let served =
            |pod: u8, attempt: u32| if (pod, attempt) == (1, 1) { decision("one") } else { foreign("<html>\n") };
        assert_eq!(followed(served, |_| Ok(vec![1])).await, (vec!["pod1 one".into()], true));
        let long = format!("{START}one\n{}", "x".repeat(MOST + 1));
        assert_eq!(followed(|_, _| foreign(&long), |_| Ok(vec![1])).await, (vec!["pod1 one".into()], true));
        for text in ["<html>\n", "", "{}\n"] {
            assert_eq!(followed(|_, _| foreign(text), |_| Ok(vec![1])).await, (vec![], false), "{text:?}");
        }
        assert_eq!(followed(|_, _| Err(anyhow!("refused")), |_| Ok(vec![1])).await, (vec![], false));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_the_name_no_longer_has_is_given_up_and_each_new_one_is_followed_once() {
        let answer = |pod: u8, attempt: u32| match (pod, attempt) {
            (1, _) => decision("old"),
            (_, 1) => decision("new"),
            _ => Ok("<html>\n".to_owned()),
        };
        let (lines, _) = followed(answer, |_| Ok(vec![2, 3])).await;
        assert_eq!(lines, ["pod1 old", "pod2 new", "pod3 new"]);
    }
}
