//! Incremental reader of `RateLimitRequest` that keeps the domain, counts the entries and drops everything else.

/// Numbers of the fields of `RateLimitRequest` and `RateLimitDescriptor` that are read, as in `proto/`.
const DOMAIN: u32 = 1;
const DESCRIPTORS: u32 = 2;
const DESCRIPTOR_ENTRIES: u32 = 1;
const DESCRIPTOR_LIMIT: u32 = 2;
/// Bytes of the longest varint: 10 (64 bits, 7 in each).
const VARINT_BYTES: u32 = 10;

/// Result of skimming a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skimmed {
    /// Domain; the last one if the message has several. A domain above the maximum length is cut off, but stays longer
    /// than the maximum.
    pub domain: String,
    /// True if a descriptor has its own limit, or may have one: also for a malformed message.
    pub may_bring_limit: bool,
    /// Number of descriptors or of entries, whichever is larger.
    pub entries: usize,
}

/// Reads a message in pieces of any size. Its memory is bounded by `longest_domain`.
#[derive(Debug)]
pub(super) struct Skimmer {
    longest_domain: usize,
    domain: Vec<u8>,
    brings_limit: bool,
    descriptors: usize,
    entries: usize,
    /// Bytes left of the current descriptor; `None` between descriptors.
    descriptor: Option<u64>,
    /// Nesting depth of groups, which proto3 has only in unknown fields.
    groups: u64,
    state: SkimState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SkimState {
    /// Key of the next field.
    Key(Varint),
    /// Varint whose value is not needed.
    Number(Varint),
    /// Length of the field with this number.
    Length(u32, Varint),
    /// Bytes left of the domain.
    Domain(u64),
    /// Bytes left to skip.
    Skip(u64),
    /// Not protobuf; the rest of the message is ignored.
    Malformed,
}

/// Varint of which some bytes have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Varint {
    value: u64,
    bytes: u32,
}

#[derive(Clone, Copy, Debug)]
enum Pushed {
    More(Varint),
    Whole(u64),
    Invalid,
}

impl Varint {
    fn push(self, byte: u8) -> Pushed {
        // The last byte holds one bit.
        if self.bytes + 1 == VARINT_BYTES && byte > 1 {
            return Pushed::Invalid;
        }
        let value = self.value | u64::from(byte & 0x7f) << (7 * self.bytes);
        if byte < 0x80 { Pushed::Whole(value) } else { Pushed::More(Self { value, bytes: self.bytes + 1 }) }
    }
}

impl Skimmer {
    /// Creates a reader of a message. A domain of more than `longest_domain` bytes is unknown to the rules.
    pub(super) fn new(longest_domain: usize) -> Self {
        Self {
            longest_domain,
            domain: Vec::new(),
            brings_limit: false,
            descriptors: 0,
            entries: 0,
            descriptor: None,
            groups: 0,
            state: SkimState::Key(Varint::default()),
        }
    }

    /// Reads the next bytes of the message.
    pub(super) fn read(&mut self, mut bytes: &[u8]) {
        while let Some(byte) = bytes.first() {
            let taken = match self.state {
                SkimState::Malformed => return,
                SkimState::Skip(left) | SkimState::Domain(left) => {
                    let taken = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
                    self.take(&bytes[..taken], left);
                    taken
                }
                SkimState::Key(varint) => self.byte(varint.push(*byte), SkimState::Key, Self::key),
                SkimState::Number(varint) => self.byte(varint.push(*byte), SkimState::Number, |_, _| SkimState::next()),
                SkimState::Length(field, varint) => self.byte(
                    varint.push(*byte),
                    |more| SkimState::Length(field, more),
                    |this, length| this.length(field, length),
                ),
            };
            bytes = bytes.get(taken..).unwrap_or_default();
            self.leave_descriptor(taken);
        }
    }

