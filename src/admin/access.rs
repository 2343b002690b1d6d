//! Access to the debug listener: who may read values, and who may change something.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::watch;

use super::mask::{Mask, ValueDigest};
use super::tokens::{AdminToken, AdminTokens, TokenRight};
use crate::edge::pages::{host, is_addressed_directly, is_of_page, only};
use crate::telemetry::throttle::LogThrottle;

/// Target of the log lines about who reads values and who changes something. They are written at every log level.
pub const AUDIT: &str = "tidegate::audit";
/// Maximum number of characters of a path in a log line: 128.
const MOST_LOGGED: usize = 128;

/// Access to the debug listener, by its address.
#[derive(Clone)]
pub enum Access {
    /// A loopback address: whoever is on this machine could read the process too.
    Loopback,
    /// Another address without tokens: values are not served.
    Closed,
    /// Another address with tokens.
    Tokens(Arc<TokenGate>),
}

/// Tokens of readers on other machines, which may change while connections are open.
pub struct TokenGate {
    tokens: watch::Sender<Arc<AdminTokens>>,
    /// Names and addresses under which this instance is reached, in lower case and without brackets.
    hosts: Arc<[String]>,
    mask: Mask,
    refusals: LogThrottle,
}

/// Reader of one request.
#[derive(Clone)]
pub(super) struct Reader(Option<(Arc<TokenGate>, Arc<AdminToken>)>);

/// Reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Denial {
    /// A web page makes the request.
    Page,
    /// The listener is not on a loopback address, and there are no tokens.
    NotHere,
    /// No Host is accepted.
    NoHosts,
    /// The Host is another one.
    Host,
    /// There is no token.
    NoToken,
    /// The token is not known.
    UnknownToken,
    /// The right of the token, which this name has, does not suffice.
    Right(Box<str>),
}

impl Access {
    /// Returns the access to a listener at `address`.
    pub fn of(address: IpAddr, gate: Option<Arc<TokenGate>>) -> Self {
        match gate {
            _ if address.is_loopback() => Self::Loopback,
            Some(gate) => Self::Tokens(gate),
            None => Self::Closed,
        }
    }

    /// Returns the reader of a request.
    fn admit(&self, method: &Method, headers: &HeaderMap) -> Result<Reader, Denial> {
        if is_of_page(headers) {
            return Err(Denial::Page);
        }
        match self {
            Self::Loopback => Ok(Reader(None)),
            Self::Closed => Err(Denial::NotHere),
            Self::Tokens(gate) => {
                let token = gate.admit(method, headers)?;
                Ok(Reader(Some((Arc::clone(gate), token))))
            }
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "Loopback",
            Self::Closed => "Closed",
            Self::Tokens(_) => "Tokens",
        })
    }
}

impl TokenGate {
    /// Returns a gate with these tokens, which accepts `hosts` only. `digest` masks values that are no addresses.
    pub fn new(tokens: AdminTokens, hosts: Arc<[String]>, digest: ValueDigest) -> Self {
        let tokens = watch::Sender::new(Arc::new(tokens));
        Self { tokens, hosts, mask: Mask::new(digest), refusals: LogThrottle::new() }
    }

    /// Replaces the tokens. They hold from the next request on, and streams of tokens that are gone end.
    pub fn replace(&self, tokens: AdminTokens) {
        self.tokens.send_replace(Arc::new(tokens));
    }

    fn admit(&self, method: &Method, headers: &HeaderMap) -> Result<Arc<AdminToken>, Denial> {
        if self.hosts.is_empty() {
            return Err(Denial::NoHosts);
        }
        let name = host(headers).ok_or(Denial::Host)?.to_ascii_lowercase();
        if !self.hosts.contains(&name) {
            return Err(Denial::Host);
        }
        let secret = bearer(headers).ok_or(Denial::NoToken)?;
        let token = self.tokens.borrow().find(secret).ok_or(Denial::UnknownToken)?;
        let reads = matches!(*method, Method::GET | Method::HEAD);
        if reads || token.right == TokenRight::Write { Ok(token) } else { Err(Denial::Right(token.name.clone())) }
    }

