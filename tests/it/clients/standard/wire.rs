use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::support::answering;

/// Frame of HTTP/2 by which a ping is answered: type and flags.
const PONG: [u8; 2] = [6, 1];

/// A way to a server that can be held and cut.
pub struct Wire {
    /// Where it begins.
    pub at: SocketAddr,
    /// Answers to pings that the server has sent.
    pub pongs: Arc<AtomicUsize>,
    state: Arc<State>,
}

struct State {
    server: Mutex<SocketAddr>,
    opened: AtomicUsize,
    /// Whether what the server sends is kept back.
    is_held: watch::Sender<bool>,
    /// Counts how often all connections were cut.
    cuts: watch::Sender<usize>,
}

impl Wire {
    pub async fn to(server: SocketAddr) -> Self {
        let (is_held, cuts) = (watch::Sender::new(false), watch::Sender::new(0));
        let state = Arc::new(State { server: Mutex::new(server), opened: AtomicUsize::new(0), is_held, cuts });
        let pongs = Arc::new(AtomicUsize::new(0));
        let (shared, counted) = (Arc::clone(&state), Arc::clone(&pongs));
        let at = answering(move |caller| relay(Arc::clone(&shared), Arc::clone(&counted), caller)).await;
        Self { at, pongs, state }
    }

    /// Connections that were opened.
    pub fn opened(&self) -> usize {
        self.state.opened.load(Ordering::Relaxed)
    }

    /// New connections lead to this server.
    pub fn leads_to(&self, server: SocketAddr) {
        *self.state.server.lock() = server;
    }

    /// Keeps back what the server sends, or lets it go.
    pub fn hold(&self, is_held: bool) {
        self.state.is_held.send_replace(is_held);
    }

    /// Ends all connections. What is held is lost.
    pub fn cut(&self) {
        self.state.cuts.send_modify(|cuts| *cuts += 1);
    }
}

async fn relay(state: Arc<State>, pongs: Arc<AtomicUsize>, mut caller: TcpStream) -> std::io::Result<()> {
    state.opened.fetch_add(1, Ordering::Relaxed);
    let (mut cuts, is_held) = (state.cuts.subscribe(), state.is_held.subscribe());
    let at = *state.server.lock();
    let mut server = TcpStream::connect(at).await?;
    let (mut from_caller, to_caller) = caller.split();
    let (from_server, mut to_server) = server.split();
    tokio::select! {
        // A connection that is cut and let go at the same moment is cut.
        biased;
        _ = cuts.changed() => Ok(()),
        ended = tokio::io::copy(&mut from_caller, &mut to_server) => ended.map(drop),
        ended = answers(from_server, to_caller, is_held, &pongs) => ended,
    }
}

/// Passes on what the server sends, when it is not held.
async fn answers(
    mut server: impl AsyncRead + Unpin,
    mut caller: impl AsyncWrite + Unpin,
    mut is_held: watch::Receiver<bool>,
    pongs: &AtomicUsize,
) -> std::io::Result<()> {
    let (mut frames, mut bytes) = (Frames::default(), vec![0; 16_384]);
    loop {
        let length = server.read(&mut bytes).await?;
        if length == 0 || is_held.wait_for(|is_held| !is_held).await.is_err() {
            return Ok(());
        }
        pongs.fetch_add(frames.pongs(&bytes[..length]), Ordering::Relaxed);
        caller.write_all(&bytes[..length]).await?;
    }
}

/// What is known of the frame in which the bytes so far end.
#[derive(Default)]
struct Frames {
    head: Vec<u8>,
    /// Bytes of its payload that are yet to come.
    rest: usize,
}

impl Frames {
    /// Answers to pings whose heads end in these bytes.
    fn pongs(&mut self, bytes: &[u8]) -> usize {
        let mut pongs = 0;
        for byte in bytes {
            if self.rest > 0 {
                self.rest -= 1;
                continue;
            }
            self.head.push(*byte);
            if let [a, b, c, kind, flags, _, _, _, _] = self.head[..] {
                self.rest = usize::try_from(u32::from_be_bytes([0, a, b, c])).expect("24 bits");
                pongs += usize::from([kind, flags] == PONG);
                self.head.clear();
            }
        }
        pongs
    }
}
