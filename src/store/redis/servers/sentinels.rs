//! Asks all sentinels for the address of their master, on connections that are kept, and elects one of their answers.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError, RedisResult, cmd};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::lookup::Lookup;
use crate::store::redis::address::Address;
use crate::store::redis::connection::Driver;
use crate::store::redis::dialect::Dialect;
use crate::store::redis::hidden::hidden;
use crate::store::redis::login::{Login, Secret};
use crate::store::redis::manager::{Access, report_failure};
use crate::store::redis::stream::RejectedReply;
use crate::telemetry::servers::Server;
use crate::telemetry::throttle::LogThrottle;

/// The most addresses of one configured sentinel that are asked: 16.
const MOST_ADDRESSES: usize = 16;
/// Failures in a row after which a sentinel is reported while others answer: 2.
const FAILURES: u32 = 2;
/// Rounds after which the answer of a sentinel that answers no more is forgotten: 600, ten minutes or less.
const KEPT: u64 = 600;

/// The sentinels, and what each has answered.
pub(super) struct Sentinels {
    sentinels: Vec<Sentinel>,
    asking: Asking,
    votes: HashMap<SocketAddr, Vote>,
    round: u64,
    /// The round in which the present master was elected.
    elected: u64,
}

/// The question and the access to the sentinels.
struct Asking {
    master: String,
    login: Login,
    access: Access,
    /// Metrics of the master: invalid replies of sentinels are counted there.
    metrics: Arc<Server>,
}

/// A configured sentinel. Each address of its name is one.
struct Sentinel {
    address: Address,
    lookup: Lookup,
    links: Vec<Link>,
    /// The last error, while no address answers.
    error: Option<RedisError>,
    failures: u32,
    complaints: LogThrottle,
}

/// A connection to a sentinel, and the task that drives it.
type Opened = (MultiplexedConnection, Driver);

/// The connection to one address.
struct Link {
    at: SocketAddr,
    opened: Option<Opened>,
    /// An attempt to connect. It may take several rounds.
    opening: Option<JoinHandle<RedisResult<Opened>>>,
}

/// The last answer of one address.
#[derive(Clone, Debug)]
struct Vote {
    master: Address,
    /// The round in which it began to name this master.
    since: u64,
    /// The round of the answer.
    round: u64,
    /// Place of the sentinel in the configuration.
    order: usize,
}

impl Sentinels {
    /// Creates the sentinels at `addresses`, which know the master `name`.
    pub(super) fn new(name: &str, addresses: &[Address], login: &Login, access: Access, metrics: Arc<Server>) -> Self {
        let sentinel = |address: &Address| {
            let Address::Tcp(host, port) = address else { return None };
            let lookup = Lookup::new(host, *port);
            let (address, links, complaints) = (address.clone(), Vec::new(), LogThrottle::new());
            Some(Sentinel { address, lookup, links, error: None, failures: 0, complaints })
        };
        Self {
            sentinels: addresses.iter().filter_map(sentinel).collect(),
            asking: Asking { master: name.to_owned(), login: login.clone(), access, metrics },
            votes: HashMap::new(),
            round: 0,
            elected: 0,
        }
    }

    /// Asks all sentinels. Returns the address of the master: `present` or another one. `None` if nobody answers before `until`.
    /// `is_connected` is true if there is a connection to `present`.
    pub(super) async fn master(
        &mut self,
        present: Option<&Address>,
        is_connected: bool,
        until: Instant,
    ) -> Option<Address> {
        self.round += 1;
        let Self { sentinels, asking, votes, round, elected } = self;
        let mut asked: FuturesUnordered<_> = sentinels
            .iter_mut()
            .enumerate()
            .map(async |(order, sentinel)| (order, sentinel.ask(asking, until).await))
            .collect();
        let mut all = 0;
        while let Some((order, answers)) = asked.next().await {
            all += answers.len().max(1);
            answers.into_iter().for_each(|(at, master)| note(votes, at, master, (*round, order)));
            // The answers of the others cannot change the result.
            let elects = majority(&of_round(votes, *round), all + asked.len());
            if elects.is_some() && elects != present {
                break;
            }
        }
        all += asked.len();
        drop(asked);
        votes.retain(|_, vote| vote.round + KEPT > *round);
        let votes = of_round(votes, *round);
        let master = elect(&votes, all, present, is_connected, *elected).cloned();
        for sentinel in sentinels.iter().filter(|sentinel| votes.is_empty() || sentinel.failures == FAILURES) {
            sentinel.report(asking);
        }
        if master.is_some() && master.as_ref() != present {
            *elected = *round;
        }
        master
    }
}