    /// Logs a refusal of a token.
    fn log(&self, denial: &Denial) {
        let is_of_token = matches!(denial, Denial::NoToken | Denial::UnknownToken | Denial::Right(_));
        if let Some(count) = is_of_token.then(|| self.refusals.due()).flatten() {
            tracing::warn!(
                event = "admin.denied",
                count,
                "requests to the debug listener were refused; the last one: {}",
                denial.to_string()
            );
        }
    }
}

impl fmt::Debug for TokenGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenGate").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

impl Reader {
    /// Returns the name of the token; `None` for a reader on this machine.
    pub(super) fn token(&self) -> Option<&str> {
        self.0.as_ref().map(|(_, token)| &*token.name)
    }

    /// Masks the values of clients in `page`, unless this reader may see them.
    pub(super) fn mask(&self, page: &mut Value) {
        if let Some(mask) = self.masks() {
            mask.apply(page);
        }
    }

    /// Returns the mask for this reader, if it has one.
    pub(super) fn masks(&self) -> Option<&Mask> {
        let (gate, token) = self.0.as_ref()?;
        (token.right != TokenRight::ReadClear).then_some(&gate.mask)
    }

    /// Waits until the token of this reader is gone. Never returns for a reader on this machine.
    pub(super) async fn is_revoked(&self) {
        let Some((gate, token)) = &self.0 else { return std::future::pending().await };
        // An error means that the gate is gone, which this reader prevents.
        let _ = gate.tokens.subscribe().wait_for(|tokens| !tokens.contains(token)).await;
    }

    /// Writes that this reader sees values in clear. Probes of the health, which has none, would fill the log.
    fn audit(&self, path: &str) {
        let is_clear = |token: &AdminToken| token.right == TokenRight::ReadClear && path != super::process::HEALTH;
        if let Some((_, token)) = self.0.as_ref().filter(|(_, token)| is_clear(token)) {
            let path: String = path.chars().take(MOST_LOGGED).collect();
            tracing::info!(target: AUDIT, event = "admin.read_clear", token = &*token.name, path, "values of clients were read in clear");
        }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Page => "a web page makes this request (Origin, Sec-Fetch-Site), and no page may read this",
            Self::NotHere => {
                "this path is not for everybody on the network, so it is served where DEBUG_HOST is a loopback address, such as 127.0.0.1, or to readers with a token of ADMIN_TOKEN_FILE"
            }
            Self::NoHosts => {
                "ADMIN_HOSTS is empty, so no Host is accepted: set it to the names under which this instance is reached"
            }
            Self::Host => "the Host header is not one of ADMIN_HOSTS",
            Self::NoToken => {
                "a token is needed: send the header `Authorization: Bearer SECRET` with a secret of ADMIN_TOKEN_FILE"
            }
            Self::UnknownToken => "the token is not one of ADMIN_TOKEN_FILE",
            Self::Right(name) => {
                return write!(f, "the token {name} may only read: a change needs the right `write` in ADMIN_TOKEN_FILE");
            }
        })
    }
}

impl IntoResponse for Denial {
    fn into_response(self) -> Response {
        let text = format!("{self}\n");
        match self {
            Self::NoToken | Self::UnknownToken => {
                (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], text).into_response()
            }
            _ => (StatusCode::FORBIDDEN, text).into_response(),
        }
    }
}

/// Passes requests on that `access` admits, with their [`Reader`].
pub(super) async fn enter(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    match access.admit(request.method(), request.headers()) {
        Ok(reader) => {
            reader.audit(request.uri().path());
            request.extensions_mut().insert(reader);
            next.run(request).await
        }
        Err(denial) => {
            if let Access::Tokens(gate) = &access {
                gate.log(&denial);
            }
            denial.into_response()
        }
    }
}

/// Rejects requests whose host is neither an address nor localhost. Applies to loopback only: other callers use names.
pub(super) async fn addressed_directly(request: Request, next: Next) -> Response {
    if is_addressed_directly(request.headers()) {
        return next.run(request).await;
    }
    let why = "the Host header is neither an address nor localhost: a page in a browser may have been led here\n";
    (StatusCode::FORBIDDEN, why).into_response()
}

