//! `tidegate call`: sends requests to a running server.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use prost_types::Struct;
use tonic::Request;
use tonic::metadata::MetadataValue;

use super::{REFUSED, admin, descriptor, metadata, server};
use crate::model::{Descriptor, Micros, counted, readable};
use crate::proto::EXPLAIN;
use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use crate::proto::envoy::extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, rate_limit};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::proto::envoy::r#type::v3::RateLimitUnit;

pub(super) fn command() -> Command {
    Command::new("call")
        .about("Send requests to a running server; exit code 0: admitted, 1: refused, 2: no answer")
        .arg(server::address())
        .args(server::arguments())
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the request"))
        .arg(descriptor::argument().action(ArgAction::Append))
        .arg(
            Arg::new("hits")
                .long("hits")
                .action(ArgAction::Append)
                .allow_negative_numbers(true)
                .value_parser(value_parser!(i64))
                .help("Hits per descriptor: once for all, or once per descriptor in the same order; 0 reads the counters and spends nothing, -2 gives 2 hits back [default: 1]"),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N/UNIT")
                .action(ArgAction::Append)
                .value_parser(sent_limit)
                .help("Limit such as 5/minute that replaces the rule's: once for all, or once per descriptor in the same order"),
        )
        .arg(
            Arg::new("show")
                .long("show")
                .action(ArgAction::SetTrue)
                .help("Show the headers, the body and the decision of the answer too, as Envoy gets them"),
        )
        .arg(
            Arg::new("times")
                .long("times")
                .value_parser(value_parser!(u32).range(1..))
                .default_value("1")
                .help("Number of requests, sent one after the other; the last answer decides the exit code"),
        )
        .arg(server::duration("timeout", "1s").help("Timeout of connecting, and of each answer"))
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(ask(matches))
}

async fn ask(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let address = matches.get_one::<String>("address").context("no address")?;
    let domain = matches.get_one::<String>("domain").context("no domain")?;
    let times = matches.get_one::<u32>("times").copied().unwrap_or(1);
    let timeout = matches.get_one::<Micros>("timeout").copied().unwrap_or(Micros::from_secs(1));
    let timeout = std::time::Duration::from_micros(timeout.get());
    let descriptors: Vec<&Descriptor> = matches.get_many("descriptor").into_iter().flatten().collect();

    let hits: Vec<i64> = of_each(matches, "hits", descriptors.len())?;
    let limits: Vec<RateLimitOverride> = of_each(matches, "limit", descriptors.len())?;
    let sent = descriptors.iter().enumerate().map(|(index, descriptor)| {
        let hits = hits.get(index).copied();
        RateLimitDescriptor {
            limit: limits.get(index).copied(),
            is_negative_hits: hits.is_some_and(i64::is_negative),
            ..wire(descriptor, hits.map(i64::unsigned_abs))
        }
    });
    let channel = server::connect(address, matches, timeout).await?;
    let mut client = RateLimitServiceClient::new(channel);
    let request = RateLimitRequest { domain: domain.clone(), descriptors: sent.collect(), hits_addend: 0 };
    let (mut refused, mut is_unmatched) = (false, false);
    for _ in 0..times {
        let mut call = Request::new(request.clone());
        call.set_timeout(timeout);
        // Servers other than Tidegate ignore it.
        call.metadata_mut().insert(EXPLAIN, MetadataValue::from_static("1"));
        let answer = client.should_rate_limit(call).await;
        let response = match answer {
            Ok(response) => response.into_inner(),
            Err(status) => anyhow::bail!(server::failed(address, &status, matches)),
        };
        super::print(&shown(&response, &descriptors))?;
        if matches.get_flag("show") {
            super::print(&details(&response))?;
        }
        if response.overall_code() == Code::Unknown {
            anyhow::bail!("{address} answered with a code that is neither OK nor OVER_LIMIT");
        }
        refused = response.overall_code() == Code::OverLimit;
        is_unmatched |= metadata::decision(&response).is_some_and(has_unmatched);
    }
    if is_unmatched {
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    Ok(if refused { ExitCode::from(REFUSED) } else { ExitCode::SUCCESS })
}

/// Returns one value for each of `number` descriptors. A single value is for all of them.
fn of_each<T: Clone + Send + Sync + 'static>(
    matches: &ArgMatches,
    name: &str,
    number: usize,
) -> anyhow::Result<Vec<T>> {
    let given: Vec<T> = matches.get_many(name).into_iter().flatten().cloned().collect();
    match given.as_slice() {
        [one] => Ok(vec![one.clone(); number]),
        _ if given.is_empty() || given.len() == number => Ok(given),
        _ => anyhow::bail!(
            "--{name} is given {} times for {}: give it once, or once for each",
            given.len(),
            counted(number, "descriptor")
        ),
    }
}

/// Parses a limit such as `5/minute`.
fn sent_limit(text: &str) -> Result<RateLimitOverride, String> {
    let expected = "write N/UNIT, where UNIT is second, minute, hour, day, month or year";
    let (number, unit) = text.split_once('/').ok_or(expected)?;
    let requests_per_unit = number.parse().map_err(|_| expected)?;
    let unit = RateLimitUnit::from_str_name(&unit.to_uppercase()).filter(|unit| *unit != RateLimitUnit::Unknown);
    Ok(RateLimitOverride { requests_per_unit, unit: unit.ok_or(expected)?.into(), unit_multiplier: None })
}

