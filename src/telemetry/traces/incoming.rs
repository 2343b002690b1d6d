//! The caller's trace context: W3C Trace Context (`traceparent`), or B3 in one header or several. Reading it allocates
//! nothing, because most requests are not recorded.

use std::str::FromStr;

use http::{HeaderMap, HeaderName};
use opentelemetry::trace::{SpanId, TraceId, TraceState};

/// Maximum length of a `tracestate` that is passed on: 512 bytes, the length that W3C asks of everyone. A longer one is
/// dropped whole.
const LONGEST_STATE: usize = 512;

// Header names built once: building one from text takes longer than looking it up.
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
static TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
static B3: HeaderName = HeaderName::from_static("b3");
static B3_TRACE: HeaderName = HeaderName::from_static("x-b3-traceid");
static B3_SPAN: HeaderName = HeaderName::from_static("x-b3-spanid");
static B3_SAMPLED: HeaderName = HeaderName::from_static("x-b3-sampled");
static B3_FLAGS: HeaderName = HeaderName::from_static("x-b3-flags");
/// Headers that are read here.
pub static CALLER_HEADERS: [&HeaderName; 7] =
    [&TRACEPARENT, &TRACESTATE, &B3, &B3_TRACE, &B3_SPAN, &B3_SAMPLED, &B3_FLAGS];

/// The caller's trace context. Malformed headers count as absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CallerTrace {
    /// IDs of the trace and of the caller's span.
    pub(super) ids: Option<(TraceId, SpanId)>,
    /// True if the caller's span is recorded; `None` if the caller leaves the decision to this service.
    pub(super) is_sampled: Option<bool>,
}

impl CallerTrace {
    /// Reads the headers of a request: W3C's if they are valid, else B3.
    pub(super) fn read(headers: &HeaderMap) -> Self {
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
        let w3c = text(&TRACEPARENT).and_then(w3c);
        w3c.or_else(|| text(&B3).and_then(b3)).or_else(|| b3_of_many(&text)).unwrap_or_default()
    }
}

/// Returns the `tracestate` that belongs to a W3C trace.
pub(super) fn state(headers: &HeaderMap) -> TraceState {
    let parent = || headers.get(&TRACEPARENT).and_then(|value| value.to_str().ok()).map(str::trim);
    let is_w3c = || parent().and_then(w3c).is_some();
    let mut given = headers.get_all(&TRACESTATE).iter();
    // Several headers would have to be joined; callers with such long state lose it.
    let only = given.next().filter(|state| given.next().is_none() && state.len() <= LONGEST_STATE);
    let text = only.filter(|_| is_w3c()).and_then(|state| state.to_str().ok());
    text.and_then(|text| TraceState::from_str(text).ok()).unwrap_or_default()
}

/// Parses `00-TRACE-SPAN-FLAGS`; later versions may append more.
fn w3c(text: &str) -> Option<CallerTrace> {
    let mut parts = text.split('-');
    let version = byte(parts.next()?)?;
    let ids = ids(parts.next().filter(|trace| trace.len() == 32)?, parts.next()?)?;
    let flags = byte(parts.next()?)?;
    let is_complete = version != 0xff && (version != 0 || parts.next().is_none());
    is_complete.then_some(CallerTrace { ids: Some(ids), is_sampled: Some(flags & 1 == 1) })
}

/// Parses `TRACE-SPAN[-STATE[-PARENT]]`, or the state alone.
fn b3(text: &str) -> Option<CallerTrace> {
    let mut parts = text.split('-');
    let first = parts.next()?;
    let Some(span) = parts.next() else {
        return Some(CallerTrace { ids: None, is_sampled: Some(sampling(first)?) });
    };
    let is_sampled = match parts.next() {
        Some(state) => Some(sampling(state)?),
        None => None,
    };
    Some(CallerTrace { ids: Some(ids(first, span)?), is_sampled })
}

fn b3_of_many<'a>(text: &impl Fn(&HeaderName) -> Option<&'a str>) -> Option<CallerTrace> {
    let is_debug = text(&B3_FLAGS) == Some("1");
    let is_sampled = if is_debug { Some(true) } else { text(&B3_SAMPLED).and_then(sampling) };
    let ids = text(&B3_TRACE).zip(text(&B3_SPAN)).and_then(|(trace, span)| ids(trace, span));
    (ids.is_some() || is_sampled.is_some()).then_some(CallerTrace { ids, is_sampled })
}

