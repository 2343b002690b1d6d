//! A simulated server: Redis, or a sentinel.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use tidegate::model::Clock as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::clock::SimulatedClock;
use super::cluster::View;
use super::keys::{Keys, Reply};
use super::lua::Interpreter;
use super::network::{Accepted, Host, Packet};

/// A server. It answers the connections to its host.
pub struct Server {
    pub host: Arc<Host>,
    interpreter: Interpreter,
    pub clock: SimulatedClock,
    /// Nothing is executed.
    pub is_paused: watch::Sender<bool>,
    /// The address of the master that it names, if it is a sentinel.
    pub named: RefCell<Option<String>>,
    /// The moment from which on no instance charges here, because another master has its place.
    pub left_by: Cell<Option<Instant>>,
    /// Charges of the counters of `counted`: time, value and hits.
    pub charged: RefCell<Vec<(Instant, usize, u64)>>,
    /// Promises that were not kept here.
    pub broken: RefCell<Vec<String>>,
    trace: Rc<RefCell<Vec<String>>>,
}

impl Server {
    pub fn start(address: String, clock: SimulatedClock, trace: Rc<RefCell<Vec<String>>>) -> Rc<Self> {
        let (host, mut accepted) = Host::new(address);
        let server = Rc::new(Self {
            host,
            interpreter: Interpreter::new(),
            clock,
            is_paused: watch::Sender::new(false),
            named: RefCell::default(),
            left_by: Cell::default(),
            charged: RefCell::default(),
            broken: RefCell::default(),
            trace,
        });
        let serving = Rc::clone(&server);
        tokio::task::spawn_local(async move {
            while let Some(connection) = accepted.recv().await {
                tokio::task::spawn_local(Rc::clone(&serving).serve(connection));
            }
        });
        server
    }

    pub fn flush_scripts(&self) {
        self.interpreter.flush();
    }

    pub fn keys<T>(&self, change: impl FnOnce(&mut Keys) -> T) -> T {
        change(&mut self.interpreter.keys.borrow_mut())
    }

    /// Changes what it knows of its cluster.
    pub fn view<T>(&self, change: impl FnOnce(&mut View) -> T) -> T {
        self.keys(|keys| change(keys.view.as_mut().expect("a cluster")))
    }

    async fn serve(self: Rc<Self>, Accepted { link, mut requests, replies }: Accepted) {
        let ended = link.is_cut();
        let answering = async {
            let (mut begun, mut is_asking) = (Vec::new(), false);
            while let Some((at, bytes)) = requests.recv().await {
                sleep_until(at).await;
                link.is_heard().await;
                let _ = self.is_paused.subscribe().wait_for(|paused| !*paused).await;
                begun.extend(bytes);
                let mut answers = Vec::new();
                while let Some(command) = next(&mut begun) {
                    write(&self.execute(&command, is_asking), &mut answers);
                    is_asking = command[0].eq_ignore_ascii_case(b"ASKING");
                }
                let packet: Packet = (link.arrival(), answers);
                if replies.send(packet).is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            () = ended => {}
            () = answering => {}
        }
    }

    fn execute(&self, command: &[Vec<u8>], is_asking: bool) -> Reply {
        let word =
            |at: usize| command.get(at).map(|word| String::from_utf8_lossy(word).to_uppercase()).unwrap_or_default();
        match (word(0).as_str(), word(1).as_str()) {
            ("HELLO", _) => Reply::List(vec![Reply::Text(b"proto".to_vec()), Reply::Number(3)]),
            ("PING", _) => Reply::Status("PONG"),
            ("ASKING", _) => Reply::Status("OK"),
            ("ROLE", _) => {
                let role: &[u8] = if self.keys(|keys| keys.is_replica) { b"slave" } else { b"master" };
                Reply::List(vec![Reply::Text(role.to_vec())])
            }
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME") => {
                let named = self.named.borrow();
                let (host, port) = named.as_ref().and_then(|named| named.split_once(':')).expect("a sentinel");
                Reply::List([host, port].map(|text| Reply::Text(text.into())).into())
            }
            ("SCRIPT", "LOAD") => {
                let text = String::from_utf8_lossy(&command[2]).into_owned();
                let sha1 = redis::Script::new(&text).get_hash().to_owned();
                self.interpreter.load(&sha1, &text);
                Reply::Text(sha1.into_bytes())
            }
            ("INFO", "SERVER") => Reply::Text(b"redis_version:7.0.15\r\n".to_vec()),
            ("INFO", "MEMORY") => {
                let is_full = self.keys(|keys| keys.is_full);
                let used = if is_full { 100 } else { 10 };
                Reply::Text(
                    format!("used_memory:{used}\r\nmaxmemory:100\r\nmaxmemory_policy:noeviction\r\n").into_bytes(),
                )
            }
            ("CLUSTER", of) => match (self.keys(|keys| keys.view.clone()), of) {
                (Some(view), "INFO") => view.info(),
                (Some(view), "SLOTS") => view.map.slots(),
                _ => Reply::Error("ERR This instance has cluster support disabled".to_owned()),
            },
            ("EVALSHA", _) => self.run_script(command, is_asking),
            other => panic!("the simulated server does not know {other:?}"),
        }
    }

