//! A Redis with little memory left. There a request that is refused makes no new counter; otherwise a client could fill it with refused
//! requests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::advice::{self, Memory};
use super::script::Mode;
use super::script_call::CallResult;
use super::servers::Servers;
use super::{Redis, each};
use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::store::{Charged, StoreError, Undo};

/// Interval between two looks at the memory of a server: 1 s.
const EVERY: Duration = Duration::from_secs(1);
/// The same for a server whose memory is not bounded, or that refuses the question: 30 s.
const SELDOM: Duration = Duration::from_secs(30);
/// Timeout of one look: 100 ms.
const TIMEOUT: Duration = Duration::from_millis(100);
/// The time for which a look is believed: 3 s, so that one without a reply changes nothing.
const BELIEVED: Duration = Duration::from_secs(3);
/// The time for which memory is taken to be scarce after a server had none: 10 s.
const AFTER_NONE: Duration = Duration::from_secs(10);

/// Numbers of the nodes that are not asked for their memory, each with the time until which. It holds no node: one that was replaced must
/// not live on.
type Postponed = HashMap<usize, Instant>;

/// Knowledge of the memory of the servers.
pub(super) struct Room {
    began: Instant,
    /// Milliseconds after `began` until which memory is scarce; 0 if it never was.
    scarce_until: AtomicU64,
}

impl Default for Room {
    fn default() -> Self {
        Self { began: Instant::now(), scarce_until: AtomicU64::new(0) }
    }
}

impl Room {
    /// Returns true if a server has used most of its memory, or had none for a counter.
    pub(super) fn is_scarce(&self) -> bool {
        let until = self.scarce_until.load(Ordering::Relaxed);
        until > 0 && self.passed(Duration::ZERO) < until
    }

    /// Notes that a server had no memory for a counter.
    pub(super) fn is_full(&self) {
        self.is_scarce_for(AFTER_NONE);
    }

    fn is_scarce_for(&self, time: Duration) {
        self.scarce_until.fetch_max(self.passed(time), Ordering::Relaxed);
    }

    fn passed(&self, more: Duration) -> u64 {
        u64::try_from((self.began.elapsed() + more).as_millis()).unwrap_or(u64::MAX)
    }

    /// Looks at the memory of `servers`; runs for ever.
    pub(super) async fn watch(&self, servers: &Servers) {
        let mut postponed = Postponed::new();
        loop {
            self.look(servers, TIMEOUT, &mut postponed).await;
            sleep(EVERY).await;
        }
    }

    /// Asks the nodes of `servers` for their memory, except those in `postponed`, and waits for `timeout` at most. Adds to `postponed` the nodes
    /// that are asked seldom, and removes those that are due again or gone.
    async fn look(&self, servers: &Servers, timeout: Duration, postponed: &mut Postponed) {
        let (nodes, now) = (servers.nodes(), Instant::now());
        postponed.retain(|number, until| now < *until && nodes.iter().any(|node| node.number() == *number));
        let due = nodes.iter().filter(|node| node.is_well() && !postponed.contains_key(&node.number()));
        let replies = join_all(due.map(async |node| {
            let replies = node.ask(vec![advice::memory()], now + timeout).await;
            (node.number(), replies.iter().flatten().next().map(advice::read_memory))
        }));
        for (number, memory) in replies.await {
            match memory {
                Some(Memory::Used(share)) if share >= advice::NEARLY_FULL => self.is_scarce_for(BELIEVED),
                Some(Memory::Unbounded | Memory::Refused) => {
                    postponed.insert(number, now + SELDOM);
                }
                // The next round asks again.
                Some(Memory::Used(_) | Memory::Unknown) | None => {}
            }
        }
    }
}

/// Returns true if the server had no memory for a counter.
pub(super) fn is_full(outcome: &CallResult) -> bool {
    match outcome {
        Ok((_, rows)) => rows.unsaved > 0,
        Err(error) => *error == StoreError::OutOfMemory,
    }
}

