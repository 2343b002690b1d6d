//! Handshakes in progress, in the order of their beginning.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::MOST_HANDSHAKES;

/// Handshakes in progress, at most [`MOST_HANDSHAKES`].
#[derive(Debug, Default)]
pub(super) struct Waiting {
    begun: u64,
    /// A handshake ends when its sender is dropped.
    senders: BTreeMap<u64, oneshot::Sender<()>>,
}

/// Permit of one handshake that waits for its peer, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct HandshakePermit {
    waiting: Arc<Mutex<Waiting>>,
    number: u64,
}

impl HandshakePermit {
    /// Takes a place. If there is none, the handshake that began first loses its own. The returned receiver is ready once
    /// this place is lost.
    pub(super) fn take(waiting: &Arc<Mutex<Waiting>>) -> (Self, oneshot::Receiver<()>) {
        let (sender, lost) = oneshot::channel();
        let mut all = waiting.lock();
        all.begun += 1;
        let number = all.begun;
        if all.senders.len() >= MOST_HANDSHAKES {
            all.senders.pop_first();
        }
        all.senders.insert(number, sender);
        (Self { waiting: Arc::clone(waiting), number }, lost)
    }
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        self.waiting.lock().senders.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_one_handshake_too_many_the_one_that_began_first_ends() {
        let waiting = Arc::default();
        let mut all: Vec<_> = (0..MOST_HANDSHAKES).map(|_| HandshakePermit::take(&waiting)).collect();
        let has_lost = |(_, lost): &mut (HandshakePermit, oneshot::Receiver<()>)| {
            lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
        };
        assert!(!all.iter_mut().any(has_lost));
        drop(all.pop());
        all.push(HandshakePermit::take(&waiting));
        assert!(!all.iter_mut().any(has_lost), "a place that is free again is taken first");
        all.push(HandshakePermit::take(&waiting));
        let lost: Vec<_> = all.iter_mut().map(has_lost).collect();
        assert_eq!(lost.iter().position(|lost| *lost), Some(0));
        assert_eq!(lost.iter().filter(|lost| **lost).count(), 1);
        drop(all);
        assert!(waiting.lock().senders.is_empty());
    }
}
