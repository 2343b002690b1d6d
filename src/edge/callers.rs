//! Rights of callers: the names in their certificates, and what the operator grants these names.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;

use self::lines::{DenialLines, DueLine};
use crate::model::{CallerGrants, CallerName, Callers, Grant, GrantedDomains, PeerName, Rights};
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::serve::http::Introduce;

mod lines;

/// Maximum number of characters of a domain, and of a caller's names, in a log line: 128.
const MOST_LOGGED: usize = 128;
/// Interval between two log lines about one caller: 10 s.
const LINES_EVERY: Duration = Duration::from_secs(10);
/// Interval between two log lines about callers of the HTTP listener, who are all one without a file of callers: 1 minute.
const HTTP_LINES_EVERY: Duration = Duration::from_secs(60);

/// Part of a request that its caller has no right to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The domain. The request is not decided.
    Domain,
    /// A limit sent with the request. The request is decided without it.
    Override,
    /// Hits given back. The request is decided without them.
    Refund,
}

/// Callers of all listeners, which may change while connections are open.
#[derive(Debug)]
pub struct CallerGate {
    current: ArcSwap<CallersVersion>,
    counts: [AtomicU64; Denial::ALL.len()],
    lines: DenialLines,
    /// Setting that gives the rights.
    setting: RightsSetting,
}

/// Setting that gives callers their rights.
#[derive(Clone, Copy, Debug)]
enum RightsSetting {
    CallersFile,
    JsonRights,
}

/// Grants, and their number in the order of changes.
#[derive(Debug)]
struct CallersVersion {
    callers: Callers,
    number: u64,
}

/// Caller at the other end of a connection.
#[derive(Debug)]
pub struct ConnectionCaller {
    gate: Arc<CallerGate>,
    /// Names in its certificate; `None` without a certificate.
    names: Option<Box<[PeerName]>>,
    /// Its grants, and the number of the version that gives them.
    granted: ArcSwap<(u64, CallerGrants)>,
}

impl Denial {
    /// All denials, in the order of the metric's series.
    pub const ALL: [Self; 3] = [Self::Domain, Self::Override, Self::Refund];

    /// Returns the value of the label `what`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Domain => "domain",
            Self::Override => "override",
            Self::Refund => "refund",
        }
    }

    /// Returns the sentence of the log line.
    const fn warning(self, setting: RightsSetting) -> &'static str {
        match (self, setting) {
            (Self::Domain, _) => {
                "calls were answered with PERMISSION_DENIED, because CALLERS_FILE does not grant their domain to their caller; an Envoy without failure_mode_deny admits the requests"
            }
            (Self::Override, RightsSetting::CallersFile) => {
                "limits of requests were ignored, because CALLERS_FILE does not grant `override` to their caller"
            }
            (Self::Refund, RightsSetting::CallersFile) => {
                "hits were not given back, because CALLERS_FILE does not grant `refund` to their caller"
            }
            (Self::Override, RightsSetting::JsonRights) => {
                "limits of requests to /json or /check were ignored, because JSON_RIGHTS does not have `override`"
            }
            (Self::Refund, RightsSetting::JsonRights) => {
                "hits were not given back over /json or /check, because JSON_RIGHTS does not have `refund`"
            }
        }
    }
}

impl CallerGate {
    /// Creates a gate with these grants.
    pub fn new(callers: Callers) -> Self {
        Self::of(callers, RightsSetting::CallersFile)
    }

    /// Creates the gate of the HTTP listener without a file of callers: everyone may ask about each domain, with these rights.
    pub fn of_http(rights: Rights) -> Self {
        let everyone = Grant { names: vec![CallerName::Anonymous], domains: GrantedDomains::All, rights };
        Self::of(Callers::new(vec![everyone]), RightsSetting::JsonRights)
    }

