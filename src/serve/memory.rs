//! Memory bound for the calls of one connection.
//!
//! An `Account` counts, for one connection, the bytes of requests without an answer and of answers that the peer has
//! not taken. A message counts with its full length from its prefix on, so that all of it can arrive. A message that
//! would exceed the bound is not read: its HTTP/2 window stays closed, and the peer holds the bytes instead. No call is
//! refused. One call at a time may exceed the bound (the turn), so that a connection full of unfinished messages makes
//! progress (`docs/decisions/0024`).

pub(crate) mod inflation;
pub mod process;
pub(crate) mod runner;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::inflation::InflationTurn;
use self::process::{CALL_BYTES, OPEN_BODY_BYTES, Pace, ProcessAccount};
use super::activity::InFlight;
use super::waiting::ReadEmpty;
use crate::telemetry::limited::{Cause, LimitedCalls};

/// Maximum bytes of messages that the calls of one connection hold: 1 MiB. A connection also holds bytes that h2 has
/// received and not passed on, at most 8 MiB (`protocol::STREAM_WINDOW_BYTES`), the message of the call that has the
/// turn, at most 1 MiB, and about 8 KiB for each call: 19 MB together.
pub const CONNECTION_BYTES: usize = 1 << 20;
/// Bytes of messages and untaken answers beyond which no new message begins: 2 MiB. Messages alone do not reach it, so
/// small requests, which arrive in one piece, overtake large ones.
pub const CONNECTION_BYTES_TO_BEGIN: usize = 2 << 20;
/// Maximum bytes of beginnings that wait for room for the rest of their message: 512 KiB, 64 windows.
pub const BEGUN_BYTES: usize = 512 << 10;
/// Bytes up to which a request that arrived whole is not counted, because it is decided at once: 1 KiB. An ordinary
/// request has a few hundred bytes.
pub const UNCOUNTED_REQUEST_BYTES: usize = 1_024;

thread_local! {
    /// Call that the running task answers.
    static CALL: RefCell<Option<Call>> = const { RefCell::new(None) };
}

/// Bytes that the calls of one connection hold, and the calls that wait for room.
#[derive(Debug)]
pub(crate) struct Account {
    /// Bytes of messages, each whole from its prefix to its answer, and of untaken answers. Excludes the message of the
    /// call that has the turn.
    held: AtomicUsize,
    /// Bytes of message beginnings that wait for room for the rest.
    begun: AtomicUsize,
    /// Bytes of arrived messages, untaken answers, calls, open bodies, unfinished heads, and other bytes read around
    /// data.
    all: AtomicUsize,
    queue: Mutex<Queue>,
    around: [Around; 2],
    /// Index in `around` of the current period.
    now: AtomicUsize,
    /// Turn of the large compressed messages on this connection: a semaphore with one permit.
    bodies: OnceLock<Arc<Semaphore>>,
    limited: Option<Arc<LimitedCalls>>,
    process: Arc<ProcessAccount>,
    read_empty: Arc<ReadEmpty>,
    /// Address of the peer. `None` on a Unix socket.
    peer: Option<IpAddr>,
}

/// Bytes that were read around the data of open bodies (those not read to their end). The data of a body can be a small
/// slice of a read buffer, and h2 keeps the whole buffer.
///
/// It is unknown which body keeps which bytes. So they count until all bodies of the same period and of the one before
/// have ended. Two periods exist at a time. A new one begins when the bodies of the older one have ended.
#[derive(Debug, Default)]
struct Around {
    bodies: AtomicUsize,
    bytes: AtomicUsize,
}

/// Bytes in an account, released on drop.
#[derive(Debug)]
pub(crate) struct Hold {
    account: Arc<Account>,
    bytes: usize,
    what: What,
}

/// Kinds of bytes that a [`Hold`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Beginning of a message that waits for room.
    Begun,
    /// Answer that the peer has not taken.
    Untaken,
    /// Bytes that h2 may hold of a body that began in the period with this index.
    OpenBody(usize),
}

/// Calls that wait for room, in the order in which they began to wait.
#[derive(Debug, Default)]
struct Queue {
    next: u64,
    turn: Option<u64>,
    waiting: BTreeMap<u64, Waker>,
}

