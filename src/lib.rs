//! Tidegate decides rate limits: Envoy's `ShouldRateLimit`, answered from counters that are exact.
//!
//! From the ground up, each floor using only those below it:
//!
//! | floor | modules | what they are |
//! |---|---|---|
//! | words | [`model`] | plain values |
//! | thought | [`algorithm`], [`rules`], [`telemetry`] | how hits are counted, which rule answers, and what those who watch are told |
//! | memory and hearing | [`mod@file`], [`store`], [`source`] | how files are read, where counters live, where rules come from |
//! | the path | [`limiter`] | request to decision |
//! | edges | [`transport`] | gRPC, JSON, the debug page |
//! | roof | [`settings`], [`app`], [`cli`] | what an operator sets, and the wiring |
//!
//! [`proto`] is the generated protocol.

pub mod proto;

pub mod model;

pub mod algorithm;
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
