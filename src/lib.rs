//! Tidegate decides rate limits: it answers Envoy's `ShouldRateLimit` from exact counters.
//!
//! ```
//! use std::sync::Arc;
//!
//! use tidegate::limiter::Limiter;
//! use tidegate::model::{Descriptor, Entry, Micros, Outcome, Request};
//! use tidegate::rulefile::{File, Options, load};
//! use tidegate::rules::live::LiveRules;
//! use tidegate::store::guard::Guard;
//!
//! let text = "domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 1 } }]\n";
//! let file = File { name: "rules.yaml".into(), bytes: text.into() };
//! let rules = LiveRules::new(load(&[file], Options::default())?.rules);
//! let clock = || Micros::from_secs(1_700_000_000);
//! let limiter = Limiter::new(Arc::new(rules), Arc::new(Guard::in_memory(1_000, Arc::new(clock))));
//!
//! let user = Descriptor { entries: vec![Entry::new("user", "alice")], ..Descriptor::default() };
//! let request = Request::new("edge".to_owned(), vec![user], 0)?;
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
//! # runtime.block_on(async {
//! let rules = limiter.rules();
//! assert_eq!(limiter.decide(&rules, &request, None).await.outcome, Outcome::Admitted);
//! assert_eq!(limiter.decide(&rules, &request, None).await.outcome, Outcome::Refused);
//! # });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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

pub mod dial;
pub mod file;
pub mod source;
pub mod store;

pub mod limiter;

pub mod transport;

pub mod app;
pub mod cli;
pub mod settings;