    /// Ends the message and returns the result.
    pub(super) fn finish(self) -> Skimmed {
        let is_whole = self.state == SkimState::next() && self.groups == 0 && self.descriptor.is_none();
        Skimmed {
            domain: String::from_utf8_lossy(&self.domain).into_owned(),
            may_bring_limit: self.brings_limit || !is_whole,
            entries: self.descriptors.max(self.entries),
        }
    }

    /// Processes one byte of a varint. Returns the number of bytes read, which is 1.
    fn byte(
        &mut self,
        pushed: Pushed,
        more: impl FnOnce(Varint) -> SkimState,
        whole: impl FnOnce(&mut Self, u64) -> SkimState,
    ) -> usize {
        self.state = match pushed {
            Pushed::More(varint) => more(varint),
            Pushed::Whole(value) => whole(self, value),
            Pushed::Invalid => SkimState::Malformed,
        };
        1
    }

    /// Takes bytes of the domain or of a skipped field, of which `left` were missing.
    fn take(&mut self, bytes: &[u8], left: u64) {
        let is_domain = matches!(self.state, SkimState::Domain(_));
        if is_domain {
            let room = (self.longest_domain + 1).saturating_sub(self.domain.len());
            self.domain.extend_from_slice(&bytes[..room.min(bytes.len())]);
        }
        self.state = match left - bytes.len() as u64 {
            0 => SkimState::next(),
            left if is_domain => SkimState::Domain(left),
            left => SkimState::Skip(left),
        };
    }

    /// Returns the state after the key of a field.
    fn key(&mut self, key: u64) -> SkimState {
        let Ok(key) = u32::try_from(key) else { return SkimState::Malformed };
        let (field, is_outermost) = (key >> 3, self.descriptor.is_none() && self.groups == 0);
        match key & 7 {
            _ if field == 0 => SkimState::Malformed,
            2 => SkimState::Length(field, Varint::default()),
            // A domain of another wire type makes the message malformed.
            _ if field == DOMAIN && is_outermost => SkimState::Malformed,
            0 => SkimState::Number(Varint::default()),
            1 => SkimState::Skip(8),
            5 => SkimState::Skip(4),
            3 => {
                self.groups += 1;
                SkimState::next()
            }
            4 if self.groups > 0 => {
                self.groups -= 1;
                SkimState::next()
            }
            _ => SkimState::Malformed,
        }
    }

    /// Returns the state after the length of a field.
    fn length(&mut self, field: u32, length: u64) -> SkimState {
        let is_known = self.groups == 0;
        match self.descriptor {
            None if is_known && field == DOMAIN => {
                self.domain.clear();
                if length == 0 { SkimState::next() } else { SkimState::Domain(length) }
            }
            None if is_known && field == DESCRIPTORS => {
                self.descriptors += 1;
                // One more, because the byte that is being read is not part of the descriptor.
                self.descriptor = length.checked_add(1).filter(|_| length > 0);
                SkimState::next()
            }
            Some(_) if is_known && field == DESCRIPTOR_ENTRIES => {
                self.entries += 1;
                SkimState::skip(length)
            }
            Some(_) if is_known && field == DESCRIPTOR_LIMIT => {
                self.brings_limit = true;
                SkimState::skip(length)
            }
            _ => SkimState::skip(length),
        }
    }

    /// Counts bytes of the current descriptor. Leaves it at its end, which must be the end of a field.
    fn leave_descriptor(&mut self, taken: usize) {
        let Some(left) = &mut self.descriptor else { return };
        match left.checked_sub(taken as u64) {
            Some(0) if self.state == SkimState::next() && self.groups == 0 => self.descriptor = None,
            None | Some(0) => self.state = SkimState::Malformed,
            Some(rest) => *left = rest,
        }
    }
}

impl SkimState {
    /// Returns the state at the end of a field.
    fn next() -> Self {
        Self::Key(Varint::default())
    }

    fn skip(length: u64) -> Self {
        if length == 0 { Self::next() } else { Self::Skip(length) }
    }
}

#[cfg(test)]
mod tests;
