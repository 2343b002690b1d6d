//! Requests to the debug listeners of several instances at the same time.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use axum::body::{Body, to_bytes};
use clap::{Arg, ArgAction, ArgMatches};
use form_urlencoded::Serializer;
use futures_util::future::join_all;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::time::timeout;

use super::server;
use crate::model::{Descriptor, Micros};

/// Maximum size of an answer: 16 MiB, more than an instance keeps.
const MOST: usize = 16 << 20;

/// Reason why an instance is missing whose answer is another page.
pub(super) const FOREIGN: &str = "its answer is not that of a debug listener";
/// Error if all instances are missing.
pub(super) const NOBODY: &str = "no instance answered: set --instance to a debug listener (DEBUG_HOST, DEBUG_PORT)";

/// Answer of an instance, or the reason why there is none.
pub(super) type Answer = (String, anyhow::Result<Value>);

/// Returns the arguments for the instances and for how long to wait.
pub(super) fn arguments() -> [Arg; 2] {
    [
        Arg::new("instance")
            .long("instance")
            .value_name("HOST:PORT")
            .action(ArgAction::Append)
            .default_value("127.0.0.1:6070")
            .help("Debug listener of an instance. A name with several addresses means one instance per address. Can be repeated"),
        server::duration("timeout", "2s").help("Longest wait for each instance. Those that do not answer are named"),
    ]
}

/// Returns the longest wait for each instance.
pub(super) fn wait(matches: &ArgMatches) -> Duration {
    let wait = matches.get_one::<Micros>("timeout").copied().unwrap_or(Micros::from_secs(2));
    Duration::from_micros(wait.get())
}

/// Returns the addresses of all instances with their names, each once, and those whose names have no address, with the reason.
pub(super) async fn instances(matches: &ArgMatches) -> (BTreeMap<SocketAddr, String>, Vec<(String, String)>) {
    let wait = wait(matches);
    let names = matches.get_many::<String>("instance").into_iter().flatten();
    let found = join_all(names.map(|name| async move {
        match timeout(wait, addresses(name)).await {
            Ok(found) => found.map_err(|why| (name.clone(), format!("{why:#}"))),
            Err(_) => Err((name.clone(), format!("its name was not resolved within {wait:?}"))),
        }
    }));
    let (mut instances, mut missing) = (BTreeMap::new(), Vec::new());
    for found in found.await {
        match found {
            Ok(found) => found.into_iter().for_each(|(label, address)| _ = instances.entry(address).or_insert(label)),
            Err(unresolved) => missing.push(unresolved),
        }
    }
    (instances, missing)
}

/// Asks all instances at the same time for `path`, each once.
pub(super) async fn ask(matches: &ArgMatches, path: &str) -> Vec<Answer> {
    let wait = wait(matches);
    let (instances, missing) = instances(matches).await;
    let asked = instances.into_iter().map(|(address, label)| async move {
        let answer = timeout(wait, get(address, path)).await;
        (label, answer.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {wait:?}"))))
    });
    let missing = missing.into_iter().map(|(name, why)| (name, Err(anyhow::anyhow!(why))));
    missing.chain(join_all(asked).await).collect()
}

/// Appends the entries of a descriptor to a query.
pub(super) fn append_entries(query: &mut Serializer<'_, String>, descriptor: Option<&Descriptor>) {
    for entry in descriptor.into_iter().flat_map(|descriptor| &descriptor.entries) {
        let entry = format!("{}={}", String::from_utf8_lossy(&entry.key), String::from_utf8_lossy(&entry.value));
        query.append_pair("entry", &entry);
    }
}

/// Returns the addresses of an instance, each with its label.
async fn addresses(name: &str) -> anyhow::Result<Vec<(String, SocketAddr)>> {
    let expected = || format!("'{name}' is not the address of a debug listener: write HOST:PORT");
    ensure!(
        name.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()),
        expected()
    );
    let found: Vec<SocketAddr> = tokio::net::lookup_host(name)
        .await
        .with_context(|| format!("the name in {name} cannot be resolved"))?
        .collect();
    // The listener is on one of the two addresses of localhost.
    let found = match name.starts_with("localhost:") && found.iter().any(SocketAddr::is_ipv4) {
        true => found.into_iter().filter(SocketAddr::is_ipv4).collect(),
        false => found,
    };
    let label = |address: &SocketAddr| match found.len() {
        1 => name.to_owned(),
        _ => format!("{name} ({address})"),
    };
    Ok(found.iter().map(|address| (label(address), *address)).collect())
}

async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Value> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    // The address and not the name: the listener refuses other names.
    let response =
        client.get(format!("http://{address}{path}").parse()?).await.context("no debug listener answers there")?;
    let status = response.status();
    let body = to_bytes(Body::new(response.into_body()), MOST).await.context("its answer was cut off")?;
    let text = String::from_utf8_lossy(&body);
    ensure!(status.is_success(), "it answered {status}: {:.1000}", printable(text.trim()));
    serde_json::from_str(&text).context(FOREIGN)
}

/// Tells which instances are missing in what follows.
pub(super) fn name_missing(missing: &[(String, String)]) {
    for (instance, why) in missing {
        eprintln!("{instance} is missing below: {why}");
    }
}

/// Returns a text of an answer; empty if there is none.
pub(super) fn text(value: &Value, name: &str) -> String {
    printable(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

/// Returns a descriptor as `--descriptor` reads it.
pub(super) fn descriptor(entries: Option<&Value>) -> String {
    let entries = entries.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let quoted = |text: String| text.replace('\\', "\\\\").replace(',', "\\,");
    let entries =
        entries.iter().map(|entry| format!("{}={}", quoted(text(entry, "key")), quoted(text(entry, "value"))));
    entries.collect::<Vec<_>>().join(",")
}

/// Replaces control characters, which could change what a terminal shows. An instance escapes them, and another answerer may not.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A length in milliseconds, as people say it.
pub(super) struct Ago(pub(super) u64);

impl fmt::Display for Ago {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 / 1_000 {
            0 => write!(f, "less than 1 s"),
            seconds @ 1..120 => write!(f, "{seconds} s"),
            seconds @ 120..7_200 => write!(f, "{} min", seconds / 60),
            seconds @ 7_200..172_800 => write!(f, "{} h", seconds / 3_600),
            seconds => write!(f, "{} d", seconds / 86_400),
        }
    }
}

/// A time of the day in UTC, from milliseconds since the epoch.
pub(super) struct Clock(pub(super) u64);

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1_000 % 86_400;
        write!(f, "{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
    }
}
