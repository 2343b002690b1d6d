//! A Redis that is slow: a proxy hands it so many scripts a second, first come first served over all connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{Instant, sleep_until};

use super::Port;

/// The work that a server may catch up with after it had none: 2 ms.
const CATCHES_UP: Duration = Duration::from_millis(2);

/// A proxy in front of one server. It has a thread of its own, so that a busy test does not slow it down.
pub struct Paced {
    address: SocketAddr,
    pace: Arc<Pace>,
    _stop: mpsc::Sender<()>,
}

struct Pace {
    upstream: SocketAddr,
    per_second: AtomicU32,
    scripts: AtomicU64,
}

/// A command on its way to the server.
struct Command {
    bytes: Vec<u8>,
    is_script: bool,
    to: Arc<Mutex<OwnedWriteHalf>>,
}

impl Paced {
    /// Starts a proxy on a free port.
    pub fn start(upstream: SocketAddr, per_second: u32) -> Self {
        let port = Port::free();
        let address = port.address();
        let pace = Arc::new(Pace { upstream, per_second: per_second.into(), scripts: AtomicU64::new(0) });
        let (stop, mut stopped) = mpsc::channel(1);
        let (shared, (ready, is_ready)) = (Arc::clone(&pace), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener = TcpListener::bind(address).await.unwrap_or_else(|error| panic!("{address}: {error}"));
                drop(port);
                ready.send(()).expect("the test waits");
                tokio::select! {
                    () = serve(listener, shared) => {}
                    _ = stopped.recv() => {}
                }
            });
        });
        is_ready.recv().expect("it listens");
        Self { address, pace, _stop: stop }
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on it hands on so many scripts a second.
    pub fn set(&self, per_second: u32) {
        self.pace.per_second.store(per_second, Ordering::Relaxed);
    }

    /// How many scripts it has handed on.
    pub fn scripts(&self) -> u64 {
        self.pace.scripts.load(Ordering::Relaxed)
    }
}

async fn serve(listener: TcpListener, pace: Arc<Pace>) {
    let (commands, mut waiting) = mpsc::unbounded_channel::<Command>();
    let shared = Arc::clone(&pace);
    tokio::spawn(async move {
        let mut ready = Instant::now();
        while let Some(Command { bytes, is_script, to }) = waiting.recv().await {
            if is_script {
                let takes = Duration::from_secs(1) / shared.per_second.load(Ordering::Relaxed);
                ready = ready.max(Instant::now() - CATCHES_UP) + takes;
                sleep_until(ready).await;
                shared.scripts.fetch_add(1, Ordering::Relaxed);
            }
            // The connection may be gone.
            let _ = to.lock().await.write_all(&bytes).await;
        }
    });
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(pace.upstream).await else { continue };
        client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).expect("a socket option");
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::spawn(hand_on(from_client, Arc::new(Mutex::new(to_server)), commands.clone()));
        tokio::spawn(hand_back(from_server, to_client));
    }
}

async fn hand_back(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let _ = tokio::io::copy(&mut from, &mut to).await;
}

async fn hand_on(mut from: OwnedReadHalf, to: Arc<Mutex<OwnedWriteHalf>>, commands: mpsc::UnboundedSender<Command>) {
    let mut read = Vec::new();
    while from.read_buf(&mut read).await.is_ok_and(|bytes| bytes > 0) {
        while let Some(bytes) = command(&read) {
            let rest = read.split_off(bytes);
            let bytes = std::mem::replace(&mut read, rest);
            let is_script = bytes.windows(7).take(16).any(|word| word == b"EVALSHA");
            if commands.send(Command { bytes, is_script, to: Arc::clone(&to) }).is_err() {
                return;
            }
        }
    }
}

/// Returns the length of the first command, if all of it is there: an array of bulk strings.
fn command(read: &[u8]) -> Option<usize> {
    let line = |at: usize| {
        let end = at + read.get(at..)?.windows(2).position(|pair| pair == b"\r\n")?;
        let number: usize = std::str::from_utf8(&read[at + 1..end]).ok()?.parse().ok()?;
        Some((number, end + 2))
    };
    let (parts, mut at) = line(0)?;
    for _ in 0..parts {
        let (bytes, begin) = line(at)?;
        at = begin + bytes + 2;
    }
    (at <= read.len()).then_some(at)
}
