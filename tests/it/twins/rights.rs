//! Whoever calls the script needs the documented rights, and no more.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tidegate::algorithm::Algorithm;

use super::bench::Bench;
use crate::histories::{charge, history};
use crate::redis::user::{Shape, User};

#[tokio::test]
async fn the_documented_user_may_do_what_every_algorithm_does() {
    let mut bench = Bench::start(&[]).await;
    let user = User::of(Shape::Single);
    bench.be(&user).await;
    let bench = RefCell::new(bench);
    let number = Cell::new(0);
    for (name, algorithm) in Algorithm::ALL {
        let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(100) };
        let held = TestRunner::new(config).run(&history(algorithm), |history| {
            number.set(number.get() + 1);
            for (now, limit, hits) in history.charges() {
                let charges = [charge(&format!("{name}{}", number.get()), limit, history.charging, hits)];
                let told = bench.borrow_mut().charge(&charges, now)[0];
                if hits.taken() > 0 && !told.outcome.is_refused() {
                    bench.borrow_mut().undo(&charges, now, now);
                    bench.borrow_mut().charge(&charges, now);
                }
            }
            Ok(())
        });
        held.unwrap_or_else(|failed| panic!("{failed}"));
    }
    assert_eq!(bench.into_inner().denied(&user).await, "");
}
