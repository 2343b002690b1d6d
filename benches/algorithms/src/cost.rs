//! How long a charge takes.

use std::slice::from_ref;

use tidegate::algorithm::Charge;
use tidegate::model::{Unit, Window};

use crate::charges::{charges, limit, subjects};
use crate::embedded::Embedded;
use crate::redis::{FEW, MANY, Redis};
use crate::{Effort, Outcome, median, thousands};

const LIMIT: u32 = 10;

pub fn print(effort: Effort) -> Outcome {
    let mut redis = Redis::start()?;
    println!("## Time per charge\n");
    println!(
        "{} counters under a limit of {LIMIT} per year, one hit per charge, {} rounds, the median of small groups of charges.\n",
        thousands(effort.charged as u64),
        effort.rounds
    );
    println!("| algorithm | Redis: admitted | refused | embedded: admitted | refused |");
    println!("|---|---|---|---|---|");
    for (name, algorithm, charging) in subjects() {
        let charges = charges(limit(algorithm, LIMIT, Window::of_unit(Unit::Year)), effort.charged);
        let charges: Vec<_> = charges.into_iter().map(|charge| Charge { charging, ..charge }).collect();
        // The first hit makes the counter and is not measured.
        let requests = || charges.iter().map(from_ref);
        let admitted = || requests().cycle().take(charges.len() * (LIMIT as usize - 1));
        let refused = || requests().cycle().take(charges.len() * LIMIT as usize);
        let mut found: [Vec<f64>; 4] = Default::default();
        for _ in 0..effort.rounds {
            redis.empty()?;
            redis.send(requests(), MANY, true)?;
            found[0].extend(redis.send(admitted(), FEW, true)?);
            found[1].extend(redis.send(refused(), FEW, false)?);
            let store = Embedded::new();
            store.send(requests(), true);
            found[2].extend(store.send(admitted(), true));
            found[3].extend(store.send(refused(), false));
        }
        let [a, b, c, d] = found.map(median);
        println!("| {name} | {a:.1} us | {b:.1} us | {c:.0} ns | {d:.0} ns |");
    }
    println!();
    Ok(())
}
