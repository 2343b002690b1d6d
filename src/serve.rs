//! Listeners and connections, the memory that their peers may take, and a graceful stop that loses no call.
//!
//! ```text
//! Listener ── accepts ──> (ListenerTls) ──> Workers ── one thread per core ──> connection (Http2 or Http1) ──> service
//! ```
//!
//! One accept loop takes the sockets of a listener and hands each to the worker with the fewest connections, so a few
//! busy Envoy connections still use every core. tonic's own server is not used: in 0.14.9 it spins when file
//! descriptors run out, cuts calls at the maximum age of a connection, and waits forever for a peer that never sent its
//! preface (hyper#4170).

pub mod activity;
pub mod answer;
mod authority;
pub mod body;
pub mod connection;
mod ending;
mod frames;
pub(crate) mod head;
pub mod http;
mod idle;
pub mod limits;
pub mod listen;
pub mod memory;
pub mod net;
mod rest;
pub mod socket;
mod stop;
mod stream;
pub mod tally;
pub mod tls;
pub mod turn;
mod waiting;
pub mod workers;

pub use body::RequestBody;
pub use http::{Http1, Http2};
pub use limits::{ConnectionLimits, ConnectionSlots, connection_cap, raise_open_files, use_small_pages};
pub use listen::{Drained, Listener};
pub use net::{NetAddress, NetListener, listen};
pub use tally::{ConnectionCounts, EndCause, Tally};
pub use tls::{Alpn, Clients, HandshakeOutcome, Identity, ListenerTls};
pub use workers::Workers;
