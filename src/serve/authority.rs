//! Repair of the `:authority` that gRPC clients send on a Unix socket.
//!
//! gRPC's C core sends the path of the socket there, with `%2F` for each slash, and grpc-java the path as it is. h2 resets
//! a call whose authority has a `%` or a `/` in it. Each `%` is replaced by `-`, and each `/` by `3`, in the bytes of the
//! connection, before h2 reads them. Nothing reads the authority. Lengths do not change, and so the tables of HPACK (RFC
//! 7541) stay the same on both sides: all codes of Huffman concerned have six bits, `010101` and `010110`, `011000` and
//! `011001`. Where a read ends after the fifth bit, the sixth is not known, so a space (`010100`) becomes `-` too; h2
//! accepts none of them.
//!
//! The fields of a head are walked by their lengths, and no table is kept. Bytes that are no HPACK are left to h2, which
//! ends the connection.

/// Flags of HEADERS whose payload has more than fields (RFC 9113, 6.2).
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Bytes of a priority.
const PRIORITY_BYTES: usize = 5;
/// Index of `:authority` in the static table (RFC 7541, appendix A), and its spellings as a literal name.
const AUTHORITY_INDEX: u8 = 1;
const PLAIN_NAME: &[u8] = b":authority";
const HUFFMAN_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];
/// Most bytes of an integer after its first one. h2 takes no more.
const INTEGER_BYTES: u8 = 4;
/// Numbers of Huffman codes by their bits, from 1 on (RFC 7541, appendix B). The codes are canonical, so the numbers say
/// where a code ends.
const CODES: [u32; 30] =
    [0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4];

/// Position in the fields of a head, which may come in any number of frames and parts.
#[derive(Debug)]
pub(super) struct AuthorityRepair {
    /// True if the next byte of the payload is the length of the padding.
    has_padding: bool,
    /// Bytes before the fields.
    before: usize,
    /// Bytes of fields in this frame. What follows them is padding.
    fields: usize,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// First byte of a field.
    Field,
    /// Rest of an index, of at most `left` bytes. The index is not that of `:authority`.
    Index { left: u8, has_value: bool },
    /// First byte of a string.
    Begin(Kind),
    /// Rest of a length, of at most `left` bytes.
    Length { kind: Kind, is_huffman: bool, length: u32, left: u8 },
    /// Text of a string, of which `left` bytes are missing.
    Text { text: Text, left: u32 },
    /// No HPACK.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Name,
    Value,
    Authority,
}

#[derive(Clone, Copy, Debug)]
enum Text {
    /// Name; the rest of `:authority` if it is the same so far.
    Name(Option<&'static [u8]>),
    Value,
    Authority(Option<Code>),
}

/// Bits of a Huffman code that were read: their number, and the distance to the first code that is longer.
#[derive(Clone, Copy, Debug, Default)]
struct Code {
    bits: usize,
    distance: u32,
}

impl AuthorityRepair {
    pub(super) fn new() -> Self {
        Self { has_padding: false, before: 0, fields: 0, place: Place::Field }
    }

    /// Begins a head, in a HEADERS frame with these flags and a payload of `bytes`.
    pub(super) fn begin(&mut self, flags: u8, bytes: usize) {
        let has_padding = flags & PADDED != 0;
        let before = if flags & PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
        let fields = bytes.saturating_sub(before + usize::from(has_padding));
        *self = Self { has_padding, before, fields, place: Place::Field };
    }

    /// Continues a head, in a CONTINUATION frame with a payload of `bytes`.
    pub(super) fn go_on(&mut self, bytes: usize) {
        *self = Self { has_padding: false, before: 0, fields: bytes, place: self.place };
    }

    /// Repairs the next bytes of a payload.
    pub(super) fn repair(&mut self, payload: &mut [u8]) {
        let padding = payload.first().copied().filter(|_| self.has_padding);
        if let Some(padding) = padding {
            (self.has_padding, self.fields) = (false, self.fields.saturating_sub(usize::from(padding)));
        }
        let rest = payload.get_mut(usize::from(padding.is_some())..).unwrap_or_default();
        let skipped = self.before.min(rest.len());
        self.before -= skipped;
        let fields = rest.get_mut(skipped..).unwrap_or_default();
        let read = self.fields.min(fields.len());
        self.fields -= read;
        self.read(fields.get_mut(..read).unwrap_or_default());
    }

