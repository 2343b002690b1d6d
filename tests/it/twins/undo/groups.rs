//! Requests of more charges than the embedded store decides in one atomic step: they are charged in groups, and what a
//! refused one took is given back.

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge};
use tidegate::model::{Charging, Hits, Unit, Window};
use tidegate::store::redis::script::Mode;

use super::all;
use crate::histories::{algorithm, burst, hits_per_window, limit, moment, pause, taken, window};
use crate::twins::bench::answers;
use crate::twins::hold;
use crate::world::{Counters, NOON};

/// One charge more than one step decides.
const MANY: usize = 1_001;

#[tokio::test]
async fn a_request_in_groups_is_answered_as_by_one_script_and_leaves_the_same() {
    let counter = (algorithm(), window(), hits_per_window(), burst());
    let counters = prop::collection::vec(counter, 1..40);
    let charges = prop::collection::vec((any::<prop::sample::Index>(), taken()), MANY..MANY + 300);
    let requests = prop::collection::vec((pause(), charges), 1..3);
    hold(40, (counters, moment(), requests), |bench, (counters, begin, requests)| {
        bench.empty();
        let memory = Counters::new();
        let limits: Vec<_> =
            counters.iter().map(|(algorithm, window, hits, burst)| limit(*algorithm, *window, *hits, *burst)).collect();
        let mut now = begin;
        for (after, charges) in requests {
            now = after.from(now, &limits[0]);
            let charge = |(which, amount): &(prop::sample::Index, crate::histories::Amount)| {
                let which = which.index(limits.len());
                all(&which.to_string(), limits[which], amount.of(&limits[which]))
            };
            let charges: Vec<_> = charges.iter().map(charge).collect();
            let expected = answers(&bench.rows(&charges, Mode::All, now));
            prop_assert_eq!(memory.request(&charges, now), expected);
            let looks: Vec<_> =
                (0..limits.len()).map(|which| all(&which.to_string(), limits[which], Hits::LOOK)).collect();
            prop_assert_eq!(memory.request(&looks, now), bench.charge(&looks, now));
        }
        Ok(())
    })
    .await;
}

#[test]
fn a_refused_request_in_groups_spends_nothing_and_keeps_what_is_charged_on_its_own() {
    for (name, algorithm) in Algorithm::ALL {
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 10, 1_000);
        let memory = Counters::new();
        let mut charges: Vec<_> = (0..3_000)
            .map(|which| Charge { descriptor: which, ..all(&which.to_string(), minute, Hits::take(1)) })
            .collect();
        charges[1] = Charge { charging: Charging::Each, ..charges[1].clone() };
        charges[2_999].hits = Hits::take(11);
        let verdicts = memory.request(&charges, NOON);
        let refused: Vec<_> = (0..3_000).filter(|&which| verdicts[which].outcome.is_refused()).collect();
        assert_eq!(refused, [2_999], "{name}");
        let left =
            |which: usize| memory.request(&[Charge { hits: Hits::LOOK, ..charges[which].clone() }], NOON)[0].remaining;
        assert_eq!([0, 1, 255, 256, 2_999].map(left), [10, 9, 10, 10, 10], "{name}");
        assert_eq!([0, 1, 255, 256].map(|which| verdicts[which].remaining), [10, 9, 10, 10], "{name}");

        charges[2_999].hits = Hits::take(1);
        assert!(memory.request(&charges, NOON).iter().all(|verdict| !verdict.outcome.is_refused()), "{name}");
        let left =
            |which: usize| memory.request(&[Charge { hits: Hits::LOOK, ..charges[which].clone() }], NOON)[0].remaining;
        assert_eq!([0, 1, 255, 256, 2_999].map(left), [9, 8, 9, 9, 9], "{name}");
    }
}
