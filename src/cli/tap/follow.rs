//! Streams of decisions. After the end of a stream, the name of its instance is resolved again, so that it may have moved.

use std::cell::Cell;
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
use tokio::time::{Instant, sleep, timeout};

use crate::cli::admin::{self, Instance, Named, number};

/// Maximum size of a line: 1 MiB, more than an instance sends.
const MOST: usize = 1 << 20;
/// Pause before the first attempt to connect again: 1 s. Each further one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause: 10 s, so that an instance that is back is seen soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Time without any address after which a name is given up: a minute, longer than a pod takes to move.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// Missing signs of life after which a stream is given up: 3. Each is waited for anew, so that a terminal that held up this process does not count.
const MOST_MISSING: u32 = 3;
/// Reason for the end of a stream that was cut.
const LOST: &str = "its connection was lost, or has reached GRPC_MAX_CONNECTION_AGE";
/// Reason for the end of a stream that the instance closed.
const CLOSED: &str = "it closed the stream, because it stops or the token was removed";
/// Reason for the end of a stream on which nothing comes any more.
const SILENT: &str = "it sends nothing any more, so it hangs, or the network to it is gone";

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
    /// Another server answers.
    Foreign,
}

/// Addresses that are followed, or were given up although their names have them.
struct Following(BTreeSet<SocketAddr>);

/// Sends the lines of the instances to `lines`, which `open` connects to, again after each end of a stream, and then at the addresses
/// that `resolve` returns for their names. Returns when none is left. The first line of a stream may take as long as `wait`; it sets
/// `is_served`.
pub(super) async fn follow(
    open: impl AsyncFn(Instance, SocketAddr) -> anyhow::Result<Body>,
    resolve: impl AsyncFn(String) -> anyhow::Result<Vec<(SocketAddr, Named)>>,
    lines: mpsc::Sender<NamedLine>,
    instances: BTreeMap<SocketAddr, Named>,
    wait: Duration,
    is_served: &Cell<bool>,
) {
    let mut following = Following(instances.keys().copied().collect());
    let connect = async |followed: Followed| {
        let end = match open(followed.named.instance.clone(), followed.address).await {
            Ok(body) => forward(body, &followed.named.label, &lines, wait, is_served).await,
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
                events.extend(ended(followed, end).map(|followed| look(followed).boxed_local()));
            }
            Event::Resolved(followed, found) => {
                let next = following.resolved(followed, found);
                events.extend(next.into_iter().map(|followed| connect(followed).boxed_local()));
            }
        }
    }
}

impl Followed {
    fn new(address: SocketAddr, named: Named) -> Self {
        Self { address, named, pause: SHORTEST_PAUSE, is_expected: false, is_told: false, nameless_since: None }
    }
}

/// Returns the instance if it is tried again.
fn ended(followed: Followed, end: End) -> Option<Followed> {
    let label = &followed.named.label;
    let why = match end {
        End::Closed(why) => {
            // One that hangs is named each time: it may hang for long.
            if !followed.is_told || why == SILENT {
                eprintln!(
                    "{label}: {why}. Connecting again, now and after each later end; decisions in between are missing"
                );
            }
            let (pause, is_expected, is_told, nameless_since) = (SHORTEST_PAUSE, true, true, None);
            return Some(Followed { pause, is_expected, is_told, nameless_since, ..followed });
        }
        // It restarts, or all places for listeners are taken.
        End::Failed(why) if followed.is_expected && !admin::is_declined(&why) => return Some(followed),
        End::Failed(why) => why,
        End::Foreign => anyhow!(admin::FOREIGN),
    };
    eprintln!("{label}: no more decisions from here on: {why:#}");
    None
}

impl Following {
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
            self.0.remove(address);
            return Vec::new();
        }
        let mut next = Vec::new();
        if found.iter().any(|(own, _)| *own == *address) {
            next.push(Followed { nameless_since: None, ..followed });
        } else {
            eprintln!("{name} no longer has the address {address}: no more decisions from there");
            self.0.remove(address);
        }
        for (address, named) in found {
            if self.0.insert(address) {
                eprintln!("{} has a new address, {address}: connecting", named.name);
                next.push(Followed { is_expected: true, ..Followed::new(address, named) });
            }
        }
        next
    }
}

/// Sends the lines of a stream until its end. The first line may take as long as `wait`, and sets `is_served`.
async fn forward(
    body: Body,
    label: &str,
    lines: &mpsc::Sender<NamedLine>,
    wait: Duration,
    is_served: &Cell<bool>,
) -> End {
    let (mut data, mut rest) = (body.into_data_stream(), Vec::new());
    let began = Instant::now();
    // Interval of signs of life, after the first line.
    let (mut interval, mut missing) = (None, 0);
    let end = |is_begun: bool, why| match is_begun {
        true => End::Closed(why),
        false => End::Failed(anyhow!("its stream ended before the first line")),
    };
    loop {
        let left = interval.unwrap_or_else(|| wait.saturating_sub(began.elapsed()));
        let some = match timeout(left, data.next()).await {
            Ok(Some(Ok(some))) => some,
            Ok(Some(Err(_))) => return end(interval.is_some(), LOST),
            Ok(None) => return end(interval.is_some(), CLOSED),
            Err(_) if interval.is_none() => return End::Failed(anyhow!("no answer within {wait:?}")),
            Err(_) if missing + 1 == MOST_MISSING => return End::Closed(SILENT),
            Err(_) => {
                missing += 1;
                continue;
            }
        };
        missing = 0;
        rest.extend_from_slice(&some);
        while let Some(line_end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=line_end).collect();
            interval = interval.or_else(|| sign_interval(&line));
            if interval.is_none() {
                return End::Foreign;
            }
            is_served.set(true);
            let line = admin::printable(String::from_utf8_lossy(&line).trim_end());
            // An empty one is a sign of life.
            if !line.is_empty() {
                // Without a reader, the command ends.
                let _ = lines.send((label.to_owned(), line)).await;
            }
        }
        if rest.len() > MOST {
            return End::Foreign;
        }
    }
}

