//! How the charges of a request are split into scripts.

use super::*;
use crate::algorithm::{Algorithm, Limit};
use crate::model::key::KeyPart;
use crate::model::{Colocation, CounterKey, Hits, Quota, StorePolicies, Window};
use crate::store::redis::credentials::{Credentials, Login};
use crate::store::redis::manager::Address;

fn redis() -> Redis {
    let access = Access {
        credentials: Arc::new(Credentials::fixed(Login::default())),
        tls: None,
        db: 0,
        connect_timeout: Duration::from_millis(1),
        alive: Arc::default(),
        watched: Arc::default(),
    };
    let topology = Topology::Single(Address::Tcp("127.0.0.1".to_owned(), 1));
    Redis::new(Instance { topology, access }, None, "", 1)
}

fn charge(value: usize, limit: Limit, charging: Charging) -> Charge {
    let bytes = value.to_le_bytes();
    let part = KeyPart::own(b"k", &bytes);
    let window = limit.quota().window().length();
    let key = CounterKey::new("d", std::iter::once(part), Colocation::Descriptor, limit.algorithm().name(), window);
    let (policies, remembers_refusals) = (StorePolicies::default(), true);
    Charge {
        key,
        limit,
        hits: Hits::take(1),
        descriptor: value,
        role: Role::Enforce,
        charging,
        policies,
        remembers_refusals,
    }
}

#[test]
fn no_script_is_longer_than_its_bound_whatever_is_charged() {
    let ordinary = Limit::new(Algorithm::FixedWindow, Quota::new(1, Window::of_unit(Unit::Minute))).unwrap();
    for (charging, most) in [(Charging::Each, MOST_PER_SCRIPT), (Charging::AllOrNothing, MOST_TOGETHER)] {
        for mostly in [ordinary, Limit::closed()] {
            let limit = |value: usize| if value == 7 { ordinary } else { mostly };
            let charges: Vec<_> = (0..2_500).map(|value| charge(value, limit(value), charging)).collect();
            let groups = redis().0.groups(&charges, charging == Charging::AllOrNothing);
            assert!(groups.iter().all(|group| group.members.len() <= most), "{charging:?}");
            let mut members: Vec<_> = groups.iter().flat_map(|group| group.members.iter().copied()).collect();
            members.sort_unstable();
            assert_eq!(members, (0..2_500).collect::<Vec<_>>(), "each charge once");
        }
    }
}
