//! The network between the instances and a simulated Redis, in virtual time: latencies, silence, and connections that are cut.

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
    /// Connections are refused.
    pub is_closed: bool,
    /// Each change ends all connections.
    pub resets: u64,
}

/// The way between an instance and a server.
pub struct Link {
    pub way: watch::Sender<Way>,
    random: Mutex<fastrand::Rng>,
    server: mpsc::UnboundedSender<Accepted>,
}

/// A connection as a server has it.
pub struct Accepted {
    pub link: Arc<Link>,
    pub requests: mpsc::UnboundedReceiver<Packet>,
    pub replies: mpsc::UnboundedSender<Packet>,
}

/// The network as one instance sees it.
#[derive(Clone, Default)]
pub struct Links(pub Arc<Mutex<BTreeMap<String, Arc<Link>>>>);

impl Link {
    pub fn new(latency: RangeInclusive<u64>, seed: u64, server: mpsc::UnboundedSender<Accepted>) -> Arc<Self> {
        let way = Way { latency, is_silent: false, is_closed: false, resets: 0 };
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        Arc::new(Self { way: watch::Sender::new(way), random, server })
    }

    /// When bytes arrive that are sent now.
    pub fn arrival(&self) -> Instant {
        let latency = self.way.borrow().latency.clone();
        Instant::now() + Duration::from_micros(self.random.lock().u64(latency))
    }

    async fn connect(self: Arc<Self>) -> io::Result<RedisSocket> {
        // The handshake of TCP goes to and fro.
        sleep_until(self.arrival()).await;
        self.is_heard().await;
        sleep_until(self.arrival()).await;
        if self.way.borrow().is_closed {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (from_client, to_client) = tokio::io::split(theirs);
        let (requests, arriving) = mpsc::unbounded_channel();
        let (replies, returning) = mpsc::unbounded_channel();
        let accepted = Accepted { link: Arc::clone(&self), requests: arriving, replies };
        if self.server.send(accepted).is_err() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let back = Arc::clone(&self);
        tokio::spawn(async move {
            let resets = self.way.subscribe();
            tokio::select! {
                biased;
                () = reset(resets) => {}
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
}

/// Waits until all connections end.
pub async fn reset(mut way: watch::Receiver<Way>) {
    let before = way.borrow().resets;
    let _ = way.wait_for(|way| way.resets != before).await;
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
        link.is_heard().await;
        if to.write_all(&bytes).await.is_err() {
            break;
        }
    }
    // Bytes of the end of a connection take their time, too.
    sleep(Duration::from_micros(1)).await;
}

impl Network for Links {
    fn connect<'a>(&'a self, address: &'a Address, _: Option<SocketAddr>, _: Option<&'a Tls>) -> Connecting<'a> {
        let link = self.0.lock().get(&address.to_string()).map(Arc::clone);
        Box::pin(async move {
            match link {
                Some(link) => link.connect().await,
                None => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }
}
