//! The support itself: what it claims to start and to break is started and broken.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

mod proxies;
mod servers;

/// A connection that says what it is told to.
struct Line(TcpStream);

impl Line {
    async fn connect(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.expect("somebody listens"))
    }

    async fn send(&mut self, command: &str) {
        self.0.write_all(format!("{command}\r\n").as_bytes()).await.expect("it is sent");
    }

    /// What comes next, which is short enough to come at once.
    async fn hear(&mut self) -> std::io::Result<String> {
        let mut heard = vec![0; 4_096];
        let length = self.0.read(&mut heard).await?;
        Ok(String::from_utf8_lossy(&heard[..length]).into_owned())
    }

    async fn ask(&mut self, command: &str) -> String {
        self.send(command).await;
        self.hear().await.expect("an answer")
    }
}
