//! Inflation of gzip streams in small steps, each of which takes a bounded amount of memory and work.

use std::collections::VecDeque;
use std::io::{BufRead, ErrorKind, Read, Result};

use bytes::{Buf, Bytes};
use flate2::bufread::MultiGzDecoder;

/// Most bytes that a step makes: 16 KiB, which take about 50 us.
pub(super) const BLOCK_BYTES: usize = 16 << 10;
/// Most bytes that a step reads: 4 KiB, which can be 200 streams without content.
const STEP_BYTES: usize = 4 << 10;

/// Gzip stream that is inflated. Streams that follow each other are one, as in gzip's files.
#[derive(Debug)]
pub(super) struct Inflation(MultiGzDecoder<Compressed>);

/// Compressed bytes.
#[derive(Debug)]
struct Compressed {
    parts: VecDeque<Bytes>,
    is_whole: bool,
    /// Bytes that this step may still read.
    allowed: usize,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// As many bytes were made.
    Made(usize),
    /// Another step is needed.
    More,
    /// More compressed bytes are needed.
    Starved,
    /// The stream has ended.
    End,
}

impl Inflation {
    /// Begins to inflate `parts`, after which nothing follows if `is_whole`.
    pub(super) fn new(parts: VecDeque<Bytes>, is_whole: bool) -> Self {
        Self(MultiGzDecoder::new(Compressed { parts, is_whole, allowed: STEP_BYTES }))
    }

    /// Adds compressed bytes, after which nothing follows if `is_whole`.
    pub(super) fn add(&mut self, part: Bytes, is_whole: bool) {
        let compressed = self.0.get_mut();
        compressed.parts.push_back(part);
        compressed.is_whole = is_whole;
    }

    /// Inflates into `block`.
    ///
    /// # Errors
    /// If the stream is broken or ends early.
    pub(super) fn step(&mut self, block: &mut [u8]) -> Result<Step> {
        self.0.get_mut().allowed = STEP_BYTES;
        match self.0.read(block) {
            Ok(0) => Ok(Step::End),
            Ok(made) => Ok(Step::Made(made)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Ok(if self.0.get_ref().is_starved() { Step::Starved } else { Step::More })
            }
            Err(error) => Err(error),
        }
    }
}

/// Inflates `parts` at once. Returns `None` if they make more than `most` bytes.
///
/// # Errors
/// If the stream is broken or ends early.
pub(super) fn inflate(parts: VecDeque<Bytes>, most: usize) -> Result<Option<Vec<u8>>> {
    let mut inflation = Inflation::new(parts, true);
    let (mut message, mut block) = (Vec::new(), vec![0; BLOCK_BYTES]);
    loop {
        match inflation.step(&mut block)? {
            Step::Made(made) if made > most.saturating_sub(message.len()) => return Ok(None),
            Step::Made(made) => message.extend_from_slice(block.get(..made).unwrap_or_default()),
            Step::More => {}
            Step::Starved | Step::End => return Ok(Some(message)),
        }
    }
}

impl Compressed {
    fn is_starved(&self) -> bool {
        !self.is_whole && self.parts.iter().all(Bytes::is_empty)
    }
}

impl BufRead for Compressed {
    fn fill_buf(&mut self) -> Result<&[u8]> {
        while self.parts.front().is_some_and(Bytes::is_empty) {
            self.parts.pop_front();
        }
        match self.parts.front() {
            None if self.is_whole => Ok(&[]),
            Some(part) if self.allowed > 0 => Ok(part.get(..self.allowed.min(part.len())).unwrap_or_default()),
            _ => Err(ErrorKind::WouldBlock.into()),
        }
    }

    fn consume(&mut self, bytes: usize) {
        self.allowed = self.allowed.saturating_sub(bytes);
        if let Some(part) = self.parts.front_mut() {
            part.advance(bytes.min(part.len()));
        }
    }
}

