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
//! Each floor uses only the floors above it in this table:
//!
//! | floor | modules | content |
//! |---|---|---|
//! | words | [`model`] | plain values |
//! | thought | [`algorithm`], [`normalize`], [`rules`], [`rulefile`] | counting algorithms, meaning of values, rule lookup, rule compiler |
//! | seeing | [`telemetry`] | metrics, spans and log lines of decisions and stores |
//! | memory and hearing | [`mod@file`], [`dial`], [`store`], [`source`] | file reading, connections to servers, counters, rule sources |
//! | the path | [`limiter`] | request to decision |
//! | edges | [`transport`], [`embedded`] | gRPC, JSON, the debug page; decisions within the calling process |
//! | roof | [`settings`], [`app`], [`cli`] | settings, wiring and the command line |
//!
//! [`proto`] is the generated protocol.

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
pub mod transport;

#[cfg(feature = "server")]
pub mod app;
#[cfg(feature = "server")]
pub mod cli;
#[cfg(feature = "server")]
pub mod settings;