/// Parses a B3 sampling state; old callers send booleans.
fn sampling(text: &str) -> Option<bool> {
    match text {
        "1" | "d" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

/// Parses a trace ID of 128 bits, or of 64 as from old callers, and a span ID of 64 bits. Returns `None` if one of them is 0.
fn ids(trace: &str, span: &str) -> Option<(TraceId, SpanId)> {
    if !matches!(trace.len(), 16 | 32) || span.len() != 16 || !is_hex(trace) || !is_hex(span) {
        return None;
    }
    let trace = TraceId::from(u128::from_str_radix(trace, 16).ok()?);
    let span = SpanId::from(u64::from_str_radix(span, 16).ok()?);
    (trace != TraceId::INVALID && span != SpanId::INVALID).then_some((trace, span))
}

fn byte(text: &str) -> Option<u8> {
    (text.len() == 2 && is_hex(text)).then(|| u8::from_str_radix(text, 16).ok()).flatten()
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn headers(given: &[(&'static str, String)]) -> HeaderMap {
        let header = |(name, value): &(&'static str, String)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        given.iter().map(header).collect()
    }

    fn read(given: &[(&'static str, String)]) -> CallerTrace {
        CallerTrace::read(&headers(given))
    }

    fn known(is_sampled: Option<bool>) -> CallerTrace {
        let ids = (TraceId::from_hex(TRACE).unwrap(), SpanId::from_hex(SPAN).unwrap());
        CallerTrace { ids: Some(ids), is_sampled }
    }

    #[test]
    fn a_caller_is_understood_in_each_of_three_ways() {
        let w3c = |flags: &str| read(&[("traceparent", format!("00-{TRACE}-{SPAN}-{flags}"))]);
        assert_eq!((w3c("01"), w3c("00"), w3c("03")), (known(Some(true)), known(Some(false)), known(Some(true))));
        assert_eq!(read(&[("traceparent", format!("01-{TRACE}-{SPAN}-01-more"))]), known(Some(true)));
        let b3 = |more: &str| read(&[("b3", format!("{TRACE}-{SPAN}{more}"))]);
        assert_eq!((b3("-1"), b3("-0"), b3("")), (known(Some(true)), known(Some(false)), known(None)));
        assert_eq!(b3("-d-05e3ac9a4f6e3b90"), known(Some(true)));
        let many = |more: &[(&'static str, &str)]| {
            let ids = [("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN)];
            let all = ids.iter().chain(more).map(|(name, value)| (*name, (*value).to_owned()));
            read(&all.collect::<Vec<_>>())
        };
        assert_eq!((many(&[]), many(&[("x-b3-sampled", "1")])), (known(None), known(Some(true))));
        assert_eq!(many(&[("x-b3-sampled", "0")]), known(Some(false)));
        assert_eq!(many(&[("x-b3-sampled", "0"), ("x-b3-flags", "1")]), known(Some(true)));
    }

    #[test]
    fn a_short_trace_of_b3_is_the_lower_half_of_a_long_one() {
        let (trace, _) = read(&[("b3", format!("{}-{SPAN}-1", &TRACE[16..]))]).ids.unwrap();
        assert_eq!(trace.to_string(), format!("{:0>32}", &TRACE[16..]));
    }

    #[test]
    fn a_state_alone_decides_without_naming_a_trace() {
        assert_eq!(read(&[("b3", "0".to_owned())]), CallerTrace { ids: None, is_sampled: Some(false) });
        assert_eq!(read(&[("x-b3-sampled", "1".to_owned())]), CallerTrace { ids: None, is_sampled: Some(true) });
    }

    #[test]
    fn w3c_goes_before_b3_and_what_is_wrong_says_nothing() {
        let b3 = ("b3", format!("{TRACE}-{SPAN}-0"));
        assert_eq!(read(&[("traceparent", format!("00-{TRACE}-{SPAN}-01")), b3.clone()]), known(Some(true)));
        let zero = "0".repeat(32);
        for wrong in [
            format!("00-{zero}-{SPAN}-01"),
            format!("00-{TRACE}-{}-01", &zero[..16]),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{}-{SPAN}-01", &TRACE[16..]),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            String::new(),
        ] {
            assert_eq!(read(&[("traceparent", wrong.clone())]), CallerTrace::default(), "{wrong:?}");
            assert_eq!(read(&[("traceparent", wrong.clone()), b3.clone()]), known(Some(false)), "{wrong:?}");
        }
        for wrong in ["2", "", "-", "x-y-1"] {
            assert_eq!(read(&[("b3", wrong.to_owned())]), CallerTrace::default(), "{wrong:?}");
        }
        assert_eq!(read(&[("b3", format!("{TRACE}-{SPAN}-2"))]), CallerTrace::default());
        assert_eq!(read(&[("x-b3-traceid", TRACE.to_owned())]), CallerTrace::default());
    }

    #[test]
    fn the_state_of_a_trace_goes_along_unless_it_is_long() {
        let parent = ("traceparent", format!("00-{TRACE}-{SPAN}-01"));
        let told = |state: String| state_of(&[parent.clone(), ("tracestate", state)]);
        let state_of_b3 = state_of(&[("tracestate", "a=1".to_owned())]);
        assert_eq!((told("a=1,b=2".to_owned()), state_of_b3), ("a=1,b=2".to_owned(), String::new()));
        let long = |more: usize| format!("a={},b={}", "x".repeat(254), "x".repeat(more));
        assert_eq!((told(long(253)).len(), told(long(254))), (512, String::new()));
    }

    fn state_of(given: &[(&'static str, String)]) -> String {
        state(&headers(given)).header()
    }
}
