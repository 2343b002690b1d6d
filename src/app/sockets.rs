//! Bound listeners of the process, and the connection slots that they share out.

use std::net::{IpAddr, SocketAddr};

use anyhow::Context;
use tokio::net::TcpListener;

use crate::serve::{ConnectionSlots, NetAddress, NetListener, connection_cap, limits, listen, raise_open_files};
use crate::settings::Settings;

/// Maximum number of connections of each of the debug and metrics listeners: 128, or a quarter of all connections if
/// that is less.
const PAGE_CONNECTIONS: usize = 128;

/// The bound sockets.
pub(super) struct Sockets {
    pub(super) grpc: NetListener,
    pub(super) http: TcpListener,
    pub(super) debug: TcpListener,
    /// Socket of the metrics listener, if there is one.
    pub(super) metrics: Option<TcpListener>,
    pub(super) slots: SlotCounts,
}

/// Addresses of the listeners.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Address of the gRPC listener.
    pub grpc: NetAddress,
    /// Address of the HTTP listener.
    pub http: SocketAddr,
    /// Address of the debug listener.
    pub debug: SocketAddr,
    /// Address of the metrics listener, if there is one.
    pub metrics: Option<SocketAddr>,
}

/// Numbers of connection slots. Each listener has slots of its own, so a flood of gRPC connections locks out neither
/// the checks nor the probes.
#[derive(Clone, Copy)]
pub(super) struct SlotCounts {
    /// Slots of the gRPC listener.
    pub(super) grpc: usize,
    /// Slots of the HTTP listener.
    pub(super) http: usize,
    /// Slots of each other listener.
    pub(super) other: usize,
}

impl Sockets {
    /// Raises the limit of open files and binds all listeners.
    ///
    /// # Errors
    /// If an address cannot be bound; names the address and its settings.
    pub(super) async fn bind(settings: &Settings) -> anyhow::Result<Self> {
        let connections = connection_cap(raise_open_files());
        let slots = SlotCounts::new(connections, limits::memory_bytes(), settings.use_prometheus);
        let metrics = match settings.use_prometheus {
            true => Some(bind_at(settings.prometheus_addr.0, "PROMETHEUS_ADDR")?),
            false => None,
        };
        Ok(Self {
            grpc: bind_grpc(settings).await?,
            http: bind("PORT", settings.host, settings.port)?,
            debug: bind("DEBUG_PORT", settings.debug_host, settings.debug_port)?,
            metrics,
            slots,
        })
    }

    /// Returns the addresses of the listeners.
    ///
    /// # Errors
    /// If the system does not return one.
    pub(super) fn addresses(&self) -> std::io::Result<Addresses> {
        Ok(Addresses {
            grpc: self.grpc.local_addr()?,
            http: self.http.local_addr()?,
            debug: self.debug.local_addr()?,
            metrics: self.metrics.as_ref().map(TcpListener::local_addr).transpose()?,
        })
    }
}

impl SlotCounts {
    fn new(connections: usize, memory_bytes: u64, has_metrics_listener: bool) -> Self {
        let other = PAGE_CONNECTIONS.min(connections / 4);
        let others = if has_metrics_listener { 2 } else { 1 };
        let left = connections - others * other;
        let http = limits::http_connections(memory_bytes).min(left / 2);
        Self { grpc: left - http, http, other }
    }

    /// Returns the slots of the gRPC listener.
    pub(super) fn of_grpc(self) -> ConnectionSlots {
        ConnectionSlots::new(self.grpc)
    }

    /// Returns the maximum number of idle connections of the gRPC listener.
    pub(super) fn idle_of_grpc(self, settings: &Settings, memory_bytes: u64) -> usize {
        match settings.grpc_max_idle_connections.0 {
            Some(connections) => limits::below(connections, self.grpc),
            None => {
                let is_tls = settings.listener_tls.is_some();
                let bytes_each = if is_tls { limits::IDLE_TLS_CONNECTION_BYTES } else { limits::IDLE_CONNECTION_BYTES };
                limits::idle_connections(memory_bytes, bytes_each, self.grpc)
            }
        }
    }

    /// Returns the slots of the HTTP listener.
    pub(super) fn of_http(self) -> ConnectionSlots {
        ConnectionSlots::new(self.http)
    }

    /// Returns the slots of one other listener.
    pub(super) fn of_other(self) -> ConnectionSlots {
        ConnectionSlots::new(self.other)
    }
}

async fn bind_grpc(settings: &Settings) -> anyhow::Result<NetListener> {
    let Some(path) = &settings.grpc_uds.0 else {
        return Ok(NetListener::Tcp(bind("GRPC_PORT", settings.grpc_host, settings.grpc_port)?));
    };
    let bound = NetListener::unix(path, settings.grpc_uds_mode.0).await;
    bound.with_context(|| {
        format!(
            "cannot listen on {}: set GRPC_UDS to a free path in a directory that exists and that this user may write to",
            path.display()
        )
    })
}

fn bind(variable: &str, host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let variables = format!("{variable} or {}", variable.replace("PORT", "HOST"));
    bind_at(SocketAddr::new(host, port), &variables)
}

fn bind_at(address: SocketAddr, variables: &str) -> anyhow::Result<TcpListener> {
    listen(address).with_context(|| format!("cannot listen on {address}: set {variables} to another value"))
}
