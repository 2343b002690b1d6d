use std::time::Duration;

use super::TraceSettings;
use crate::settings::ExportProtocol;
use crate::settings::tests::{read, wrong};

const ON: (&str, &str) = ("TRACING_ENABLED", "true");

fn traces(given: &[(&str, &str)]) -> TraceSettings {
    let settings = read(&[&[ON], given].concat()).unwrap_or_else(|wrong| panic!("{given:?}: {wrong:?}"));
    settings.traces.expect("they are on")
}

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn nothing_is_recorded_unless_somebody_asks() {
    assert_eq!(read(&[]).unwrap().traces, None);
    assert_eq!(read(&[ON, ("OTEL_SDK_DISABLED", "TRUE")]).unwrap().traces, None);
    assert_eq!(read(&[("OTEL_TRACES_SAMPLER", "of somebody else")]).unwrap().traces, None);
}

#[test]
fn the_defaults_are_the_references() {
    let expected = TraceSettings {
        protocol: ExportProtocol::Http,
        endpoint: "http://localhost:4318/v1/traces".to_owned(),
        tls: None,
        timeout: Duration::from_secs(10),
        ratio: 1.0,
        follows_caller: true,
        resource: pairs(&[("service.name", "RateLimit")]),
    };
    assert_eq!(traces(&[]), expected);
}

#[test]
fn an_endpoint_that_is_refused_is_shown_without_its_secrets() {
    for endpoint in ["http://alice:hunter2@h:4318", "http://h:4318/?key=hunter2", "http://h:4318?hunter2#hunter2"] {
        for variable in ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] {
            let wrong = wrong(&[("TRACING_ENABLED", "true"), (variable, endpoint)]).concat();
            assert!(wrong.contains("***") && !wrong.contains("hunter2"), "{wrong}");
        }
    }
}

#[test]
fn http_adds_its_path_to_the_endpoint_of_everything_and_nothing_to_the_one_of_spans() {
    let endpoint = |given: &[(&str, &str)]| traces(given).endpoint;
    let (all, spans) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    let grpc = ("TRACING_EXPORTER_PROTOCOL", "grpc");
    assert_eq!(endpoint(&[(all, "http://a:1")]), "http://a:1/v1/traces");
    assert_eq!(endpoint(&[(all, "http://a:1/otlp/")]), "http://a:1/otlp/v1/traces");
    assert_eq!(endpoint(&[(all, "http://a:1"), (spans, "https://b:2/x")]), "https://b:2/x");
    assert_eq!(endpoint(&[grpc]), "http://localhost:4317");
    assert_eq!(endpoint(&[grpc, (all, "http://a:1")]), "http://a:1");
}

#[test]
fn a_variable_of_opentelemetry_goes_before_the_references() {
    let given = traces(&[
        ("TRACING_EXPORTER_PROTOCOL", "http"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("TRACING_SAMPLING_RATE", "0.5"),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
    ]);
    assert_eq!((given.protocol, given.ratio, given.follows_caller), (ExportProtocol::Grpc, 0.25, false));
    assert_eq!(given.timeout, Duration::from_millis(1_500));
    let spans = [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")];
    assert_eq!(traces(&spans).protocol, ExportProtocol::Http);
}

#[test]
fn every_sampler_is_a_share_and_whether_callers_are_followed() {
    for (name, ratio, follows_caller) in [
        ("always_on", 1.0, false),
        ("always_off", 0.0, false),
        ("traceidratio", 1.0, false),
        ("parentbased_always_on", 1.0, true),
        ("parentbased_always_off", 0.0, true),
        ("parentbased_traceidratio", 1.0, true),
    ] {
        let given = traces(&[("TRACING_SAMPLING_RATE", "0.5"), ("OTEL_TRACES_SAMPLER", name)]);
        assert_eq!((given.ratio, given.follows_caller), (ratio, follows_caller), "{name}");
    }
    let given = traces(&[("TRACING_SAMPLING_RATE", "0.5")]);
    assert_eq!((given.ratio, given.follows_caller), (0.5, true));
}

#[test]
fn the_process_is_described_by_both_and_its_name_is_the_most_particular_one() {
    let own = [
        ("TRACING_SERVICE_NAME", "ours"),
        ("TRACING_SERVICE_NAMESPACE", "edge"),
        ("TRACING_SERVICE_INSTANCE_ID", "one"),
    ];
    let described = |more: &[(&str, &str)]| {
        let mut resource = traces(&[&own, more].concat()).resource;
        resource.sort_unstable();
        resource
    };
    let with =
        |name: &str| pairs(&[("service.instance.id", "one"), ("service.name", name), ("service.namespace", "edge")]);
    assert_eq!(described(&[]), with("ours"));
    assert_eq!(described(&[("OTEL_RESOURCE_ATTRIBUTES", "service.name=a%2Cb")]), with("a,b"));
    let both = [("OTEL_RESOURCE_ATTRIBUTES", "service.name=a"), ("OTEL_SERVICE_NAME", "theirs")];
    assert_eq!(described(&both), with("theirs"));
    let attributes = [("OTEL_RESOURCE_ATTRIBUTES", "zone=north, service.namespace=n,")];
    let expected =
        [("service.instance.id", "one"), ("service.name", "ours"), ("service.namespace", "n"), ("zone", "north")];
    assert_eq!(described(&attributes), pairs(&expected));
}

#[test]
fn what_is_wrong_is_named_with_what_was_expected_and_no_secret() {
    let all = [
        ON,
        ("OTEL_SDK_DISABLED", "maybe"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key hunter2"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_RESOURCE_ATTRIBUTES", "=x"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://collector"),
        ("OTEL_TRACES_SAMPLER", "xray"),
        ("OTEL_TRACES_SAMPLER_ARG", "2"),
    ];
    assert_eq!(
        wrong(&all),
        [
            r#"OTEL_SDK_DISABLED is "maybe": expected true or false"#,
            r#"OTEL_EXPORTER_OTLP_ENDPOINT is "collector:4318": expected a URL such as http://collector:4318 or https://collector:4318"#,
            r#"OTEL_EXPORTER_OTLP_PROTOCOL is "http/json": expected http/protobuf or grpc"#,
            r#"OTEL_EXPORTER_OTLP_HEADERS is "***": expected NAME=VALUE,NAME=VALUE, with %2C for a comma in a value"#,
            r#"OTEL_EXPORTER_OTLP_TIMEOUT is "10s": expected a whole number of milliseconds from 1 to 600000"#,
            r#"OTEL_RESOURCE_ATTRIBUTES is "=x": expected KEY=VALUE,KEY=VALUE, with %2C for a comma in a value"#,
            r#"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is "ftp://collector": expected a URL such as http://collector:4318 or https://collector:4318"#,
            r#"OTEL_TRACES_SAMPLER is "xray": expected always_on, always_off or traceidratio, each also with the prefix parentbased_"#,
            r#"OTEL_TRACES_SAMPLER_ARG is "2": expected a number from 0 to 1"#,
        ]
    );
    assert_eq!(
        wrong(&[("TRACING_SAMPLING_RATE", "1.5"), ("TRACING_EXPORTER_PROTOCOL", "udp")]),
        [
            r#"TRACING_EXPORTER_PROTOCOL is "udp": expected http or grpc"#,
            r#"TRACING_SAMPLING_RATE is "1.5": expected a number from 0 to 1"#,
        ]
    );
}
