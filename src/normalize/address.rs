//! Parser for IP addresses in the forms that clients and gateways send, and a formatter. The standard library parses each address;
//! its formatter would add 3% to the instructions of a decision about an IPv6 address (`docs/decisions/0017`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use memchr::{memchr, memrchr};
use smallvec::SmallVec;

/// Text of an address or network: at most 43 bytes.
pub type Text = SmallVec<[u8; 48]>;

/// Parses the address in `value`: alone, in brackets, with a port or with a zone id (RFC 4007, 11: `fe80::1%eth0`). Takes the
/// last address of a list with commas, as in `X-Forwarded-For`. Drops port and zone id, and any white space and commas at either end.
/// Turns an IPv4-mapped IPv6 address into the IPv4 address.
pub fn parse(value: &[u8]) -> Option<IpAddr> {
    parse_one(value).or_else(|| {
        let list = trimmed(value);
        let last = memrchr(b',', list).map_or(list, |comma| trimmed(&list[comma + 1..]));
        parse_one(last).or_else(|| parse_zoned(last))
    })
}

/// Returns `value` without the white space (space, tab, line feed, vertical tab, form feed, carriage return) and the commas at its ends.
fn trimmed(value: &[u8]) -> &[u8] {
    let is_kept = |byte: &u8| !matches!(byte, b' ' | b'\t'..=b'\r' | b',');
    let begin = value.iter().position(is_kept).unwrap_or(value.len());
    let end = value.iter().rposition(is_kept).map_or(begin, |last| last + 1);
    &value[begin..end]
}

/// Parses one address with a zone id. The zone id goes from the first `%` to the last `]` if `value` begins with a bracket,
/// else to the end.
fn parse_zoned(value: &[u8]) -> Option<IpAddr> {
    let (address, zone) = value.split_at(memchr(b'%', value)?);
    if address.first() == Some(&b'[') && !address.contains(&b']') {
        let after = &zone[memrchr(b']', zone)?..];
        parse_one(&[address, after].concat())
    } else {
        parse_one(address)
    }
}