/// Returns the interval of signs of life, from the first line of a stream, which says since when it has decisions. `None` if it is none. An
/// instance of an older version sends no signs, so it may be silent.
fn sign_interval(line: &[u8]) -> Option<Duration> {
    let line: Value = serde_json::from_slice(line).ok()?;
    number(&line, "since_us")?;
    Some(number(&line, "alive_every_ms").map_or(Duration::MAX, Duration::from_millis))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;

    /// First line of a stream of an older version.
    const START: &str = "{\"since_us\":1}\n";
    /// First line of a stream.
    const ALIVE_START: &str = "{\"since_us\":1,\"alive_every_ms\":5000}\n";
    const NAME: &str = "tidegate:6070";
    /// Longest wait for the first line of a stream.
    const WAIT: Duration = Duration::from_secs(2);

    fn at(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, number], 6070))
    }

    fn named(number: u8) -> (SocketAddr, Named) {
        let instance = Instance::parse(NAME).expect("a name");
        (at(number), Named { instance, name: NAME.to_owned(), label: format!("pod{number}") })
    }

    /// Follows pod 1. `answer` returns the body of an address for the number of its attempt; `addresses` those of the name by attempt.
    /// Returns the lines, and the result.
    async fn followed<B: Into<Body>>(
        answer: impl Fn(u8, u32) -> anyhow::Result<B>,
        addresses: impl Fn(u32) -> anyhow::Result<Vec<u8>>,
    ) -> (Vec<String>, bool) {
        let (sender, mut received) = mpsc::channel(100);
        let (opened, resolved) = (RefCell::new(BTreeMap::<SocketAddr, u32>::new()), Cell::new(0));
        let open = async |_: Instance, address: SocketAddr| {
            let attempt = *opened.borrow_mut().entry(address).and_modify(|attempt| *attempt += 1).or_insert(1);
            let SocketAddr::V4(address) = address else { unreachable!("all are of IPv4") };
            answer(address.ip().octets()[3], attempt).map(Into::into)
        };
        let resolve = async |name: String| {
            assert_eq!(name, NAME);
            resolved.set(resolved.get() + 1);
            addresses(resolved.get()).map(|found| found.into_iter().map(named).collect())
        };
        let is_served = Cell::new(false);
        let following = follow(open, resolve, sender, BTreeMap::from([named(1)]), WAIT, &is_served);
        timeout(Duration::from_secs(3_600), following).await.expect("it ends");
        let mut lines = Vec::new();
        while let Some((label, line)) = received.recv().await {
            lines.push(format!("{label} {line}"));
        }
        (lines.into_iter().filter(|line| !line.contains("since_us")).collect(), is_served.get())
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
        assert_eq!(followed(|_, _| Err::<String, _>(anyhow!("refused")), |_| Ok(vec![1])).await, (vec![], false));
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

    /// Returns a stream of these texts, each after a pause in seconds. It hangs after the last one, or ends.
    fn paced(texts: Vec<(u64, &'static str)>, hangs: bool) -> Body {
        let texts = stream::iter(texts).then(|(pause, text)| async move {
            sleep(Duration::from_secs(pause)).await;
            Ok::<_, Infallible>(text)
        });
        if hangs { Body::from_stream(texts.chain(stream::pending())) } else { Body::from_stream(texts) }
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_that_hangs_is_connected_to_again_after_three_missing_signs_of_life() {
        let began = Instant::now();
        let answer = |_: u8, attempt: u32| match attempt {
            1 => Ok(paced(vec![(0, ALIVE_START), (4, "one\n"), (5, "\n")], true)),
            2 => Err(anyhow!("no answer")),
            3 => Ok(paced(vec![(0, ALIVE_START), (0, "two\n")], false)),
            _ => Ok(paced(vec![(0, "<html>\n")], false)),
        };
        let (lines, is_served) = followed(answer, |_| Ok(vec![1])).await;
        assert_eq!((lines, is_served), (vec!["pod1 one".into(), "pod1 two".into()], true));
        // The last sign was after 9 s; pauses of 1 s, 2 s and 1 s.
        assert_eq!(began.elapsed(), Duration::from_secs(9 + 15 + 1 + 2 + 1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_without_decisions_stays_connected_by_its_signs_of_life_or_its_older_version() {
        let signs = || [vec![(0, ALIVE_START)], vec![(14, "\n"); 20], vec![(14, "late\n")]].concat();
        for texts in [signs(), vec![(0, START), (600, "late\n")]] {
            let answer = |_: u8, attempt: u32| match attempt {
                1 => Ok(paced(texts.clone(), false)),
                _ => Ok(paced(vec![(0, "<html>\n")], false)),
            };
            let (lines, is_served) = followed(answer, |_| Ok(vec![1])).await;
            assert_eq!((lines, is_served), (vec!["pod1 late".into()], true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_that_answers_without_a_first_line_is_given_up() {
        for texts in [vec![], vec![(1, "{"); 100]] {
            let began = Instant::now();
            let answered = followed(|_, _| Ok(paced(texts.clone(), true)), |_| Ok(vec![1])).await;
            assert_eq!((answered, began.elapsed()), ((vec![], false), WAIT), "{texts:?}");
        }
    }
}