impl Sentinel {
    /// Asks every address of its name. Returns the answers.
    async fn ask(&mut self, asking: &Asking, until: Instant) -> Vec<(SocketAddr, Address)> {
        if self.links.is_empty() || self.links.iter().any(|link| link.opened.is_none()) {
            // Where some addresses are known, they do not wait for the resolver.
            let wait = if self.links.is_empty() { until } else { Instant::now() };
            match self.lookup.addresses(wait).await {
                Ok(addresses) => {
                    self.links.retain(|link| addresses.contains(&link.at));
                    for at in addresses.into_iter().take(MOST_ADDRESSES) {
                        if !self.links.iter().any(|link| link.at == at) {
                            self.links.push(Link { at, opened: None, opening: None });
                        }
                    }
                }
                Err(error) => self.error = Some(error.into()),
            }
        }
        let address = &self.address;
        let answers = join_all(self.links.iter_mut().map(|link| link.ask(address, asking, until))).await;
        let mut named = Vec::new();
        for (link, answer) in self.links.iter().zip(answers) {
            match answer {
                Ok(master) => named.push((link.at, master)),
                Err(error) => self.error = Some(error),
            }
        }
        self.failures = if named.is_empty() { self.failures.saturating_add(1) } else { 0 };
        named
    }

    /// Logs its last error, at most every ten seconds. For a sentinel of which no address answers.
    fn report(&self, asking: &Asking) {
        if let Some(error) = &self.error
            && self.complaints.is_due()
        {
            let password = asking.login.password.as_ref().map(Secret::expose);
            let error = hidden(&error.to_string(), password);
            report_failure(&format!("sentinel {}", self.address), &error, "REDIS_SENTINEL_AUTH");
        }
    }
}

impl Link {
    async fn ask(&mut self, address: &Address, asking: &Asking, until: Instant) -> RedisResult<Address> {
        let answer = timeout_at(until, async {
            let mut opened = match self.opened.take() {
                Some(opened) => opened,
                None => {
                    let at = self.at;
                    let opening = self.opening.get_or_insert_with(|| tokio::spawn(asking.open(address.clone(), at)));
                    let opened = opening.await;
                    self.opening = None;
                    opened.map_err(io::Error::other)??
                }
            };
            let mut question = cmd("SENTINEL");
            question.arg("get-master-addr-by-name").arg(&asking.master);
            let named: Option<(String, u16)> = question.query_async(&mut opened.0).await?;
            self.opened = Some(opened);
            let unknown = (ErrorKind::MasterNameNotFoundBySentinel, "the sentinel does not know the master");
            named.map(|(host, port)| Address::Tcp(host, port)).ok_or_else(|| unknown.into())
        });
        answer.await.unwrap_or_else(|_| Err((ErrorKind::Io, "the sentinel did not answer in time").into()))
    }
}

impl Asking {
    /// Connects to `at`, an address of the sentinel `address`.
    fn open(&self, address: Address, at: SocketAddr) -> impl Future<Output = RedisResult<Opened>> + Send + use<> {
        let (access, login, metrics) = (self.access.clone(), self.login.clone(), Arc::clone(&self.metrics));
        async move {
            let report = move |refused: &RejectedReply| metrics.bad_reply(refused.refusal.reason());
            let opened = access.handshake((&address, Some(at)), &login, 0, Dialect::default(), report, || {});
            let late = |_| io::Error::from(io::ErrorKind::TimedOut).into();
            let opened = timeout(access.connect_timeout, opened).await.unwrap_or_else(|late_by| Err(late(late_by)));
            opened.map(|(handle, driver, _)| (handle, driver))
        }
    }
}

/// Notes that the sentinel at `at` names `master`.
fn note(votes: &mut HashMap<SocketAddr, Vote>, at: SocketAddr, master: Address, (round, order): (u64, usize)) {
    let vote = votes.entry(at).or_insert_with(|| Vote { master: master.clone(), since: round, round, order });
    let since = if vote.master == master { vote.since } else { round };
    *vote = Vote { master, since, round, order };
}

/// Returns the answers of `round`, in the order of the configuration.
fn of_round(votes: &HashMap<SocketAddr, Vote>, round: u64) -> Vec<&Vote> {
    let mut votes: Vec<_> = votes.values().filter(|vote| vote.round == round).collect();
    votes.sort_by_key(|vote| vote.order);
    votes
}

fn count(votes: &[&Vote], master: &Address) -> usize {
    votes.iter().filter(|vote| vote.master == *master).count()
}