impl Redis {
    /// Charges a request whose charges are independent, so that it makes no new counter if it is refused, by one of these charges or,
    /// if `is_refused`, by another. No hits are leased beside them.
    pub(super) async fn charge_sparingly(&self, charges: &[Charge], is_refused: bool, until: Instant) -> Charged {
        let charges: Vec<Charge> = charges.iter().map(|charge| Charge { ask: 0, ..charge.clone() }).collect();
        // One script that has all charges of the request can decide on it.
        let mut mode = if is_refused { Mode::Existing } else { Mode::Lean };
        let mut groups = self.0.groups(&charges, mode);
        if groups.len() > 1 {
            mode = Mode::Existing;
            groups = self.0.groups(&charges, mode);
        }
        let outcomes = self.0.ask(&groups, &charges, until).await;
        let mut unmade = Vec::new();
        for (group, (_, rows)) in
            groups.iter().zip(&outcomes).filter_map(|(group, outcome)| Some((group, outcome.as_ref().ok()?)))
        {
            let members = group.members.iter().zip(rows.iter());
            unmade.extend(members.filter(|(_, row)| row.is_unrecorded).map(|(&member, _)| member));
        }
        let mut charged = self.conclude(&groups, &charges, outcomes);
        let answered = charges.iter().zip(&charged.answers);
        let decided =
            answered.filter_map(|(charge, answer)| Some(charge.charge_outcome(answer.as_ref().ok()?.outcome)));
        if mode == Mode::Lean || is_refused || unmade.is_empty() || is_request_refused(decided) {
            return charged;
        }
        // Nothing refuses the request, so its new counters are made.
        let new: Vec<Charge> = unmade.iter().map(|&member| charges[member].clone()).collect();
        let groups = self.0.groups(&new, each(&new));
        let outcomes = self.0.ask(&groups, &new, until).await;
        let made = self.conclude(&groups, &new, outcomes);
        made.undos.into_iter().for_each(Undo::keep);
        for (member, answer) in unmade.into_iter().zip(made.answers) {
            charged.answers[member] = answer;
        }
        charged
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::store::redis::address::{Address, Topology};
    use crate::store::redis::manager::{Access, Locate};
    use crate::store::redis::node::Node;
    use crate::store::redis::tests::access;

    /// A timeout that no test reaches: 60 s.
    const AMPLE: Duration = Duration::from_secs(60);
    const FULL: &str = "used_memory:95\r\nmaxmemory:100\r\n";
    const UNBOUNDED: &str = "used_memory:95\r\nmaxmemory:0\r\n";

    fn text(bytes: &str) -> String {
        format!("${}\r\n{bytes}\r\n", bytes.len())
    }

    /// Answers the commands of one connection, `INFO` with the next of `about`.
    async fn serve(stream: TcpStream, mut about: impl Iterator<Item = String>) {
        let mut stream = BufReader::new(stream);
        loop {
            let mut arguments = Vec::new();
            let mut line = String::new();
            if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                return;
            }
            for _ in 0..line.trim()[1..].parse::<usize>().expect("a number of arguments") {
                let mut length = String::new();
                stream.read_line(&mut length).await.expect("a length");
                let mut argument = vec![0; length.trim()[1..].parse::<usize>().expect("a length") + 2];
                stream.read_exact(&mut argument).await.expect("an argument");
                arguments.push(String::from_utf8_lossy(&argument).trim().to_owned());
            }
            let reply = match arguments[0].as_str() {
                "HELLO" => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned(),
                "INFO" => about.next().expect("it is asked no more"),
                "SCRIPT" => text(&"0".repeat(40)),
                _ => "-NOSCRIPT none\r\n".to_owned(),
            };
            stream.write_all(reply.as_bytes()).await.expect("it is sent");
        }
    }

    /// Starts a server that answers `INFO memory` with each of `about`, in order.
    async fn server(about: &[&str]) -> Address {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("it has one").port();
        // A new connection asks twice by itself.
        let about: Vec<String> =
            [text(""), text("")].into_iter().chain(about.iter().map(|&about| about.to_owned())).collect();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("a connection");
            serve(stream, about.into_iter()).await;
        });
        Address::Tcp("127.0.0.1".to_owned(), port)
    }

    fn access_in_time() -> Access {
        Access { connect_timeout: AMPLE, ..access() }
    }

    fn servers(address: Address) -> Servers {
        Servers::new(Topology::Single(address), access_in_time(), 1)
    }

    /// Opens the connection, which may take longer than a look.
    async fn connect(servers: &Servers) {
        servers.connect(Instant::now() + AMPLE).await;
    }

    #[tokio::test]
    async fn an_error_in_place_of_the_memory_is_passed_over_and_the_next_round_asks_again() {
        let servers = servers(server(&["-BUSY a script runs\r\n", &text(FULL)]).await);
        connect(&servers).await;
        let (room, mut postponed) = (Room::default(), Postponed::new());
        room.look(&servers, AMPLE, &mut postponed).await;
        assert!(!room.is_scarce() && postponed.is_empty());
        room.look(&servers, AMPLE, &mut postponed).await;
        assert!(room.is_scarce());
    }

    #[tokio::test]
    async fn a_server_that_refuses_or_is_not_bounded_is_asked_seldom_and_one_in_its_place_at_once() {
        for seldom in ["-NOPERM no right\r\n".to_owned(), "-ERR unknown command 'INFO'\r\n".to_owned(), text(UNBOUNDED)]
        {
            let servers = servers(server(&[&seldom, &text(FULL)]).await);
            connect(&servers).await;
            let (room, mut postponed) = (Room::default(), Postponed::new());
            for _ in 0..3 {
                room.look(&servers, AMPLE, &mut postponed).await;
                assert!(!room.is_scarce() && postponed.len() == 1, "{seldom}");
            }
            // The time has passed.
            postponed.values_mut().for_each(|until| *until = Instant::now());
            room.look(&servers, AMPLE, &mut postponed).await;
            assert!(room.is_scarce() && postponed.is_empty(), "{seldom}");

            let (room, mut postponed) = (Room::default(), Postponed::new());
            postponed.insert(servers.nodes()[0].number(), Instant::now() + SELDOM);
            let locate = Locate::At(server(&[&text(FULL)]).await);
            servers.replace(Arc::new(Node::new(locate, access_in_time(), 1, Arc::default())));
            connect(&servers).await;
            room.look(&servers, AMPLE, &mut postponed).await;
            assert!(room.is_scarce() && postponed.is_empty(), "{seldom}");
        }
    }
}