/// Returns the lines for the rest of an answer.
fn details(response: &RateLimitResponse) -> String {
    let mut details = String::new();
    let headers = [("client", &response.response_headers_to_add), ("upstream", &response.request_headers_to_add)];
    for (whom, headers) in headers {
        for header in headers {
            let _ = writeln!(details, "  header for the {whom}: {}: {}", header.key, admin::printable(&header.value));
        }
    }
    if !response.raw_body.is_empty() {
        let _ = writeln!(
            details,
            "  body for the client: {}",
            admin::printable(&String::from_utf8_lossy(&response.raw_body))
        );
    }
    if let Some(decision) = metadata::decision(response) {
        let said = ["outcome", "rule", "limit", "provenance", "id"];
        let fields = said.iter().filter_map(|name| Some(format!("{name}: {}", metadata::text(decision, name)?)));
        let _ = writeln!(details, "  decision: {}", fields.collect::<Vec<_>>().join(", "));
    }
    details
}

/// Returns the descriptor as it is sent.
pub(super) fn wire(descriptor: &Descriptor, hits: Option<u64>) -> RateLimitDescriptor {
    let entries = descriptor.entries.iter().cloned();
    RateLimitDescriptor {
        entries: entries.map(|entry| rate_limit_descriptor::Entry { key: entry.key, value: entry.value }).collect(),
        limit: None,
        hits_addend: hits,
        is_negative_hits: false,
    }
}

/// Returns the lines for an answer: the code of the request, then one line for each descriptor, and one for each limit that refuses only in
/// shadow mode.
fn shown(response: &RateLimitResponse, descriptors: &[&Descriptor]) -> String {
    let mut shown = format!("{}\n", word(response.overall_code()));
    let decision = metadata::decision(response);
    for (index, (status, descriptor)) in response.statuses.iter().zip(descriptors).enumerate() {
        let entries = descriptor.entries.iter();
        let entries: Vec<_> =
            entries.map(|entry| format!("{}={}", readable(&entry.key), readable(&entry.value))).collect();
        let limit = limit(status).unwrap_or_else(|| without_limit(decision, index));
        let _ = writeln!(shown, "  {:10}  {}  {limit}", word(status.code()), entries.join(","));
    }
    let shadow = decision.map_or(&[][..], |decision| metadata::list(decision, "shadow"));
    for refusal in shadow.iter().filter_map(metadata::object) {
        let [rule, quota, limit] =
            ["rule", "quota", "limit"].map(|name| metadata::text(refusal, name).unwrap_or_default());
        let _ = writeln!(shown, "  would be refused by {} (shadow mode)", super::limit_of(rule, quota, limit));
    }
    shown
}

/// Returns true if no rule matches one of the descriptors.
fn has_unmatched(decision: &Struct) -> bool {
    let descriptors = metadata::list(decision, "descriptors").iter().filter_map(metadata::object);
    let mut unmatched = descriptors.filter(|descriptor| metadata::text(descriptor, "rule").is_none());
    unmatched.any(|descriptor| metadata::text(descriptor, "provenance") == Some("none"))
}

/// Returns the reason why the status of descriptor `index` has no limit.
fn without_limit(decision: Option<&Struct>, index: usize) -> String {
    let explained = decision.and_then(|decision| {
        let descriptor = metadata::object(metadata::list(decision, "descriptors").get(index)?)?;
        let rule = metadata::text(descriptor, "rule").unwrap_or("no rule");
        Some((metadata::text(descriptor, "provenance")?, rule))
    });
    let is_known = || decision.and_then(|decision| metadata::flag(decision, "known_domain")) != Some(false);
    match explained {
        Some(("deny", rule)) => format!("denied by {rule}"),
        Some(("exempt", rule)) => format!("exempt by {rule}"),
        Some(("uncounted", _)) => "not counted, because the rule of another descriptor decides the request".to_owned(),
        Some((policy @ ("open" | "closed" | "error"), rule)) => {
            format!("not counted: the store did not answer, policy {policy} of {rule}")
        }
        Some(("known", _)) => "not counted, because another limit of the request is used up".to_owned(),
        Some(("none", "no rule")) if is_known() => "no rule".to_owned(),
        Some(("none", "no rule")) => "unknown domain".to_owned(),
        Some(("none", rule)) => format!("no limit of its own at {rule}, or another rule replaces it"),
        Some((_, rule)) => format!("no limit at {rule}"),
        None => "no limit, and the server does not say why".to_owned(),
    }
}

/// Returns the limit in `status`, if it has one.
fn limit(status: &DescriptorStatus) -> Option<String> {
    let Some(limit) = &status.current_limit else {
        return (status.limit_remaining == u32::MAX).then(|| "unlimited".to_owned());
    };
    let unit = match limit.unit() {
        rate_limit::Unit::Unknown => "window".to_owned(),
        unit => unit.as_str_name().to_lowercase(),
    };
    let window = match limit.unit_multiplier {
        Some(multiplier) => counted(multiplier, &unit),
        None => unit,
    };
    let reset = status.duration_until_reset.map_or(0, |reset| reset.seconds);
    let name = if limit.name.is_empty() { String::new() } else { format!("  ({})", limit.name) };
    let (quota, remaining) = (limit.requests_per_unit, status.limit_remaining);
    Some(format!("{quota} per {window}  remaining {remaining}  reset {reset} s{name}"))
}

fn word(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::OverLimit => "OVER_LIMIT",
        Code::Unknown => "UNKNOWN",
    }
}