    fn of(callers: Callers, setting: RightsSetting) -> Self {
        let every = match setting {
            RightsSetting::CallersFile => LINES_EVERY,
            RightsSetting::JsonRights => HTTP_LINES_EVERY,
        };
        Self {
            current: ArcSwap::from_pointee(CallersVersion { callers, number: 0 }),
            counts: Default::default(),
            lines: DenialLines::new(every),
            setting,
        }
    }

    /// Replaces the grants. They hold from the next call on, on open connections too. One task calls this.
    pub fn replace(&self, callers: Callers) {
        let number = self.current.load().number + 1;
        self.current.store(Arc::new(CallersVersion { callers, number }));
    }

    /// Returns the number of denials of this kind.
    pub fn count(&self, denial: Denial) -> u64 {
        self.counts[denial as usize].load(Ordering::Relaxed)
    }

    /// Returns what adds the caller to each call of a connection.
    pub fn introduce(self: &Arc<Self>) -> Introduce {
        let gate = Arc::clone(self);
        Arc::new(move |names| {
            let caller = Arc::new(gate.caller(names));
            Arc::new(move |extensions| {
                extensions.insert(Arc::clone(&caller));
            })
        })
    }

    /// Returns the caller of a new connection, whose certificate has these `names`; `None` without a certificate.
    fn caller(self: &Arc<Self>, names: Option<Box<[PeerName]>>) -> ConnectionCaller {
        let granted = self.current.load().granted(names.as_deref());
        ConnectionCaller { gate: Arc::clone(self), names, granted: ArcSwap::from_pointee(granted) }
    }
}

impl CallersVersion {
    fn granted(&self, names: Option<&[PeerName]>) -> (u64, CallerGrants) {
        let grants = match names {
            None => self.callers.anonymous().clone(),
            Some(names) => self.callers.of(&names.iter().map(PeerName::as_presented).collect::<Vec<_>>()),
        };
        (self.number, grants)
    }
}

impl ConnectionCaller {
    /// Returns true if the caller may not ask about any domain at present.
    pub fn is_granted_nothing(&self) -> bool {
        self.with_grants(|_, grants| grants.is_empty())
    }

    /// Returns the rights of the caller in `domain` at present. `None` if it may not ask about the domain, which is counted.
    pub fn rights(&self, domain: &str) -> Option<Rights> {
        let rights = self.with_grants(|callers, grants| callers.rights(grants, domain));
        if rights.is_none() {
            self.deny(Denial::Domain, domain);
        }
        rights
    }

    /// Removes from `descriptors` what `rights` do not allow. What is removed is counted in `denied`.
    pub fn restrict(rights: Rights, descriptors: &mut [RateLimitDescriptor], denied: &mut Denied) {
        if rights == Rights::ALL {
            return;
        }
        for descriptor in descriptors {
            if !rights.may_override && descriptor.limit.take().is_some() {
                denied.overrides = true;
            }
            if !rights.may_refund && descriptor.is_negative_hits {
                // A look: it takes nothing, and gives nothing back.
                (descriptor.is_negative_hits, descriptor.hits_addend) = (false, Some(0));
                denied.refunds = true;
            }
        }
    }

    /// Counts what was removed from one request about `domain`.
    pub fn note(&self, denied: Denied, domain: &str) {
        for (is_denied, denial) in [(denied.overrides, Denial::Override), (denied.refunds, Denial::Refund)] {
            if is_denied {
                self.deny(denial, domain);
            }
        }
    }

    fn deny(&self, denial: Denial, domain: &str) {
        self.gate.counts[denial as usize].fetch_add(1, Ordering::Relaxed);
        let name = self.to_string();
        if let Some(DueLine { count, is_shared }) = self.gate.lines.due(&name, denial) {
            let (what, last_domain) = (denial.name(), Shown(domain).to_string());
            let (caller, last_caller) = if is_shared { (None, Some(name)) } else { (Some(name), None) };
            tracing::warn!(
                event = "caller.denied",
                what,
                count,
                caller,
                last_caller,
                last_domain,
                "{}",
                denial.warning(self.gate.setting)
            );
        }
    }

