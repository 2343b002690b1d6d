//! Requests that a browser makes for a page of another site: their headers say so, and no page may charge counters or read values.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header};

use crate::telemetry::throttle::LogThrottle;

/// Header in which a browser says whose page makes a request.
pub(crate) const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Interval between two log lines of one sign: 1 minute. A page can send thousands of requests.
const LINE_EVERY: Duration = Duration::from_secs(60);

/// Sign that a web page of another site makes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSign {
    /// `Sec-Fetch-Site` names another site.
    Site,
    /// `Origin` is not the address under which this process is called.
    Origin,
    /// `Host` is a name, which a page may have led here.
    Host,
}

/// Gate of the HTTP listener that admits no page of another site. It counts the requests that it refuses.
#[derive(Debug)]
pub struct PageGate {
    checks_host: bool,
    refused: [LogThrottle; PageSign::ALL.len()],
}

impl PageSign {
    /// All signs, in the order of the metric's series.
    pub const ALL: [Self; 3] = [Self::Site, Self::Origin, Self::Host];

    /// Returns the value of the label `reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Site => "site",
            Self::Origin => "origin",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for PageSign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Site => "a web page of another site makes it (Sec-Fetch-Site)",
            Self::Origin => "a web page of another site makes it (Origin)",
            Self::Host => {
                "the Host header is neither an address nor localhost (JSON_ACCESS=loopback): a page in a browser may have been led here"
            }
        })
    }
}

impl PageGate {
    /// Creates a gate. With `checks_host`, a request to `/json` names an address or localhost as its host.
    pub fn new(checks_host: bool) -> Self {
        Self { checks_host, refused: PageSign::ALL.map(|_| LogThrottle::every(LINE_EVERY)) }
    }

    /// Returns the number of requests refused because of `sign`.
    pub fn count(&self, sign: PageSign) -> u64 {
        self.refused[sign as usize].events()
    }

    /// Checks a request to `/json`.
    ///
    /// # Errors
    /// The sign of a page.
    pub(crate) fn admit_to_json(&self, headers: &HeaderMap) -> Result<(), PageSign> {
        self.refuse((self.checks_host && !is_addressed_directly(headers)).then_some(PageSign::Host))?;
        self.admit(headers)
    }

    /// Checks a request with descriptors in its body.
    ///
    /// # Errors
    /// The sign of a page.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<(), PageSign> {
        self.refuse(sign_of_another_site(headers))
    }

    fn refuse(&self, sign: Option<PageSign>) -> Result<(), PageSign> {
        let Some(sign) = sign else { return Ok(()) };
        if let Some(count) = self.refused[sign as usize].due() {
            tracing::warn!(
                event = "http.page_refused",
                reason = sign.name(),
                count,
                "requests to /json or /check were refused and charged nothing: {}",
                sign.to_string()
            );
        }
        Err(sign)
    }
}

/// Returns true if the Host header of the request is an address or localhost. This stops DNS rebinding: a foreign web
/// page can make its own name resolve to this machine, but the browser then sends that name.
pub(crate) fn is_addressed_directly(headers: &HeaderMap) -> bool {
    host(headers).is_some_and(|name| name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok())
}

/// Returns true if a browser makes the request for a page. It names the page in the Origin header, but not for images and the like: there
/// it says in Sec-Fetch-Site that the page is not the user's own input.
pub(crate) fn is_of_page(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || is_of_another_site(headers)
}

/// Returns the host of the Host header without brackets and port.
pub(crate) fn host(headers: &HeaderMap) -> Option<String> {
    let host: Authority = only(headers, &header::HOST)?.parse().ok()?;
    Some(host.host().trim_start_matches('[').trim_end_matches(']').to_owned())
}

/// Returns the text of a header that is there once.
pub(crate) fn only<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { value.to_str().ok() }
}

fn is_of_another_site(headers: &HeaderMap) -> bool {
    let is_own = |site: &HeaderValue| matches!(site.as_bytes(), b"none" | b"same-origin");
    !headers.get_all(FETCH_SITE).iter().all(is_own)
}

fn sign_of_another_site(headers: &HeaderMap) -> Option<PageSign> {
    if is_of_another_site(headers) {
        return Some(PageSign::Site);
    }
    (headers.contains_key(header::ORIGIN) && !is_of_own_origin(headers)).then_some(PageSign::Origin)
}

