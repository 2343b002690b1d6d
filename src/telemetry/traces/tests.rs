use http::{HeaderMap, HeaderValue};
use opentelemetry_sdk::trace::SpanData;
use tokio::sync::mpsc::{self, Receiver};

use super::*;
use crate::model::Micros;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

struct Noon;

impl Clock for Noon {
    fn now(&self) -> Micros {
        Micros::from_secs(12 * 3_600)
    }
}

struct World {
    traces: Arc<Traces>,
    spans: Receiver<SpanData>,
    dropped: Arc<AtomicU64>,
}

impl World {
    fn new(ratio: f64, follows_caller: bool) -> Self {
        let (sender, spans) = mpsc::channel(4);
        let dropped = Arc::new(AtomicU64::new(0));
        let sampler = Sampler { ratio, follows_caller };
        Self { traces: Arc::new(Traces::new(sampler, Arc::new(Noon), sender, Arc::clone(&dropped))), spans, dropped }
    }

    fn request(&self, flags: Option<&str>) -> Option<Span> {
        let mut headers = HeaderMap::new();
        if let Some(flags) = flags {
            let parent = HeaderValue::from_str(&format!("00-{TRACE}-b7ad6b7169203331-{flags}")).unwrap();
            headers.insert("traceparent", parent);
        }
        self.traces.request(Way::Grpc, &headers)
    }
}

fn has(span: &SpanData, key: &str, value: &str) -> bool {
    span.attributes.iter().any(|pair| pair.key.as_str() == key && pair.value.as_str() == value)
}

#[test]
fn a_caller_decides_whether_its_trace_goes_on_where_it_is_followed() {
    for (ratio, follows, flags, is_recorded) in [
        (0.0, true, None, false),
        (0.0, true, Some("01"), true),
        (0.0, true, Some("00"), false),
        (0.0, false, Some("01"), false),
        (1.0, true, None, true),
        (1.0, true, Some("00"), false),
        (1.0, false, Some("00"), true),
    ] {
        let span = World::new(ratio, follows).request(flags);
        assert_eq!(span.is_some(), is_recorded, "{ratio} {follows} {flags:?}");
    }
}

#[test]
fn of_new_traces_about_the_share_is_recorded() {
    let world = World::new(0.25, true);
    let recorded = (0..4_000).filter(|_| world.request(None).is_some()).count();
    // Seven standard deviations, of 27 requests each, to both sides.
    assert!((800..=1_200).contains(&recorded), "{recorded}");
}

#[test]
fn of_a_share_the_number_of_the_trace_decides_as_in_other_services() {
    let takes = |low: u64| Sampler { ratio: 0.5, follows_caller: false }.takes(TraceId::from(u128::from(low)));
    assert!(takes(0) && takes((1 << 63) - 2) && !takes(1 << 63) && !takes(u64::MAX));
}

#[test]
fn a_span_goes_on_with_the_trace_of_its_caller_and_ends_when_it_is_dropped() {
    let mut world = World::new(0.0, true);
    let mut span = world.request(Some("01")).unwrap();
    span.answered("UNAVAILABLE", true);
    assert!(world.spans.try_recv().is_err(), "it has not ended");
    drop(span);
    let span = world.spans.try_recv().unwrap();
    assert_eq!(span.span_context.trace_id().to_string(), TRACE);
    assert_eq!((span.parent_span_id.to_string().as_str(), span.parent_span_is_remote), ("b7ad6b7169203331", true));
    assert_eq!((span.span_kind.clone(), span.name.as_ref()), (SpanKind::Server, RPC));
    assert_eq!(span.start_time, SystemTime::UNIX_EPOCH + Duration::from_secs(12 * 3_600));
    assert!(has(&span, "rpc.system.name", "grpc") && has(&span, "rpc.response.status_code", "UNAVAILABLE"));
    assert!(has(&span, "error.type", "UNAVAILABLE") && matches!(span.status, Status::Error { .. }));
}

#[tokio::test]
async fn a_store_call_is_a_child_of_the_request_it_serves_and_of_nothing_elsewhere() {
    let mut world = World::new(1.0, true);
    assert!(store_call("a", None, 1).is_none());
    let span = world.request(None).unwrap();
    let (told, done) = tokio::sync::oneshot::channel();
    span.around(async {
        drop(store_call("a", Some(6379), 1).unwrap());
        spawn(async {
            drop(store_call("b", None, 2).unwrap());
            let _ = told.send(());
        });
    })
    .await;
    done.await.unwrap();
    assert!(store_call("a", None, 1).is_none());
    drop(span);
    let [one, two, request] = std::array::from_fn(|_| world.spans.try_recv().unwrap());
    for child in [&one, &two] {
        assert_eq!(child.parent_span_id, request.span_context.span_id());
        assert_eq!(child.span_context.trace_id(), request.span_context.trace_id());
        assert_eq!((child.span_kind.clone(), child.parent_span_is_remote), (SpanKind::Client, false));
    }
    assert!(has(&one, "db.operation.name", "EVALSHA") && has(&one, "server.port", "6379"));
    assert!(has(&two, "db.operation.name", "PIPELINE EVALSHA") && has(&two, "db.operation.batch.size", "2"));
}

#[test]
fn what_finds_no_room_is_dropped_and_counted() {
    let world = World::new(1.0, true);
    for _ in 0..7 {
        drop(world.request(None));
    }
    assert_eq!(world.dropped.load(Ordering::Relaxed), 3);
}

#[test]
fn a_span_whose_caller_went_away_before_its_end_says_so() {
    let mut world = World::new(1.0, true);
    let mut answered = world.request(None).unwrap();
    answered.answered("OK", false);
    drop(answered);
    drop(world.request(None).unwrap());
    let [answered, cancelled] = [world.spans.try_recv().unwrap(), world.spans.try_recv().unwrap()];
    assert!(!has(&answered, "error.type", "cancelled") && answered.status == Status::Unset, "{answered:?}");
    assert!(has(&cancelled, "error.type", "cancelled") && cancelled.status == Status::error(""), "{cancelled:?}");
}

#[test]
fn a_span_of_http_has_the_method_if_it_is_a_known_one_and_the_route() {
    let mut world = World::new(1.0, true);
    for (method, name, recorded) in [
        ("GET", "GET /check/{domain}", "GET"),
        ("get", "HTTP /check/{domain}", "_OTHER"),
        ("X", "HTTP /check/{domain}", "_OTHER"),
    ] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let way = Way::Http { interface: HttpInterface::Check, method: &method };
        let mut span = world.traces.request(way, &HeaderMap::new()).unwrap();
        span.answered_http(503);
        drop(span);
        let span = world.spans.try_recv().unwrap();
        assert_eq!((span.name.as_ref(), span.span_kind.clone()), (name, SpanKind::Server));
        assert!(has(&span, "http.request.method", recorded) && has(&span, "http.route", "/check/{domain}"), "{span:?}");
        assert!(has(&span, "error.type", "503") && matches!(span.status, Status::Error { .. }), "{span:?}");
    }
}
