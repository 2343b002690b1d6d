//! Connections of a listener, in two orders: those that never had a call, and the others. Each order starts with the
//! connection that is idle longest.
//!
//! Only the accept loop keeps these orders, so there is no lock. A call does not touch them: a connection keeps the
//! place of the time when the loop last checked it, which is never later than its true place. So the loop checks the
//! first connection of an order again before it closes it, and moves it to its true place if there were calls
//! meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::task::Id;

use super::activity::Activity;

/// Maximum number of connections checked for each one accepted beyond the bound: 16, so that an accept stays cheap.
pub(super) const LOOKS: usize = 16;
/// Maximum number of connections checked every [`LOOK_EVERY`] while there are more than the bound: 1,024, which takes
/// less than 1 ms. Without it, connections whose calls end while no new connection arrives would stay.
pub(super) const LOOKS_AT_REST: usize = 1_024;
/// Time between two such checks: 250 ms.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Minimum idle time before a connection is closed: 250 ms. A caller opens a connection because it has a call, which is
/// then on its way.
const LEAST_IDLE_MS: u64 = 250;
/// The same for a connection without any call so far, on a listener at which further connections wait: 2 s. There a closed
/// connection is an admission, and a gateway that is busy may send its request late.
const LEAST_UNUSED_MS: u64 = 2_000;
/// Number of crowding connections that is never too many: 2,000, which take 72 MB. A connection crowds if it is
/// leaving, or is beyond the bound and never had a call.
const LEAST_CROWD: usize = 2_000;
/// Maximum number of crowding connections, whatever the bound is: 4,000, which take 144 MB. 11,000 new connections a
/// second do not reach it (`LEAST_IDLE_MS` and `connection::UNUSED_GRACE`), so a flood of them does not keep a caller
/// waiting.
const MOST_CROWD: usize = 4_000;

/// Place in an order: the time since which the connection is idle, as last checked, and a sequence number.
type IdlePosition = (u64, u64);

/// Connections of one listener.
#[derive(Debug)]
pub(super) struct Idle {
    most: usize,
    /// Minimum idle time before a connection that never had a call is closed.
    least_unused_ms: u64,
    /// Connections that never had a call, as last checked.
    unused: BTreeMap<IdlePosition, (Id, Activity)>,
    used: BTreeMap<IdlePosition, (Id, Activity)>,
    places: HashMap<Id, IdlePosition>,
    /// Number of connections on which [`Activity::leave`] was called and that have not ended.
    leaving: usize,
    number: u64,
}

/// Result of the check of a connection.
enum Looked {
    /// The connection is leaving, or has another place.
    Moved,
    /// The connection was idle for too short a time, as are all others of its order.
    Young,
}

impl Idle {
    /// Creates an empty set. Beyond `most` connections, idle ones are closed. `waits` is true if further connections wait.
    pub(super) fn new(most: usize, waits: bool) -> Self {
        let least_unused_ms = if waits { LEAST_UNUSED_MS } else { LEAST_IDLE_MS };
        let [unused, used] = [0; 2].map(|_| BTreeMap::new());
        Self { most, least_unused_ms, unused, used, places: HashMap::new(), leaving: 0, number: 0 }
    }

    /// Adds a connection.
    pub(super) fn add(&mut self, id: Id, activity: Activity) {
        self.place(id, activity.idle_since_ms(), activity);
    }

    /// Removes a connection that has ended. It may have been leaving.
    pub(super) fn remove(&mut self, id: Id) {
        match self.places.remove(&id) {
            Some(place) => {
                let _ = self.unused.remove(&place).or_else(|| self.used.remove(&place));
            }
            None => self.leaving = self.leaving.saturating_sub(1),
        }
    }

    /// Returns true if there are more connections than the bound.
    pub(super) fn is_over(&self) -> bool {
        self.places.len() > self.most
    }