/// Part of one call in the account of its connection.
#[derive(Debug)]
pub(crate) struct Call {
    account: Arc<Account>,
    /// Bytes of the request that are counted as held.
    bytes: usize,
    /// Bytes of its message that have arrived and are kept.
    arrived: usize,
    /// Place in the queue, from the first wait on.
    ticket: Option<u64>,
    has_turn: bool,
    answer: AnswerProgress,
    /// Guard that makes the connection busy.
    in_flight: Option<InFlight>,
    /// Turn in which its message was inflated.
    inflation: Option<InflationTurn>,
}

/// Progress of the answer of a call.
#[derive(Clone, Copy, Debug, Default)]
struct AnswerProgress {
    /// Number of times that the connection asked for more of the answer, or that the peer took a part of it.
    steps: u64,
    /// True if a part was given and the peer must take it before the next step.
    is_given: bool,
}

impl Default for Account {
    fn default() -> Self {
        Self::new(None, Arc::default(), Arc::default())
    }
}

impl Account {
    /// Creates an account for a new connection of `process`. `limited` counts its calls that meet a bound, and
    /// `read_empty` belongs to its socket.
    pub(crate) fn new(
        limited: Option<Arc<LimitedCalls>>,
        process: Arc<ProcessAccount>,
        read_empty: Arc<ReadEmpty>,
    ) -> Self {
        let [held, begun, all] = [0; 3].map(AtomicUsize::new);
        let (queue, around, now, bodies) = Default::default();
        Self { held, begun, all, queue, around, now, bodies, limited, process, read_empty, peer: None }
    }

    /// Sets the address of the peer.
    pub(crate) fn with_peer(self, peer: Option<IpAddr>) -> Self {
        Self { peer, ..self }
    }

    /// Returns true while requests must arrive soon, because all connections together hold far too much memory.
    pub(crate) fn is_pressed(&self) -> bool {
        self.process.is_pressed()
    }

    /// Counts bytes that were read and are not data of a body, if a body is open.
    pub(crate) fn reads_around(&self, bytes: usize) {
        if self.around.iter().any(|around| around.bodies.load(Ordering::Relaxed) > 0) {
            self.around[self.now.load(Ordering::Relaxed) & 1].bytes.fetch_add(bytes, Ordering::Relaxed);
            self.add(bytes);
        }
    }

    /// Records the end of a body of `period`, and begins a new period if it can.
    fn ends_body(&self, period: usize) {
        self.around[period].bodies.fetch_sub(1, Ordering::Relaxed);
        for _ in 0..2 {
            let before = (self.now.load(Ordering::Relaxed) + 1) & 1;
            if self.around[before].bodies.load(Ordering::Relaxed) > 0 {
                break;
            }
            self.subtract(self.around[before].bytes.swap(0, Ordering::Relaxed));
            self.now.store(before, Ordering::Relaxed);
        }
    }

    /// Returns the speed at which the connection may be read.
    pub(crate) fn pace(&self) -> Pace {
        self.process.pace(self.all.load(Ordering::Relaxed))
    }

    /// Replaces `before` counted bytes by `after` bytes.
    pub(crate) fn change(&self, before: usize, after: usize) {
        self.add(after);
        self.subtract(before);
    }

    fn add(&self, bytes: usize) {
        let before = self.all.fetch_add(bytes, Ordering::Relaxed);
        self.process.change(before, before.saturating_add(bytes));
    }

    fn subtract(&self, bytes: usize) {
        let before = self.all.fetch_sub(bytes, Ordering::Relaxed);
        self.process.change(before, before.saturating_sub(bytes));
    }

    /// Counts a call that met a bound.
    pub(crate) fn count(&self, cause: Cause) {
        if let Some(limited) = &self.limited {
            limited.count(cause);
        }
    }

    /// Returns the bytes that are held now.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns true if a message may begin.
    pub(crate) fn may_begin(&self) -> bool {
        self.held() <= CONNECTION_BYTES_TO_BEGIN && self.begun.load(Ordering::Relaxed) <= BEGUN_BYTES
    }

