//! Head of a call that waits for its body, reduced to the parts that the services read.
//!
//! h2 decodes up to 7,700 fields for a call, which take 600 KB of memory and 7.5 KB on the wire. A call whose request
//! has arrived drops them at once. A call that waits for its body would hold them as long as it waits.

use http::header::{CONTENT_TYPE, EXPECT, HeaderName, HeaderValue, TE};
use http::request::Parts;
use http::{HeaderMap, Method, Uri};

use crate::proto;
use crate::telemetry::traces::CALLER_HEADERS;

/// Maximum bytes of a value that is kept: 512, as for the longest `tracestate`. The other values are far shorter.
const LONGEST_VALUE: usize = 512;
/// Maximum bytes of a path that is kept: 256. The longest path of a service here has 75.
const LONGEST_PATH: usize = 256;
/// Maximum bytes of a method that is kept: 15, which need no allocation.
const LONGEST_METHOD: usize = 15;

static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// Compression of the messages of a call.
pub(crate) static GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
static GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
/// [`proto::EXPLAIN`] as a header name.
pub(crate) static EXPLAIN: HeaderName = HeaderName::from_static(proto::EXPLAIN);
/// Headers that the services read, besides [`CALLER_HEADERS`].
static NEEDED: [&HeaderName; 7] =
    [&CONTENT_TYPE, &TE, &GRPC_TIMEOUT, &GRPC_ENCODING, &GRPC_ACCEPT_ENCODING, &EXPLAIN, &EXPECT];

/// Drops the parts of `head` that no service reads. Copies the rest, because h2's values are slices of whole read
/// buffers.
pub(crate) fn reduce(head: &mut Parts) {
    let mut kept = HeaderMap::new();
    for name in NEEDED.into_iter().chain(CALLER_HEADERS) {
        // Two values are enough to detect a repeated header, which some readers treat as absent.
        let values = || head.headers.get_all(name).iter().take(2);
        if values().any(|value| value.len() > LONGEST_VALUE) {
            continue;
        }
        for value in values().filter_map(|value| HeaderValue::from_bytes(value.as_bytes()).ok()) {
            kept.append(name, value);
        }
    }
    head.headers = kept;
    let path = head.uri.path();
    let path = if path.len() > LONGEST_PATH { "/" } else { path };
    head.uri = Uri::try_from(path).unwrap_or_default();
    if head.method.as_str().len() > LONGEST_METHOD {
        head.method = Method::default();
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn reduced(request: http::request::Builder) -> Parts {
        let (mut head, ()) = request.body(()).unwrap().into_parts();
        reduce(&mut head);
        head
    }

    #[test]
    fn what_the_services_read_is_kept_and_everything_else_is_dropped() {
        let mut request = Request::post("http://edge/a.Service/Call?query")
            .header("grpc-timeout", "20m")
            .header("tidegate-explain", "1")
            .header("tracestate", "a=1")
            .header("tracestate", "b=2")
            .header("user-agent", "x".repeat(1_000));
        for number in 0..1_000 {
            request = request.header("many", number.to_string());
        }
        let head = reduced(request);
        assert_eq!((head.uri.path(), &head.method), ("/a.Service/Call", &Method::POST));
        assert_eq!(head.headers["grpc-timeout"], "20m");
        assert_eq!(head.headers.get_all("tracestate").iter().count(), 2, "several are none to who reads them");
        assert_eq!(head.headers["tidegate-explain"], "1");
        assert_eq!(head.headers.len(), 4);
    }

    #[test]
    fn what_is_longer_than_any_that_is_read_is_dropped() {
        let long = Request::builder()
            .method(Method::from_bytes(&[b'M'; 1_000]).unwrap())
            .uri(format!("http://edge/{}", "p".repeat(1_000)))
            .header("traceparent", "x".repeat(LONGEST_VALUE + 1))
            .header("b3", "x".repeat(LONGEST_VALUE));
        let head = reduced(long);
        assert_eq!((head.uri.path(), &head.method), ("/", &Method::GET));
        assert_eq!(head.headers.keys().collect::<Vec<_>>(), ["b3"]);
    }
}
