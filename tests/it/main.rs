//! What Tidegate promises, tried from outside.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

/// Getting at a Redis, however it is guarded: passwords that change, TLS, sockets, and no right too many.
mod access;
/// What clients are told: headers, bodies and metadata they can act on.
mod answers;
/// A value that is sensitive stands nowhere.
mod canary;
/// The HTTP check, for gateways that ask by a subrequest.
mod check;
/// The commands, as a user types them.
mod cli;
/// The clients of `examples/clients/`: what services and callers in other languages do, whatever Tidegate does.
mod clients;
/// Many clients at one counter: never one too many, and nothing wasted.
mod concurrency;
/// The conformance suite: the same answers as the reference, but for the differences that are written down.
mod conformance;
/// The listeners under load, attack and stop.
mod edges;
/// The variables of the reference and of its libraries: obeyed, or named as without effect.
mod environment;
/// A real Envoy in front, with the configurations and rules of `examples/`.
mod envoy;
/// What the embedded store forgets when it is full.
mod eviction;
/// A Redis that fails, each way there is: answers by policy in time, nothing late, nothing twice, and exact again after it.
mod faults;
/// Files that the process reads at its start: regular files of a bounded size, or the start stops with the reason.
mod files;
/// The command line and the environment of gateways, and a real Envoy as they configure it.
mod gateways;
/// Rule files with mistakes that people make, and what `tidegate check` says of them.
mod golden_rules;
/// The chart and the image: what they deploy is valid, confined, and is what runs.
mod helm;
/// What hostile clients and careless operators send.
mod hostile;
/// The house checks itself: who may import whom, and what every file owes its reader.
mod house;
/// Requests over `/json`: bounded in size, in memory and in the time that they take from others.
mod json;
/// What an instance knows of counters in the store: refusals it repeats, and hits it charges later.
mod known;
/// The rule language: who is one client, who is exempt or refused, and what a request costs.
mod language;
/// Requests too large to be decoded whole: decided like any others, in bounded memory.
mod large;
/// What every algorithm obeys on every store, and an oracle that it equals.
mod laws;
/// Leases, in many instances on a virtual clock and network.
mod leases;
/// The library: decisions in the process that asks.
mod library;
/// Worked examples of the literature, number by number, in this process and on a real Redis.
mod literature;
/// What is logged, for people and for programs, and what becomes of it where nobody reads.
mod logs;
/// Requests beyond the bound on bytes, entries and charges: decided by their domain, in bounded memory.
mod messages;
/// Two services behind one Envoy, of which one decides and the other is compared.
mod migrate;
/// Rule files with one mistake each, and the advice that `check` gives.
mod mistakes;
/// A Redis that moves to another address while the old one lives: under sentinels, and behind a name.
mod moved;
/// Metrics, as a collector of OpenTelemetry is sent them.
mod otlp;
/// Overlays: what an operator lays over rules of any source, followed live.
mod overlay;
/// Rules, requests and time, and the decisions that follow.
mod path;
/// The example of plans, each limit to its last hit.
mod plans;
/// What is answered while the store cannot be asked.
mod policy;
/// A real Prometheus that watches: every alert provoked, every query of the dashboard answered, every number checked.
mod prometheus;
/// A client in another language, with nothing but the address.
mod python;
/// Histories of three instances on a cluster under faults, and a checker of every bound.
mod recorded;
/// Rules that change while they are in force: whole or not at all, and nobody waits.
mod reload;
/// Instances that are replaced one after the other behind an Envoy that fails closed: no request notices.
mod rolling;
/// Redis servers that lack commands, and proxies in front of servers.
mod servers;
/// Many instances, one cluster: never one hit over.
mod shared;
/// The service on virtual time, with a network and a Redis that fail as a seed says.
mod simulation;
/// A long run: an instance under a load that changes all the time keeps neither memory nor open files.
mod soak;
/// Which files of a directory are rule files.
mod sources;
/// Statistics, as a receiver of statsd or DogStatsD gets them.
mod statsd;
/// A server under systemd: its unit, and the notices that it sends.
mod systemd;
/// TLS on the gRPC listener: who is let in, and certificates that change under load.
mod tls;
/// A cluster that changes and breaks under load.
mod topology;
/// Spans, as a receiver of OpenTelemetry is told of them, and as parts of an Envoy's own.
mod traces;
/// What the counters of the embedded store and of Redis owe each other: the same answers.
mod twins;
/// Calls that get no decision, each with its reason, and calls compressed by gzip, which get one.
mod undecided;
/// gRPC on a Unix socket.
mod unix;
/// The protocol as it is published, in messages that are not those of the service.
mod wire;
/// Rules from a control plane, with a management server of the tests.
mod xds;

mod grpc;
mod histories;
mod http;
mod load;
mod redis;
mod support;
mod world;