/// Returns the secret of the Authorization header.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = only(headers, &header::AUTHORIZATION)?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;
    use futures_util::FutureExt;

    use super::*;
    use crate::edge::pages::{FETCH_SITE, headers};

    const SECRET: &str = "q83vEjRWeJq83vEjRWeJq83vEjRWeJq83vEjRWeJq80=";

    fn gate(hosts: &[&str]) -> Arc<TokenGate> {
        let tokens = AdminTokens::parse(format!("ann:read:{SECRET}").as_bytes()).unwrap();
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        Arc::new(TokenGate::new(tokens, hosts, Arc::new(|_: &str, _: &str| "digest".to_owned())))
    }

    #[test]
    fn a_request_needs_one_host_of_the_list_and_one_bearer_token() {
        let access = Access::Tokens(gate(&["tidegate.edge", "2001:db8::1"]));
        let (host, bearer) = ((header::HOST, "Tidegate.Edge:6070"), format!("Bearer {SECRET}"));
        let token = (header::AUTHORIZATION, bearer.as_str());
        let denial = |pairs: &[(HeaderName, &str)]| access.admit(&Method::GET, &headers(pairs)).err();
        assert_eq!(denial(&[host.clone(), token.clone()]), None);
        assert_eq!(denial(&[(header::HOST, "[2001:db8::1]:6070"), token.clone()]), None);
        assert_eq!(denial(&[host.clone(), (header::AUTHORIZATION, &format!("bearer  {SECRET}"))]), None);
        assert_eq!(denial(std::slice::from_ref(&token)), Some(Denial::Host));
        assert_eq!(denial(&[host.clone(), host.clone(), token.clone()]), Some(Denial::Host));
        assert_eq!(denial(&[(header::HOST, "tidegate.edge.evil"), token.clone()]), Some(Denial::Host));
        assert_eq!(denial(std::slice::from_ref(&host)), Some(Denial::NoToken));
        assert_eq!(denial(&[host.clone(), token.clone(), token.clone()]), Some(Denial::NoToken));
        assert_eq!(denial(&[host.clone(), (header::AUTHORIZATION, SECRET)]), Some(Denial::NoToken));
        assert_eq!(denial(&[host.clone(), (header::AUTHORIZATION, "Bearer ann")]), Some(Denial::UnknownToken));
        assert_eq!(denial(&[host, token, (header::ORIGIN, "null")]), Some(Denial::Page));
        let put =
            access.admit(&Method::PUT, &headers(&[(header::HOST, "tidegate.edge"), (header::AUTHORIZATION, &bearer)]));
        assert_eq!(put.err(), Some(Denial::Right("ann".into())));
    }

    #[test]
    fn a_request_that_a_browser_makes_for_a_page_is_denied() {
        let site = |site| Access::Loopback.admit(&Method::GET, &headers(&[(FETCH_SITE, site)])).err();
        for own in ["none", "same-origin"] {
            assert_eq!(site(own), None, "{own}");
        }
        for page in ["cross-site", "same-site", "", "None"] {
            assert_eq!(site(page), Some(Denial::Page), "{page}");
        }
        let both = headers(&[(FETCH_SITE, "none"), (FETCH_SITE, "cross-site")]);
        assert_eq!(Access::Loopback.admit(&Method::GET, &both).err(), Some(Denial::Page));
    }

    #[test]
    fn without_hosts_nobody_is_admitted() {
        let bearer = format!("Bearer {SECRET}");
        let request = headers(&[(header::HOST, "127.0.0.1"), (header::AUTHORIZATION, &bearer)]);
        let denial = Access::Tokens(gate(&[])).admit(&Method::GET, &request).err();
        assert_eq!(denial, Some(Denial::NoHosts));
        assert_eq!(Access::Closed.admit(&Method::GET, &request).err(), Some(Denial::NotHere));
        assert!(Access::Loopback.admit(&Method::PUT, &HeaderMap::new()).is_ok());
    }

    #[tokio::test]
    async fn a_reader_ends_when_its_token_is_gone() {
        let gate = gate(&["a"]);
        let bearer = format!("Bearer {SECRET}");
        let request = headers(&[(header::HOST, "a"), (header::AUTHORIZATION, &bearer)]);
        let reader = Access::Tokens(Arc::clone(&gate)).admit(&Method::GET, &request).unwrap();
        let is_revoked = async || reader.is_revoked().now_or_never().is_some();
        assert!(!is_revoked().await);
        gate.replace(AdminTokens::parse(format!("ann:read-clear:{SECRET}").as_bytes()).unwrap());
        assert!(is_revoked().await, "its right has changed");
    }
}
