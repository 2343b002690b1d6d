//! Charges as a rule would make them.

use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::key::KeyPart;
use tidegate::model::{Charging, Colocation, CounterKey, Hits, Quota, Role, StorePolicies, Window};

/// The limit of some hits per window.
pub fn limit(algorithm: Algorithm, hits: u32, window: Window) -> Limit {
    Limit::new(algorithm, Quota::new(hits, window)).expect("it can be counted")
}

/// One hit on the counter of a user.
pub fn charge(limit: Limit, user: usize) -> Charge {
    let value = format!("u{user:07}");
    let part = KeyPart::own(b"user", value.as_bytes());
    let (algorithm, window) = (limit.algorithm().name(), limit.quota().window().length());
    Charge {
        key: CounterKey::new("bench", std::iter::once(part), Colocation::Descriptor, algorithm, window),
        limit,
        hits: Hits::take(1),
        descriptor: 0,
        role: Role::Enforce,
        charging: Charging::Each,
        policies: StorePolicies::default(),
        remembers_refusals: true,
        lease: None,
        ask: 0,
    }
}

/// One hit on the counters of so many users.
pub fn charges(limit: Limit, users: usize) -> Vec<Charge> {
    (0..users).map(|user| charge(limit, user)).collect()
}

/// The algorithms and how a table calls them, and the one that is charged in two ways in both.
pub fn subjects() -> impl Iterator<Item = (String, Algorithm, Charging)> {
    let each = Algorithm::ALL.into_iter().map(|(name, algorithm)| (format!("`{name}`"), algorithm, Charging::Each));
    let together = ("`fixed_window`, `all_or_nothing`".to_owned(), Algorithm::FixedWindow, Charging::AllOrNothing);
    each.chain([together])
}
