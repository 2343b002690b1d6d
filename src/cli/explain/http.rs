//! The descriptors that `requests` of a domain makes of an HTTP request, and what each of them meets.

use std::fmt::Write;
use std::net::IpAddr;

use anyhow::{Context, ensure};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::cli::descriptor::spelled;
use crate::rules::requests::Gateway;
use crate::rules::{self, RuleSet};

/// Name of the argument for the path.
pub(super) const PATH: &str = "path";

/// The request on the command line.
pub(super) struct HttpRequest {
    pub(super) method: Method,
    /// Path and query.
    pub(super) path: String,
    pub(super) headers: HeaderMap,
}

impl HttpRequest {
    /// Returns the request that the arguments describe.
    pub(super) fn of(matches: &ArgMatches) -> anyhow::Result<Self> {
        let path = matches.get_one::<String>(PATH).context("no path")?.clone();
        let method = matches.get_one::<Method>("method").cloned().unwrap_or_default();
        let mut headers = HeaderMap::new();
        for (name, value) in matches.get_many::<(HeaderName, HeaderValue)>("header").into_iter().flatten() {
            headers.append(name, value.clone());
        }
        Ok(Self { method, path, headers })
    }
}

/// Returns the arguments that describe a request.
pub(super) fn arguments() -> [Arg; 5] {
    let of_request = |name: &'static str| Arg::new(name).long(name).help_heading("An HTTP request");
    let beside_path = |name: &'static str| of_request(name).requires(PATH).conflicts_with("descriptor");
    let gateways = Gateway::ALL.into_iter().map(|(name, _)| name).filter(|name| *name != "none");
    [
        of_request(PATH)
            .conflicts_with("descriptor")
            .value_name("PATH")
            .help("Path and query of a request about which a gateway asks at /check/DOMAIN, or with --envoy over gRPC"),
        beside_path("method").value_parser(value_parser!(Method)).default_value("GET").help("Method of the request"),
        beside_path("header")
            .action(ArgAction::Append)
            .value_name("NAME: VALUE")
            .value_parser(header)
            .help("Header that the gateway passes on; can be repeated. The client's address is the last one in X-Forwarded-For that is no trusted proxy"),
        beside_path("gateway")
            .value_parser(PossibleValuesParser::new(gateways))
            .help("Gateway that asks. An error if `from_gateway` of the domain is another"),
        beside_path("peer")
            .value_parser(value_parser!(IpAddr))
            .help("Address from which the gateway asks [default: the first of `trusted_proxies`]. With --envoy, the address of the client that Envoy trusts"),
    ]
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once([':', '=']).ok_or("write NAME: VALUE")?;
    let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|error| error.to_string())?;
    Ok((name, HeaderValue::from_str(value.trim()).map_err(|error| error.to_string())?))
}

/// Prints the descriptors of the request and what each of them meets. Returns true if each of them meets a rule.
///
/// # Errors
/// If the domain does not read HTTP requests, or reads those of another gateway.
pub(super) fn explain(matches: &ArgMatches, rules: &RuleSet, domain: &str) -> anyhow::Result<bool> {
    let requests = rules.requests(domain).with_context(|| {
        format!("the domain {domain} has no `requests`, so no gateway can ask about it at /check: write `requests`, or use --descriptor")
    })?;
    let own = Gateway::ALL.into_iter().find(|(_, gateway)| *gateway == requests.gateway).map_or("", |(name, _)| name);
    ensure!(
        !requests.are_in_body(),
        "the domain {domain} has `from_gateway: none`, so its descriptors are in the body of the request: use --descriptor"
    );
    if let Some(asked) = matches.get_one::<String>("gateway") {
        ensure!(asked == own, "the domain {domain} has `from_gateway: {own}`, so it reads no request of {asked}");
    }
    let HttpRequest { method, path, mut headers } = HttpRequest::of(matches)?;
    if let Some((of_path, of_method)) = requests.gateway.headers() {
        headers.insert(of_path, HeaderValue::from_str(&path)?);
        headers.insert(of_method, HeaderValue::from_str(method.as_str())?);
    }
    let first = requests.trusted_proxies.first().map(|network| network.address);
    let peer = matches.get_one::<IpAddr>("peer").copied().or(first).context("no `trusted_proxies`")?;
    let mut text = format!("{own} at {peer} asks about {method} {}\n", path.escape_debug());
    let mut is_matched = true;
    if !requests.trusts(peer) {
        let _ = writeln!(text, "=> refused with 403: {peer} is not in `trusted_proxies` of the domain");
        crate::cli::print(&text)?;
        return Ok(is_matched);
    }
    match requests.read(peer, &method, &path, &headers) {
        Err(unreadable) => {
            let status = requests.refusal_status();
            let _ = writeln!(text, "=> refused with {status}, and nothing is charged: {unreadable}");
        }
        Ok(descriptors) => {
            for descriptor in &descriptors {
                let explanation = rules::explain(rules, domain, descriptor);
                is_matched &= explanation.is_matched();
                let _ = write!(text, "\ndescriptor {}\n{explanation}", spelled(descriptor));
            }
            let skipped = requests.descriptors.len() - descriptors.len();
            if skipped > 0 {
                let _ = writeln!(
                    text,
                    "\n{skipped} of {} descriptors are not made, because a header with `missing: skip` is missing",
                    requests.descriptors.len()
                );
            }
        }
    }
    crate::cli::print(&text)?;
    Ok(is_matched)
}
