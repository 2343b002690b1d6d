//! A simulated Redis server.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep_until;

use super::clock::SimulatedClock;
use super::cluster::{Cluster, slot};
use super::keys::Reply;
use super::lua::Interpreter;
use super::network::{Accepted, Packet, reset};
use tidegate::model::Clock as _;

/// A server. It answers connections that arrive in its channel.
pub struct Server {
    interpreter: Interpreter,
    pub clock: SimulatedClock,
    /// Nothing is executed.
    pub is_paused: watch::Sender<bool>,
    /// What the script raised.
    pub broken: RefCell<Vec<String>>,
    trace: Rc<RefCell<Vec<String>>>,
}

impl Server {
    pub fn start(
        clock: SimulatedClock,
        place: Option<(usize, Rc<Cluster>)>,
        trace: Rc<RefCell<Vec<String>>>,
    ) -> (Rc<Self>, mpsc::UnboundedSender<Accepted>) {
        let interpreter = Interpreter::new();
        interpreter.keys.borrow_mut().place = place;
        let server = Rc::new(Self {
            interpreter,
            clock,
            is_paused: watch::Sender::new(false),

            broken: RefCell::default(),
            trace,
        });
        let (sender, mut accepted) = mpsc::unbounded_channel();
        let serving = Rc::clone(&server);
        tokio::task::spawn_local(async move {
            while let Some(connection) = accepted.recv().await {
                tokio::task::spawn_local(Rc::clone(&serving).serve(connection));
            }
        });
        (server, sender)
    }

    pub fn flush_scripts(&self) {
        self.interpreter.flush();
    }

    pub fn keys<T>(&self, change: impl FnOnce(&mut super::keys::Keys) -> T) -> T {
        change(&mut self.interpreter.keys.borrow_mut())
    }

    async fn serve(self: Rc<Self>, Accepted { link, mut requests, replies }: Accepted) {
        let ended = reset(link.way.subscribe());
        let answering = async {
            let mut begun = Vec::new();
            while let Some((at, bytes)) = requests.recv().await {
                sleep_until(at).await;
                link.is_heard().await;
                let _ = self.is_paused.subscribe().wait_for(|paused| !*paused).await;
                begun.extend(bytes);
                let mut answers = Vec::new();
                while let Some(command) = next(&mut begun) {
                    write(&self.execute(&command), &mut answers);
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

    fn execute(&self, command: &[Vec<u8>]) -> Reply {
        let word =
            |at: usize| command.get(at).map(|word| String::from_utf8_lossy(word).to_uppercase()).unwrap_or_default();
        match (word(0).as_str(), word(1).as_str()) {
            ("HELLO", _) => Reply::List(vec![Reply::Text(b"proto".to_vec()), Reply::Number(3)]),
            ("PING", _) => Reply::Status("PONG"),
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
            ("CLUSTER", of) => match (self.keys(|keys| keys.place.clone()), of) {
                (Some((_, cluster)), "INFO") => cluster.info(),
                (Some((_, cluster)), "SLOTS") => cluster.slots(),
                _ => Reply::Error("ERR This instance has cluster support disabled".to_owned()),
            },
            ("EVALSHA", _) => self.run_script(command),
            other => panic!("the simulated server does not know {other:?}"),
        }
    }

    fn run_script(&self, command: &[Vec<u8>]) -> Reply {
        let sha1 = String::from_utf8_lossy(&command[1]).to_lowercase();
        let count: usize = String::from_utf8_lossy(&command[2]).parse().expect("a number of keys");
        let (keys, arguments) = command[3..].split_at(count);
        if let Some((own, cluster)) = self.keys(|held| held.place.clone()) {
            let mut slots = keys.iter().map(|key| slot(key));
            if let Some(first) = slots.next() {
                if slots.any(|other| other != first) {
                    return Reply::Error("CROSSSLOT Keys in request don't hash to the same slot".to_owned());
                } else if cluster.owner(first) != own {
                    return cluster.moved(first);
                }
            }
        }
        let now = self.clock.now().get();
        self.keys(|held| held.begin(now));
        let reply = self.interpreter.run(&sha1, keys, arguments);
        let names: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        let place = self.keys(|keys| keys.place.as_ref().map_or(0, |(place, _)| *place));
        self.trace.borrow_mut().push(format!("{now} redis {place} runs for {names:?}"));
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
