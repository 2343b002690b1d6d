//! Compiler for `requests`: how plain HTTP requests are read.

use std::ops::RangeInclusive;
use std::time::Duration;

use http::HeaderName;

use super::lists::invalid;
use super::{Compiler, Inherited};
use crate::model::Micros;
use crate::normalize::network::Network;
use crate::rulefile::document::{LimitNode, PartNode, RequestEntryNode, RequestPart, RequestsNode};
use crate::rulefile::problem::{Placed, Report, quoted};
use crate::rules::Domain;
use crate::rules::requests::{
    ClientName, ClientPart, FORWARDED_FOR, Gateway, HttpRequests, Missing, ReadEntry, Source,
};
use crate::rules::tree::Position;

/// Status of a refusal unless another is written: 429 Too Many Requests (RFC 6585).
const TOO_MANY: u16 = 429;
/// Statuses that may be written for a refusal: those of errors (RFC 9110, 15.5 and 15.6).
const REFUSALS: RangeInclusive<u32> = 400..=599;
/// Time that a gateway waits unless another is written: 200 ms, far less than the 5 s of the examples.
const TIMEOUT: Micros = Micros::from_millis(200);
/// Times that may be written: from 10 ms, of which a store in the same network leaves something, to 1 min, the longest that a
/// gateway of the examples waits unless it is configured.
const TIMEOUTS: RangeInclusive<Micros> = Micros::from_millis(10)..=Micros::from_secs(60);

/// A delay in a rule file.
pub(super) struct PlacedDelay {
    domain: Box<str>,
    file: usize,
    place: Position,
    max: Micros,
}

