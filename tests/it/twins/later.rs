//! Hits that an instance admitted by itself and charges afterwards: as many as still fit, by every algorithm.

use proptest::prelude::*;
use tidegate::algorithm::Charge;
use tidegate::model::Hits;
use tidegate::store::redis::script::Mode;

use super::hold;
use crate::histories::{any_limit, charge, charging, moment, pause, taken};
use crate::world::Counters;

#[tokio::test]
async fn what_is_charged_later_is_as_much_as_fits_in_lua_as_in_rust() {
    let events = prop::collection::vec((pause(), taken(), any::<bool>()), 1..20);
    hold(3_000, (any_limit(), charging(), moment(), events), |bench, (limit, charging, begin, events)| {
        bench.empty();
        let memory = Counters::new();
        let mut now = begin;
        for (after, amount, is_later) in events {
            now = after.from(now, &limit);
            let charge = charge("only", limit, charging, amount.of(&limit));
            let look = Charge { hits: Hits::LOOK, ..charge.clone() };
            if is_later {
                let remaining: u64 = memory.request(std::slice::from_ref(&look), now)[0].remaining.into();
                let hits = charge.hits.taken();
                // Of hits that were refused here, a counter that records refusals gets all, once it is full.
                let fits = match limit.records_refused(charging) {
                    true if remaining == 0 => hits,
                    true => 0,
                    false => hits.min(remaining),
                };
                bench.rows(std::slice::from_ref(&charge), Mode::Later, now);
                memory.request(&[Charge { hits: Hits::take(fits), ..charge }], now);
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
