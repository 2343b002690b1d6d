//! The network between the instances and the simulated servers, in virtual time: latency, silence in one direction or both, and connections that
//! are cut. It is a stream of bytes, as TCP is: it loses replies only together with their connection, and repeats none.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::dial::tls::Tls;
use tidegate::store::redis::address::Address;
use tidegate::store::redis::{Connecting, Network, RedisSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// Bytes on their way, and when they arrive.
pub type Packet = (Instant, Vec<u8>);

/// The state of the way between an instance and a server.
#[derive(Clone, Debug)]
pub struct Way {
    /// Microseconds that bytes take, each way.
    pub latency: RangeInclusive<u64>,
    /// Nothing arrives, until this ends.
    pub is_silent: bool,
    /// Requests arrive, and no replies.
    pub is_mute: bool,
    /// Connections are refused.
    pub is_closed: bool,
    /// Each change ends all connections.
    pub resets: u64,
}

/// A server as the network knows it.
pub struct Host {
    pub address: String,
    accepted: mpsc::UnboundedSender<Accepted>,
    process: watch::Sender<ServerProcess>,
}

#[derive(Default)]
struct ServerProcess {
    is_down: bool,
    /// Each change ends all connections.
    ends: u64,
}

/// The way between an instance and a server.
pub struct Link {
    pub way: watch::Sender<Way>,
    random: Mutex<fastrand::Rng>,
    host: Arc<Host>,
}

/// A connection as a server has it.
pub struct Accepted {
    pub link: Arc<Link>,
    pub requests: mpsc::UnboundedReceiver<Packet>,
    pub replies: mpsc::UnboundedSender<Packet>,
}

/// The network as one instance sees it.
pub struct Links(BTreeMap<String, Arc<Link>>);

impl Host {
    /// Creates a host, and the receiver of its connections.
    pub fn new(address: String) -> (Arc<Self>, mpsc::UnboundedReceiver<Accepted>) {
        let (accepted, connections) = mpsc::unbounded_channel();
        (Arc::new(Self { address, accepted, process: watch::Sender::default() }), connections)
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.process.send_modify(|process| process.ends += 1);
    }

    /// Starts or kills the server. A killed one refuses connections.
    pub fn set_down(&self, is_down: bool) {
        self.process.send_modify(|process| (process.is_down, process.ends) = (is_down, process.ends + 1));
    }
}

impl Link {
    pub fn new(latency: RangeInclusive<u64>, seed: u64, host: Arc<Host>) -> Arc<Self> {
        let way = Way { latency, is_silent: false, is_mute: false, is_closed: false, resets: 0 };
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        Arc::new(Self { way: watch::Sender::new(way), random, host })
    }

    pub fn address(&self) -> &str {
        &self.host.address
    }

    /// Returns the time at which bytes arrive that are sent now.
    pub fn arrival(&self) -> Instant {
        let latency = self.way.borrow().latency.clone();
        Instant::now() + Duration::from_micros(self.random.lock().u64(latency))
    }

    async fn connect(self: Arc<Self>) -> io::Result<RedisSocket> {
        // The handshake of TCP goes to and fro.
        sleep_until(self.arrival()).await;
        self.is_heard().await;
        sleep_until(self.arrival()).await;
        if self.way.borrow().is_closed || self.host.process.borrow().is_down {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (from_client, to_client) = tokio::io::split(theirs);
        let (requests, arriving) = mpsc::unbounded_channel();
        let (replies, returning) = mpsc::unbounded_channel();
        let accepted = Accepted { link: Arc::clone(&self), requests: arriving, replies };
        if self.host.accepted.send(accepted).is_err() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let back = Arc::clone(&self);
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = self.is_cut() => {}
                () = there(&self, from_client, requests) => {}
                () = and_back(&back, to_client, returning) => {}
            }
        });
        Ok(Box::new(ours))
    }

    /// Waits until the way is not silent.
    pub async fn is_heard(&self) {
        // The sender lives as long as this link.
        let _ = self.way.subscribe().wait_for(|way| !way.is_silent).await;
    }

    /// Waits until all connections end, on this way or of its server. Notes their number when it is called.
    pub fn is_cut(&self) -> impl Future<Output = ()> + Send + use<> {
        let (mut way, mut process) = (self.way.subscribe(), self.host.process.subscribe());
        let (resets, ends) = (way.borrow().resets, process.borrow().ends);
        async move {
            tokio::select! {
                biased;
                _ = way.wait_for(|way| way.resets != resets) => {}
                _ = process.wait_for(|process| process.ends != ends) => {}
            }
        }
    }
}

async fn there(link: &Link, mut from: ReadHalf<DuplexStream>, to: mpsc::UnboundedSender<Packet>) {
    let (mut bytes, mut last) = (vec![0; 65_536], Instant::now());
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        last = last.max(link.arrival());
        if to.send((last, bytes[..read].to_vec())).is_err() {
            // The server closed; the client must see that.
            return;
        }
    }
}

async fn and_back(link: &Link, mut to: WriteHalf<DuplexStream>, mut from: mpsc::UnboundedReceiver<Packet>) {
    while let Some((at, bytes)) = from.recv().await {
        sleep_until(at).await;
        let _ = link.way.subscribe().wait_for(|way| !way.is_silent && !way.is_mute).await;
        if to.write_all(&bytes).await.is_err() {
            break;
        }
    }
    // Bytes of the end of a connection take their time, too.
    sleep(Duration::from_micros(1)).await;
}

impl Links {
    pub fn new(links: &[Arc<Link>]) -> Self {
        Self(links.iter().map(|link| (link.address().to_owned(), Arc::clone(link))).collect())
    }
}

impl Network for Links {
    fn connect<'a>(&'a self, address: &'a Address, _: Option<SocketAddr>, _: Option<&'a Tls>) -> Connecting<'a> {
        let link = self.0.get(&address.to_string()).map(Arc::clone);
        Box::pin(async move {
            match link {
                Some(link) => link.connect().await,
                None => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }
}