impl Compiler<'_> {
    /// Adds to `domain` how its requests are read, as `file` says.
    pub(super) fn requests(&mut self, domain: &mut Domain, node: Option<Box<RequestsNode>>, file: usize) {
        let Some(node) = node else { return };
        if domain.requests.is_some() {
            let message = "`requests` is already in an earlier file of this domain: write it in one file only";
            self.error(file, node.place, message.to_owned());
        }
        domain.requests = self.http_requests(file, *node).map(Box::new);
    }

    /// Keeps the delay of a limit until `requests` of its domain is known.
    pub(super) fn note_delay(&mut self, node: &LimitNode, inherited: Inherited<'_>) {
        if let Some(max) = node.delay.as_ref().and_then(|delay| delay.max.as_ref()) {
            let (domain, file, place) = (inherited.domain.into(), inherited.file, max.place);
            self.delays.push(PlacedDelay { domain, file, place, max: max.value });
        }
    }

    /// Warns about delays that are longer than a check may be held.
    pub(super) fn delays_fit_checks(&mut self) {
        for PlacedDelay { domain, file, place, max } in std::mem::take(&mut self.delays) {
            let requests = self.domains.get(&domain).and_then(|domain| domain.requests.as_ref());
            let longest = requests.map(|requests| Micros::from(requests.longest_delay()));
            if let Some(longest) = longest.filter(|longest| max > *longest) {
                let message = format!(
                    "over /check a request waits for at most {longest} (80% of `timeout` of `requests`, less 5 ms for the answer) and is refused where this delay is longer: write `max: {longest}` or less, or raise `timeout` if the gateway waits longer"
                );
                self.warning(file, place, message);
            }
        }
    }

    /// Returns how requests are read. Reports what is missing or has no effect.
    fn http_requests(&mut self, file: usize, node: RequestsNode) -> Option<HttpRequests> {
        let place = node.place;
        let Some(gateway) = node.from_gateway else {
            let message =
                "`requests` does not say who asks: write `from_gateway:` with nginx, traefik, caddy, envoy or none";
            self.error(file, place, message.to_owned());
            return None;
        };
        if node.trusted_proxies.is_empty() {
            let message = "`requests` names nobody who may ask: write the addresses of the gateway like `trusted_proxies: [10.0.0.0/8]`";
            self.error(file, place, message.to_owned());
        }
        let trusted_proxies = node.trusted_proxies.iter().filter_map(|text| self.proxy(file, text)).collect();
        let refusal_place = node.refusal_status.as_ref().map_or(place, |status| status.place);
        let refusal_status = self.refusal_status(file, node.refusal_status.as_ref());
        let is_valid = REFUSALS.contains(&refusal_status.into());
        if gateway.value == Gateway::Nginx && is_valid && !matches!(refusal_status, 401 | 403) {
            let message = "NGINX' `auth_request` takes only 401 and 403 for a refusal, and answers 500 for any other status: write `refusal_status: 403`";
            self.warning(file, refusal_place, message.to_owned());
        }
        let timeout = self.timeout(file, node.timeout.as_ref());
        let descriptors = match (gateway.value, node.descriptors) {
            (Gateway::None, Some((place, _))) => {
                let message =
                    "with `from_gateway: none` the descriptors are in the body of each request: remove `descriptors`";
                self.error(file, place, message.to_owned());
                Vec::new()
            }
            (Gateway::None, None) => Vec::new(),
            (_, Some((_, descriptors))) if !descriptors.is_empty() => {
                let descriptors = descriptors.into_iter();
                descriptors.map(|entries| self.request_entries(file, entries)).collect()
            }
            _ => {
                let message = "`requests` counts nothing: write `descriptors:` with a list like `- [{ key: remote_address, from: client_ip }]`";
                self.error(file, place, message.to_owned());
                Vec::new()
            }
        };
        let keeps_escaped_slashes = node.keeps_escaped_slashes;
        Some(HttpRequests {
            file,
            gateway: gateway.value,
            trusted_proxies,
            refusal_status,
            timeout,
            keeps_escaped_slashes,
            descriptors,
        })
    }

    fn proxy(&mut self, file: usize, text: &Placed<String>) -> Option<Network> {
        match Network::parse(&text.value) {
            Some(Ok(network)) => return Some(network),
            Some(Err(error)) => self.error(file, text.place, invalid(&quoted(&text.value), error)),
            None => {
                let message =
                    format!("{} is no address and no network: write one like 10.0.0.0/8", quoted(&text.value));
                self.error(file, text.place, message);
            }
        }
        None
    }

    fn refusal_status(&mut self, file: usize, found: Option<&Placed<u32>>) -> u16 {
        let Some(Placed { value, place }) = found else { return TOO_MANY };
        if !REFUSALS.contains(value) {
            let message =
                format!("{value} is no status that refuses: write a number from 400 to 599, such as 429 or 403");
            self.error(file, *place, message);
        }
        u16::try_from(*value).unwrap_or(u16::MAX)
    }

    fn timeout(&mut self, file: usize, found: Option<&Placed<Micros>>) -> Duration {
        if let Some(Placed { value, place }) = found.filter(|timeout| !TIMEOUTS.contains(&timeout.value)) {
            let message = format!("{value} is no time that a gateway waits for a check: write one from 10ms to 1m");
            self.error(file, *place, message);
        }
        Duration::from_micros(found.map_or(TIMEOUT, |timeout| timeout.value).get())
    }

    fn request_entries(&mut self, file: usize, entries: Vec<RequestEntryNode>) -> Vec<ReadEntry> {
        entries.into_iter().filter_map(|entry| self.request_entry(file, entry)).collect()
    }

    fn request_entry(&mut self, file: usize, node: RequestEntryNode) -> Option<ReadEntry> {
        let RequestEntryNode { place, key, from, name, value, missing } = node;
        let Some(key) = key else {
            self.error(file, place, "the entry has no key: write `key:` with the key of a descriptor".to_owned());
            return None;
        };
        let is_header = |part: &PartNode| part.part == RequestPart::Header;
        let beside = [
            (
                "name",
                name.as_ref().map(|name| name.place),
                from.iter().any(|part| is_header(part) && part.header.is_none()),
            ),
            ("missing", missing.as_ref().map(|missing| missing.place), from.iter().any(is_header)),
        ];
        for (what, beside, has_effect) in beside {
            if let Some(beside) = beside
                && !has_effect
            {
                let message = format!("`{what}` is for headers: write `from: header` beside it, or remove it");
                self.error(file, beside, message);
            }
        }
        let source = match (from.first().map(|part| part.part), value) {
            (Some(_), Some(value)) => {
                self.error(
                    file,
                    value.place,
                    "the entry has both `from` and `value`: remove one of the two".to_owned(),
                );
                return None;
            }
            (None, None) => {
                let message =
                    "the entry has no value: write `from:` with client_ip, path, method or header, or `value:`";
                self.error(file, place, message.to_owned());
                return None;
            }
            (None, Some(value)) => Source::Value(value.value),
            (Some(RequestPart::Path), _) => Source::Path,
            (Some(RequestPart::Method), _) => Source::Method,
            (Some(RequestPart::ClientIp | RequestPart::Header), _) => {
                let parts = self.client_parts(file, place, &from, name.as_ref())?;
                let missing = match parts.last() {
                    // Every request has an address.
                    Some(ClientPart::Address) => {
                        if let Some(missing) = missing.filter(|_| parts.len() > 1) {
                            let message =
                                "`missing` has no effect beside `client_ip`, which every request has: remove it";
                            self.warning(file, missing.place, message.to_owned());
                        }
                        Missing::Refuse
                    }
                    _ => self.missing(file, place, missing)?,
                };
                Source::First(named(parts), missing)
            }
        };
        Some(ReadEntry { key: key.value, source, place })
    }

    /// Returns the parts of a request that `from` names. `name` is the name of the header beside `from`.
    fn client_parts(
        &mut self,
        file: usize,
        entry: Position,
        from: &[PartNode],
        name: Option<&Placed<String>>,
    ) -> Option<Vec<ClientPart>> {
        let mut parts = Vec::new();
        for node in from {
            let part = match node.part {
                RequestPart::Header => {
                    let header = self.header_name(file, entry, node.header.as_ref().or(name))?;
                    if header == FORWARDED_FOR {
                        let message = "anybody can write the beginning of `x-forwarded-for`: write `client_ip` in its place, which finds the client's address in it";
                        self.warning(file, node.place, message.to_owned());
                    }
                    if node.is_address(name) { ClientPart::AddressHeader(header) } else { ClientPart::Header(header) }
                }
                _ => ClientPart::Address,
            };
            if parts.iter().any(|earlier| matches!(earlier, ClientPart::Address) || *earlier == part) {
                let message = "no request comes to this item of `from`, because an item before it always has a value or is the same: remove it, or write `client_ip` last";
                self.error(file, node.place, message.to_owned());
            }
            parts.push(part);
        }
        Some(parts)
    }

    fn header_name(&mut self, file: usize, place: Position, name: Option<&Placed<String>>) -> Option<HeaderName> {
        let Some(name) = name else {
            self.error(
                file,
                place,
                "the entry does not say which header: write `name:`, such as `name: x-api-key`".to_owned(),
            );
            return None;
        };
        let parsed = HeaderName::from_bytes(name.value.as_bytes());
        if parsed.is_err() {
            self.error(file, name.place, format!("{} is no name of a header", quoted(&name.value)));
        }
        parsed.ok()
    }

    fn missing(&mut self, file: usize, place: Position, missing: Option<Placed<Missing>>) -> Option<Missing> {
        let Some(missing) = missing else {
            let message = "the entry does not say what counts without the header: write `missing:` with skip, refuse or a value like `{value: anonymous}`";
            self.error(file, place, message.to_owned());
            return None;
        };
        if missing.value == Missing::Skip {
            let message = "`missing: skip` sets no limit on requests without this header, which a client can leave out: write `refuse` or a value, unless the gateway always sends it";
            self.warning(file, missing.place, message.to_owned());
        }
        Some(missing.value)
    }
}

/// Reports headers with which a client gets any number of counters, because nothing limits its address.
pub(super) fn warn_of_unlimited_addresses(domain: &Domain, reports: &mut [Report]) {
    let Some(requests) = &domain.requests else { return };
    for (place, header) in domain.headers_beyond_addresses(requests) {
        reports[requests.file].warning(place, || {
            format!(
                "a client can write any `{header}`, and each value is counted by itself: beside it, limit the address alone, like `- [{{ key: remote_address, from: client_ip }}]` with a `rate_limit` for that key, unless the gateway always writes this header itself"
            )
        });
    }
}

/// Returns `parts` with the texts that make their values different: addresses beside a header with any text begin with `client_ip:`, and a
/// second such header with its name.
fn named(parts: Vec<ClientPart>) -> Vec<ClientName> {
    let is_mixed = parts.iter().any(|part| !part.is_address());
    let mut is_first = true;
    let name = |part| {
        let prefix = match &part {
            ClientPart::Header(_) if std::mem::take(&mut is_first) => String::new(),
            ClientPart::Header(name) => format!("{name}:"),
            _ if is_mixed => "client_ip:".to_owned(),
            _ => String::new(),
        };
        ClientName { part, prefix }
    };
    parts.into_iter().map(name).collect()
}