    fn read(&mut self, mut fields: &mut [u8]) {
        while !fields.is_empty() {
            let read = match self.place {
                Place::Text { text: Text::Value, left } => {
                    let skipped = u32::try_from(fields.len()).unwrap_or(u32::MAX).min(left);
                    self.place = Place::text(Text::Value, left - skipped);
                    usize::try_from(skipped).unwrap_or(usize::MAX)
                }
                place => {
                    fields.iter_mut().take(1).for_each(|byte| self.place = place.after(byte));
                    1
                }
            };
            fields = fields.get_mut(read..).unwrap_or_default();
        }
    }
}

impl Place {
    /// Returns the place after `byte`, which it repairs.
    fn after(self, byte: &mut u8) -> Self {
        match self {
            Self::Field => Self::after_field(*byte),
            Self::Index { left, has_value } => match (*byte & 0x80 != 0, left) {
                (true, 1) => Self::Lost,
                (true, _) => Self::Index { left: left.saturating_sub(1), has_value },
                (false, _) if has_value => Self::Begin(Kind::Value),
                (false, _) => Self::Field,
            },
            Self::Begin(kind) => {
                let is_huffman = *byte & 0x80 != 0;
                match u32::from(*byte & 0x7f) {
                    0x7f => Self::Length { kind, is_huffman, length: 0x7f, left: INTEGER_BYTES },
                    length => Self::of_string(kind, is_huffman, length),
                }
            }
            Self::Length { kind, is_huffman, length, left } => {
                let shift = 7 * u32::from(INTEGER_BYTES.saturating_sub(left));
                let length = length.saturating_add(u32::from(*byte & 0x7f) << shift);
                match (*byte & 0x80 != 0, left) {
                    (true, 1) => Self::Lost,
                    (true, _) => Self::Length { kind, is_huffman, length, left: left.saturating_sub(1) },
                    (false, _) => Self::of_string(kind, is_huffman, length),
                }
            }
            Self::Text { text, left } => Self::text(text.after(byte), left.saturating_sub(1)),
            Self::Lost => Self::Lost,
        }
    }

    /// Returns the place after the first byte of a field (RFC 7541, 6).
    fn after_field(byte: u8) -> Self {
        let (prefix, has_value) = match byte {
            0x80.. => (0x7f, false),
            0x40.. => (0x3f, true),
            0x20.. => (0x1f, false),
            _ => (0x0f, true),
        };
        match byte & prefix {
            index if index == prefix => Self::Index { left: INTEGER_BYTES, has_value },
            _ if !has_value => Self::Field,
            0 => Self::Begin(Kind::Name),
            AUTHORITY_INDEX => Self::Begin(Kind::Authority),
            _ => Self::Begin(Kind::Value),
        }
    }

    fn of_string(kind: Kind, is_huffman: bool, length: u32) -> Self {
        let text = match kind {
            Kind::Name => Text::Name(Some(if is_huffman { HUFFMAN_NAME } else { PLAIN_NAME })),
            Kind::Value => Text::Value,
            Kind::Authority => Text::Authority(is_huffman.then(Code::default)),
        };
        Self::text(text, length)
    }

    /// Returns the place in a text of which `left` bytes are missing, or after it.
    fn text(text: Text, left: u32) -> Self {
        match text {
            text if left > 0 => Self::Text { text, left },
            Text::Name(Some([])) => Self::Begin(Kind::Authority),
            Text::Name(_) => Self::Begin(Kind::Value),
            Text::Value | Text::Authority(_) => Self::Field,
        }
    }
}

impl Text {
    fn after(self, byte: &mut u8) -> Self {
        match self {
            Self::Name(rest) => Self::Name(rest.and_then(|rest| rest.strip_prefix(&[*byte]))),
            Self::Value => Self::Value,
            Self::Authority(None) => {
                *byte = match *byte {
                    b'%' | b' ' => b'-',
                    b'/' => b'3',
                    other => other,
                };
                self
            }
            Self::Authority(Some(mut code)) => {
                let read = *byte;
                *byte = (0..8).rev().fold(0, |repaired, bit| repaired << 1 | code.repair(read >> bit & 1));
                Self::Authority(Some(code))
            }
        }
    }
}

impl Code {
    /// Reads the next bit of a text. Returns the bit in its place: of `%` and the space, `01010` and one bit more, the
    /// last two bits become those of `-`; of `/`, the last bit becomes that of `3`.
    fn repair(&mut self, bit: u8) -> u8 {
        let repaired = match (self.bits, self.distance) {
            (4, 0b0101) if bit == 0 => 1,
            (5, 0) => 0,
            (5, 2) => 1,
            _ => bit,
        };
        let codes = CODES.get(self.bits).copied().unwrap_or(u32::MAX);
        let distance = self.distance << 1 | u32::from(bit);
        *self = match distance.checked_sub(codes) {
            Some(distance) => Self { bits: self.bits + 1, distance },
            None => Self::default(),
        };
        repaired
    }
}

#[cfg(test)]
mod tests {
    use httlib_hpack::{Decoder, Encoder};
    use proptest::prelude::*;

