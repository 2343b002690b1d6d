//! Requests to the debug listeners of several instances at the same time.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use axum::body::to_bytes;
use clap::{Arg, ArgAction, ArgMatches};
use form_urlencoded::Serializer;
use futures_util::future::join_all;
use serde_json::Value;
use tokio::time::timeout;

use super::server;
use crate::model::{Descriptor, Micros};

mod client;

pub(super) use client::{Client, Instance, is_declined};

/// Maximum size of an answer: 16 MiB, more than an instance keeps.
const MOST: usize = 16 << 20;

/// Reason why an instance is missing whose answer is another page.
pub(super) const FOREIGN: &str = "its answer is not that of a debug listener";
/// Reason why an instance is missing whose answer ends early.
const CUT: &str = "its answer was cut off";
/// Error if all instances are missing.
pub(super) const NOBODY: &str = "no instance answered: set --instance to a debug listener (DEBUG_HOST, DEBUG_PORT)";

/// Advice where no rule matches, or nothing is known.
pub(super) const SEE_UNMATCHED: &str =
    "See also `tidegate top --unmatched`: it lists requests that no rule matches, with the nearest rule.";

/// Answers of the instances.
pub(super) struct Answers {
    /// Instances that answered, each with its answer.
    pub(super) pages: Vec<(String, Value)>,
    /// Instances that did not, each with the reason.
    pub(super) missing: Vec<(String, String)>,
}

impl Answers {
    /// Names the instances that are missing in what follows.
    ///
    /// # Errors
    /// If all are.
    pub(super) fn name_missing(&self) -> anyhow::Result<()> {
        for (instance, why) in &self.missing {
            eprintln!("{instance} is missing below: {why}");
        }
        ensure!(!self.pages.is_empty(), NOBODY);
        Ok(())
    }
}

/// Instances of a command by address, each once, with the names to show.
pub(super) struct Instances {
    /// Client of all of them.
    pub(super) client: Client,
    /// Each address, and its instance.
    pub(super) found: BTreeMap<SocketAddr, Named>,
    /// Instances whose names have no address, with the reason.
    pub(super) missing: Vec<(String, String)>,
}

/// An instance at one of the addresses of a name.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) instance: Instance,
    /// Name on the command line.
    pub(super) name: String,
    /// Name to show, with the address if the name has several.
    pub(super) label: String,
}

/// Returns the arguments for the instances, for access to them, and for how long to wait.
pub(super) fn arguments() -> [Arg; 4] {
    let [token_file, ca] = client::arguments();
    [
        Arg::new("instance")
            .long("instance")
            .value_name("HOST:PORT")
            .action(ArgAction::Append)
            .default_value("127.0.0.1:6070")
            .help("Debug listener of an instance; https://HOST:PORT: over TLS, from another machine. A name with several addresses means one instance per address. Can be repeated"),
        token_file,
        ca,
        server::duration("timeout", "2s").help("Longest wait for each instance. Those that do not answer are named"),
    ]
}

/// Returns the longest wait for each instance.
pub(super) fn wait(matches: &ArgMatches) -> Duration {
    let wait = matches.get_one::<Micros>("timeout").copied().unwrap_or(Micros::from_secs(2));
    Duration::from_micros(wait.get())
}

/// Resolves the names of all instances.
///
/// # Errors
/// If a file of the command cannot be used.
pub(super) async fn instances(matches: &ArgMatches) -> anyhow::Result<Instances> {
    let wait = wait(matches);
    let names = || matches.get_many::<String>("instance").into_iter().flatten();
    let client = Client::of(matches, names())?;
    let resolved = join_all(
        names().map(|name| async move { resolve(name, wait).await.map_err(|why| (name.clone(), format!("{why:#}"))) }),
    );
    let (mut found, mut missing) = (BTreeMap::new(), Vec::new());
    for resolved in resolved.await {
        match resolved {
            Ok(addresses) => {
                for (address, named) in addresses {
                    // What is named by its address stays there, whatever a name has later.
                    let is_address = named.instance.authority.parse() == Ok(address);
                    if is_address || !found.contains_key(&address) {
                        found.insert(address, named);
                    }
                }
            }
            Err(unresolved) => missing.push(unresolved),
        }
    }
    Ok(Instances { client, found, missing })
}

