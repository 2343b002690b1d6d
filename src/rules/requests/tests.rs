use proptest::prelude::*;

use super::*;

fn requests(trusted_proxies: &[&str], entries: Vec<ReadEntry>) -> HttpRequests {
    let network = |text: &&str| Network::parse(text).expect("a network").expect("it is valid");
    HttpRequests {
        file: 0,
        gateway: Gateway::Envoy,
        trusted_proxies: trusted_proxies.iter().map(network).collect(),
        refusal_status: 429,
        keeps_escaped_slashes: false,
        timeout: Duration::from_millis(200),
        descriptors: vec![entries],
    }
}

fn entry(names: &[(ClientPart, &str)], missing: Missing) -> ReadEntry {
    let name = |(part, prefix): &(ClientPart, &str)| ClientName { part: part.clone(), prefix: (*prefix).to_owned() };
    let source = Source::First(names.iter().map(name).collect(), missing);
    ReadEntry { key: "client".to_owned(), source, place: Position::default() }
}

fn headers(all: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in all {
        let name: HeaderName = name.parse().expect("a name");
        headers.append(name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
    }
    headers
}

/// Returns the value of the one entry, and true if it is the address of a proxy; `None` if it is skipped.
fn read(requests: &HttpRequests, all: &[(&str, &str)]) -> Option<(String, bool)> {
    let peer = "127.0.0.1".parse().expect("an address");
    let read = requests.read(peer, &Method::GET, "/", &headers(all)).expect("it is read");
    let descriptor = read.into_iter().next()?;
    let value = String::from_utf8(descriptor.entries[0].value.to_vec()).expect("text");
    Some((value, descriptor.proxy_entry == Some(0)))
}

fn by_address() -> HttpRequests {
    requests(
        &["127.0.0.1", "10.0.0.0/8", "2001:db8:f::/48"],
        vec![entry(&[(ClientPart::Address, "")], Missing::Refuse)],
    )
}

fn is(value: &str, is_of_proxy: bool) -> Option<(String, bool)> {
    Some((value.to_owned(), is_of_proxy))
}

#[test]
fn the_client_is_the_rightmost_address_that_is_no_trusted_proxy() {
    let requests = by_address();
    for (chain, client) in [
        ("198.51.100.7", "198.51.100.7"),
        ("198.51.100.7, 10.0.0.1", "198.51.100.7"),
        ("1.1.1.1, 198.51.100.7, 10.0.0.1, 127.0.0.1", "198.51.100.7"),
        ("unknown, 198.51.100.7", "198.51.100.7"),
        ("_hidden, 198.51.100.7", "198.51.100.7"),
        ("\"2.2.2.2\", 198.51.100.7", "198.51.100.7"),
        ("\"2.2.2.2, 198.51.100.7", "198.51.100.7"),
        ("a.example, 198.51.100.7", "198.51.100.7"),
        ("fe80::1%eth0, 198.51.100.7", "198.51.100.7"),
        (", 198.51.100.7", "198.51.100.7"),
        ("198.51.100.7,", "198.51.100.7"),
        ("198.51.100.7,, ,10.0.0.1,", "198.51.100.7"),
        (",,\t,198.51.100.7", "198.51.100.7"),
        ("10.0.0.256, 198.51.100.7", "198.51.100.7"),
        ("\u{e9}\u{202e}, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.9, 198.51.100.7", "198.51.100.7"),
        ("198.51.100.7:1234", "198.51.100.7"),
        ("[2001:db8::7]:443", "2001:db8::7"),
        ("[2001:db8::7], 2001:db8:f::1", "2001:db8::7"),
        ("::ffff:198.51.100.7, ::ffff:10.0.0.1", "198.51.100.7"),
        ("fe80::1%eth0", "fe80::1"),
    ] {
        assert_eq!(read(&requests, &[("x-forwarded-for", chain)]), is(client, false), "{chain:?}");
    }
    let long = format!("{}198.51.100.7", "192.0.2.1, ".repeat(5_000));
    assert_eq!(read(&requests, &[("x-forwarded-for", &long)]), is("198.51.100.7", false), "a long chain");
    let lines = [("x-forwarded-for", "unknown"), ("x-forwarded-for", "198.51.100.7"), ("x-forwarded-for", "10.0.0.1")];
    assert_eq!(read(&requests, &lines), is("198.51.100.7", false), "the lines are one list");
}

#[test]
fn a_client_whose_address_is_unknown_is_its_nearest_proxy() {
    let requests = by_address();
    for (chain, proxy) in [
        ("", "127.0.0.1"),
        (" ,\t, ", "127.0.0.1"),
        ("unknown", "127.0.0.1"),
        ("198.51.100.7, unknown", "127.0.0.1"),
        ("198.51.100.7, unknown, 10.0.0.1", "10.0.0.1"),
        ("198.51.100.7, \"198.51.100.8\", 10.0.0.1", "10.0.0.1"),
        ("10.0.0.2, 10.0.0.1", "10.0.0.2"),
    ] {
        assert_eq!(read(&requests, &[("x-forwarded-for", chain)]), is(proxy, true), "{chain:?}");
    }
    assert_eq!(read(&requests, &[]), is("127.0.0.1", true), "without the header");
    let long = format!("198.51.100.7{}", ", 10.0.0.1".repeat(101));
    assert_eq!(
        read(&requests, &[("x-forwarded-for", &long)]),
        is("10.0.0.1", true),
        "more proxies than are passed over"
    );
}

/// Headers with an address, and a descriptor that is skipped without one.
fn by_header(name: &'static str) -> HttpRequests {
    let header = ClientPart::AddressHeader(HeaderName::from_static(name));
    requests(&["127.0.0.1", "10.0.0.0/8"], vec![entry(&[(header, "")], Missing::Skip)])
}

#[test]
fn a_header_with_an_address_is_read_only_behind_a_trusted_proxy() {
    for name in ["cf-connecting-ip", "x-real-ip"] {
        let requests = by_header(name);
        let read = |chain: &[(&str, &str)], value| read(&requests, &[chain, &[(name, value)]].concat());
        let trusted = [("x-forwarded-for", "198.51.100.7, 10.0.0.1")];
        assert_eq!(read(&trusted, "203.0.113.5"), is("203.0.113.5", false));
        assert_eq!(read(&trusted, "[2001:db8::7]:443"), is("2001:db8::7", false));
        assert_eq!(read(&trusted, "10.0.0.9"), is("10.0.0.9", true), "a trusted proxy");
        for value in ["unknown", "", "203.0.113.5, 203.0.113.6", "\"203.0.113.5\""] {
            assert_eq!(read(&trusted, value), None, "{value:?}");
        }
        // A client can write them: nothing shows that a trusted proxy sent them.
        for chain in ["198.51.100.7", "10.0.0.1, 198.51.100.7", "10.0.0.1, unknown", "", "unknown"] {
            assert_eq!(read(&[("x-forwarded-for", chain)], "203.0.113.5"), None, "{chain:?}");
        }
        assert_eq!(read(&[], "203.0.113.5"), None, "the peer is a trusted proxy, and counts for nothing");
        let lines = [("x-forwarded-for", "10.0.0.1"), (name, "203.0.113.6")];
        assert_eq!(read(&lines, "203.0.113.5"), None, "it is there twice");
        let lines = [("x-forwarded-for", "10.0.0.1"), ("x-forwarded-for", "198.51.100.7")];
        assert_eq!(read(&lines, "203.0.113.5"), None, "the last line counts");
    }
}

#[test]
fn the_client_of_forwarded_is_found_from_the_right() {
    let requests = by_header("forwarded");
    let read = |value| read(&requests, &[("x-forwarded-for", "10.0.0.1"), ("forwarded", value)]);
    for (value, client) in [
        ("for=198.51.100.7", "198.51.100.7"),
        ("For=198.51.100.7;proto=http;by=10.0.0.1", "198.51.100.7"),
        ("proto=http ; for=\"198.51.100.7:80\"", "198.51.100.7"),
        ("for=1.1.1.1, for=198.51.100.7, for=10.0.0.2", "198.51.100.7"),
        ("for=\"[2001:db8::7]:4711\"", "2001:db8::7"),
        ("for=unknown, for=198.51.100.7", "198.51.100.7"),
        ("for=\"a, for=198.51.100.7", "198.51.100.7"),
        ("\"\"\", for=198.51.100.7, for=\"10.0.0.2\"", "198.51.100.7"),
        ("for=1.1.1.1;x=\"a,b;for=2.2.2.2\", , for=198.51.100.7;x=\"a,b;for=2.2.2.2\"", "198.51.100.7"),
    ] {
        assert_eq!(read(value), is(client, false), "{value}");
    }
    assert_eq!(read("for=unknown, for=10.0.0.2"), is("10.0.0.2", true));
    for value in ["for=unknown", "for=_secret", "proto=http", "for=1.1.1.1;for=2.2.2.2", "for", "", "for=\"1.1.1.1"] {
        assert_eq!(read(value), None, "{value}");
    }
}

#[test]
fn a_client_cannot_write_the_value_of_another_part() {
    let header = |name| ClientPart::Header(HeaderName::from_static(name));
    let real = ClientPart::AddressHeader(HeaderName::from_static("cf-connecting-ip"));
    let names = [
        (header("x-user-id"), ""),
        (header("x-api-key"), "x-api-key:"),
        (real, "client_ip:"),
        (ClientPart::Address, "client_ip:"),
    ];
    let requests = requests(&["127.0.0.1", "10.0.0.0/8"], vec![entry(&names, Missing::Refuse)]);
    let from = ("x-forwarded-for", "2001:db8:1:2::7");
    let read = |all: &[(&str, &str)]| read(&requests, &[&[from], all].concat()).expect("a value").0;
    assert_eq!(read(&[("x-user-id", "ann"), ("x-api-key", "k")]), "ann");
    assert_eq!(read(&[("x-user-id", " "), ("x-api-key", "k")]), "x-api-key:k");
    assert_eq!(read(&[]), "client_ip:2001:db8:1:2::/64");
    assert_eq!(read(&[("cf-connecting-ip", "203.0.113.5")]), "client_ip:2001:db8:1:2::/64", "the client wrote it");
    assert_eq!(read(&[("x-user-id", "2001:db8:1:2::/64")]), "2001:db8:1:2::/64");
    for forged in
        ["client_ip:203.0.113.5", "CLIENT_IP:203.0.113.5", " ,client_ip:203.0.113.5", "x-api-key:k", "X-Api-Key:"]
    {
        assert_eq!(read(&[("x-user-id", forged)]), "client_ip:2001:db8:1:2::/64", "{forged:?}");
    }
    assert_eq!(read(&[("x-user-id", "client_ip")]), "client_ip");
    let twice = [from, ("x-user-id", "ann"), ("x-user-id", "bob")];
    let read = requests.read("127.0.0.1".parse().expect("an address"), &Method::GET, "/", &headers(&twice));
    assert!(matches!(read, Err(Unreadable::Repeated(_))), "{read:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn nothing_that_a_client_writes_in_front_changes_who_it_is(
        written in "[ -~\t]{0,60}",
        lines in prop::collection::vec("[ -~]{0,20}", 0..3),
        proxies in prop::collection::vec(0_u8..=255, 0..4),
    ) {
        let proxies: String = proxies.iter().map(|last| format!(", 10.0.0.{last}")).collect();
        let chain = format!("{written},198.51.100.7{proxies}");
        let mut all: Vec<(&str, &str)> = lines.iter().map(|line| ("x-forwarded-for", line.as_str())).collect();
        all.push(("x-forwarded-for", &chain));
        prop_assert_eq!(read(&by_address(), &all), is("198.51.100.7", false), "{:?}", all);
        let element = format!("{written},for=198.51.100.7{}", proxies.replace(", ", ", for="));
        let all = [("x-forwarded-for", "10.0.0.1"), ("forwarded", element.as_str())];
        prop_assert_eq!(read(&by_header("forwarded"), &all), is("198.51.100.7", false), "{:?}", all);
    }
}
