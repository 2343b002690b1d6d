//! `tidegate bench`: measures a running server under load.

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::client::Calls;
use self::load::{Length, Load, Measured, Pace};
use self::process::Process;
use self::requests::Distribution;
use self::results::Results;
use super::{FAILED, descriptor, server, with_braces};
use crate::model::{Descriptor, Micros};

mod client;
mod http;
mod json;
mod load;
mod plot;
mod process;
mod requests;
mod results;

/// Longest `--timeout`: a minute, the longest latency that the results tell.
const MAX_TIMEOUT: Micros = Micros::from_secs(60);

pub(super) fn command() -> Command {
    Command::new("bench")
        .about("Measure a running server under load: calls a second, latencies, and how they were decided")
        .long_about(
            "Measures a running server under load: calls a second, latencies, and how they were decided.\n\nWithout --rate it is a closed loop: --in-flight calls at a time on each connection, each followed by the next, so a\nslow server is asked less. With --rate it is an open loop, like callers who do not wait for each other: calls are made\nat that rate whatever the server does, and the latency of a call counts from the moment at which it was due.\n\nWrites a line for each second to standard error, and the results to standard output. Ctrl-C ends it early, with the\nresults so far. Any server of envoy.service.ratelimit.v3 can be measured, and with --http the HTTP check of Tidegate.",
        )
        .after_help(with_braces(
            "Examples:\n  As fast as 32 callers can, over 1,000 users:\n    tidegate bench --domain edge --descriptor user=u{n}\n  5,000 calls a second of a few busy users among 100,000, with a picture of the latencies:\n    tidegate bench --domain edge --descriptor user=u{n} --rate 5000 --keys 100000 --distribution zipf --plot latency.svg\n  One call for each of 1,000 users in 10 tenants, for a script, with the CPU time of the server:\n    tidegate bench --domain edge --descriptor tenant=t{n%10},user=u{n} --distribution in-turn --calls 1000 --json --process server=$(pidof tidegate)\n  128 callers of the HTTP check, each on its connection:\n    tidegate bench --http --address 127.0.0.1:8080 --domain jobs --descriptor user=u{n} --connections 4 --in-flight 32",
        ))
        .arg(server::address())
        .arg(http())
        .args(server::arguments())
        .args(requests())
        .args(pace())
        .args(length())
        .args(timeout())
        .args(output())
}

fn count(name: &'static str, default: &'static str, most: i64) -> Arg {
    Arg::new(name).long(name).value_name("N").default_value(default).value_parser(value_parser!(u32).range(1..=most))
}

fn http() -> Arg {
    Arg::new("http")
        .long("http")
        .action(ArgAction::SetTrue)
        .requires("address")
        .conflicts_with("provenance")
        .help("Ask at /check/DOMAIN over HTTP/1.1, for a domain with `from_gateway: none`. --address is the HTTP port then, and each call in flight has a connection of its own")
}

/// Returns the arguments for the requests.
fn requests() -> [Arg; 5] {
    [
        Arg::new("domain").long("domain").required(true).help("Domain of the requests"),
        descriptor::argument().action(ArgAction::Append).help(with_braces(
            "Descriptor: its entries, outermost first. {n} stands for the number of the request's key, and {n%10} for its last digit (with any divisor). Can be repeated",
        )),
        Arg::new("hits")
            .long("hits")
            .value_name("N")
            .value_parser(value_parser!(u64))
            .help("Hits that each descriptor costs; 0 spends nothing [default: 1]"),
        count("keys", "1000", 1_000_000).help("Number of different requests, numbered from 0"),
        Arg::new("distribution")
            .long("distribution")
            .value_parser(["uniform", "zipf", "in-turn"])
            .default_value("uniform")
            .help("How often each key is drawn. With zipf, the key of rank k as often as 1/k. With in-turn, they are not drawn but sent one after the other"),
    ]
}

/// Returns the arguments for the connections and their calls at the same time.
fn pace() -> [Arg; 3] {
    [
        count("connections", "2", 1_000).help("Connections, each with a thread of this command; with --rate, with two"),
        count("in-flight", "16", 1_000_000).conflicts_with("rate").help("Calls in flight on each connection"),
        Arg::new("rate")
            .long("rate")
            .value_name("N")
            .value_parser(value_parser!(u32).range(1..=10_000_000))
            .help("Calls a second, of all connections together, whatever the server does"),
    ]
}