/// Parses one address without a zone id.
pub fn parse_one(value: &[u8]) -> Option<IpAddr> {
    // The first byte rules out most values that are no address.
    if !matches!(value.first()?, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F' | b':' | b'[') {
        return None;
    }
    let text = std::str::from_utf8(value).ok()?;
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let address = match bare {
        Some(bare) => bare.parse().ok().map(IpAddr::V6),
        None => text.parse().ok().or_else(|| text.parse().ok().map(|address: SocketAddr| address.ip())),
    };
    address.map(|address| address.to_canonical())
}

/// Parses `192.0.2.1`. A dotted IPv4 address has no other spelling.
pub fn v4(text: &[u8]) -> Option<Ipv4Addr> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Writes an address in the form of RFC 5952.
pub fn write(address: IpAddr, text: &mut Text) {
    match address {
        IpAddr::V4(v4) => {
            for (index, octet) in v4.octets().into_iter().enumerate() {
                if index > 0 {
                    text.push(b'.');
                }
                write_number(octet, text);
            }
        }
        IpAddr::V6(v6) => write_v6(v6, text),
    }
}

/// Writes a number in decimal digits.
pub fn write_number(number: u8, text: &mut Text) {
    if number >= 100 {
        text.push(b'0' + number / 100);
    }
    if number >= 10 {
        text.push(b'0' + number / 10 % 10);
    }
    text.push(b'0' + number % 10);
}

fn write_v6(address: Ipv6Addr, text: &mut Text) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let groups = address.segments();
    // RFC 5952 shortens the first of the longest runs of zero groups, and no run of one group.
    let (mut begin, mut length, mut run) = (0, 1, 0);
    for (index, group) in groups.into_iter().enumerate() {
        run = if group == 0 { run + 1 } else { 0 };
        if run > length {
            (begin, length) = (index + 1 - run, run);
        }
    }
    let gap = if length > 1 { begin..begin + length } else { 8..8 };
    for (index, group) in groups.into_iter().enumerate() {
        if gap.contains(&index) {
            if index == gap.start {
                text.extend_from_slice(b"::");
            }
            continue;
        }
        if index > 0 && index != gap.end {
            text.push(b':');
        }
        let digits = (16 - group.leading_zeros()).div_ceil(4).max(1);
        for digit in (0..digits).rev() {
            text.push(HEX[usize::from(group >> (digit * 4) & 15)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(address: IpAddr) -> String {
        let mut text = Text::new();
        write(address, &mut text);
        String::from_utf8(text.to_vec()).expect("it is ASCII")
    }

    /// Generates addresses with many zero groups.
    fn address() -> impl Strategy<Value = IpAddr> {
        let group = prop_oneof![Just(0_u16), any::<u16>(), 0_u16..16];
        let v6 = prop::array::uniform8(group).prop_map(|groups| IpAddr::V6(groups.into()));
        prop_oneof![any::<u32>().prop_map(|bits| IpAddr::V4(bits.into())), v6]
    }

    /// Generates texts that are almost addresses.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            ":",
            "::",
            "0",
            "1",
            "12",
            "a",
            "FF",
            "db8",
            "ffff",
            "12345",
            ".",
            "255",
            "256",
            "01",
            "[",
            "]",
            "192.0.2.1",
            "/",
            " ",
            "+1",
        ]);
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    /// Parses an address with the standard library: alone, in brackets or with a port.
    fn by_the_library(text: &str) -> Option<IpAddr> {
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).and_then(|bare| bare.parse().ok());
        let socket = || text.parse().ok().map(|address: SocketAddr| address.ip());
        let any = text.parse().ok().or(bare.map(IpAddr::V6)).or_else(socket);
        any.map(|address: IpAddr| address.to_canonical())
    }

    #[test]
    fn a_zone_id_is_dropped_in_every_form() {
        let of = |text: &str| parse(text.as_bytes()).map(|address| address.to_string());
        for zone in ["%eth0", "%2", "%25eth0", "%", "%%", "%a%b", "%eth0.100", "%\u{e9}", "%a]b", "%a:b", "%[", "% "] {
            for form in
                ["fe80::1Z", "FE80:0::1Z", "[fe80::1Z]", "[fe80::1Z]:443", "10.0.0.1, fe80::1Z", "a,[fe80::1Z]:1"]
            {
                assert_eq!(of(&form.replace('Z', zone)).as_deref(), Some("fe80::1"), "{form} {zone}");
            }
            for form in
                ["::ffff:192.0.2.1Z", "[::ffff:192.0.2.1Z]:443", "::ffff:c000:201Z", "192.0.2.1Z", "x, 192.0.2.1Z"]
            {
                assert_eq!(of(&form.replace('Z', zone)).as_deref(), Some("192.0.2.1"), "{form} {zone}");
            }
        }
        for other in [
            "%eth0",
            "[%eth0]",
            "[fe80::1%eth0",
            "[fe80::1%eth0]443",
            "[fe80::1%eth0]:",
            "g::1%eth0",
            "10%",
            "fe80::1%a,b",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn the_last_of_a_list_is_the_address() {
        let of = |text: &str| parse(text.as_bytes()).map(|address| address.to_string());
        for list in ["192.0.2.1", "10.0.0.1,192.0.2.1", "x, 10.0.0.1 ,\t192.0.2.1 ", ",192.0.2.1", "a, 192.0.2.1:443"] {
            assert_eq!(of(list).as_deref(), Some("192.0.2.1"), "{list}");
        }
        for other in
            ["", ",", " , ", "192.0.2.1, unknown", "192.0.2.1 10.0.0.1", "\u{a0}192.0.2.1", "192.0.2.1;", "192.0.2.1\0"]
        {
            assert_eq!(of(other), None, "{other:?}");
        }
    }

    #[test]
    fn white_space_and_commas_at_either_end_of_an_address_are_dropped() {
        for (address, forms) in [
            ("192.0.2.1", &["192.0.2.1", "[::ffff:192.0.2.1]", "192.0.2.1:443", "10.0.0.1, 192.0.2.1"][..]),
            ("fe80::1", &["fe80::1", "FE80:0::1%eth0", "[fe80::1%2]:443", "x,fe80::1"]),
        ] {
            for form in forms {
                for end in
                    [" ", "\t", "\r", "\n", "\r\n", "\u{b}", "\u{c}", ",", ", ", " ,", ",,", " \t,\u{b}, ,\r\n\u{c}"]
                {
                    for spelling in [format!("{form}{end}"), format!("{end}{form}"), format!("{end}{form}{end}")] {
                        let read = parse(spelling.as_bytes()).map(|address| address.to_string());
                        assert_eq!(read.as_deref(), Some(address), "{spelling:?}");
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn an_address_is_written_as_the_library_writes_it(address in address()) {
            prop_assert_eq!(written(address), address.to_string());
        }

        #[test]
        fn what_the_library_takes_for_an_address_is_one_and_nothing_else(text in text()) {
            prop_assert_eq!(parse(text.as_bytes()), by_the_library(text.trim_matches(' ')), "{}", text);
        }

        #[test]
        fn a_zone_id_and_the_addresses_before_change_no_address(text in text(), before in text(), zone in "[^,]{0,8}") {
            // In brackets, the zone id is before the last bracket.
            let zoned = match text.rsplit_once(']').filter(|_| text.starts_with('[')) {
                Some((inside, after)) => format!("{inside}%{zone}]{after}"),
                None => format!("{text}%{zone}"),
            };
            if let Some(address) = by_the_library(&text) {
                for spelling in [zoned.clone(), format!("{before},{text}"), format!("{before}, {zoned}")] {
                    prop_assert_eq!(parse(spelling.as_bytes()), Some(address), "{}", spelling);
                }
            }
        }

        #[test]
        fn what_is_written_is_read(address in address()) {
            prop_assert_eq!(parse(written(address).as_bytes()), Some(address.to_canonical()));
            prop_assert_eq!(parse(written(address).to_uppercase().as_bytes()), Some(address.to_canonical()));
        }
    }
}
