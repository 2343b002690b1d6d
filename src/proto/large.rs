//! Reads requests that are too large to decode whole: 4 MiB hold two million empty descriptors, which take 170 MB when decoded.

use bytes::Bytes;
use prost::encoding::{
    DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field, string, uint32,
};
use prost::{DecodeError, Message};

use super::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;

/// Number of bytes above which a request is large: 64 KiB. The largest request that clients cause has one header of 60 KB.
const LARGE_BYTES: usize = 64 << 10;
/// Number of descriptors above which a request is large: 1,000, the number of limits charged in one atomic step. 1,000 unmatched
/// descriptors occupy a worker for about 1 ms.
pub const LARGE_DESCRIPTORS: usize = 1_000;
/// Number of bytes that hold at most [`LARGE_DESCRIPTORS`] descriptors: an empty one takes 2. A message up to this size is not
/// large, and its descriptors are not counted.
const FEW_BYTES: usize = 2 * LARGE_DESCRIPTORS;

/// Maximum number of descriptors in one slice: 256, the number of limits that the embedded store charges in one group.
pub const SLICE_DESCRIPTORS: usize = 256;
/// Number of bytes after which a slice ends: 64 KiB, which hold 32,000 empty entries.
const SLICE_BYTES: usize = 64 << 10;
/// Number of fields of any kind after which a slice ends: 16,384, which take about 0.1 ms to skip.
const SLICE_FIELDS: usize = 16 << 10;

/// Maximum number of entries of a descriptor that are read: 256. Rule files nest at most 50 rules, so the later entries of a
/// longer descriptor match no rule. If such a descriptor brings its own limit, all descriptors that begin with the same 256
/// entries share its counter.
pub const MOST_ENTRIES: usize = 256;

/// Field numbers of `RateLimitRequest`, and of the entries in `RateLimitDescriptor`.
const DOMAIN: u32 = 1;
const DESCRIPTORS: u32 = 2;
const HITS_ADDEND: u32 = 3;
const ENTRIES: u32 = 1;

/// Returns true if an encoded `RateLimitRequest` is decided slice by slice. Descriptors after an unreadable field are not
/// counted.
pub fn is_large(message: &[u8]) -> bool {
    if message.len() <= FEW_BYTES || message.len() > LARGE_BYTES {
        return message.len() > LARGE_BYTES;
    }
    let mut fields = Fields(message);
    let mut descriptors = 0;
    while let Ok(Some(field)) = fields.next() {
        descriptors += usize::from(field.tag == DESCRIPTORS);
    }
    descriptors > LARGE_DESCRIPTORS
}

/// Fields of a large request besides its descriptors.
#[derive(Debug, Default)]
pub struct Head {
    /// Domain of the request.
    pub domain: String,
    /// Addend of the request; 0 if it sent none.
    pub hits_addend: u32,
    /// Number of descriptors.
    pub descriptors: usize,
}

/// Reads a large request from its beginning, slice by slice.
#[derive(Clone, Debug)]
pub struct Slices<'a> {
    message: &'a Bytes,
    rest: Fields<'a>,
    most_descriptors: usize,
}

/// Unread fields of a message.
#[derive(Clone, Copy, Debug)]
struct Fields<'a>(&'a [u8]);

/// One field of a message.
#[derive(Clone, Copy, Debug)]
struct Field<'a> {
    tag: u32,
    wire: WireType,
    /// Bytes after the key.
    value: &'a [u8],
    /// Bytes of key and value.
    whole: &'a [u8],
}

impl Head {
    /// Reads the next fields, at most 16,384. Returns false at the end of the message.
    ///
    /// # Errors
    /// If the message is not a `RateLimitRequest`.
    pub fn read(&mut self, slices: &mut Slices<'_>) -> Result<bool, DecodeError> {
        for _ in 0..SLICE_FIELDS {
            let Some(Field { tag, wire, mut value, .. }) = slices.rest.next()? else { return Ok(false) };
            match tag {
                DOMAIN => string::merge(wire, &mut self.domain, &mut value, DecodeContext::default())?,
                DESCRIPTORS => {
                    check_wire_type(WireType::LengthDelimited, wire)?;
                    self.descriptors += 1;
                }
                HITS_ADDEND => uint32::merge(wire, &mut self.hits_addend, &mut value, DecodeContext::default())?,
                _ => {}
            }
        }
        Ok(true)
    }
}

impl<'a> Slices<'a> {
    /// Returns slices of the whole message with at most [`SLICE_DESCRIPTORS`] descriptors each.
    pub fn new(message: &'a Bytes) -> Self {
        Self::of(message, SLICE_DESCRIPTORS)
    }

    /// Returns slices of the whole message with at most `most_descriptors` descriptors each.
    pub fn of(message: &'a Bytes, most_descriptors: usize) -> Self {
        Self { message, rest: Fields(message), most_descriptors }
    }

    /// Decodes the descriptors of the next slice, possibly none; `None` at the end of the message.
    ///
    /// # Errors
    /// If the message is not a `RateLimitRequest`.
    pub fn read(&mut self) -> Result<Option<Vec<RateLimitDescriptor>>, DecodeError> {
        if self.rest.0.is_empty() {
            return Ok(None);
        }
        let mut descriptors = Vec::new();
        let mut bytes = 0;
        for _ in 0..SLICE_FIELDS {
            let Some(field) = self.rest.next()? else { break };
            bytes += field.whole.len();
            if field.tag == DESCRIPTORS {
                descriptors.push(self.descriptor(field.text()?)?);
            }
            if descriptors.len() >= self.most_descriptors || bytes >= SLICE_BYTES {
                break;
            }
        }
        Ok(Some(descriptors))
    }