/// Returns the master that more than half of `all` sentinels name.
fn majority<'a>(votes: &[&'a Vote], all: usize) -> Option<&'a Address> {
    votes.iter().map(|vote| &vote.master).find(|master| count(votes, master) * 2 > all)
}

/// Returns the master that most of the answering sentinels name. Of two that as many name: the one that a sentinel began to name
/// last, since a sentinel changes its answer only for a later failover; then `present`; then the one named first.
///
/// While there is a connection to `present`, it is left only if more than half of `all` sentinels name the other, or if a sentinel has
/// changed its answer since the election of `present`, in round `elected`: a few that have missed a failover do not bring it back.
fn elect<'a>(
    votes: &[&'a Vote],
    all: usize,
    present: Option<&Address>,
    is_connected: bool,
    elected: u64,
) -> Option<&'a Address> {
    let since = |master: &Address| votes.iter().filter(|vote| vote.master == *master).map(|vote| vote.since).max();
    let best = votes.iter().max_by_key(|vote| {
        let master = &vote.master;
        (count(votes, master), since(master), Some(master) == present, Reverse(vote.order))
    })?;
    let is_news = since(&best.master) > Some(elected);
    let has_majority = count(votes, &best.master) * 2 > all;
    let is_elected = has_majority || is_news || !is_connected || present.is_none() || Some(&best.master) == present;
    is_elected.then_some(&best.master)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sentinels' answers, by round; `-`: none. Returns the master after each round.
    fn follow(rounds: &[&str]) -> Vec<String> {
        let (mut votes, mut present, mut elected) = (HashMap::new(), None::<Address>, 0);
        let after = rounds.iter().zip(1..).map(|(answers, round)| {
            for (order, answer) in answers.chars().enumerate().filter(|(_, answer)| *answer != '-') {
                let at = SocketAddr::from(([127, 0, 0, 1], u16::try_from(order).unwrap()));
                note(&mut votes, at, Address::Tcp(answer.to_string(), 1), (round, order));
            }
            let new = elect(&of_round(&votes, round), answers.len(), present.as_ref(), true, elected).cloned();
            if new.is_some() && new != present {
                (present, elected) = (new, round);
            }
            present.as_ref().map_or_else(String::new, ToString::to_string).replace(":1", "")
        });
        after.collect()
    }

    #[test]
    fn without_a_connection_to_it_the_present_master_stays_where_as_many_name_it_as_another() {
        let mut votes = HashMap::new();
        let [first, present] = ["A", "B"].map(|name| Address::Tcp(name.to_owned(), 1));
        for (order, master) in [&first, &present].into_iter().enumerate() {
            let at = SocketAddr::from(([127, 0, 0, 1], u16::try_from(order).unwrap()));
            note(&mut votes, at, master.clone(), (1, order));
        }
        assert_eq!(elect(&of_round(&votes, 1), 3, Some(&present), false, 1), Some(&present));
        assert_eq!(elect(&of_round(&votes, 1), 3, None, false, 1), Some(&first));
    }

    #[test]
    fn most_of_the_sentinels_that_answer_name_the_master_whichever_is_first() {
        assert_eq!(follow(&["ABB"]), ["B"], "the first missed a failover");
        assert_eq!(follow(&["AAA", "ABA", "ABB"]), ["A", "A", "B"], "the others have not heard of it yet");
        assert_eq!(follow(&["AB-"]), ["A"], "nothing is known of who is right");
        assert_eq!(follow(&["---", "--B"]), ["", "B"]);
    }

    #[test]
    fn of_two_that_as_many_name_the_later_one_is_the_master() {
        assert_eq!(follow(&["AAA", "AB-", "AB-", "BB-"]), ["A", "B", "B", "B"]);
        assert_eq!(follow(&["AAAA", "AABB"]), ["A", "B"]);
    }

    #[test]
    fn sentinels_that_missed_a_failover_do_not_bring_the_old_master_back_when_the_others_are_silent() {
        assert_eq!(follow(&["AAA", "ABB", "A--", "A--", "ABB"]), ["A", "B", "B", "B", "B"]);
        assert_eq!(follow(&["AAA", "ABB", "---"]), ["A", "B", "B"], "nobody answers");
        assert_eq!(
            follow(&["AAAA", "BBBC", "---C"]),
            ["A", "B", "B"],
            "the last one changed its answer in the election of B, not after it"
        );
        assert_eq!(follow(&["AAA", "A--", "B--"]), ["A", "A", "B"], "the only one has heard of a failover");
        assert_eq!(follow(&["AAA", "ABB", "AAB", "ABB"]), ["A", "B", "A", "B"], "most of them decide each time");
    }
}
