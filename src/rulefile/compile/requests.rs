//! Compiler for `requests`: how plain HTTP requests are read.

use std::ops::RangeInclusive;

use http::HeaderName;

use super::Compiler;
use super::lists::invalid;
use crate::normalize::network::Network;
use crate::rulefile::document::{RequestEntryNode, RequestPart, RequestsNode};
use crate::rulefile::problem::{Placed, quoted};
use crate::rules::Domain;
use crate::rules::requests::{Gateway, HttpRequests, Missing, ReadEntry, Source};
use crate::rules::tree::Position;

/// Status of a refusal unless another is written: 429 Too Many Requests (RFC 6585).
const TOO_MANY: u16 = 429;
/// Statuses that may be written for a refusal: those of errors (RFC 9110, 15.5 and 15.6).
const REFUSALS: RangeInclusive<u32> = 400..=599;

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
            gateway: gateway.value,
            trusted_proxies,
            refusal_status,
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

    fn request_entries(&mut self, file: usize, entries: Vec<RequestEntryNode>) -> Vec<ReadEntry> {
        entries.into_iter().filter_map(|entry| self.request_entry(file, entry)).collect()
    }

    fn request_entry(&mut self, file: usize, node: RequestEntryNode) -> Option<ReadEntry> {
        let Some(key) = node.key else {
            self.error(file, node.place, "the entry has no key: write `key:` with the key of a descriptor".to_owned());
            return None;
        };
        let is_header = node.from.as_ref().is_some_and(|from| from.value == RequestPart::Header);
        let beside = [
            ("name", node.name.as_ref().map(|name| name.place)),
            ("missing", node.missing.as_ref().map(|missing| missing.place)),
        ];
        for (what, place) in beside.into_iter().filter_map(|(what, place)| place.map(|place| (what, place))) {
            if !is_header {
                self.error(
                    file,
                    place,
                    format!("`{what}` is for headers: write `from: header` beside it, or remove it"),
                );
            }
        }
        let source = match (node.from.map(|from| from.value), node.value) {
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
                self.error(file, node.place, message.to_owned());
                return None;
            }
            (None, Some(value)) => Source::Value(value.value),
            (Some(RequestPart::ClientIp), _) => Source::ClientIp,
            (Some(RequestPart::Path), _) => Source::Path,
            (Some(RequestPart::Method), _) => Source::Method,
            (Some(RequestPart::Header), _) => {
                let name = self.header_name(file, node.place, node.name.as_ref())?;
                Source::Header(name, self.missing(file, node.place, node.missing)?)
            }
        };
        Some(ReadEntry { key: key.value, source })
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
