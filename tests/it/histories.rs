//! Limits, moments and hits as they come: most of them at the edges, where counting goes wrong.

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::key::KeyPart;
use tidegate::model::{
    Charging, Colocation, CounterKey, Delay, Hits, InvalidQuota, Micros, Quota, Role, StorePolicies, Unit, Window,
};

use crate::world::NOON;

/// What happens to one counter.
#[derive(Clone, Debug)]
pub struct History {
    pub algorithm: Algorithm,
    pub charging: Charging,
    /// The limits that hold by turns, all over one window.
    pub limits: Vec<Limit>,
    pub begin: Micros,
    pub events: Vec<Event>,
}

/// A charge, some time after the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub after: Pause,
    pub amount: Amount,
    /// Which of the limits holds, counted round.
    pub turn: usize,
}

/// How the clock moves, by the limit that holds.
#[derive(Clone, Copy, Debug)]
pub enum Pause {
    None,
    Micros(u32),
    Ticks(u32),
    /// What so many hits take to drain, and so many microseconds less or more.
    Hits(u8, i8),
    /// To the end of the window, and so many microseconds less or more.
    Edge(i8),
    /// So many thousandths of the window.
    Share(u16),
    /// The same, back.
    Back(u16),
}

/// What a charge costs, by the limit that holds.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    Look,
    Take(u64),
    /// The limit, and so many more or less.
    Limit(i8),
    /// The burst, and so many more or less.
    Burst(i8),
    /// So many thousandths of the limit.
    Share(u16),
    GiveBack(u64),
}

impl Pause {
    pub fn from(self, now: Micros, limit: &Limit) -> Micros {
        let window = limit.quota().window().length().get();
        let about = |moment: u64, off: i8| moment.saturating_add_signed(i64::from(off)).max(now.get());
        Micros::new(match self {
            Self::None => now.get(),
            Self::Micros(micros) => now.get() + u64::from(micros),
            Self::Ticks(ticks) => now.get() + u64::from(ticks) * limit.quota().tick().get(),
            Self::Hits(hits, off) => {
                about(now.get() + window * u64::from(hits) / u64::from(limit.quota().limit().max(1)), off)
            }
            Self::Edge(off) => about((now.get() / window + 1) * window, off),
            Self::Share(share) => now.get() + thousandths(window, share),
            Self::Back(share) => now.get().saturating_sub(thousandths(window, share)),
        })
    }
}

impl Amount {
    pub fn of(self, limit: &Limit) -> Hits {
        let about = |hits: u32, off: i8| Hits::take(u64::from(hits).saturating_add_signed(i64::from(off)));
        match self {
            Self::Look => Hits::LOOK,
            Self::Take(hits) => Hits::take(hits),
            Self::Limit(off) => about(limit.quota().limit(), off),
            Self::Burst(off) => about(limit.quota().burst(), off),
            Self::Share(share) => Hits::take(thousandths(limit.quota().limit().into(), share)),
            Self::GiveBack(hits) => Hits::give_back(hits),
        }
    }
}

fn thousandths(of: u64, share: u16) -> u64 {
    u64::try_from(u128::from(of) * u128::from(share) / 1_000).expect("65 times as much at most")
}

/// A charge that is the whole of its request, on the counter of that name.
pub fn charge(name: &str, limit: Limit, charging: Charging, hits: Hits) -> Charge {
    let part = KeyPart::own(b"tier", name.as_bytes());
    let key = CounterKey::new(
        "d",
        std::iter::once(part),
        Colocation::Descriptor,
        limit.algorithm().name(),
        limit.quota().window().length(),
    );
    Charge {
        key,
        limit,
        hits,
        descriptor: 0,
        role: Role::Enforce,
        charging,
        policies: StorePolicies::default(),
        remembers_refusals: true,
        lease: None,
        ask: 0,
    }
}

impl History {
    /// The charges with their moments, in order.
    pub fn charges(&self) -> impl Iterator<Item = (Micros, Limit, Hits)> {
        let mut now = self.begin;
        self.events.iter().map(move |Event { after, amount, turn }| {
            let limit = self.limits[turn % self.limits.len()];
            now = after.from(now, &limit);
            (now, limit, amount.of(&limit))
        })
    }
}

pub fn algorithm() -> impl Strategy<Value = Algorithm> {
    prop::sample::select(Algorithm::ALL.map(|(_, algorithm)| algorithm).to_vec())
}

pub fn charging() -> impl Strategy<Value = Charging> {
    prop::sample::select(Charging::ALL.map(|(_, charging)| charging).to_vec())
}

