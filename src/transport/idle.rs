//! The connections of a listener, from the one that is idle longest.
//!
//! The accept loop alone keeps this order, so there is no lock. A call does not touch it: a connection has the place of the
//! time when the loop last looked at it, which is never later than its true one. The loop therefore looks at the first of
//! the order again before it closes it, and puts it back at its true place if there were calls meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::task::Id;

use super::activity::Activity;

/// Connections that are looked at for each one accepted beyond the bound: 16, so that an accept stays cheap.
pub(super) const LOOKS: usize = 16;
/// Connections that are looked at every [`LOOK_EVERY`] while there are more than the bound: 1,024, which takes less than a
/// millisecond. Without it, connections that end their calls while nobody connects would stay.
pub(super) const LOOKS_AT_REST: usize = 1_024;
/// The time between two such looks: 250 ms.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A connection that has been idle for less is not asked to leave: 250 ms. A caller opens one because it has a call, which is
/// then on its way.
const LEAST_IDLE_MS: u64 = 250;

/// A place in the order: the time since when the connection is idle, as far as the loop knows, and its number.
type Place = (u64, u64);

/// The connections of one listener that have not been asked to leave.
#[derive(Debug)]
pub(super) struct Idle {
    most: usize,
    order: BTreeMap<Place, (Id, Activity)>,
    places: HashMap<Id, Place>,
    number: u64,
}

impl Idle {
    /// No connection yet. Beyond `most` of them, idle ones are asked to leave.
    pub(super) fn new(most: usize) -> Self {
        Self { most, order: BTreeMap::new(), places: HashMap::new(), number: 0 }
    }

    /// Adds a connection.
    pub(super) fn add(&mut self, id: Id, activity: Activity) {
        self.place(id, activity.idle_since_ms(), activity);
    }

    /// Removes a connection that has ended; it may have been asked to leave before.
    pub(super) fn remove(&mut self, id: Id) {
        if let Some(place) = self.places.remove(&id) {
            self.order.remove(&place);
        }
    }

    /// Returns true when there are more connections than the bound.
    pub(super) fn is_over(&self) -> bool {
        self.places.len() > self.most
    }

    /// While there are more than the bound, asks those that are idle longest to leave. Looks at up to `looks` connections,
    /// and passes over those that have calls, or had one a moment ago.
    pub(super) fn make_room(&mut self, looks: usize) {
        for _ in 0..looks {
            if !self.is_over() {
                break;
            }
            let Some(((since_ms, _), (id, activity))) = self.order.pop_first() else { break };
            self.places.remove(&id);
            let idle_since_ms = if activity.is_busy() { activity.now_ms() } else { activity.idle_since_ms() };
            if activity.is_busy() || idle_since_ms > since_ms {
                self.place(id, idle_since_ms, activity);
            } else if activity.now_ms().saturating_sub(idle_since_ms) < LEAST_IDLE_MS {
                // All others have had a call later.
                self.place(id, idle_since_ms, activity);
                break;
            } else {
                activity.leave();
            }
        }
    }

    fn place(&mut self, id: Id, since_ms: u64, activity: Activity) {
        self.number += 1;
        let place = (since_ms, self.number);
        self.places.insert(id, place);
        self.order.insert(place, (id, activity));
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, advance};

    use super::*;

    /// A connection of its own, idle from now on.
    async fn connection(began: Instant) -> (Id, Activity) {
        advance(Duration::from_millis(1)).await;
        (tokio::spawn(async {}).id(), Activity::new(began))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_leave_first_whatever_was_known_of_them() {
        let began = Instant::now();
        let mut idle = Idle::new(3);
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
    async fn a_connection_that_has_ended_needs_no_room_and_busy_ones_are_looked_at_a_bounded_number_of_times() {
        let began = Instant::now();
        let mut idle = Idle::new(1);
        let mut calls = Vec::new();
        for _ in 0..100 {
            let (id, activity) = connection(began).await;
            calls.push((id, activity.call()));
            idle.add(id, activity);
        }
        advance(Duration::from_secs(1)).await;
        idle.make_room(LOOKS);
        assert!(idle.is_over());
        let looked_at = idle.order.keys().filter(|(_, number)| *number > 100).count();
        assert_eq!(looked_at, LOOKS);
        for (id, call) in calls.drain(1..) {
            idle.remove(id);
            drop(call);
        }
        assert_eq!((idle.order.len(), idle.places.len(), idle.is_over()), (1, 1, false));
    }
}
