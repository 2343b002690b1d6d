//! The servers of a run: one, a master that sentinels name, or a cluster of three masters; and what takes several of them: failovers, and
//! slots that move.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::clock::SimulatedClock;
use super::cluster::{Map, Moving, SLOTS, View};
use super::keys::Stock;
use super::network::Host;
use super::server::Server;
use super::world::{Processes, after};

/// The time after which a server that is not heard counts as failed.
const DOWN: Duration = Duration::from_millis(800);
/// The time in which all instances leave a master that most sentinels have replaced (docs/guarantees.md).
const LEAVE_SENTINELS: Duration = Duration::from_millis(1_500);
/// The same for a master that is cut off from its cluster, after [`DOWN`].
const LEAVE_CLUSTER: Duration = Duration::from_millis(500);
/// The time after a promotion in which the store decides again.
pub const DECIDES: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Single,
    Sentinel,
    Cluster,
}

/// The servers of a run.
pub struct Deployment {
    pub kind: Kind,
    /// The masters, and then their replicas.
    pub servers: Vec<Rc<Server>>,
    pub sentinels: Vec<Rc<Server>>,
    /// The master of each shard, and its replica.
    pub shards: RefCell<Vec<(usize, Option<usize>)>>,
    /// The newest map of a cluster.
    map: RefCell<Option<Rc<Map>>>,
    /// A failover, or a move of slots, is going on.
    pub is_changing: Cell<bool>,
    pub losses: RefCell<Vec<Loss>>,
    clock: SimulatedClock,
    trace: Rc<RefCell<Vec<String>>>,
}

/// Charges that are lost, and a master that lives on.
#[derive(Clone)]
pub struct Loss {
    /// Time of the first lost charge.
    pub from: Instant,
    /// Time at which another state replaced this one.
    pub at: Instant,
    /// Time at which the last instance left the old master.
    pub to: Instant,
    /// The slots; `None` for all.
    of: Option<(Rc<Map>, usize)>,
}

impl Loss {
    pub fn concerns(&self, slot: usize) -> bool {
        self.of.as_ref().is_none_or(|(map, master)| map.owner(slot) == *master)
    }
}

/// The way in which a master is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failover {
    Planned,
    /// It dies.
    Killed,
    /// It is cut off from the others, and some instances still reach it.
    Cut,
}

