use proptest::prelude::*;
use prost::Message;

use super::{Skimmed, Skimmer};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

/// Maximum domain length that is above any domain below.
const ROOM: usize = 64;

fn skimmed(longest_domain: usize, pieces: &[&[u8]]) -> Skimmed {
    let mut skimmer = Skimmer::new(longest_domain);
    pieces.iter().for_each(|piece| skimmer.read(piece));
    skimmer.finish()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    bytes.push(u8::try_from(value).unwrap());
    bytes
}

fn delimited(field: u64, content: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

/// Generates a field that is unknown here, or that is skipped: of each wire type, including nested groups.
fn unknown() -> impl Strategy<Value = Vec<u8>> {
    let field = || prop_oneof![Just(9_u64), 5_u64..(1 << 29)];
    let leaf = prop_oneof![
        (field(), any::<u64>()).prop_map(|(field, value)| [varint(field << 3), varint(value)].concat()),
        (field(), any::<[u8; 8]>()).prop_map(|(field, bytes)| [varint(field << 3 | 1), bytes.to_vec()].concat()),
        (field(), any::<[u8; 4]>()).prop_map(|(field, bytes)| [varint(field << 3 | 5), bytes.to_vec()].concat()),
        (field(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(field, bytes)| delimited(field, &bytes)),
        // Inside a group these field numbers have no meaning.
        Just(delimited(1, b"no domain")),
        Just(delimited(2, &[0x12, 0])),
    ];
    let grouped = leaf.prop_recursive(3, 12, 4, move |inner| {
        (field(), prop::collection::vec(inner, 0..4))
            .prop_map(|(field, fields)| [varint(field << 3 | 3), fields.concat(), varint(field << 3 | 4)].concat())
    });
    // Only fields inside a group may have the numbers of known fields.
    (field(), grouped).prop_map(|(field, inside)| [varint(field << 3 | 3), inside, varint(field << 3 | 4)].concat())
}

/// Generates a descriptor: entries, limits, hits, flags and unknown fields, in any order and number.
fn descriptor() -> impl Strategy<Value = Vec<u8>> {
    let field = prop_oneof![
        3 => prop::collection::vec(any::<u8>(), 0..12)
            .prop_map(|value| delimited(1, &[delimited(1, b"key"), delimited(2, &value)].concat())),
        1 => Just(delimited(2, &[0x08, 5, 0x10, 2])),
        1 => Just(delimited(2, &[])),
        1 => any::<u64>().prop_map(|hits| delimited(3, &[vec![0x08], varint(hits)].concat())),
        1 => Just(vec![0x20, 1]),
        1 => unknown(),
    ];
    prop::collection::vec(field, 0..5).prop_map(|fields| delimited(2, &fields.concat()))
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    let field = prop_oneof![
        2 => "[a-z\u{e9}]{0,20}".prop_map(|domain| delimited(1, domain.as_bytes())),
        4 => descriptor(),
        1 => any::<u32>().prop_map(|hits| [vec![0x18], varint(hits.into())].concat()),
        1 => unknown(),
    ];
    prop::collection::vec(field, 0..8).prop_map(|fields| fields.concat())
}

fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0_u8..3);
    (message(), prop::collection::vec(change, 1..4)).prop_map(|(mut bytes, changes)| {
        for (place, byte, how) in changes {
            let place = place.index(bytes.len() + 1);
            match how {
                0 => bytes.insert(place, byte),
                1 => bytes.truncate(place),
                _ => bytes.iter_mut().skip(place).take(1).for_each(|at| *at = byte),
            }
        }
        bytes
    })
}

/// Cuts `bytes` at `places`.
fn cut<'b>(bytes: &'b [u8], places: &[prop::sample::Index]) -> Vec<&'b [u8]> {
    let mut places: Vec<_> = places.iter().map(|place| place.index(bytes.len() + 1)).collect();
    places.sort_unstable();
    places.push(bytes.len());
    let mut from = 0;
    places.into_iter().map(|to| &bytes[std::mem::replace(&mut from, to)..to]).collect()
}

/// Skims `bytes` in pieces and in single bytes, and compares both with the result of prost. Returns true if prost can
/// read `bytes`.
fn compare(bytes: &[u8], places: &[prop::sample::Index]) -> Result<bool, TestCaseError> {
    let found = skimmed(ROOM, &cut(bytes, places));
    prop_assert_eq!(&found, &skimmed(ROOM, &bytes.chunks(1).collect::<Vec<_>>()), "the pieces make no difference");
    let Ok(request) = RateLimitRequest::decode(bytes) else { return Ok(false) };
    prop_assert_eq!(&found.domain, &request.domain);
    let entries = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    prop_assert_eq!(found.entries, request.descriptors.len().max(entries));
    prop_assert_eq!(found.may_bring_limit, request.descriptors.iter().any(|descriptor| descriptor.limit.is_some()));
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn the_domain_is_the_one_that_prost_reads(
        bytes in message(),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        prop_assert!(compare(&bytes, &places)?, "prost reads {:02x?}", bytes);
    }

    #[test]
    fn a_damaged_message_is_read_to_its_end(
        bytes in prop_oneof![1 => prop::collection::vec(any::<u8>(), 0..100), 3 => damaged()],
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        compare(&bytes, &places)?;
    }
}

#[test]
fn of_several_domains_the_last_one_counts() {
    let bytes = [delimited(1, b"first"), delimited(2, &[]), delimited(1, b"last")].concat();
    assert_eq!(skimmed(ROOM, &[&bytes]), Skimmed { domain: "last".to_owned(), may_bring_limit: false, entries: 1 });
    let bytes = [delimited(1, b"first"), delimited(1, b"")].concat();
    assert_eq!(skimmed(ROOM, &[&bytes]).domain, "");
}

#[test]
fn of_a_domain_that_is_too_long_only_the_beginning_is_kept() {
    let bytes = delimited(1, &vec![b'x'; 1 << 20]);
    let mut skimmer = Skimmer::new(4);
    bytes.chunks(1_000).for_each(|piece| skimmer.read(piece));
    assert!(skimmer.domain.capacity() < 64, "{} bytes are kept", skimmer.domain.capacity());
    assert_eq!(skimmer.finish().domain, "xxxxx", "longer than any known domain");
}

#[test]
fn a_message_that_is_no_protobuf_may_bring_a_limit() {
    for bytes in
        [&[0x0a][..], &[0x0a, 9, b'd'], &[0x12, 4, 0x0a], &[0x4b], &[0x4c], &[0x08, 1], &[0xff; 20], &[0x07, 0]]
    {
        assert!(skimmed(ROOM, &[bytes]).may_bring_limit, "{bytes:02x?}");
    }
    assert_eq!(skimmed(ROOM, &[]), Skimmed { domain: String::new(), may_bring_limit: false, entries: 0 });
}
