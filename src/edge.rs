//! The interfaces of the service: gRPC, `/json` and `/check`. Each makes a `Request` of what it gets, and an answer of the `Decision`.

pub mod answer;
pub mod callers;
mod delay;
pub mod grpc;
pub mod json;
pub mod message;
pub mod metrics;
pub mod pages;