impl Read for Compressed {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        let read = self.fill_buf()?.read(to)?;
        self.consume(read);
        Ok(read)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;
    use flate2::{Compression, GzBuilder};

    use super::*;

    pub(in super::super) fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    fn inflated(stream: &[u8], most: usize) -> Result<Option<Vec<u8>>> {
        let in_parts = |cut: usize| inflate(stream.chunks(cut).map(Bytes::copy_from_slice).collect(), most);
        let whole = in_parts(stream.len().max(1));
        for cut in [1, 2, 3, 1_000] {
            assert_eq!(in_parts(cut).map_err(|error| error.kind()).ok(), whole.as_ref().ok().cloned(), "{cut}");
        }
        whole
    }

    #[test]
    fn streams_are_inflated_however_they_are_cut_and_one_after_the_other() {
        let long: Vec<u8> = (0..40_000_u32).flat_map(u32::to_be_bytes).collect();
        for content in [&b""[..], b"a", b"domain", &long] {
            assert_eq!(inflated(&gzip(content), 1 << 20).unwrap().unwrap(), content);
        }
        let several = [gzip(b"one"), gzip(b""), gzip(b" and "), gzip(b"another")].concat();
        assert_eq!(inflated(&several, 100).unwrap().unwrap(), b"one and another");
        let mut named = GzBuilder::new().filename([b'n'; 60_000]).comment([b'c'; 60_000]).extra([7; 60_000]);
        named = named.mtime(7);
        let mut named = named.write(Vec::new(), Compression::fast());
        named.write_all(b"named").unwrap();
        assert_eq!(inflated(&named.finish().unwrap(), 100).unwrap().unwrap(), b"named");
    }

    #[test]
    fn no_more_is_inflated_than_asked_for() {
        assert_eq!(inflated(&gzip(&[7; 100]), 100).unwrap().unwrap(), [7; 100]);
        assert_eq!(inflated(&gzip(&[7; 101]), 100).unwrap(), None);
        let bomb = gzip(&vec![0; 64 << 20]);
        assert!(bomb.len() < 70_000 && inflated(&bomb, 4 << 20).unwrap().is_none(), "{}", bomb.len());
        let mut inflation = Inflation::new([Bytes::from(gzip(b"").repeat(10_000))].into(), true);
        let mut steps = 0;
        while inflation.step(&mut [0; 100]).unwrap() != Step::End {
            steps += 1;
        }
        assert!(steps >= 10_000 * 20 / STEP_BYTES, "{steps}");
    }

    #[test]
    fn what_is_broken_or_ends_early_is_an_error() {
        let whole = gzip(b"a message of some length, a message of some length");
        for end in 0..whole.len() {
            assert!(inflated(&whole[..end], 1_000).is_err(), "{end}");
        }
        for place in 0..whole.len() {
            let mut broken = whole.clone();
            broken[place] ^= 0x41;
            // Time, flags of the compressor and system are content of no importance.
            let matters = !(4..10).contains(&place);
            assert_eq!(inflated(&broken, 1_000).is_err(), matters, "{place}");
        }
        assert!(inflated(&[&whole[..], b"\0"].concat(), 1_000).is_err());
        assert!(inflated(b"no gzip at all", 1_000).is_err());
    }

    #[test]
    fn what_has_not_arrived_is_waited_for() {
        let whole = Bytes::from(gzip(b"one"));
        let mut inflation = Inflation::new(VecDeque::new(), false);
        let mut block = [0; 10];
        for (number, byte) in whole.iter().enumerate() {
            assert!(matches!(inflation.step(&mut block).unwrap(), Step::Starved | Step::Made(_)), "{number}");
            inflation.add(Bytes::copy_from_slice(&[*byte]), number + 1 == whole.len());
        }
        let end: Vec<Step> = (0..2).map(|_| inflation.step(&mut block).unwrap()).collect();
        assert_eq!(end.last(), Some(&Step::End), "{end:?}");
    }
}
