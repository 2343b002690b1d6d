//! Delivery to statsd (TCP or UDP) and DogStatsD (UDP): a separate thread takes the counters that grew, so no decision waits for the
//! receiver.
//!
//! Counters are taken only when the receiver can be written to, so one that is away or late loses nothing: the counters themselves
//! hold what it has not got. What was taken and not written, at most 64 KiB and the lines of one rule, is written first next time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::duration;
use crate::settings::StatsdSettings;
use crate::telemetry::Telemetry;
use crate::telemetry::throttle::LogThrottle;

/// Timeout of connecting: 1.5 s, as in the reference (gostats, `defaultDialTimeout`).
const CONNECT: Duration = Duration::from_millis(1_500);
/// Timeout of a write: 1 s, as in the reference (gostats, `defaultWriteTimeout`).
const WRITE: Duration = Duration::from_secs(1);
/// Longest wait for the last flush when the process ends: 1 s, as for spans.
const FLUSH: Duration = Duration::from_secs(1);
/// Size of a write over TCP: 64 KiB, as in the reference (gostats, `defaultBufferSizeTCP`).
const MOST_BYTES: usize = 1 << 16;
/// Largest datagram: 1,432 bytes, which fit into an Ethernet frame, as in the reference.
const DATAGRAM: usize = 1_432;
/// Name of the times of calls.
const TIMES: &str = "ratelimit_server.ShouldRateLimit.response_time";

/// Handle of the thread that delivers statistics.
pub(super) struct Statsd {
    stop: watch::Sender<bool>,
}

impl Statsd {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(settings: &StatsdSettings, telemetry: Arc<Telemetry>) -> anyhow::Result<Self> {
        if settings.is_asked_twice {
            tracing::warn!(
                event = "statsd.twice",
                "USE_STATSD and USE_DOG_STATSD are both true: only DogStatsD is sent, so that a receiver of both counts nothing twice; set one of them to false"
            );
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let delivery = Delivery {
            telemetry,
            settings: settings.clone(),
            connection: None,
            pending: Vec::new(),
            begun: 0,
            last: [0; 6],
            complaints: LogThrottle::new(),
        };
        let started = std::thread::Builder::new().name("statsd".to_owned()).spawn(move || {
            runtime.block_on(delivery.run(stopped));
            // Do not wait for a name that is still being looked up.
            runtime.shutdown_background();
        });
        started.context("the thread that delivers statistics cannot be started")?;
        Ok(Self { stop })
    }

    /// Delivers what is left, for at most 1 s.
    pub(super) async fn flush(self) {
        self.stop.send_replace(true);
        let _ = timeout(FLUSH, self.stop.closed()).await;
    }
}

enum Connection {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// State of the delivery thread.
struct Delivery {
    telemetry: Arc<Telemetry>,
    settings: StatsdSettings,
    connection: Option<Connection>,
    /// Lines that were taken and are not yet written.
    pending: Vec<u8>,
    /// Bytes of the first pending line that are already written on this connection.
    begun: usize,
    /// Counters of the process at the last flush, in their order.
    last: [u64; 6],
    complaints: LogThrottle,
}

impl Delivery {
    /// Flushes at each interval until `stopped` is set, and a last time then.
    async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let mut due = interval(duration(self.settings.interval));
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once, when there is nothing to send.
        due.tick().await;
        let mut goes_on = true;
        while goes_on {
            goes_on = tokio::select! {
                _ = due.tick() => true,
                _ = stopped.wait_for(|stop| *stop) => false,
            };
            if let Err(error) = self.flush().await {
                self.connection = None;
                if self.complaints.is_due() {
                    let StatsdSettings { host, port, .. } = &self.settings;
                    tracing::warn!(
                        event = "statsd.unreachable",
                        receiver = format!("{host}:{port}"),
                        "statistics wait here, because their receiver does not take them; the next attempt is after STATS_FLUSH_INTERVAL: {error}"
                    );
                }
            }
        }
    }

