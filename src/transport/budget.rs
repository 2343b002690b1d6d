//! Memory that the calls of one connection may hold.
//!
//! An `Account` counts, for one connection, the bytes of requests that are not answered and of answers that the peer has
//! not taken. A message counts whole from its prefix on, so that all of it can arrive. A message that would go beyond the
//! bound is not read, so that its HTTP/2 window stays closed and the peer holds the bytes instead. Nothing
//! is refused. One call at a time may go beyond the bound (the turn), so that a connection full of unfinished messages
//! makes progress (`docs/decisions/0024`).

pub mod process;
pub(super) mod runner;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::process::{CALL_BYTES, OPEN_BODY_BYTES, Pace, ProcessAccount};
use super::activity::InFlight;
use super::waiting::ReadEmpty;
use crate::telemetry::limited::{Cause, LimitedCalls};

/// Bytes of messages that the calls of one connection hold: 1 MiB. Beside them a connection holds what h2 has received and
/// nobody has read, at most 8 MiB (`protocol::STREAM_WINDOW_BYTES`), the message of the call that has the turn, at most
/// 4 MiB, and about 8 KiB for each call: 32 MB together.
pub const CONNECTION_BYTES: usize = 1 << 20;
/// Bytes of messages and untaken answers beyond which no new message is begun: 2 MiB. Messages alone do not reach it, so
/// small requests, which arrive in one piece, pass large ones.
pub const CONNECTION_BYTES_TO_BEGIN: usize = 2 << 20;
/// Bytes of beginnings that wait for room for the rest of their message: 512 KiB, 64 windows.
pub const BEGUN_BYTES: usize = 512 << 10;
/// Requests that are not counted because they arrived whole and are decided at once: up to 1 KiB. An ordinary one has some
/// hundred bytes.
pub const UNCOUNTED_REQUEST_BYTES: usize = 1_024;

thread_local! {
    /// The call that the running task answers.
    static CALL: RefCell<Option<Call>> = const { RefCell::new(None) };
}

/// The bytes that the calls of one connection hold, and the calls that wait for room.
#[derive(Debug)]
pub(super) struct Account {
    /// Messages whole from their prefix to their answer, and untaken answers. Not the message of the call that has the turn.
    held: AtomicUsize,
    /// Beginnings of messages that wait for room for the rest.
    begun: AtomicUsize,
    /// Bytes of messages that have arrived, of untaken answers, of the calls themselves, and of their bodies.
    all: AtomicUsize,
    queue: Mutex<Queue>,
    around: [Around; 2],
    /// The place among them of what is read now.
    now: AtomicUsize,
    /// The turn of the large requests of this connection.
    large: OnceLock<Arc<Semaphore>>,
    limited: Option<Arc<LimitedCalls>>,
    process: Arc<ProcessAccount>,
    read_empty: Arc<ReadEmpty>,
}

/// Bytes that were read around the data of bodies that are not read to their end. A body's data can be a small slice of what
/// was read, and h2 keeps all of it.
///
/// Nobody knows which body keeps them. So they count until all bodies of the same period and of the one before have ended.
/// There are two periods at a time. A new one begins when the bodies of the one before have ended.
#[derive(Debug, Default)]
struct Around {
    bodies: AtomicUsize,
    bytes: AtomicUsize,
}

/// Bytes in an account, which its drop gives back.
#[derive(Debug)]
pub(super) struct Hold {
    account: Arc<Account>,
    bytes: usize,
    what: What,
}

/// The kinds of bytes that a [`Hold`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// The beginning of a message that waits for room.
    Begun,
    /// An answer that the peer has not taken.
    Untaken,
    /// Bytes that h2 may hold of a body that began in this period.
    OpenBody(usize),
}

/// The calls that wait for room, in the order in which they began to wait.
#[derive(Debug, Default)]
struct Queue {
    next: u64,
    turn: Option<u64>,
    waiting: BTreeMap<u64, Waker>,
}

/// The part of one call in its connection's account.
#[derive(Debug)]
pub(super) struct Call {
    account: Arc<Account>,
    /// Bytes of the request that are counted as held.
    bytes: usize,
    /// Bytes of its message that have arrived and are kept.
    arrived: usize,
    /// The place in the queue, from the first wait on.
    ticket: Option<u64>,
    has_turn: bool,
    answer: Answering,
    /// Makes the connection busy.
    in_flight: Option<InFlight>,
}

/// How far the answer of a call is.
#[derive(Clone, Copy, Debug, Default)]
struct Answering {
    /// Number of times that the connection asked for more of the answer, or that the peer took a part of it.
    steps: u64,
    /// Whether a part was given and the peer has to take it before there are more steps.
    is_given: bool,
}

impl Default for Account {
    fn default() -> Self {
        Self::new(None, Arc::default(), Arc::default())
    }
}

impl Account {
    /// An account of a new connection of `process`, whose calls that meet a bound `limited` counts. `read_empty` is that of its socket.
    pub(super) fn new(
        limited: Option<Arc<LimitedCalls>>,
        process: Arc<ProcessAccount>,
        read_empty: Arc<ReadEmpty>,
    ) -> Self {
        let [held, begun, all] = [0; 3].map(AtomicUsize::new);
        let (queue, around, now, large) = Default::default();
        Self { held, begun, all, queue, around, now, large, limited, process, read_empty }
    }

    /// Returns true when requests have to arrive soon, because all connections together hold far too much.
    pub(super) fn is_pressed(&self) -> bool {
        self.process.is_pressed()
    }

    /// Counts bytes that were read and are no data of a body.
    pub(super) fn reads_around(&self, bytes: usize) {
        if self.around.iter().any(|around| around.bodies.load(Ordering::Relaxed) > 0) {
            self.around[self.now.load(Ordering::Relaxed) & 1].bytes.fetch_add(bytes, Ordering::Relaxed);
            self.add(bytes);
        }
    }