    fn run_script(&self, command: &[Vec<u8>], is_asking: bool) -> Reply {
        let sha1 = String::from_utf8_lossy(&command[1]).to_lowercase();
        let count: usize = String::from_utf8_lossy(&command[2]).parse().expect("a number of keys");
        let (keys, arguments) = command[3..].split_at(count);
        let (now, moment) = (self.clock.now().get(), Instant::now());
        let before = self.keys(|held| {
            held.begin(now, is_asking);
            let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            let view = held.view.as_ref();
            let elsewhere = view.and_then(|view| view.elsewhere(&names, is_asking, |key| held.has(key)));
            elsewhere
                .zip(view)
                .map_or_else(|| Ok(held.counted()), |(elsewhere, view)| Err(view.redirection(&elsewhere)))
        });
        let before = match before {
            Ok(before) => before,
            Err(redirection) => return redirection,
        };
        let reply = self.interpreter.run(&sha1, keys, arguments);
        let names: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        let address = &self.host.address;
        self.trace.borrow_mut().push(format!("{now} redis {address} runs for {names:?}"));
        let (after, has_written) = self.keys(|held| (held.counted(), held.has_written));
        for (place, (before, after)) in
            before.into_iter().zip(after).enumerate().filter(|(_, (one, other))| one < other)
        {
            self.charged.borrow_mut().push((moment, place, after - before));
        }
        if has_written && self.left_by.get().is_some_and(|left_by| left_by < moment) {
            self.broken.borrow_mut().push(format!("{now}: {address} is charged, and another is the master"));
        }
        match reply {
            Some(Ok(reply)) => reply,
            Some(Err(error)) => {
                self.broken.borrow_mut().push(error);
                Reply::Error("ERR the script fails".to_owned())
            }
            None => Reply::Error("NOSCRIPT No matching script. Please use EVAL.".to_owned()),
        }
    }
}

/// Takes the next whole command out of what has arrived.
fn next(begun: &mut Vec<u8>) -> Option<Vec<Vec<u8>>> {
    let mut at = 0;
    let line = |at: &mut usize| {
        let length = begun[*at..].windows(2).position(|end| end == b"\r\n")?;
        let line = &begun[*at + 1..*at + length];
        *at += length + 2;
        std::str::from_utf8(line).ok()?.parse::<usize>().ok()
    };
    let count = line(&mut at)?;
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        let length = line(&mut at)?;
        words.push(begun.get(at..at + length)?.to_vec());
        at += length + 2;
    }
    if at > begun.len() {
        return None;
    }
    begun.drain(..at);
    Some(words)
}

fn write(reply: &Reply, to: &mut Vec<u8>) {
    match reply {
        Reply::Nothing => to.extend(b"$-1\r\n"),
        Reply::Number(number) => to.extend(format!(":{number}\r\n").bytes()),
        Reply::Status(status) => to.extend(format!("+{status}\r\n").bytes()),
        Reply::Error(error) => to.extend(format!("-{error}\r\n").bytes()),
        Reply::Text(text) => {
            to.extend(format!("${}\r\n", text.len()).bytes());
            to.extend(text);
            to.extend(b"\r\n");
        }
        Reply::List(replies) => {
            to.extend(format!("*{}\r\n", replies.len()).bytes());
            replies.iter().for_each(|reply| write(reply, to));
        }
    }
}