impl Deployment {
    pub fn new(kind: Kind, clock: &SimulatedClock, trace: &Rc<RefCell<Vec<String>>>) -> Self {
        let masters = if kind == Kind::Cluster { 3 } else { 1 };
        let replicas = if kind == Kind::Single { 0 } else { masters };
        let start = |address| Server::start(address, clock.clone(), Rc::clone(trace));
        let servers: Vec<_> = (1..=masters + replicas).map(|place| start(format!("10.0.0.{place}:6379"))).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.host.address.clone()).collect();
        let map = (kind == Kind::Cluster).then(|| Rc::new(Map::new(masters, addresses.into())));
        for (own, server) in servers.iter().enumerate() {
            let view = map.clone().map(|map| View { own, map, moving: None, is_down: false });
            server.keys(|keys| (keys.view, keys.is_replica) = (view, own >= masters));
        }
        let sentinels = if kind == Kind::Sentinel { 3 } else { 0 };
        let sentinels: Vec<_> = (1..=sentinels).map(|place| start(format!("10.0.1.{place}:26379"))).collect();
        sentinels.iter().for_each(|sentinel| *sentinel.named.borrow_mut() = Some(servers[0].host.address.clone()));
        let shards = (0..masters).map(|master| (master, (replicas > 0).then_some(master + masters))).collect();
        Self {
            kind,
            servers,
            sentinels,
            shards: RefCell::new(shards),
            map: RefCell::new(map),
            is_changing: Cell::default(),
            losses: RefCell::default(),
            clock: clock.clone(),
            trace: Rc::clone(trace),
        }
    }

    /// Returns the hosts of all servers and sentinels.
    pub fn hosts(&self) -> Vec<Arc<Host>> {
        self.servers.iter().chain(&self.sentinels).map(|server| Arc::clone(&server.host)).collect()
    }

    /// Returns the present masters.
    pub fn masters(&self) -> Vec<usize> {
        self.shards.borrow().iter().map(|(master, _)| *master).collect()
    }

    /// Returns the present master of a slot.
    pub fn master_of(&self, slot: usize) -> usize {
        self.map.borrow().as_ref().map_or_else(|| self.masters()[0], |map| map.owner(slot))
    }

    pub fn note(&self, what: &str) {
        use tidegate::model::Clock as _;
        self.trace.borrow_mut().push(format!("{} {what}", self.clock.now()));
    }

    /// Notes that `master` has lost what was charged from `from` on, `to` being the moment at which the last instance leaves the old state.
    fn lose(&self, master: usize, map: Option<Rc<Map>>, (from, at, to): (Instant, Instant, Instant)) {
        self.losses.borrow_mut().push(Loss { from, at, to, of: map.map(|map| (map, master)) });
    }

    /// Empties a server, or restarts one that is killed, with what it had saved `lag` ago.
    pub async fn restart(self: Rc<Self>, place: usize, down_for: Duration, lag: Option<Duration>) {
        let (server, at) = (Rc::clone(&self.servers[place]), Instant::now());
        let from = lag.map_or(at.checked_sub(Duration::from_secs(3_600)).expect("a time"), |lag| at - lag);
        let saved = lag.map_or_else(Stock::new, |_| server.keys(|keys| keys.as_of(from)));
        if self.masters().contains(&place) {
            self.lose(place, self.map.borrow().clone(), (from, at, at));
        }
        if down_for > Duration::ZERO {
            self.is_changing.set(true);
            server.host.set_down(true);
            sleep(down_for).await;
            server.flush_scripts();
            server.host.set_down(false);
            self.is_changing.set(false);
        }
        server.keys(|keys| keys.replace(saved));
    }

    /// Tells all servers of a new map: the first of them now, the others a little later.
    fn tell(self: &Rc<Self>, map: Rc<Map>, first: &[usize], random: &mut fastrand::Rng) {
        for (place, server) in self.servers.iter().enumerate() {
            let (server, map) = (Rc::clone(server), Rc::clone(&map));
            if first.contains(&place) {
                server.view(|view| view.learn(&map));
            } else {
                let late = Duration::from_millis(random.u64(1..100));
                after(late, move || server.view(|view| view.hear(&map)));
            }
        }
        *self.map.borrow_mut() = Some(map);
    }

    /// Moves slots of a cluster to another master, with their keys: all at once, or key by key.
    pub async fn move_slots(self: Rc<Self>, slots: Range<usize>, to: usize, steps: u32, mut random: fastrand::Rng) {
        let map = self.map.borrow().clone().expect("a cluster");
        let owners: Vec<_> = self.masters().into_iter().filter(|from| *from != to).collect();
        // Slots move from one master to another.
        let from = owners[random.usize(..owners.len())];
        let first = slots.clone().find(|slot| map.owner(*slot) == from);
        let Some(first) = first else { return };
        let length = (first..slots.end).take_while(|slot| map.owner(*slot) == from).count();
        let slots = first..first + length;
        self.is_changing.set(true);
        self.note(&format!("slots {slots:?} move from redis {from} to redis {to} in {steps} steps"));
        let servers = [from, to].map(|place| &self.servers[place]);
        let moving = Moving { slots: slots.clone(), from, to };
        servers.iter().for_each(|server| server.view(|view| view.moving = Some(moving.clone())));
        for step in (0..steps).rev() {
            let moved = servers[0].keys(|keys| keys.take(&slots, || step == 0 || random.bool()));
            servers[1].keys(|keys| keys.add(moved));
            if step > 0 {
                sleep(Duration::from_millis(random.u64(1..300))).await;
            }
        }
        servers.iter().for_each(|server| server.view(|view| view.moving = None));
        self.tell(Rc::new(map.given(slots, to)), &[to, from], &mut random);
        self.is_changing.set(false);
    }

    /// Replaces the master of a shard by its replica, which lacks the last charges. Returns the time before the old master is back in which the
    /// store decides on all calls, if nothing else fails.
    pub async fn fail_over(
        self: Rc<Self>,
        shard: usize,
        how: Failover,
        processes: Processes,
        mut random: fastrand::Rng,
    ) -> Range<Instant> {
        let (old, new) = self.shards.borrow()[shard];
        let new = new.expect("a replica");
        self.is_changing.set(true);
        let [left, promoted] = [old, new].map(|place| Rc::clone(&self.servers[place]));
        let lag = if how == Failover::Planned && self.kind == Kind::Cluster { 0 } else { random.u64(0..300) };
        let (at, lag) = (Instant::now(), Duration::from_millis(lag));
        self.note(&format!("{how:?}: redis {old} is to be replaced by redis {new}, which lags {lag:?}"));
        let saved = left.keys(|keys| keys.as_of(at - lag));
        if how == Failover::Killed {
            left.host.set_down(true);
        } else if how == Failover::Cut {
            let processes = processes.borrow();
            let cut_off = processes.iter().filter(|_| random.bool());
            cut_off.for_each(|process| process.links[old].way.send_modify(|way| way.is_silent = true));
        }
        if how != Failover::Planned {
            sleep(DOWN).await;
            if self.kind == Kind::Cluster && how == Failover::Cut {
                left.view(|view| view.is_down = true);
            }
            sleep(Duration::from_millis(random.u64(1..700))).await;
        }
        promoted.keys(|keys| {
            keys.replace(saved);
            keys.is_replica = false;
        });
        self.note(&format!("redis {new} is promoted"));
        let (map, is_planned) = (self.map.borrow().clone(), how == Failover::Planned);
        let left_by = match &map {
            Some(map) => {
                left.keys(|keys| keys.is_replica |= is_planned);
                let first = if is_planned { vec![old, new] } else { vec![new] };
                self.tell(Rc::new(map.promoted(old, new)), &first, &mut random);
                at + DOWN + LEAVE_CLUSTER
            }
            None => {
                let left_by = self.name(new, &mut random).await + LEAVE_SENTINELS;
                left.left_by.set(Some(left_by));
                left_by
            }
        };
        if !is_planned || map.is_none() {
            self.lose(old, map, (at - lag, at, if how == Failover::Killed { at } else { left_by }));
        }
        self.shards.borrow_mut()[shard] = (new, Some(old));
        sleep_until(left_by.max(Instant::now() + DECIDES)).await;
        let decides_from = Instant::now();
        sleep(Duration::from_millis(random.u64(1..2_000))).await;
        let decides = decides_from..Instant::now();
        self.note(&format!("redis {old} is back"));
        self.join(&left, how, &processes, old);
        for sentinel in &self.sentinels {
            *sentinel.named.borrow_mut() = Some(promoted.host.address.clone());
        }
        self.is_changing.set(false);
        decides
    }

    /// Makes a replica of a server that was a master.
    fn join(&self, left: &Server, how: Failover, processes: &Processes, old: usize) {
        left.keys(|keys| {
            keys.replace(Stock::new());
            keys.is_replica = true;
        });
        if let Some(map) = &*self.map.borrow() {
            left.view(|view| {
                view.learn(map);
                view.is_down = false;
            });
        } else {
            left.left_by.set(None);
            left.host.cut();
        }
        match how {
            Failover::Planned => {}
            Failover::Killed => {
                left.flush_scripts();
                left.host.set_down(false);
            }
            Failover::Cut => {
                let processes = processes.borrow();
                processes.iter().for_each(|process| process.links[old].way.send_modify(|way| way.is_silent = false));
            }
        }
    }

    /// Lets two of the sentinels name a master, one after the other. Returns when most name it.
    async fn name(&self, master: usize, random: &mut fastrand::Rng) -> Instant {
        let mut order = [0, 1, 2];
        random.shuffle(&mut order);
        for place in &order[..2] {
            sleep(Duration::from_millis(random.u64(0..700))).await;
            *self.sentinels[*place].named.borrow_mut() = Some(self.servers[master].host.address.clone());
            self.note(&format!("sentinel {place} names redis {master}"));
        }
        Instant::now()
    }

    /// Chooses slots to move.
    pub fn some_slots(random: &mut fastrand::Rng) -> Range<usize> {
        let first = random.usize(..SLOTS);
        first..(first + random.usize(1..6_000)).min(SLOTS)
    }
}