    /// Notes the end of a body of this period, and begins a new one if it can.
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

    /// Returns how fast the connection may be read.
    pub(super) fn pace(&self) -> Pace {
        self.process.pace(self.all.load(Ordering::Relaxed))
    }

    /// Counts `after` bytes of memory where `before` were counted.
    pub(super) fn change(&self, before: usize, after: usize) {
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
    pub(super) fn count(&self, cause: Cause) {
        if let Some(limited) = &self.limited {
            limited.count(cause);
        }
    }

    /// Returns the bytes that are held now.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns true when a message may be begun.
    pub(super) fn may_begin(&self) -> bool {
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
    pub(super) fn begun(account: Arc<Account>, bytes: usize) -> Self {
        account.begun.fetch_add(bytes, Ordering::Relaxed);
        Self::new(account, bytes, What::Begun)
    }

    /// Counts an answer that the peer has not taken.
    pub(super) fn untaken(account: Arc<Account>, bytes: usize) -> Self {
        account.held.fetch_add(bytes, Ordering::Relaxed);
        Self::new(account, bytes, What::Untaken)
    }

    /// Counts the bytes that h2 may hold of a body that is not read to its end.
    pub(super) fn open_body(account: Arc<Account>) -> Self {
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

impl Answering {
    fn step(&mut self, is_given: bool) {
        *self = Self { steps: self.steps.wrapping_add(1), is_given };
    }
}

impl Queue {
    /// Wakes the call that waits longest if nobody has the turn.
    fn pass_on(&mut self) {
        if self.turn.is_none()
            && let Some((_, first)) = self.waiting.first_key_value()
        {
            first.wake_by_ref();
        }
    }
}

impl Call {
    /// A call that holds nothing yet. With `in_flight` it makes its connection busy.
    pub(super) fn new(account: Arc<Account>, in_flight: Option<InFlight>) -> Self {
        account.add(CALL_BYTES);
        let answer = Answering::default();
        Self { account, bytes: 0, arrived: 0, ticket: None, has_turn: false, answer, in_flight }
    }

    /// Returns true when this call may begin a message. Else the task is woken for another try. `may_take_turn` is false for
    /// a call that need not end.
    pub(super) fn may_begin(&mut self, may_take_turn: bool, waker: &Waker) -> bool {
        self.has_room(self.account.may_begin(), may_take_turn, waker)
    }

    /// Returns true when this call may hold a message of `bytes`, and counts it. Else the task is woken for another try.
    pub(super) fn may_hold(&mut self, bytes: usize, may_take_turn: bool, waker: &Waker) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let is_within = self.account.held().saturating_add(more) <= CONNECTION_BYTES;
        let has_room = more == 0 || self.has_room(is_within, may_take_turn, waker);
        if has_room && !self.has_turn {
            self.bytes += more;
            self.account.held.fetch_add(more, Ordering::Relaxed);
        }
        has_room
    }

    /// Counts that so many bytes of a message have arrived and are kept, in place of what was counted before.
    pub(super) fn keeps(&mut self, bytes: usize) {
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

    /// Returns true when this call takes the turn. Else it stands in the queue.
    fn takes_turn(&mut self, may_take_turn: bool, waker: &Waker) -> bool {
        let mut queue = self.account.queue.lock();
        let ticket = *self.ticket.get_or_insert_with(|| {
            queue.next += 1;
            // Those who do not take the turn stand behind all others.
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

/// Asks the running call. Returns `None` outside of a call.
fn running<T>(ask: impl FnOnce(&mut Call) -> T) -> Option<T> {
    CALL.with(|call| call.borrow_mut().as_mut().map(ask))
}

/// Returns true when the running call may begin a message. Else its task is woken for another try. Outside of a call nothing
/// may be begun.
pub(super) fn may_begin(cx: &Context<'_>) -> bool {
    running(|call| call.may_begin(true, cx.waker())).unwrap_or(false)
}

/// Returns true when the running call may hold a message of `bytes`, and counts it until the answer is there. Else its task
/// is woken for another try. Outside of a call nothing may be held.
pub(super) fn may_hold(bytes: usize, cx: &Context<'_>) -> bool {
    running(|call| call.may_hold(bytes, true, cx.waker())).unwrap_or(false)
}

/// Counts that so many bytes of a message of the running call have arrived and are kept.
pub(super) fn keeps(bytes: usize) {
    let _ = running(|call| call.keeps(bytes));
}

/// Returns the turn of the large requests of the running call's connection. `None` outside of a call.
pub(super) fn large() -> Option<Arc<Semaphore>> {
    running(|call| Arc::clone(call.account.large.get_or_init(|| Arc::new(Semaphore::new(1)))))
}

/// Returns the longest time for which the running call can have waited for its thread; nothing outside of a call.
pub(super) fn waited() -> Duration {
    running(|call| call.account.read_empty.waited()).unwrap_or_default()
}

/// Notes that the running call need not end, so that its connection is idle if it has no other.
pub(super) fn need_not_end() {
    let _ = running(|call| call.in_flight.as_mut().map(InFlight::need_not_end));
}

/// Notes that the running call was asked for the next part of its answer.
pub(super) fn is_asked() {
    let _ = running(|call| call.answer.step(false));
}

/// Notes that the running call gave a part of its answer, which the peer has to take before the next. Its request counts no
/// longer. Returns the account for the answer, and `None` outside of a call.
pub(super) fn gives(is_counted: bool) -> Option<Arc<Account>> {
    running(|call| {
        call.answer.step(true);
        call.release_request();
        is_counted.then(|| Arc::clone(&call.account))
    })
    .flatten()
}

#[cfg(test)]
mod tests;