/// From a millisecond to a year, of any length.
pub fn window() -> impl Strategy<Value = Window> {
    let length = prop_oneof![
        3 => prop::sample::select(Unit::ALL.map(Unit::length).map(Micros::get).to_vec()),
        1 => 1_000_u64..10_000,
        1 => 10_000_u64..1_000_000,
        1 => 1_000_000_u64..86_400_000_000,
        1 => 86_400_000_000_u64..=Window::LONGEST.get(),
        1 => Just(Window::SHORTEST.get()),
    ];
    length.prop_map(|length| Window::of_length(Micros::new(length)).expect("it is in bounds"))
}

/// Above nothing, up to all that 32 bits hold.
pub fn hits_per_window() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1_u32..10, 3 => 10_u32..1_000, 1 => 1_000_u32..10_000_000, 1 => 1_u32.., 1 => Just(u32::MAX)]
}

/// How many thousandths of the limit the burst is; 1,000 is the default.
pub fn burst() -> impl Strategy<Value = u16> {
    prop_oneof![2 => Just(1_000), 1 => 0_u16..1_000, 1 => 1_000_u16..4_000]
}

/// The limit that comes nearest to what was asked for.
pub fn limit(algorithm: Algorithm, window: Window, hits: u32, burst: u16) -> Limit {
    let quota = |window: Window| {
        let quota = Quota::new(hits, window);
        if !algorithm.has_burst() {
            return quota;
        }
        let least = u64::from(hits).div_ceil(quota.ticks()).max(1);
        let burst = thousandths(hits.into(), burst).max(least);
        quota.with_burst(u32::try_from(burst).unwrap_or(u32::MAX))
    };
    match Limit::new(algorithm, quota(window)) {
        Ok(limit) => limit,
        Err(InvalidQuota::Ticks { below, .. }) => {
            let window = Window::of_length(below).expect("a tick below is in bounds");
            Limit::new(algorithm, quota(window)).expect("the nearest window that can be counted, can be counted")
        }
        Err(InvalidQuota::Limit { most, .. }) => limit(algorithm, window, most, burst),
        Err(error) => panic!("{error}"),
    }
}

/// Waiting instead of refusals, by the limit that asks for it.
#[derive(Clone, Copy, Debug)]
pub enum Waiting {
    None,
    /// So many thousandths of what the capacity takes to drain, and so many microseconds less or more.
    Slot(u16, i8),
    /// So many thousandths of the window for each hit, and so many of that at most, and microseconds less or more.
    Growing(u16, u16, i8),
    /// Any lengths.
    Lengths(bool, u64, u64),
}

impl Waiting {
    /// The limit with that delay, or without one where it cannot have it.
    pub fn on(self, limit: Limit) -> Limit {
        let (window, most) = (limit.quota().window().length().get(), Delay::LONGEST.get());
        let micros = |length: u64, off: i8| Micros::new(length.saturating_add_signed(i64::from(off)).clamp(1, most));
        let delay = match self {
            Self::None => return limit,
            Self::Slot(share, off) => {
                let drained =
                    u128::from(window) * u128::from(limit.capacity()) / u128::from(limit.quota().limit().max(1));
                Delay::Slot { max: micros(thousandths(u64::try_from(drained).unwrap_or(most), share), off) }
            }
            Self::Growing(share, times, off) => {
                let step = micros(thousandths(window, share), 0);
                Delay::Growing { step, max: micros(step.get() * u64::from(times), off) }
            }
            Self::Lengths(true, max, _) => Delay::Slot { max: Micros::new(max) },
            Self::Lengths(false, step, max) => {
                Delay::Growing { step: Micros::new(step.min(max)), max: Micros::new(max) }
            }
        };
        limit.delaying(delay).unwrap_or(limit)
    }
}

/// Waiting for a slot: twice as long as the capacity takes to drain at most, or for any length.
pub fn slot() -> impl Strategy<Value = Waiting> {
    prop_oneof![
        3 => (0_u16..2_000, -1_i8..=1).prop_map(|(share, off)| Waiting::Slot(share, off)),
        1 => (1..=Delay::LONGEST.get()).prop_map(|max| Waiting::Lengths(true, max, 0)),
    ]
}

/// Waiting the longer the more hits there are over the limit.
pub fn growing() -> impl Strategy<Value = Waiting> {
    let longest = 1..=Delay::LONGEST.get();
    prop_oneof![
        3 => (0_u16..100, 1_u16..10, -1_i8..=1).prop_map(|(share, times, off)| Waiting::Growing(share, times, off)),
        1 => (longest.clone(), longest).prop_map(|(step, max)| Waiting::Lengths(false, step, max)),
    ]
}

/// Waiting of every kind that the algorithm has, and mostly none.
pub fn waiting(algorithm: Algorithm) -> impl Strategy<Value = Waiting> {
    let slots = u32::from(algorithm.has_slots());
    prop_oneof![3 => Just(Waiting::None), 2 => growing(), 2 * slots => slot()]
}

