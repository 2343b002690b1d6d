//! A TCP proxy that does to connections what networks do, while they run.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Port;

/// What happens to bytes that go one way. By default: nothing.
///
/// Bytes keep their order, and a tick of the timer, 1 ms, is added to every delay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// What each piece that arrives is held up by.
    pub latency: Duration,
    /// Up to so much more, evenly spread.
    pub jitter: Duration,
    /// Each so many pieces, one is held up by so much more, and what comes after it on its connection waits.
    pub straggler: Option<(u64, Duration)>,
    /// At most so many bytes at once, and then a pause.
    pub slices: Option<(usize, Duration)>,
    /// Nothing arrives, not even the end of a connection, until this ends: then all does, as TCP sends it again.
    pub is_black_hole: bool,
}

impl Way {
    /// Held up by so many milliseconds.
    pub fn latency_ms(latency_ms: u64) -> Self {
        Self { latency: Duration::from_millis(latency_ms), ..Self::default() }
    }

    /// A black hole.
    pub fn black_hole() -> Self {
        Self { is_black_hole: true, ..Self::default() }
    }

    /// What this piece, of the pieces of its way the so manieth, is held up by.
    fn delay(&self, piece: u64) -> Duration {
        // Spread evenly, in an order that does not repeat (Knuth's multiplicative hash).
        let thousandth = (piece.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % 1_000;
        let jitter = self.jitter * u32::try_from(thousandth).expect("it is small") / 1_000;
        let straggler = self.straggler.filter(|(each, _)| piece.is_multiple_of(*each));
        self.latency + jitter + straggler.map_or(Duration::ZERO, |(_, delay)| delay)
    }
}

/// What happens at a proxy. By default: nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// To what clients send.
    pub to_server: Way,
    /// To what the server answers.
    pub to_client: Way,
    /// Nobody listens: whoever connects is refused. Connections that there are stay.
    pub is_refusing: bool,
    /// All connections are reset, again and again.
    pub reset_each: Option<Duration>,
}

impl Faults {
    /// The same both ways.
    pub fn both(way: Way) -> Self {
        Self { to_server: way, to_client: way, ..Self::default() }
    }
}

/// A proxy in front of one server. Connections are made to the server when a client makes one; dropped, it closes them.
///
/// It runs on the runtime of the test that starts it. What it cannot do is to let a client wait for a connection: the
/// kernel of this machine makes it, also while both ways are black holes.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    upstream: SocketAddr,
    faults: watch::Sender<Faults>,
    /// How many times all connections were reset.
    resets: watch::Sender<u64>,
    accepted: AtomicU64,
    /// Bytes passed on, to the server and to clients.
    passed: [AtomicU64; 2],
    pieces: [AtomicU64; 2],
}

impl Proxy {
    /// Starts a proxy on a free port.
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::listen(Port::free(), upstream).await
    }

    /// Starts a proxy on this port.
    pub(super) async fn listen(port: Port, upstream: SocketAddr) -> Self {
        let address = port.address();
        let listener = TcpListener::bind(address).await.unwrap_or_else(|error| panic!("{address}: {error}"));
        let shared = Arc::new(Shared {
            upstream,
            faults: watch::Sender::default(),
            resets: watch::Sender::default(),
            accepted: AtomicU64::new(0),
            passed: Default::default(),
            pieces: Default::default(),
        });
        let task = tokio::spawn(serve(port, listener, Arc::clone(&shared))).abort_handle();
        Self { address, shared, task }
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on these happen, and no others: to bytes that arrive later, and `is_black_hole` to all.
    pub fn set(&self, faults: Faults) {
        self.shared.faults.send_replace(faults);
    }

    /// From now on nothing happens.
    pub fn heal(&self) {
        self.set(Faults::default());
    }

    /// Resets all connections that there are, once.
    pub fn reset(&self) {
        self.shared.reset();
    }

    /// How many connections it has accepted.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// How many bytes it has passed on: to the server, and to clients.
    pub fn passed(&self) -> [u64; 2] {
        self.shared.passed.each_ref().map(|bytes| bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn reset(&self) {
        self.resets.send_modify(|resets| *resets += 1);
    }
}

async fn serve(port: Port, listener: TcpListener, shared: Arc<Shared>) {
    tokio::join!(accept(port, listener, &shared), reset_again(&shared));
}

async fn accept(port: Port, listener: TcpListener, shared: &Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut listener = Some(listener);
    let mut faults = shared.faults.subscribe();
    loop {
        if faults.borrow_and_update().is_refusing {
            listener = None;
        } else if listener.is_none() {
            listener = Some(TcpListener::bind(port.address()).await.expect("nobody took the port"));
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await.expect("a connection"),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = faults.changed() => changed.expect("the proxy holds the other end"),
            (client, _) = accepted => {
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                connections.spawn(connect(client, Arc::clone(shared)));
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn reset_again(shared: &Shared) {
    let mut faults = shared.faults.subscribe();
    loop {
        let period = faults.borrow_and_update().reset_each.unwrap_or(Duration::MAX);
        if timeout(period, faults.changed()).await.is_err() {
            shared.reset();
        }
    }
}

async fn connect(mut client: TcpStream, shared: Arc<Shared>) {
    let mut resets = shared.resets.subscribe();
    let Ok(mut server) = TcpStream::connect(shared.upstream).await else {
        client.set_zero_linger().expect("a socket option");
        return;
    };
    for socket in [&client, &server] {
        socket.set_nodelay(true).expect("a socket option");
    }
    let is_cut = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let there = pass(from_client, to_server, &shared, 0);
        let back = pass(from_server, to_client, &shared, 1);
        tokio::select! {
            ended = async { tokio::try_join!(there, back) } => ended.is_err(),
            _ = resets.changed() => true,
        }
    };
    if is_cut {
        // Closed like this, a connection is reset.
        for socket in [&client, &server] {
            socket.set_zero_linger().expect("a socket option");
        }
    }
}

/// Passes on what goes one way, until that ends; fails when the connection is cut.
async fn pass(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, shared: &Shared, way: usize) -> std::io::Result<()> {
    /// As many pieces may be under way; with more, the sender has to wait.
    const UNDER_WAY: usize = 1_024;
    let (sent, mut under_way) = mpsc::channel(UNDER_WAY);
    let now = || {
        let faults = shared.faults.borrow();
        [faults.to_server, faults.to_client][way]
    };
    let out_of_hole = async || {
        let mut faults = shared.faults.subscribe();
        while now().is_black_hole {
            faults.changed().await.expect("the proxy holds the other end");
        }
    };
    let read = async move {
        loop {
            let mut piece = Vec::with_capacity(16_384);
            match from.read_buf(&mut piece).await {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    out_of_hole().await;
                    return Err(error);
                }
            }
            let delay = now().delay(shared.pieces[way].fetch_add(1, Ordering::Relaxed));
            // Who does not write any more has failed, and tells.
            let _ = sent.send((Instant::now() + delay, piece)).await;
        }
    };
    let write = async {
        while let Some((due, piece)) = under_way.recv().await {
            // The timer would round up what is due by now.
            if due > Instant::now() {
                sleep_until(due).await;
            }
            out_of_hole().await;
            let (most, pause) = now().slices.unwrap_or((piece.len(), Duration::ZERO));
            for slice in piece.chunks(most) {
                to.write_all(slice).await?;
                shared.passed[way].fetch_add(slice.len() as u64, Ordering::Relaxed);
                if !pause.is_zero() {
                    sleep(pause).await;
                }
            }
        }
        out_of_hole().await;
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(|_| ())
}
