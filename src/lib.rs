//! Tidegate decides rate limits: it answers Envoy's `ShouldRateLimit` from exact counters.
//!
//! Each floor uses only the floors above it in this table:
//!
//! | floor | modules | content |
//! |---|---|---|
//! | words | [`model`] | plain values |
//! | thought | [`algorithm`], [`normalize`], [`rules`], [`rulefile`] | counting algorithms, meaning of values, rule lookup, rule compiler |
//! | seeing | [`telemetry`] | metrics, spans and log lines of decisions and stores |
//! | memory and hearing | [`mod@file`], [`store`], [`source`] | file reading, counters, rule sources |
//! | the path | [`limiter`] | request to decision |
//! | edges | [`transport`] | gRPC, JSON, the debug page |
//! | roof | [`settings`], [`app`], [`cli`] | settings, wiring and the command line |
//!
//! [`proto`] is the generated protocol.

pub mod proto;

pub mod model;

pub mod algorithm;
pub mod normalize;
pub mod rulefile;
pub mod rules;

pub mod telemetry;

pub mod file;
pub mod source;
pub mod store;

pub mod limiter;

pub mod transport;

pub mod app;
pub mod cli;
pub mod settings;