    fn with_grants<T>(&self, take: impl FnOnce(&Callers, &CallerGrants) -> T) -> T {
        let version = self.gate.current.load();
        let granted = self.granted.load();
        if granted.0 == version.number {
            return take(&version.callers, &granted.1);
        }
        let granted = version.granted(self.names.as_deref());
        let taken = take(&version.callers, &granted.1);
        self.granted.store(Arc::new(granted));
        taken
    }
}

/// Kinds of denials in one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Denied {
    overrides: bool,
    refunds: bool,
}

impl Denied {
    /// A limit was ignored, and nothing else.
    pub const OVERRIDES: Self = Self { overrides: true, refunds: false };
}

/// Writes the first name, and the number of others.
impl fmt::Display for ConnectionCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.as_deref() {
            None => f.write_str("anonymous"),
            Some([]) => f.write_str("a certificate without names"),
            Some([first]) => Shown(&first.to_string()).fmt(f),
            Some([first, others @ ..]) => write!(f, "{} and {} other names", Shown(&first.to_string()), others.len()),
        }
    }
}

/// Text of a caller, escaped and cut.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().take(MOST_LOGGED).flat_map(char::escape_debug).try_for_each(|c| fmt::Write::write_char(f, c))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callers(name: CallerName, domain: &str, rights: Rights) -> Callers {
        let domains = GrantedDomains::These([domain.into()].into_iter().collect());
        Callers::new(vec![Grant { names: vec![name], domains, rights }])
    }

    fn edge() -> PeerName {
        PeerName::parse("envoy.edge").unwrap()
    }

    #[test]
    fn an_open_connection_has_the_rights_of_the_last_version() {
        let gate = Arc::new(CallerGate::new(callers(CallerName::Certificate(edge()), "edge", Rights::ALL)));
        let caller = gate.caller(Some([edge()].into()));
        assert_eq!(caller.rights("edge"), Some(Rights::ALL));
        gate.replace(callers(CallerName::Certificate(edge()), "edge", Rights::default()));
        assert_eq!(caller.rights("edge"), Some(Rights::default()));
        gate.replace(callers(CallerName::Anonymous, "edge", Rights::ALL));
        assert_eq!((caller.rights("edge"), caller.is_granted_nothing()), (None, true));
        assert_eq!(gate.caller(None).rights("edge"), Some(Rights::ALL));
        assert_eq!(gate.count(Denial::Domain), 1);
    }

    #[test]
    fn without_a_file_of_callers_http_asks_about_each_domain_with_the_rights_of_its_setting() {
        for rights in [Rights::default(), Rights { may_override: true, may_refund: false }, Rights::ALL] {
            let gate = Arc::new(CallerGate::of_http(rights));
            let caller = gate.caller(None);
            assert_eq!((caller.rights("any"), caller.is_granted_nothing()), (Some(rights), false));
        }
    }

    #[test]
    fn what_a_caller_has_no_right_to_is_taken_out_and_counted_once_for_each_request() {
        let gate = Arc::new(CallerGate::new(callers(CallerName::Anonymous, "edge", Rights::default())));
        let caller = gate.caller(None);
        let refund = RateLimitDescriptor {
            limit: Some(Default::default()),
            hits_addend: Some(7),
            is_negative_hits: true,
            ..Default::default()
        };
        let mut descriptors = [refund.clone(), refund.clone(), RateLimitDescriptor::default()];
        let mut denied = Denied::default();
        ConnectionCaller::restrict(Rights::ALL, &mut descriptors, &mut denied);
        assert_eq!(descriptors[0], refund);
        ConnectionCaller::restrict(Rights::default(), &mut descriptors, &mut denied);
        let look = RateLimitDescriptor { hits_addend: Some(0), ..Default::default() };
        assert_eq!(descriptors, [look.clone(), look, RateLimitDescriptor::default()]);
        caller.note(denied, "edge");
        assert_eq!(Denial::ALL.map(|denial| gate.count(denial)), [0, 1, 1]);
    }
}