    async fn flush(&mut self) -> io::Result<()> {
        self.connect().await?;
        self.write().await?;
        let format = self.settings.format.clone();
        let now = self.telemetry.process_counts();
        for ((name, count), last) in now.into_iter().zip(&mut self.last) {
            let grown = count.saturating_sub(*last);
            if grown > 0 {
                format.counter(name, grown, &mut self.pending);
            }
            *last = count;
        }
        for hits in self.telemetry.named_hits() {
            let grown = hits.take().into_iter().filter(|(_, grown)| *grown > 0);
            for (counter, grown) in grown {
                let name = format!("ratelimit.service.rate_limit.{}.{counter}", hits.name());
                format.counter(&name, grown, &mut self.pending);
            }
            if self.pending.len() >= MOST_BYTES {
                self.write().await?;
            }
        }
        format.times(TIMES, &self.telemetry.take_times(), &mut self.pending);
        self.write().await
    }

    /// Connects, unless there is a connection that the receiver has not closed.
    async fn connect(&mut self) -> io::Result<()> {
        if let Some(Connection::Tcp(stream)) = &self.connection {
            match stream.try_read(&mut [0; 64]) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => self.connection = None,
                Ok(0) => self.connection = None,
                _ => {}
            }
        }
        if self.connection.is_some() {
            return Ok(());
        }
        let StatsdSettings { host, port, transport, .. } = &self.settings;
        let connected = async {
            let all = tokio::net::lookup_host((host.as_str(), *port)).await?;
            let all: Vec<_> = all.filter(|address| transport.admits(address)).collect();
            let first = all.first().ok_or_else(|| io::Error::other("the host has no address for STATSD_PROTOCOL"))?;
            Ok::<_, io::Error>(if transport.is_udp {
                let own = if first.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(own).await?;
                socket.connect(first).await?;
                Connection::Udp(socket)
            } else {
                Connection::Tcp(TcpStream::connect(all.as_slice()).await?)
            })
        };
        self.connection = Some(timeout(CONNECT, connected).await??);
        // A line that was cut off is written whole again.
        self.begun = 0;
        Ok(())
    }

    /// Writes the pending lines. After an error, the lines that were not written whole are still pending.
    async fn write(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            let written = match &mut self.connection {
                Some(Connection::Udp(socket)) => {
                    let length = datagram(&self.pending);
                    let sent = timeout(WRITE, socket.send(self.pending.get(..length).unwrap_or_default())).await;
                    if length > DATAGRAM {
                        // A line that the network does not carry must not keep the others waiting for ever.
                        self.pending.drain(..length);
                        sent??;
                        continue;
                    }
                    sent??;
                    length
                }
                Some(Connection::Tcp(stream)) => {
                    let rest = self.pending.get(self.begun..).unwrap_or_default();
                    let upto = self.begun + timeout(WRITE, stream.write(rest)).await??;
                    if upto == self.begun {
                        return Err(io::ErrorKind::WriteZero.into());
                    }
                    let whole = self.pending.get(..upto).unwrap_or_default().iter().rposition(|byte| *byte == b'\n');
                    let whole = whole.map_or(0, |at| at + 1);
                    self.begun = upto - whole;
                    whole
                }
                None => return Err(io::ErrorKind::NotConnected.into()),
            };
            self.pending.drain(..written);
        }
        Ok(())
    }
}

/// Returns the number of bytes of the next datagram: as many whole lines as fit, and at least one.
fn datagram(lines: &[u8]) -> usize {
    let ends = lines.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    let mut length = lines.len();
    for (number, end) in ends.enumerate() {
        if number > 0 && end > DATAGRAM {
            break;
        }
        length = end;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::datagram;

    #[test]
    fn a_datagram_has_whole_lines_that_fit() {
        let line = |length: usize| format!("{}\n", "a".repeat(length - 1));
        let of =
            |lengths: &[usize]| datagram(lengths.iter().map(|length| line(*length)).collect::<String>().as_bytes());
        assert_eq!(of(&[700, 732]), 1_432);
        assert_eq!(of(&[700, 733]), 700);
        assert_eq!(of(&[2_000, 3]), 2_000);
        assert_eq!(of(&[5]), 5);
    }
}
