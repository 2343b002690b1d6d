//! Tidegate decides rate limits: it answers Envoy's `ShouldRateLimit` from exact counters.
//!
//! As a library it decides in the process that asks ([`embedded`]), with counters in memory:
//!
//! ```no_run
//! let limiter = tidegate::embedded::RateLimiter::from_files(["rules.yaml"])?;
//! let answer = limiter.decide("edge", [[("user", "alice")]])?;
//! if answer.is_refused() {
//!     println!("again after {:?}", answer.retry_after);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With `default-features = false` the crate has neither gRPC nor Redis. What [`embedded`] shows is the library; the other modules are
//! the service's own, and change with any version.
//!
//! Each layer uses only the layers above it in this table:
//!
//! | layer | modules | content |
//! |---|---|---|
//! | values | [`model`], [`proto`] | plain values; generated protocol types |
//! | logic | [`algorithm`], [`normalize`], [`rules`], [`rulefile`] | counting algorithms, meaning of values, rule lookup, rule compiler |
//! | observation | [`telemetry`] | metrics, spans and log lines of decisions and stores |
//! | input and output | [`mod@file`], [`dial`], [`store`], [`source`] | file reading, connections to servers, counters, rule sources |
//! | decision | [`limiter`], [`embedded`] | request to decision; decisions within the calling process |
//! | listeners | [`serve`], [`edge`], [`admin`] | sockets and connections; gRPC, `/json`, `/check`; the debug pages |
//! | program | [`settings`], [`app`], [`cli`] | settings, wiring and the command line |
#[cfg(feature = "server")]
pub mod proto;

#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod model;

#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod algorithm;
#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod normalize;
#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod rulefile;
#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod rules;

#[cfg(feature = "server")]
pub mod telemetry;

#[cfg(feature = "server")]
pub mod dial;
#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod file;
#[cfg(feature = "server")]
pub mod source;
#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod store;

#[cfg_attr(not(feature = "server"), doc(hidden))]
pub mod limiter;

pub mod embedded;

#[cfg(feature = "server")]
pub mod admin;
#[cfg(feature = "server")]
pub mod edge;
#[cfg(feature = "server")]
pub mod serve;

#[cfg(feature = "server")]
pub mod app;
#[cfg(feature = "server")]
pub mod cli;
#[cfg(feature = "server")]
pub mod settings;