    /// Returns true if too many connections are leaving, or are beyond the bound and never had a call.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowd() > self.most.clamp(LEAST_CROWD, MOST_CROWD)
    }

    fn crowd(&self) -> usize {
        self.leaving + self.unused.len().min(self.places.len().saturating_sub(self.most))
    }

    /// While there are more connections than the bound, closes those that never had a call, and then those that are
    /// idle longest. Checks at most `looks` connections, and skips those that have calls or had one a moment ago.
    pub(super) fn make_room(&mut self, looks: usize) {
        let mut looks = 0..looks;
        while self.is_over() && looks.next().is_some() {
            let looked = self.unused.pop_first().map_or(Looked::Young, |first| self.look(first));
            if matches!(looked, Looked::Moved) {
                continue;
            }
            // Connections that were opened a moment ago do not displace those that have calls now and then.
            let first = if self.used.len() > self.most { self.used.pop_first() } else { None };
            if first.is_none_or(|first| matches!(self.look(first), Looked::Young)) {
                break;
            }
        }
    }

    /// Checks the first connection of an order, which was taken out of the order.
    fn look(&mut self, ((since_ms, _), (id, activity)): (IdlePosition, (Id, Activity))) -> Looked {
        let idle_since_ms = if activity.is_busy() { activity.now_ms() } else { activity.idle_since_ms() };
        let least_ms = if activity.is_used() { LEAST_IDLE_MS } else { self.least_unused_ms };
        let is_young = activity.now_ms().saturating_sub(idle_since_ms) < least_ms;
        if activity.is_busy() || idle_since_ms > since_ms || is_young {
            let is_young = !activity.is_busy() && idle_since_ms == since_ms;
            self.place(id, idle_since_ms, activity);
            return if is_young { Looked::Young } else { Looked::Moved };
        }
        self.places.remove(&id);
        self.leaving += 1;
        activity.leave();
        Looked::Moved
    }

    fn place(&mut self, id: Id, since_ms: u64, activity: Activity) {
        self.number += 1;
        let place = (since_ms, self.number);
        self.places.insert(id, place);
        let order = if activity.is_used() { &mut self.used } else { &mut self.unused };
        order.insert(place, (id, activity));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::{Instant, advance};

    use super::*;

    /// Creates a connection that is idle from now on.
    async fn connection(began: Instant) -> (Id, Activity) {
        advance(Duration::from_millis(1)).await;
        (tokio::spawn(async {}).id(), Activity::new(began, Arc::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_leave_first_whatever_was_known_of_them() {
        let began = Instant::now();
        let mut idle = Idle::new(3, false);
        let mut all = Vec::new();
        for _ in 0..5 {
            let (id, activity) = connection(began).await;
            idle.add(id, activity.clone());
            all.push(activity);
        }
        idle.make_room(LOOKS);
        assert!(!all.iter().any(Activity::is_leaving), "a call may be on its way");
        let _in_flight = all[0].call();
        advance(Duration::from_millis(LEAST_IDLE_MS)).await;
        drop(all[1].call());
        idle.make_room(LOOKS);
        let left = all.iter().map(Activity::is_leaving).collect::<Vec<_>>();
        assert_eq!(left, [false, false, true, true, false], "the first has a call, and the second had one lately");
        assert!(!idle.is_over(), "there is room again");
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_never_had_a_call_leave_before_the_others_and_make_none_of_them_leave() {
        let began = Instant::now();
        let mut idle = Idle::new(3, false);
        let mut all = Vec::new();
        for is_used in [true, true, false, false, false] {
            let (id, activity) = connection(began).await;
            let call = is_used.then(|| activity.call());
            advance(Duration::from_millis(1)).await;
            drop(call);
            idle.add(id, activity.clone());
            all.push((id, activity));
        }
        let left = |all: &[(Id, Activity)]| all.iter().map(|(_, activity)| activity.is_leaving()).collect::<Vec<_>>();
        advance(Duration::from_millis(LEAST_IDLE_MS - 10)).await;
        idle.make_room(LOOKS);
        assert_eq!((left(&all), idle.crowd()), (vec![false; 5], 2), "a call may be on its way");
        advance(Duration::from_millis(LEAST_IDLE_MS)).await;
        idle.make_room(LOOKS);
        assert_eq!((left(&all), idle.crowd()), (vec![false, false, true, true, false], 2));
        for (id, _) in &all[2..4] {
            idle.remove(*id);
        }
        assert_eq!(idle.crowd(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_has_ended_needs_no_room_and_busy_ones_are_looked_at_a_bounded_number_of_times() {
        let began = Instant::now();
        let mut idle = Idle::new(1, false);
        let mut calls = Vec::new();
        for _ in 0..100 {
            let (id, activity) = connection(began).await;
            calls.push((id, activity.call()));
            idle.add(id, activity);
        }
        advance(Duration::from_secs(1)).await;
        idle.make_room(LOOKS);
        assert!(idle.is_over());
        let looked_at = idle.used.keys().filter(|(_, number)| *number > 100).count();
        assert_eq!(looked_at, LOOKS);
        for (id, call) in calls.drain(1..) {
            idle.remove(id);
            drop(call);
        }
        assert_eq!((idle.used.len(), idle.places.len(), idle.crowd()), (1, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn where_connections_wait_one_without_a_request_stays_for_longer() {
        let began = Instant::now();
        for (waits, least_ms) in [(false, LEAST_IDLE_MS), (true, LEAST_UNUSED_MS)] {
            let mut idle = Idle::new(0, waits);
            let (id, activity) = connection(began).await;
            idle.add(id, activity.clone());
            advance(Duration::from_millis(least_ms - 1)).await;
            idle.make_room(LOOKS);
            assert!(!activity.is_leaving(), "{waits}");
            advance(Duration::from_millis(1)).await;
            idle.make_room(LOOKS);
            assert!(activity.is_leaving(), "{waits}");
        }
    }
}