/// Returns the arguments for the length of the load.
fn length() -> [Arg; 3] {
    [
        server::duration("duration", "10s").help("Length of the measurement"),
        Arg::new("calls")
            .long("calls")
            .value_name("N")
            .value_parser(value_parser!(u64).range(1..))
            .conflicts_with_all(["duration", "warm-up"])
            .help("Make exactly this many calls, without a warm-up, and end"),
        server::duration("warm-up", "2s")
            .value_parser(|text: &str| Micros::parse(text).ok_or("write a duration, such as 2s or 0"))
            .help("Time before the measurement in which calls are made too"),
    ]
}

/// Returns the arguments for the wait for an answer.
fn timeout() -> [Arg; 2] {
    [
        server::duration("timeout", "1s")
            .value_parser(|text: &str| {
                let timeout = Micros::parse(text).filter(|timeout| (Micros::new(1)..=MAX_TIMEOUT).contains(timeout));
                timeout.ok_or("write a duration above 0 and up to 1m, such as 20ms")
            })
            .help("Longest wait for an answer, up to 1m. It is sent with each call, as by Envoy"),
        Arg::new("no-deadline")
            .long("no-deadline")
            .action(ArgAction::SetTrue)
            .help("Do not send the timeout to the server, like callers that set no deadline"),
    ]
}

/// Returns the arguments for what is measured and written.
fn output() -> [Arg; 4] {
    [
        Arg::new("provenance")
            .long("provenance")
            .action(ArgAction::SetTrue)
            .help("Ask Tidegate in each call what decided it, which costs the server more. Other servers do not say it"),
        Arg::new("process")
            .long("process")
            .value_name("NAME=PID")
            .action(ArgAction::Append)
            .value_parser(process::parse)
            .help("Report the CPU time for each answer, and the resident memory, of this process on the same Linux machine. Can be repeated"),
        Arg::new("json")
            .long("json")
            .action(ArgAction::SetTrue)
            .help("Write the results as one JSON object, and no line for each second"),
        Arg::new("plot")
            .long("plot")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help("Draw the latencies by percentile, an SVG"),
    ]
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let load = read(matches)?;
    let plot = matches.get_one::<PathBuf>("plot");
    let is_plot_new = plot.is_some_and(|path| !path.exists());
    if let Some(path) = plot {
        // Before the load, which may take long. A plot that is there stays until then.
        File::options()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let measured = load.run(matches);
    if let (Some(path), true, Err(_)) = (plot, is_plot_new, &measured) {
        // Without it an empty file stays, which harms nothing.
        let _ = std::fs::remove_file(path);
    }
    let Measured { tally, length, used } = measured?;
    let title = load.title(length);
    let latency = tally.latency()?;
    let results = Results { title: &title, tally: &tally, latency: &latency, measured: length, used: &used };
    if matches.get_flag("json") {
        super::print(&format_args!("{:#}\n", results.json()))?;
    } else {
        super::print(&results)?;
    }
    if let Some(path) = plot {
        plot::draw(path, &latency, &title)
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
    let is_http = matches.get_flag("http");
    let encode = if is_http { requests::json } else { requests::framed };
    let requests = requests::encoded(domain, &descriptors, hits, keys, encode);
    let requests = requests.map_err(|error| anyhow!("--descriptor: {error}"))?;
    let calls = matches.get_one::<u64>("calls").copied();
    Ok(Load {
        address: matches.get_one::<String>("address").context("no --address")?.clone(),
        http: is_http.then(|| domain.clone()),
        requests,
        distribution: match matches.get_one::<String>("distribution").map(String::as_str) {
            Some("zipf") => Distribution::zipf(keys),
            Some("in-turn") => Distribution::InTurn,
            _ => Distribution::Uniform,
        },
        connections: number("connections")?,
        pace: match matches.get_one::<u32>("rate") {
            Some(rate) => Pace::Rate(*rate),
            None => Pace::InFlight(number("in-flight")?),
        },
        warm_up: if calls.is_some() { Duration::ZERO } else { duration("warm-up")? },
        length: calls.map_or_else(|| duration("duration").map(Length::For), |calls| Ok(Length::Calls(calls)))?,
        calls: Calls {
            timeout: duration("timeout")?,
            has_deadline: !matches.get_flag("no-deadline"),
            explains: matches.get_flag("provenance"),
        },
        processes: matches.get_many::<Process>("process").into_iter().flatten().cloned().collect(),
        reports: !matches.get_flag("json"),
    })
}
