//! A Redis that lies: in front of a real one, it answers some requests itself while a test wants it to.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::Port;

/// A lie: the answer to each request with a word in it, which does not reach the real server.
#[derive(Clone, Debug)]
pub struct Lie {
    /// The word.
    pub word: &'static str,
    /// The bytes that the answer begins with.
    pub begin: Arc<str>,
    /// What follows them.
    pub then: Then,
}

/// What follows the first bytes of a lie.
#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// These bytes, again and again.
    Endless(&'static str),
    /// Nothing, ever.
    Silence,
    /// The answers of the real server to the next requests.
    Truth,
}

/// A proxy that lies. Dropped, it closes its connections.
pub struct Liar {
    address: SocketAddr,
    lie: Arc<watch::Sender<Option<Lie>>>,
    task: AbortHandle,
}

impl Liar {
    /// Starts an honest proxy on a free port.
    pub async fn start(upstream: SocketAddr) -> Self {
        let port = Port::free();
        let address = port.address();
        let listener = TcpListener::bind(address).await.unwrap_or_else(|error| panic!("{address}: {error}"));
        let lie = Arc::new(watch::Sender::default());
        let shared = Arc::clone(&lie);
        let task = tokio::spawn(async move {
            let (_port, mut connections) = (port, JoinSet::new());
            loop {
                let (client, _) = listener.accept().await.expect("a connection");
                connections.spawn(serve(client, upstream, Arc::clone(&shared)));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, lie, task: task.abort_handle() }
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on it tells this lie.
    pub fn lies(&self, lie: &Lie) {
        self.lie.send_replace(Some(lie.clone()));
    }

    /// From now on it is honest.
    pub fn is_honest(&self) {
        self.lie.send_replace(None);
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut client: TcpStream, upstream: SocketAddr, lie: Arc<watch::Sender<Option<Lie>>>) {
    let mut server = TcpStream::connect(upstream).await.expect("the real server listens");
    for socket in [&client, &server] {
        socket.set_nodelay(true).expect("a socket option");
    }
    loop {
        let lie = {
            let (mut from_client, mut to_client) = client.split();
            let (mut from_server, mut to_server) = server.split();
            tokio::select! {
                _ = copy(&mut from_server, &mut to_client) => return,
                lie = pass(&mut from_client, &mut to_server, &lie) => lie,
            }
        };
        let Some(Lie { begin, then, .. }) = lie else { return };
        if client.write_all(begin.as_bytes()).await.is_err() {
            return;
        }
        match then {
            Then::Truth => {}
            Then::Endless(more) => {
                let more = more.repeat(16_384);
                while client.write_all(more.as_bytes()).await.is_ok() {}
                return;
            }
            Then::Silence => {
                while client.read(&mut [0; 1_024]).await.is_ok_and(|length| length > 0) {}
                return;
            }
        }
    }
}

/// Passes requests on, up to the first that is to be lied to; `None` when the client has gone.
async fn pass(from: &mut ReadHalf<'_>, to: &mut WriteHalf<'_>, lie: &watch::Sender<Option<Lie>>) -> Option<Lie> {
    let mut piece = Vec::with_capacity(65_536);
    loop {
        piece.clear();
        if from.read_buf(&mut piece).await.ok()? == 0 {
            return None;
        }
        let told = lie.borrow().clone();
        let is_asked = |lie: &Lie| String::from_utf8_lossy(&piece).contains(lie.word);
        if let Some(lie) = told.filter(is_asked) {
            return Some(lie);
        }
        to.write_all(&piece).await.ok()?;
    }
}