/// So many hits a minute.
pub fn per_minute(algorithm: Algorithm, hits: u32) -> Limit {
    Limit::new(algorithm, Quota::new(hits, Window::of_unit(Unit::Minute))).expect("it can be counted")
}

pub fn any_limit() -> impl Strategy<Value = Limit> {
    algorithm().prop_flat_map(limit_of)
}

/// Any limit of this algorithm.
pub fn limit_of(algorithm: Algorithm) -> impl Strategy<Value = Limit> {
    (window(), hits_per_window(), burst()).prop_map(move |(window, hits, burst)| limit(algorithm, window, hits, burst))
}

/// From the epoch to the year 2106, most of all today.
pub fn moment() -> impl Strategy<Value = Micros> {
    let near = |moment: Micros| (0_u64..40_000_000).prop_map(move |off| Micros::new(moment.get() + off));
    prop_oneof![
        4 => near(NOON),
        1 => near(Micros::ZERO),
        1 => near(Micros::from_secs(2_147_483_647)),
        1 => near(Micros::from_secs(4_294_967_295)),
        1 => (0..4_294_967_295_000_000_u64).prop_map(Micros::new),
    ]
}

/// Time that goes on or stands.
pub fn pause() -> impl Strategy<Value = Pause> {
    prop_oneof![
        6 => Just(Pause::None),
        1 => (0_u32..1_000).prop_map(Pause::Micros),
        1 => (0_u32..4).prop_map(Pause::Ticks),
        3 => (1_u8..4, -1_i8..=1).prop_map(|(hits, off)| Pause::Hits(hits, off)),
        2 => (-1_i8..=1).prop_map(Pause::Edge),
        2 => (0_u16..2_500).prop_map(Pause::Share),
    ]
}

/// Time that steps back besides.
pub fn unsteady_pause() -> impl Strategy<Value = Pause> {
    prop_oneof![8 => pause(), 1 => (0_u16..1_500).prop_map(Pause::Back)]
}

/// Hits that are taken.
pub fn taken() -> impl Strategy<Value = Amount> {
    prop_oneof![
        6 => Just(Amount::Take(1)),
        3 => (2_u64..6).prop_map(Amount::Take),
        3 => (0_u16..600).prop_map(Amount::Share),
        2 => (-1_i8..=1).prop_map(Amount::Limit),
        2 => (-1_i8..=1).prop_map(Amount::Burst),
        1 => prop_oneof![Just(Hits::MOST - 1), Just(Hits::MOST), Just(u64::MAX), any::<u64>()].prop_map(Amount::Take),
    ]
}

/// Looks and hits that are given back besides.
pub fn amount() -> impl Strategy<Value = Amount> {
    prop_oneof![
        8 => taken(),
        1 => Just(Amount::Look),
        2 => prop_oneof![4 => 0_u64..6, 1 => any::<u64>()].prop_map(Amount::GiveBack),
    ]
}

/// Everything that can happen to a counter: limits that change, are nothing or make hits wait, refusals that are kept, hits
/// given back, clocks that step back.
pub fn history(algorithm: Algorithm) -> impl Strategy<Value = History> {
    let limits = prop_oneof![
        3 => prop::collection::vec((hits_per_window(), burst(), waiting(algorithm)), 1),
        2 => prop::collection::vec(
            (prop_oneof![6 => hits_per_window(), 1 => Just(0)], burst(), waiting(algorithm)),
            2..4,
        ),
    ];
    let event = (unsteady_pause(), amount(), prop_oneof![3 => Just(0_usize), 1 => 0_usize..4]);
    let event = event.prop_map(|(after, amount, turn)| Event { after, amount, turn });
    let kinds = (prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    (charging(), window(), limits, kinds, moment(), prop::collection::vec(event, 1..40)).prop_map(
        move |(charging, window, limits, (counts_refused, refuses_peeks), begin, events)| {
            let limits = limits.into_iter();
            let limits = limits.map(|(hits, burst, waiting)| waiting.on(limit(algorithm, window, hits, burst)));
            let limits = limits.map(|limit| if refuses_peeks { refusing_peeks(limit) } else { limit });
            let limits = limits.map(|limit| if counts_refused { limit.counting_refused() } else { limit }).collect();
            History { algorithm, charging, limits, begin, events }
        },
    )
}

/// The limit that refuses a peek while it is used up, if it has no delay, as rule files allow.
fn refusing_peeks(limit: Limit) -> Limit {
    if limit.delay().is_none() { limit.refusing_full_peek() } else { limit }
}

/// What happens to the counters of some requests.
#[derive(Clone, Debug)]
pub struct Requests {
    pub begin: Micros,
    /// Each counter with the limits that hold by turns.
    pub counters: Vec<Vec<Limit>>,
    pub requests: Vec<(Pause, Vec<Part>)>,
}

/// One charge of a request.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Which counter, counted round.
    pub counter: usize,
    /// Which of its limits holds, counted round.
    pub turn: usize,
    pub amount: Amount,
    pub charging: Charging,
    pub role: Role,
    /// Whether it belongs to a descriptor of its own, or else to that of the charge before it.
    pub begins: bool,
}