    use super::super::frames::{FrameReader, PREFACE};
    use super::*;

    const END_HEADERS: u8 = 4;

    /// One head: its fields with the flags of their encoder, and how they are put into frames.
    #[derive(Clone, Debug)]
    struct Head {
        fields: Vec<(Vec<u8>, Vec<u8>, u8)>,
        by_index: bool,
        padding: Option<u8>,
        has_priority: bool,
        frame: usize,
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("it is short").to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    fn encoded(head: &Head, encoder: &mut Encoder<'_>) -> Vec<u8> {
        let mut block = Vec::new();
        for (name, value, flags) in &head.fields {
            let done = match name.as_slice() == PLAIN_NAME && head.by_index {
                true => encoder.encode((u32::from(AUTHORITY_INDEX), value.clone(), *flags), &mut block),
                false => encoder.encode((name.clone(), value.clone(), *flags), &mut block),
            };
            done.expect("it encodes");
        }
        block
    }

    /// Returns the frames of a head, and the places of its fields in them.
    fn framed(head: &Head, stream: u32, block: &[u8]) -> (Vec<u8>, Vec<usize>) {
        let mut parts: Vec<&[u8]> = block.chunks(head.frame).collect();
        let last = parts.len() - 1;
        let first = parts.remove(0);
        let flag = |number| if number == last { END_HEADERS } else { 0 };
        let padding = usize::from(head.padding.unwrap_or(0));
        let before = [
            head.padding.map_or(vec![], |padding| vec![padding]),
            if head.has_priority { b"%%%% ".to_vec() } else { vec![] },
        ]
        .concat();
        let flags =
            flag(0) | if head.padding.is_some() { PADDED } else { 0 } | if head.has_priority { PRIORITY } else { 0 };
        let mut bytes = frame(1, flags, stream, &[&before[..], first, &vec![b'%'; padding]].concat());
        let mut places: Vec<usize> = (9 + before.len()..).take(first.len()).collect();
        for (number, part) in parts.into_iter().enumerate() {
            places.extend((bytes.len() + 9..).take(part.len()));
            bytes.extend(frame(9, flag(number + 1), stream, part));
        }
        (bytes, places)
    }

    fn text() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(
            prop_oneof![Just(b'%'), Just(b' '), Just(b'/'), Just(b'3'), Just(b'-'), Just(b':'), any::<u8>()],
            0..200,
        )
    }

    fn head() -> impl Strategy<Value = Head> {
        let name = prop_oneof![
            Just(PLAIN_NAME.to_vec()),
            Just(b":authorit".to_vec()),
            Just(b":authority-".to_vec()),
            Just(b":path".to_vec()),
            "[a-z-]{1,80}".prop_map(String::into_bytes),
        ];
        let field = (name, text(), 0..16_u8);
        let fields = prop::collection::vec(field, 1..12);
        (fields, any::<bool>(), prop::option::of(any::<u8>()), any::<bool>(), 1..400_usize).prop_map(
            |(fields, by_index, padding, has_priority, frame)| Head { fields, by_index, padding, has_priority, frame },
        )
    }

    fn read(bytes: &mut [u8], mut cuts: impl Iterator<Item = usize>) {
        let mut frames = FrameReader::new().repairing_authority();
        frames.pass(&mut PREFACE.to_vec()).expect("a preface");
        let mut rest = bytes;
        while !rest.is_empty() {
            let cut = cuts.next().unwrap_or(1).min(rest.len());
            let (part, after) = rest.split_at_mut(cut);
            let _ = frames.pass(part);
            rest = after;
        }
    }

