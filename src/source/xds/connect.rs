//! The connection to a control plane.

use std::io;
use std::time::Duration;

use rustls::ClientConfig;
use thiserror::Error;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::plane::{ControlPlane, PlaneTls};
use super::status::XdsStatus;
use crate::dial::TcpTimeouts;
use crate::dial::grpc::{GrpcServer, with_causes};
use crate::dial::tls::Tls;
use crate::file::{Unusable, blocking};

/// Time for a connection to the control plane, with certificates, DNS and TLS: 10 s. grpc-go allows 20 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// TCP probes an idle peer every 20 s, and the connection ends after 60 s without an acknowledgement. No HTTP/2 PING is sent: a
/// server of grpc-go ends connections with more than one PING in 5 minutes.
const TIMEOUTS: TcpTimeouts =
    TcpTimeouts { keepalive: Duration::from_secs(20), unacknowledged: Duration::from_secs(60) };

/// Reason why there is no connection.
#[derive(Debug, Error)]
pub enum NotConnected {
    /// A file with certificates or keys cannot be used.
    #[error(transparent)]
    File(#[from] Unusable),
    /// Certificate and key do not belong together, or an authority cannot be used.
    #[error("the certificates cannot be used: {0}")]
    Certificates(io::Error),
    /// The control plane or the network refused.
    #[error("{}", with_causes(.0))]
    Refused(#[from] tonic::transport::Error),
    /// The read of the certificates panicked.
    #[error("reading the certificates panicked, which is a bug: {0}")]
    Panicked(String),
    /// Nothing answered in time.
    #[error("no connection within {CONNECT_TIMEOUT:?}")]
    TimedOut,
}

/// Connects to the control plane. The files of TLS are read for each connection.
///
/// # Errors
/// The reason why there is no connection.
pub(super) async fn connect(plane: &ControlPlane, status: &XdsStatus) -> Result<Channel, NotConnected> {
    timeout(CONNECT_TIMEOUT, channel(plane, status)).await.unwrap_or(Err(NotConnected::TimedOut))
}

async fn channel(plane: &ControlPlane, status: &XdsStatus) -> Result<Channel, NotConnected> {
    let tls = match &plane.tls {
        None => None,
        Some(tls) => {
            let read = tls.clone();
            let config = blocking(move || config(&read), |_| {}).await;
            let (config, expiry) = config.map_err(|error| NotConnected::Panicked(error.to_string()))??;
            status.set(|state| state.client_expiry = expiry);
            Some((config, tls.name.clone().unwrap_or_else(|| plane.host.clone())))
        }
    };
    let server = GrpcServer { host: plane.host.clone(), port: plane.port, tls, timeouts: TIMEOUTS };
    Ok(server.connect(|endpoint| endpoint).await?)
}

/// Reads the files of TLS. Returns the time until which the client certificate is valid, too. Blocks while the file system
/// does.
///
/// # Errors
/// If a file cannot be used.
pub(super) fn config(tls: &PlaneTls) -> Result<(ClientConfig, Option<u64>), NotConnected> {
    let tls = Tls::of_files(tls.files.clone())?;
    let config = tls.config().map_err(NotConnected::Certificates)?;
    Ok((config, tls.client_expiry()))
}
