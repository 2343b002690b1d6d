//! `tidegate bench`: measures a running server under load.

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::load::{Distribution, Load, Pace};
use self::results::Results;
use super::call::wire;
use super::{FAILED, descriptor, server};
use crate::model::{Descriptor, Entry, Micros};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

mod load;
mod plot;
mod results;

/// Text in the value of an entry that stands for the number of a key.
const NUMBER: &str = "{n}";
/// Longest `--timeout`: a minute, the longest latency that the results tell.
const MAX_TIMEOUT: Micros = Micros::from_secs(60);

pub(super) fn command() -> Command {
    let count = |name: &'static str, default: &'static str, most: i64| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .default_value(default)
            .value_parser(value_parser!(u32).range(1..=most))
    };
    Command::new("bench")
        .about("Measure a running server under load: calls a second, latencies, and how they were decided")
        .long_about(
            "Measures a running server under load: calls a second, latencies, and how they were decided.\n\nWithout --rate it is a closed loop: --in-flight calls at a time on each connection, each followed by the next, so a\nslow server is asked less. With --rate it is an open loop, like callers who do not wait for each other: calls are made\nat that rate whatever the server does, and the latency of a call counts from the moment at which it was due.\n\nWrites a line for each second to standard error, and the results to standard output. Ctrl-C ends it early, with the\nresults so far. Any server of envoy.service.ratelimit.v3 can be measured.",
        )
        .after_help(
            "Examples:\n  As fast as 32 callers can, over 1,000 users:\n    tidegate bench --domain edge --descriptor user=u{n}\n  5,000 calls a second of a few busy users among 100,000, with a picture of the latencies:\n    tidegate bench --domain edge --descriptor user=u{n} --rate 5000 --keys 100000 --distribution zipf --plot latency.svg",
        )
        .arg(server::address())
        .args(server::arguments())
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the requests"))
        .arg(descriptor::argument().action(ArgAction::Append).help(
            "Descriptor: its entries, outermost first. In a value, {n} stands for the number of the request's key. Can be repeated",
        ))
        .arg(
            Arg::new("hits")
                .long("hits")
                .value_parser(value_parser!(u64))
                .help("Hits that each descriptor costs; 0 spends nothing [default: 1]"),
        )
        .arg(count("keys", "1000", 1_000_000).help("Number of different requests, numbered from 0"))
        .arg(
            Arg::new("distribution")
                .long("distribution")
                .value_parser(["uniform", "zipf"])
                .default_value("uniform")
                .help("How often each key is drawn. With zipf, the key of rank k as often as 1/k"),
        )
        .arg(count("connections", "2", 1_000).help("Connections, each with a thread of this command; with --rate, with two"))
        .arg(count("in-flight", "16", 1_000_000).conflicts_with("rate").help("Calls in flight on each connection"))
        .arg(
            Arg::new("rate")
                .long("rate")
                .value_name("N")
                .value_parser(value_parser!(u32).range(1..=10_000_000))
                .help("Calls a second, of all connections together, whatever the server does"),
        )
        .arg(server::duration("duration", "10s").help("Length of the measurement"))
        .arg(
            server::duration("warm-up", "2s")
                .value_parser(|text: &str| Micros::parse(text).ok_or("write a duration, such as 2s or 0"))
                .help("Time before the measurement in which calls are made too"),
        )
        .arg(timeout())
        .arg(
            Arg::new("provenance")
                .long("provenance")
                .action(ArgAction::SetTrue)
                .help("Ask Tidegate in each call what decided it, which costs the server more. Other servers do not say it"),
        )
        .arg(
            Arg::new("plot")
                .long("plot")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("Draw the latencies by percentile, an SVG"),
        )
}

fn timeout() -> Arg {
    server::duration("timeout", "1s")
        .value_parser(|text: &str| {
            let timeout = Micros::parse(text).filter(|timeout| (Micros::new(1)..=MAX_TIMEOUT).contains(timeout));
            timeout.ok_or("write a duration above 0 and up to 1m, such as 20ms")
        })
        .help("Longest wait for an answer, up to 1m. It is sent with each call, as by Envoy")
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let load = read(matches)?;
    let plot = matches.get_one::<PathBuf>("plot");
    if let Some(path) = plot {
        // Before the load, which may take long. A plot that is there stays until then.
        File::options()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let (tally, measured) = load.run(matches)?;
    let title = load.title(measured);
    super::print(&Results { title: &title, tally: &tally, measured })?;
    if let Some(path) = plot {
        plot::draw(path, &tally, &title)
            .with_context(|| format!("the plot cannot be written to {}", path.display()))?;
    }
    Ok(if tally.decided() > 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn read(matches: &ArgMatches) -> anyhow::Result<Load> {
    let number = |name| matches.get_one::<u32>(name).copied().with_context(|| format!("no --{name}"));
    let duration = |name| {
        let duration = matches.get_one::<Micros>(name).with_context(|| format!("no --{name}"))?;
        anyhow::Ok(Duration::from_micros(duration.get()))
    };
    let domain = matches.get_one::<String>("domain").context("no --domain")?;
    let descriptors: Vec<&Descriptor> = matches.get_many("descriptor").into_iter().flatten().collect();
    let hits = matches.get_one::<u64>("hits").copied();
    let keys = number("keys")?;
    let has_number = |entry: &Entry| String::from_utf8_lossy(&entry.value).contains(NUMBER);
    let is_single = keys > 1 && !descriptors.iter().flat_map(|descriptor| &descriptor.entries).any(has_number);
    // One request is as many as any number of equal ones.
    let keys = if is_single { 1 } else { keys };
    let requests = (0..keys).map(|key| request(domain, &descriptors, hits, key)).collect();
    let is_zipf = matches.get_one::<String>("distribution").is_some_and(|name| name == "zipf");
    Ok(Load {
        address: matches.get_one::<String>("address").context("no --address")?.clone(),
        requests,
        distribution: if is_zipf { Distribution::zipf(keys) } else { Distribution::Uniform },
        connections: number("connections")?,
        pace: match matches.get_one::<u32>("rate") {
            Some(rate) => Pace::Rate(*rate),
            None => Pace::InFlight(number("in-flight")?),
        },
        warm_up: duration("warm-up")?,
        duration: duration("duration")?,
        timeout: duration("timeout")?,
        explains: matches.get_flag("provenance"),
    })
}

/// Returns the request of the key `number`.
fn request(domain: &str, descriptors: &[&Descriptor], hits: Option<u64>, number: u32) -> RateLimitRequest {
    let numbered = |entry: &Entry| {
        let value = String::from_utf8_lossy(&entry.value).replace(NUMBER, &number.to_string());
        Entry::new(String::from_utf8_lossy(&entry.key).into_owned(), value)
    };
    let descriptors = descriptors.iter().map(|descriptor| {
        let entries = descriptor.entries.iter().map(numbered).collect();
        wire(&Descriptor { entries, ..Descriptor::default() }, hits)
    });
    RateLimitRequest { domain: domain.to_owned(), descriptors: descriptors.collect(), hits_addend: 0 }
}