    fn release(&self, bytes: usize, of: &AtomicUsize) {
        of.fetch_sub(bytes, Ordering::Relaxed);
        if self.may_begin() {
            let waiting = mem::take(&mut self.queue.lock().waiting);
            waiting.into_values().for_each(Waker::wake);
        }
    }
}

impl Hold {
    /// Counts the beginning of a message that waits for room.
    pub(crate) fn begun(account: Arc<Account>, bytes: usize) -> Self {
        account.begun.fetch_add(bytes, Ordering::Relaxed);
        Self::new(account, bytes, What::Begun)
    }

    /// Counts an answer that the peer has not taken.
    pub(crate) fn untaken(account: Arc<Account>, bytes: usize) -> Self {
        account.held.fetch_add(bytes, Ordering::Relaxed);
        Self::new(account, bytes, What::Untaken)
    }

    /// Counts the bytes that h2 may hold of a body that is not read to its end.
    pub(crate) fn open_body(account: Arc<Account>) -> Self {
        let period = account.now.load(Ordering::Relaxed) & 1;
        account.around[period].bodies.fetch_add(1, Ordering::Relaxed);
        Self::new(account, OPEN_BODY_BYTES, What::OpenBody(period))
    }

    fn new(account: Arc<Account>, bytes: usize, what: What) -> Self {
        account.add(bytes);
        Self { account, bytes, what }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.account.subtract(self.bytes);
        match self.what {
            What::Begun => self.account.release(self.bytes, &self.account.begun),
            What::Untaken => self.account.release(self.bytes, &self.account.held),
            What::OpenBody(period) => self.account.ends_body(period),
        }
    }
}

impl AnswerProgress {
    fn step(&mut self, is_given: bool) {
        *self = Self { steps: self.steps.wrapping_add(1), is_given };
    }
}

impl Queue {
    /// Wakes the call that has waited longest, if no call has the turn.
    fn pass_on(&mut self) {
        if self.turn.is_none()
            && let Some((_, first)) = self.waiting.first_key_value()
        {
            first.wake_by_ref();
        }
    }
}

impl Call {
    /// Creates a call that holds nothing yet. `in_flight` makes its connection busy.
    pub(crate) fn new(account: Arc<Account>, in_flight: Option<InFlight>) -> Self {
        account.add(CALL_BYTES);
        let answer = AnswerProgress::default();
        Self { account, bytes: 0, arrived: 0, ticket: None, has_turn: false, answer, in_flight, inflation: None }
    }

    /// Returns true if this call may begin a message. Otherwise `waker` is woken for another try. `may_take_turn` is
    /// false for a call that need not end.
    pub(crate) fn may_begin(&mut self, may_take_turn: bool, waker: &Waker) -> bool {
        self.has_room(self.account.may_begin(), may_take_turn, waker)
    }

    /// Returns true if this call may hold a message of `bytes`, and counts it. Otherwise `waker` is woken for another
    /// try.
    pub(crate) fn may_hold(&mut self, bytes: usize, may_take_turn: bool, waker: &Waker) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let is_within = self.account.held().saturating_add(more) <= CONNECTION_BYTES;
        let has_room = more == 0 || self.has_room(is_within, may_take_turn, waker);
        if has_room && !self.has_turn {
            self.bytes += more;
            self.account.held.fetch_add(more, Ordering::Relaxed);
        }
        has_room
    }

    /// Replaces the counted bytes of a message that have arrived and are kept by `bytes`.
    pub(crate) fn keeps(&mut self, bytes: usize) {
        self.account.change(self.arrived, bytes);
        self.arrived = bytes;
    }

    fn has_room(&mut self, is_within: bool, may_take_turn: bool, waker: &Waker) -> bool {
        if !is_within {
            return self.has_turn || self.takes_turn(may_take_turn, waker);
        }
        if let Some(ticket) = self.ticket {
            self.account.queue.lock().waiting.remove(&ticket);
        }
        true
    }

    /// Returns true if this call takes the turn. Otherwise the call joins the queue.
    fn takes_turn(&mut self, may_take_turn: bool, waker: &Waker) -> bool {
        let mut queue = self.account.queue.lock();
        let ticket = *self.ticket.get_or_insert_with(|| {
            queue.next += 1;
            // Calls that do not take the turn queue behind all others.
            if may_take_turn { queue.next } else { queue.next | 1 << 63 }
        });
        let is_first = queue.waiting.first_key_value().is_none_or(|(first, _)| *first >= ticket);
        self.has_turn = may_take_turn && is_first && queue.turn.is_none();
        if self.has_turn {
            queue.turn = Some(ticket);
            queue.waiting.remove(&ticket);
        } else {
            queue.waiting.insert(ticket, waker.clone());
        }
        self.has_turn
    }

    fn release_request(&mut self) {
        self.inflation = None;
        if self.arrived > 0 {
            self.account.subtract(mem::take(&mut self.arrived));
        }
        if self.bytes > 0 {
            self.account.release(mem::take(&mut self.bytes), &self.account.held);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.release_request();
        self.account.subtract(CALL_BYTES);
        if let Some(ticket) = self.ticket {
            let mut queue = self.account.queue.lock();
            queue.waiting.remove(&ticket);
            if self.has_turn {
                queue.turn = None;
            }
            queue.pass_on();
        }
    }
}