/// Returns true if the Origin is that of the Host, which is an address or localhost: where Host is a name, the page may have led it here.
fn is_of_own_origin(headers: &HeaderMap) -> bool {
    let origin = only(headers, &header::ORIGIN).and_then(|origin| origin.parse::<Uri>().ok());
    let host = only(headers, &header::HOST).and_then(|host| host.parse::<Authority>().ok());
    let (Some(origin), Some(host)) = (origin, host) else { return false };
    let default_port = match origin.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let port = |port: Option<u16>| port.unwrap_or(default_port);
    is_addressed_directly(headers)
        && origin.host().is_some_and(|name| name.eq_ignore_ascii_case(host.host()))
        && port(origin.port_u16()) == port(host.port_u16())
}

/// Returns these headers.
#[cfg(test)]
pub(crate) fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sign(pairs: &[(HeaderName, &str)]) -> Option<PageSign> {
        PageGate::new(false).admit_to_json(&headers(pairs)).err()
    }

    #[test]
    fn a_request_of_no_page_or_of_the_own_origin_is_admitted() {
        assert_eq!(sign(&[]), None);
        assert_eq!(sign(&[(header::HOST, "tidegate.edge:8080")]), None);
        for site in ["none", "same-origin"] {
            assert_eq!(sign(&[(FETCH_SITE, site)]), None, "{site}");
        }
        for (origin, host) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080"),
            ("http://LOCALHOST:8080", "localhost:8080"),
            ("http://[::1]:8080", "[::1]:8080"),
            ("http://localhost", "localhost:80"),
            ("http://localhost:80", "localhost"),
            ("https://192.0.2.1", "192.0.2.1"),
        ] {
            let pairs = [(header::ORIGIN, origin), (header::HOST, host), (FETCH_SITE, "same-origin")];
            assert_eq!(sign(&pairs), None, "{origin}");
        }
    }

    #[test]
    fn a_request_of_a_page_of_another_site_is_refused() {
        for site in ["cross-site", "same-site", "", "None", "same-origin, cross-site"] {
            assert_eq!(sign(&[(FETCH_SITE, site)]), Some(PageSign::Site), "{site}");
        }
        assert_eq!(sign(&[(FETCH_SITE, "none"), (FETCH_SITE, "cross-site")]), Some(PageSign::Site));
        for origin in [
            "null",
            "",
            "https://attacker.example",
            "http://localhost:3000",
            "http://127.0.0.1:8080",
            "http://localhost:8080.attacker.example",
            "http://localhost:8080@attacker.example",
            "ftp://localhost:8080",
            "file://",
            "http://localhost:x",
        ] {
            let pairs = [(header::ORIGIN, origin), (header::HOST, "localhost:8080"), (FETCH_SITE, "none")];
            assert_eq!(sign(&pairs), Some(PageSign::Origin), "{origin}");
        }
        let own = (header::ORIGIN, "http://localhost:8080");
        assert_eq!(sign(std::slice::from_ref(&own)), Some(PageSign::Origin), "no Host");
        let host = (header::HOST, "localhost:8080");
        assert_eq!(sign(&[own.clone(), own.clone(), host.clone()]), Some(PageSign::Origin));
        assert_eq!(sign(&[own, host.clone(), host]), Some(PageSign::Origin));
        let rebound = [(header::ORIGIN, "http://attacker.example:8080"), (header::HOST, "attacker.example:8080")];
        assert_eq!(sign(&rebound), Some(PageSign::Origin), "its name was made to resolve to this machine");
    }

    #[test]
    fn json_on_loopback_takes_no_name_but_localhost_as_its_host() {
        let gate = PageGate::new(true);
        for host in ["127.0.0.1", "localhost:8080", "[::1]:8080", "192.0.2.1"] {
            assert_eq!(gate.admit_to_json(&headers(&[(header::HOST, host)])), Ok(()), "{host}");
        }
        for host in ["attacker.example", "localhost.attacker.example:8080", ""] {
            assert_eq!(gate.admit_to_json(&headers(&[(header::HOST, host)])), Err(PageSign::Host), "{host}");
        }
        assert_eq!(gate.admit_to_json(&HeaderMap::new()), Err(PageSign::Host));
        assert_eq!(PageSign::ALL.map(|sign| gate.count(sign)), [0, 0, 4]);
    }

    #[test]
    fn only_an_address_or_this_machines_own_name_is_direct() {
        let is_direct = |host: &str| is_addressed_directly(&headers(&[(header::HOST, host)]));
        for direct in ["127.0.0.1", "127.0.0.1:6070", "[::1]:6070", "[::1]", "localhost", "LocalHost:6070"] {
            assert!(is_direct(direct), "{direct}");
        }
        for led in ["", "evil.example", "evil.example:6070", "localhost.evil.example", "127.0.0.1.evil.example", "a b"]
        {
            assert!(!is_direct(led), "{led}");
        }
        assert!(!is_addressed_directly(&HeaderMap::new()));
    }
}