/// Asks all instances at the same time for `path`, each once. An answer without one of `lists` is that of something else.
///
/// # Errors
/// If a file of the command cannot be used.
pub(super) async fn ask(matches: &ArgMatches, path: &str, lists: &[&str]) -> anyhow::Result<Answers> {
    let wait = wait(matches);
    let Instances { client, found, mut missing } = instances(matches).await?;
    let client = &client;
    let asked = found.into_iter().map(|(address, Named { instance, label, .. })| async move {
        let answer = within(wait, get(client, &instance, address, path)).await;
        (label, answer.and_then(|page| if has(&page, lists) { Ok(page) } else { Err(anyhow!(FOREIGN)) }))
    });
    let mut pages = Vec::new();
    for (label, answer) in join_all(asked).await {
        match answer {
            Ok(page) => pages.push((label, page)),
            Err(error) => missing.push((label, format!("{error:#}"))),
        }
    }
    Ok(Answers { pages, missing })
}

fn has(page: &Value, lists: &[&str]) -> bool {
    lists.iter().all(|name| page.get(name).is_some_and(Value::is_array))
}

/// Returns what an instance answers, or an error if that takes longer than `wait`.
pub(super) async fn within<T>(wait: Duration, answer: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    timeout(wait, answer).await.unwrap_or_else(|_| Err(anyhow!("no answer within {wait:?}")))
}

/// Runs a command to its end. A name that does not resolve holds up nothing after it.
///
/// # Errors
/// If the command fails, or cannot be run.
pub(super) fn run<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(command);
    runtime.shutdown_background();
    result
}

/// Returns the argument for the domain.
pub(super) fn domain() -> Arg {
    Arg::new("domain").long("domain").help("Domain of the requests [default: all]")
}

/// Returns the argument for the rule.
pub(super) fn rule() -> Arg {
    Arg::new("rule").long("rule").help("Path of the rule, such as edge.user [default: all]")
}

/// Returns a query with the arguments of these names that are given.
pub(super) fn query(matches: &ArgMatches, names: &[&str]) -> Serializer<'static, String> {
    let mut query = Serializer::new(String::new());
    for name in names {
        if let Some(value) = matches.get_one::<String>(name) {
            query.append_pair(name, value);
        }
    }
    query
}

/// Appends the entries of a descriptor to a query.
pub(super) fn append_entries(query: &mut Serializer<'_, String>, descriptor: Option<&Descriptor>) {
    for entry in descriptor.into_iter().flat_map(|descriptor| &descriptor.entries) {
        let entry = format!("{}={}", String::from_utf8_lossy(&entry.key), String::from_utf8_lossy(&entry.value));
        query.append_pair("entry", &entry);
    }
}

/// Returns the addresses of a name, each with its instance.
///
/// # Errors
/// If the name has none, or is not resolved within `wait`.
pub(super) async fn resolve(name: &str, wait: Duration) -> anyhow::Result<Vec<(SocketAddr, Named)>> {
    let resolved = timeout(wait, addresses(name)).await;
    resolved.unwrap_or_else(|_| Err(anyhow!("its name was not resolved within {wait:?}")))
}

async fn addresses(name: &str) -> anyhow::Result<Vec<(SocketAddr, Named)>> {
    let instance = Instance::parse(name)?;
    let found: Vec<SocketAddr> = tokio::net::lookup_host(&instance.authority)
        .await
        .with_context(|| format!("the name in {name} cannot be resolved"))?
        .collect();
    // The listener is on one of the two addresses of localhost.
    let found = match instance.authority.starts_with("localhost:") && found.iter().any(SocketAddr::is_ipv4) {
        true => found.into_iter().filter(SocketAddr::is_ipv4).collect(),
        false => found,
    };
    let label = |address: &SocketAddr| match found.len() {
        1 => name.to_owned(),
        _ => format!("{name} ({address})"),
    };
    let named =
        |address: &SocketAddr| Named { instance: instance.clone(), name: name.to_owned(), label: label(address) };
    Ok(found.iter().map(|address| (*address, named(address))).collect())
}

async fn get(client: &Client, instance: &Instance, address: SocketAddr, path: &str) -> anyhow::Result<Value> {
    let body = to_bytes(client.open(instance, address, path).await?, MOST).await.context(CUT)?;
    serde_json::from_slice(&body).context(FOREIGN)
}

/// Returns a text of an answer; empty if there is none.
pub(super) fn text(value: &Value, name: &str) -> String {
    printable(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

/// Returns a number of an answer.
pub(super) fn number(value: &Value, name: &str) -> Option<u64> {
    value.get(name).and_then(Value::as_u64)
}

/// Returns a flag of an answer; false if there is none.
pub(super) fn flag(value: &Value, name: &str) -> bool {
    value.get(name).and_then(Value::as_bool).unwrap_or_default()
}

/// Returns a list of an answer; empty if there is none.
pub(super) fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value.get(name).map(items).unwrap_or_default()
}

/// Returns the items of a list.
pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns a descriptor as `--descriptor` reads it.
pub(super) fn descriptor(entries: &[Value]) -> String {
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