    fn repaired(name: &[u8], value: &[u8]) -> Vec<u8> {
        let repair = |byte: &u8| match *byte {
            b'%' | b' ' => b'-',
            b'/' => b'3',
            other => other,
        };
        if name == PLAIN_NAME { value.iter().map(repair).collect() } else { value.to_vec() }
    }

    proptest! {
        #[test]
        fn heads_decode_to_the_same_fields_but_for_percent_signs_and_slashes_of_the_authority(
            heads in prop::collection::vec(head(), 1..5),
            cuts in prop::collection::vec(1..40_usize, 1..50),
        ) {
            let (mut encoder, mut sent, mut places) = (Encoder::default(), Vec::new(), Vec::new());
            for (number, head) in (0_u32..).zip(&heads) {
                let (bytes, of_head) = framed(head, 2 * number + 1, &encoded(head, &mut encoder));
                places.push(of_head.into_iter().map(|place| place + sent.len()).collect::<Vec<_>>());
                sent.extend(bytes);
                sent.extend(frame(0, 1, 2 * number + 1, b"\x41\x83%% %"));
            }
            let mut read_bytes = sent.clone();
            read(&mut read_bytes, cuts.iter().copied().cycle());
            let mut decoder = Decoder::default();
            let mut of_heads = std::collections::HashSet::new();
            for (head, places) in heads.iter().zip(&places) {
                let mut block: Vec<u8> = places.iter().map(|place| read_bytes[*place]).collect();
                let mut fields = Vec::new();
                decoder.decode(&mut block, &mut fields).expect("it decodes");
                let fields: Vec<_> = fields.into_iter().map(|(name, value, _)| (name, value)).collect();
                let expected: Vec<_> = head.fields.iter().map(|(name, value, _)| (name.clone(), repaired(name, value))).collect();
                prop_assert_eq!(fields, expected);
                of_heads.extend(places.iter().copied());
            }
            for (place, (now, before)) in read_bytes.iter().zip(&sent).enumerate() {
                prop_assert!(now == before || of_heads.contains(&place), "{}", place);
            }
        }

        #[test]
        fn bytes_that_are_no_head_pass_unchanged(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            cuts in prop::collection::vec(1..40_usize, 1..50),
        ) {
            let mut frames = frame(1, 0, 1, &bytes);
            frames.extend(frame(9, END_HEADERS, 1, &bytes));
            let whole = frames.len();
            read(&mut frames, cuts.iter().copied().cycle());
            prop_assert_eq!(frames.len(), whole);
            // Without a byte with which a field of the authority begins, nothing is one.
            let harmless = |byte: &u8| if matches!(byte, 0 | 1 | 0x10 | 0x11 | 0x40 | 0x41) { b'%' } else { *byte };
            let bytes: Vec<u8> = bytes.iter().map(harmless).collect();
            for mut frames in [bytes.clone(), frame(0, 1, 1, &bytes), frame(1, 0, 1, &bytes)] {
                let before = frames.clone();
                read(&mut frames, cuts.iter().copied().cycle());
                prop_assert_eq!(frames, before);
            }
        }
    }

    #[test]
    fn the_codes_are_complete_and_longer_integers_than_h2_reads_are_lost() {
        let codes: u64 = (1_u32..).zip(CODES).map(|(bits, codes)| u64::from(codes) << (30 - bits)).sum();
        assert_eq!((codes, CODES.iter().sum::<u32>()), (1 << 30, 257));
        let after = |bytes: &[u8]| bytes.iter().fold(Place::Field, |place, byte| place.after(&mut byte.clone()));
        for lost in [&[0xff, 0x80, 0x80, 0x80, 0x80][..], &[0x41, 0x7f, 0x80, 0x80, 0x80, 0x80, 0, b'%']] {
            assert!(matches!(after(lost), Place::Lost), "{lost:?}");
        }
        assert!(matches!(after(&[0xff, 0x80, 0x80, 0x80, 0]), Place::Field));
        let Place::Text { left, .. } = after(&[0x41, 0xff, 0xff, 0xff, 0xff, 0x7f]) else { panic!("a text") };
        assert_eq!(left, 0x7f + (1 << 28) - 1);
    }
}