    /// Decodes a descriptor. A descriptor up to the size of a slice is not copied. A longer one is copied with its first
    /// [`MOST_ENTRIES`] entries only.
    fn descriptor(&self, bytes: &'a [u8]) -> Result<RateLimitDescriptor, DecodeError> {
        if bytes.len() <= SLICE_BYTES {
            return RateLimitDescriptor::decode(self.message.slice_ref(bytes));
        }
        let mut kept = Vec::new();
        let mut entries = 0;
        let mut fields = Fields(bytes);
        while let Some(field) = fields.next()? {
            entries += usize::from(field.tag == ENTRIES);
            if field.tag != ENTRIES || entries <= MOST_ENTRIES {
                kept.extend_from_slice(field.whole);
            }
        }
        RateLimitDescriptor::decode(Bytes::from(kept))
    }
}

impl<'a> Fields<'a> {
    fn next(&mut self) -> Result<Option<Field<'a>>, DecodeError> {
        let before = self.0;
        if before.is_empty() {
            return Ok(None);
        }
        let mut rest = before;
        let (tag, wire) = decode_key(&mut rest)?;
        let begin = before.len() - rest.len();
        skip_field(wire, tag, &mut rest, DecodeContext::default())?;
        let end = before.len() - rest.len();
        self.0 = rest;
        Ok(Some(Field { tag, wire, value: &before[begin..end], whole: &before[..end] }))
    }
}

impl<'a> Field<'a> {
    /// Returns the bytes of a string or message field.
    fn text(&self) -> Result<&'a [u8], DecodeError> {
        check_wire_type(WireType::LengthDelimited, self.wire)?;
        let mut value = self.value;
        decode_varint(&mut value)?;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::super::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
    use super::super::envoy::service::ratelimit::v3::RateLimitRequest;
    use super::*;

    fn request(descriptors: usize, entries: usize, bytes: usize) -> RateLimitRequest {
        let entry = Entry { key: vec![b'k'; bytes].into(), value: Bytes::new() };
        let descriptor = RateLimitDescriptor { entries: vec![entry; entries], ..RateLimitDescriptor::default() };
        RateLimitRequest { domain: "d".to_owned(), descriptors: vec![descriptor; descriptors], hits_addend: 7 }
    }

    fn read(message: &RateLimitRequest) -> (Head, Vec<Vec<RateLimitDescriptor>>) {
        let bytes = Bytes::from(message.encode_to_vec());
        let mut head = Head::default();
        let mut slices = Slices::new(&bytes);
        while head.read(&mut slices).expect("it can be read") {}
        let mut slices = Slices::new(&bytes);
        let mut all = Vec::new();
        while let Some(slice) = slices.read().expect("it can be read") {
            all.push(slice);
        }
        (head, all)
    }

    #[test]
    fn a_request_is_large_by_its_bytes_or_its_descriptors() {
        let is_large = |request: RateLimitRequest| is_large(&request.encode_to_vec());
        assert!(!is_large(request(1_000, 0, 0)));
        assert!(is_large(request(1_001, 0, 0)));
        assert!(!is_large(request(1, 1, 65_000)), "one long header");
        assert!(is_large(request(1, 1, 66_000)));
        assert!(!super::is_large(&[0xff; 3_000]), "no message: the ordinary decoder says so");
    }

    #[test]
    fn slices_are_the_request_in_bounded_parts() {
        for request in
            [request(0, 0, 0), request(1, 0, 0), request(2_000, 0, 0), request(300, 3, 10), request(9, 2, 40_000)]
        {
            let (head, slices) = read(&request);
            assert_eq!((head.domain.as_str(), head.hits_addend, head.descriptors), ("d", 7, request.descriptors.len()));
            assert!(slices.iter().all(|slice| slice.len() <= SLICE_DESCRIPTORS));
            let bytes = |slice: &Vec<RateLimitDescriptor>| slice.iter().map(Message::encoded_len).sum::<usize>();
            assert!(slices.iter().all(|slice| bytes(slice) < SLICE_BYTES + 100_000));
            assert_eq!(slices.concat(), request.descriptors);
        }
    }

    #[test]
    fn of_a_descriptor_longer_than_a_slice_only_the_entries_that_count_are_decoded() {
        let mut long = request(1, 100_000, 1);
        long.descriptors[0].hits_addend = Some(3);
        let (_, slices) = read(&long);
        let [descriptor] = slices.concat().try_into().expect("one descriptor");
        assert_eq!((descriptor.entries.len(), descriptor.hits_addend), (MOST_ENTRIES, Some(3)));
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        for wrong in [&[0x12, 0x05][..], &[0x10, 0x01], &[0x0a, 0x01, 0xff], &[0x12, 0x02, 0x0a, 0x05]] {
            let bytes = Bytes::copy_from_slice(wrong);
            let mut head = Head::default();
            let is_read = head.read(&mut Slices::new(&bytes)).is_ok() && Slices::new(&bytes).read().is_ok();
            assert!(!is_read, "{wrong:?}");
            assert!(RateLimitRequest::decode(bytes).is_err(), "{wrong:?}");
        }
    }
}