/// Applies `ask` to the running call. Returns `None` outside of a call.
fn running<T>(ask: impl FnOnce(&mut Call) -> T) -> Option<T> {
    CALL.with(|call| call.borrow_mut().as_mut().map(ask))
}

/// Returns true if the running call may begin a message. Otherwise its task is woken for another try. Returns false
/// outside of a call.
pub(super) fn may_begin(cx: &Context<'_>) -> bool {
    running(|call| call.may_begin(true, cx.waker())).unwrap_or(false)
}

/// Returns true if the running call may hold a message of `bytes`, and counts it until the answer is there. Otherwise
/// its task is woken for another try. Returns false outside of a call.
pub(super) fn may_hold(bytes: usize, cx: &Context<'_>) -> bool {
    running(|call| call.may_hold(bytes, true, cx.waker())).unwrap_or(false)
}

/// Returns true if the running call may keep `bytes` in place of its message, and counts them until the answer is there.
/// Otherwise its task is woken for another try. Returns true outside of a call.
pub(crate) fn may_keep(bytes: usize, cx: &Context<'_>) -> bool {
    running(|call| {
        let may_hold = call.may_hold(bytes, true, cx.waker());
        if may_hold {
            call.keeps(bytes);
        }
        may_hold
    })
    .unwrap_or(true)
}

/// Returns the address of the peer of the running call. `None` on a Unix socket.
pub(crate) fn peer() -> Option<IpAddr> {
    running(|call| call.account.peer).flatten()
}

/// Sets the bytes of the running call's message that have arrived and are kept to `bytes`.
pub(super) fn keeps(bytes: usize) {
    let _ = running(|call| call.keeps(bytes));
}

/// Returns the turn of the large compressed messages of the running call's connection. `None` outside of a call.
pub(super) fn bodies() -> Option<Arc<Semaphore>> {
    running(|call| Arc::clone(call.account.bodies.get_or_init(|| Arc::new(Semaphore::new(1)))))
}

/// Returns the longest time for which the running call can have waited for its thread; zero outside of a call.
pub(crate) fn waited() -> Duration {
    running(|call| call.account.read_empty.waited()).unwrap_or_default()
}

/// Marks the running call as endless: its connection is idle if it has no other call.
pub(super) fn need_not_end() {
    let _ = running(|call| call.in_flight.as_mut().map(InFlight::need_not_end));
}

/// Records a request for the next part of the running call's answer.
pub(super) fn note_asked() {
    let _ = running(|call| call.answer.step(false));
}

/// Records that the running call gave a part of its answer, which the peer must take before the next. Its request no
/// longer counts. Returns the account for the answer if `is_counted`; `None` outside of a call.
pub(super) fn note_given(is_counted: bool) -> Option<Arc<Account>> {
    running(|call| {
        call.answer.step(true);
        call.release_request();
        is_counted.then(|| Arc::clone(&call.account))
    })
    .flatten()
}

#[cfg(test)]
mod tests;
