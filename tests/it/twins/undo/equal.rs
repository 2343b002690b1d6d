//! An undo in the embedded store leaves what the same undo leaves in Redis.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Hits, Micros, Unit, Window};
use tidegate::store::redis::script::Mode;

use super::all;
use crate::histories::{
    Amount, Pause, burst, charge, hits_per_window, limit, moment, pause, taken, unsteady_pause, waiting, window,
};
use crate::twins::bench::Bench;
use crate::twins::hold;
use crate::world::{Counters, NOON};

/// A part of a request, and when it is undone: after how many more of them, if at all.
#[derive(Clone, Debug)]
struct Event {
    after: Pause,
    /// The counter and the limit of each charge, counted round, and its hits.
    charges: Vec<(usize, usize, Amount)>,
    undone: Option<usize>,
}

/// How many histories of each algorithm are tried.
const HISTORIES: u32 = 1_000;

/// Charges one part in both stores and undoes what is due, and compares what they say.
fn play(
    bench: &mut Bench,
    memory: &Counters,
    begin: Micros,
    events: &[Event],
    make: impl Fn(usize, usize, Amount) -> Charge,
) -> TestCaseResult {
    bench.empty();
    let mut now = begin;
    let mut pending: Vec<(usize, Micros, Vec<Charge>)> = Vec::new();
    for (index, Event { after, charges, undone }) in events.iter().enumerate() {
        let charges: Vec<_> = charges.iter().map(|(counter, turn, amount)| make(*counter, *turn, *amount)).collect();
        now = after.from(now, &charges[0].limit);
        memory.clock.set(now);
        let rows = bench.rows(&charges, Mode::Take, now);
        let (verdicts, taken) = memory.store.take_now(&charges);
        let answers: Vec<_> = rows.iter().map(|row| row.answer.expect("its key is ours")).collect();
        if answers.iter().any(|answer| answer.outcome.is_refused()) {
            // The script takes nothing then; the embedded store leaves it to its caller.
            memory.store.give_back_now(&charges, &taken);
            let outcomes = |verdicts: &[tidegate::model::Verdict]| -> Vec<_> {
                verdicts.iter().map(|verdict| verdict.outcome).collect()
            };
            prop_assert_eq!(outcomes(&verdicts), outcomes(&answers), "part {}", index);
        } else {
            prop_assert_eq!(verdicts.as_slice(), &answers, "part {}", index);
            let counted = rows.iter().zip(&charges).map(|(row, charge)| !row.is_unrecorded && charge.hits.taken() > 0);
            prop_assert_eq!(taken.iter().map(Option::is_some).collect::<Vec<_>>(), counted.collect::<Vec<_>>());
            let kept = charges.iter().zip(&taken).filter_map(|(charge, taken)| taken.and(Some(charge.clone())));
            pending.extend(undone.map(|after| (index + after, now, kept.collect())));
        }
        for (_, at, undone) in pending.extract_if(.., |(due, ..)| *due <= index) {
            bench.undo(&undone, at, now);
            memory.store.give_back_now(&undone, &vec![Some(at); undone.len()]);
        }
        let looks: Vec<_> = charges.into_iter().map(|charge| Charge { hits: Hits::LOOK, ..charge }).collect();
        let looked = bench.charge(&looks, now);
        prop_assert_eq!(memory.request(&looks, now), looked, "after part {}", index);
    }
    Ok(())
}

fn undone() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![Just(None), (0_usize..4).prop_map(Some)]
}

/// Undos of one counter whose limits change, by a clock that steps back too.
async fn equal_alone(algorithm: Algorithm) {
    let limits = prop::collection::vec((hits_per_window(), burst(), waiting(algorithm)), 1..4);
    let event = (unsteady_pause(), 0_usize..4, taken(), undone());
    let event =
        event.prop_map(|(after, turn, amount, undone)| Event { after, charges: vec![(0, turn, amount)], undone });
    let events = prop::collection::vec(event, 1..30);
    hold(HISTORIES, (window(), limits, moment(), events), |bench, (window, limits, begin, events)| {
        let limits = limits.iter().map(|(hits, burst, waiting)| waiting.on(limit(algorithm, window, *hits, *burst)));
        let limits: Vec<Limit> = limits.collect();
        play(bench, &Counters::new(), begin, &events, |_, turn, amount| {
            let limit = limits[turn % limits.len()];
            all("only", limit, amount.of(&limit))
        })
    })
    .await;
}

/// Undos of requests with several charges, also of one counter.
async fn equal_together(algorithm: Algorithm) {
    let counters = prop::collection::vec((window(), hits_per_window(), burst(), waiting(algorithm)), 1..3);
    let charges = prop::collection::vec((0_usize..3, Just(0_usize), taken()), 1..5);
    let event = (pause(), charges, undone());
    let event = event.prop_map(|(after, charges, undone)| Event { after, charges, undone });
    let events = prop::collection::vec(event, 1..20);
    hold(HISTORIES, (counters, moment(), events), |bench, (counters, begin, events)| {
        play(bench, &Counters::new(), begin, &events, |counter, _, amount| {
            let which = counter % counters.len();
            let (window, hits, burst, waiting) = &counters[which];
            let limit = waiting.on(limit(algorithm, *window, *hits, *burst));
            all(&which.to_string(), limit, amount.of(&limit))
        })
    })
    .await;
}

async fn equal(algorithm: Algorithm) {
    equal_alone(algorithm).await;
    equal_together(algorithm).await;
}

#[tokio::test]
async fn an_undo_of_a_fixed_window_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::FixedWindow).await;
}

#[tokio::test]
async fn an_undo_of_a_sliding_window_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::SlidingWindow).await;
}

#[tokio::test]
async fn an_undo_of_a_sliding_log_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::SlidingLog).await;
}

#[tokio::test]
async fn an_undo_of_a_token_bucket_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::TokenBucket).await;
}

#[tokio::test]
async fn an_undo_of_a_leaky_bucket_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::LeakyBucket).await;
}

#[tokio::test]
async fn an_undo_of_gcra_leaves_the_same_in_rust_as_in_lua() {
    equal(Algorithm::Gcra).await;
}

#[tokio::test]
async fn an_undo_moves_as_many_entries_of_a_log_in_rust_as_in_lua() {
    let mut bench = Bench::start(&[]).await;
    let minute = limit(Algorithm::SlidingLog, Window::of_unit(Unit::Minute), 10_000, 1_000);
    for entries in [999, 1_000] {
        bench.empty();
        let memory = Counters::new();
        let asked = [charge("only", minute, tidegate::model::Charging::AllOrNothing, Hits::take(3))];
        let one = [Charge { hits: Hits::take(1), ..asked[0].clone() }];
        let requests = (0..=entries).map(|moment| {
            let now = NOON.saturating_add(Micros::new(moment));
            (now, if moment == 0 { asked.to_vec() } else { one.to_vec() })
        });
        let requests: Vec<_> = requests.collect();
        bench.all(&requests);
        requests.iter().for_each(|(now, charges)| drop(memory.request(charges, *now)));
        let now = NOON.saturating_add(Micros::from_millis(2));
        memory.clock.set(now);
        bench.undo(&asked, NOON, now);
        memory.store.give_back_now(&asked, &[Some(NOON)]);
        let look = [Charge { hits: Hits::LOOK, ..asked[0].clone() }];
        let left = memory.request(&look, now);
        assert_eq!(left, bench.charge(&look, now), "{entries} came after it");
        let back = if entries < 1_000 { 3 } else { 0 };
        assert_eq!(u64::from(left[0].remaining), 10_000 - 3 - entries + back, "{entries} came after it");
    }
}
