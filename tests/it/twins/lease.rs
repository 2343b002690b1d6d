//! Hits that are charged ahead of the requests that spend them: at most a quarter of what remains, or the last hits one by one, by
//! every algorithm.

use proptest::prelude::*;
use tidegate::algorithm::Charge;
use tidegate::model::{Charging, Hits, Outcome};
use tidegate::store::redis::script::Mode;

use super::hold;
use crate::histories::{any_limit, charge, granted, moment, pause, taken};
use crate::world::Counters;

#[tokio::test]
async fn what_is_leased_is_a_quarter_of_what_remains_or_the_last_hits_in_lua_as_in_rust() {
    let events = prop::collection::vec((pause(), taken(), any::<bool>()), 1..20);
    hold(2_000, (any_limit(), moment(), events), |bench, (limit, begin, events)| {
        bench.empty();
        let memory = Counters::new();
        let limit = limit.plain();
        let mut now = begin;
        for (after, amount, is_leased) in events {
            now = after.from(now, &limit);
            let charge = charge("only", limit, Charging::AllOrNothing, amount.of(&limit));
            let look = Charge { hits: Hits::LOOK, ..charge.clone() };
            if is_leased {
                let remaining = memory.request(std::slice::from_ref(&look), now)[0].remaining;
                let hits = charge.hits.taken().min(granted(&limit, remaining));
                let row = bench.rows(std::slice::from_ref(&charge), Mode::Lease, now)[0];
                let told = memory.request(&[Charge { hits: Hits::take(hits), ..charge }], now)[0];
                let answer = row.answer.expect("its key is ours");
                prop_assert_eq!(u64::from(answer.room), hits);
                prop_assert_eq!((answer.remaining, answer.reset), (told.remaining, told.reset));
                if hits == 0 && told.remaining == 0 {
                    let one = Charge { hits: Hits::take(1), ..look.clone() };
                    prop_assert_eq!(answer.retry, memory.request(&[one], now)[0].retry);
                }
            } else {
                let answers = bench.charge(std::slice::from_ref(&charge), now);
                prop_assert_eq!(answers, memory.request(&[charge], now));
            }
            let left = bench.charge(std::slice::from_ref(&look), now);
            prop_assert_eq!(left, memory.request(&[look], now));
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn what_is_leased_beside_a_charge_is_what_would_be_leased_after_it() {
    let events = prop::collection::vec((pause(), taken(), 1_u32..100), 1..20);
    let limits = any_limit().prop_filter("it can be leased", |limit| limit.can_be_leased().is_ok());
    hold(2_000, (limits, moment(), events), |bench, (limit, begin, events)| {
        bench.empty();
        let memory = Counters::new();
        let mut now = begin;
        for (after, amount, ask) in events {
            now = after.from(now, &limit);
            let charge = charge("only", limit, Charging::Each, amount.of(&limit));
            let asking = Charge { ask, ..charge.clone() };
            let answer = bench.charge(std::slice::from_ref(&asking), now)[0];
            let told = memory.request(std::slice::from_ref(&charge), now)[0];
            if told.outcome == Outcome::Admitted {
                let most = if charge.hits.taken() > 0 { granted(&limit, told.remaining) } else { 0 };
                let hits = most.min(ask.into());
                let hits_of = if hits == 0 { Hits::LOOK } else { Hits::take(hits) };
                let after = memory.request(&[Charge { hits: hits_of, ..charge.clone() }], now)[0];
                prop_assert_eq!((answer.outcome, u64::from(answer.room)), (Outcome::Admitted, hits));
                prop_assert_eq!((answer.remaining, answer.reset), (after.remaining, after.reset));
            } else {
                prop_assert_eq!(answer, told);
            }
            let look = Charge { hits: Hits::LOOK, ..charge };
            let left = bench.charge(std::slice::from_ref(&look), now);
            prop_assert_eq!(left, memory.request(&[look], now));
        }
        Ok(())
    })
    .await;
}