impl Requests {
    /// The requests with their moments, in order.
    pub fn charges(&self) -> Vec<(Micros, Vec<Charge>)> {
        let mut now = self.begin;
        let request = |(after, parts): &(Pause, Vec<Part>)| {
            now = after.from(now, &self.limit(&parts[0]));
            let mut descriptor = 0;
            let charges = parts.iter().map(|part| {
                descriptor += usize::from(part.begins);
                let limit = self.limit(part);
                let name = (part.counter % self.counters.len()).to_string();
                let charge = charge(&name, limit, part.charging, part.amount.of(&limit));
                Charge { descriptor, role: part.role, ..charge }
            });
            (now, charges.collect())
        };
        self.requests.iter().map(request).collect()
    }

    fn limit(&self, part: &Part) -> Limit {
        let limits = &self.counters[part.counter % self.counters.len()];
        limits[part.turn % limits.len()]
    }
}

pub fn role() -> impl Strategy<Value = Role> {
    prop_oneof![
        4 => Just(Role::Enforce), 1 => Just(Role::Shadow), 2 => Just(Role::Quota), 1 => Just(Role::ShadowQuota),
    ]
}

/// A counter of this algorithm, with one limit or with some that hold by turns. Where the burst is apart they are as fast
/// or nothing: what is idle under one limit is not under a slower one, and the embedded store may have forgotten it.
fn counter(algorithm: Algorithm) -> impl Strategy<Value = Vec<Limit>> {
    let limit_of = || (hits_per_window(), prop::bool::weighted(0.1), burst(), (0_u8..5, 0_u8..5), waiting(algorithm));
    let limits = prop_oneof![3 => prop::collection::vec(limit_of(), 1), 1 => prop::collection::vec(limit_of(), 2..4)];
    (window(), limits).prop_map(move |(window, limits)| {
        let first = limits[0].0;
        let limits = limits.into_iter().map(|(hits, is_closed, burst, (counts_refused, refuses_peeks), waiting)| {
            let hits = if algorithm.has_burst() { first } else { hits };
            let limit = waiting.on(limit(algorithm, window, if is_closed { 0 } else { hits }, burst));
            let limit = if refuses_peeks == 0 { refusing_peeks(limit) } else { limit };
            if counts_refused == 0 { limit.counting_refused() } else { limit }
        });
        limits.collect()
    })
}

/// Requests with charges of every kind: in one, the first counter and perhaps others, some of them twice. The first is of
/// this algorithm. Time does not step back: a counter that was forgotten as idle would be missed.
pub fn requests(first: Algorithm) -> impl Strategy<Value = Requests> {
    let others = prop::collection::vec(algorithm().prop_flat_map(counter), 0..4);
    let in_group = prop_oneof![3 => charging(), 2 => (0_u32..3).prop_map(Charging::Group)];
    let part =
        (0_usize..4, prop_oneof![3 => Just(0_usize), 1 => 0_usize..4], amount(), in_group, role(), any::<bool>());
    let part = part.prop_map(|(counter, turn, amount, charging, role, begins)| Part {
        counter,
        turn,
        amount,
        charging,
        role,
        begins,
    });
    let parts = prop::collection::vec(part, 1..6);
    // Each limit on its own, all of them together, or as they come.
    let charging = prop_oneof![charging().prop_map(Some), Just(None)];
    let requests = prop::collection::vec((pause(), parts), 1..20);
    (counter(first), others, charging, moment(), requests).prop_map(|(first, others, charging, begin, mut requests)| {
        for part in requests.iter_mut().flat_map(|(_, parts)| parts) {
            part.charging = charging.unwrap_or(part.charging);
        }
        let counters = std::iter::once(first).chain(others).collect();
        Requests { begin, counters, requests }
    })
}

/// Returns the most hits that a store grants to one lease of a counter with so many remaining hits: a quarter, and of a counter from which four
/// hits a second drain at least one.
pub fn granted(limit: &Limit, remaining: u32) -> u64 {
    let quota = limit.quota();
    let drains = limit.algorithm() != Algorithm::FixedWindow;
    let is_fast = u64::from(quota.limit()) * 250_000 >= quota.window().length().get();
    let least = if drains && is_fast { remaining.min(1) } else { 0 };
    u64::from(least.max(remaining / 4))
}
