//! The checker itself: it finds each breach in a history made by hand, and none in one that keeps every bound.

use tonic::Code;

use super::*;

/// A full window of every counter begins then.
const BEGIN: Time = 1_000 * SECOND;
const MS: Time = 1_000;
const ALL: [Counting; 4] =
    [Counting::FixedWindow, Counting::SlidingWindow, Counting::SlidingLog, Counting::Meter { burst: 10 }];

/// Ten hits a second.
fn counter(counting: Counting) -> Counter {
    Counter {
        name: "a=b".to_owned(),
        counting,
        window: SECOND,
        limits: [10; 2],
        leased: 0,
        leased_for: 0,
        policy: "closed",
        is_one_step: true,
    }
}

fn history(counter: Counter) -> History {
    History { began: BEGIN, counters: vec![counter], instances: 3, ..History::default() }
}

fn policy(name: &str, is_admitted: bool) -> Answer {
    Answer::Policy { names: vec![name.to_owned()], is_admitted }
}

impl History {
    /// With a call of so many hits that is sent and answered at these milliseconds.
    fn call(mut self, span: [Time; 2], hits: u64, answer: Answer) -> Self {
        let [sent, answered] = span.map(|at| BEGIN + at * MS);
        let provenance = "store".to_owned();
        self.calls.push(Call { instance: 0, counters: vec![0], hits, sent, answered, answer, provenance });
        self
    }

    /// With hits that are admitted at this millisecond.
    fn admitted(self, at: Time, hits: u64) -> Self {
        self.call([at; 2], hits, Answer::Admitted)
    }

    /// With a fault between these milliseconds.
    fn fault(mut self, span: [Time; 2], forgotten: Vec<usize>, killed: Option<usize>) -> Self {
        let [from, to] = span.map(|at| BEGIN + at * MS);
        self.faults.push(Fault { name: "a fault".to_owned(), from, to, forgotten, killed });
        self
    }

    fn assert_kept(&self) {
        let breaches = self.check();
        assert!(breaches.is_empty(), "{}", self.excerpt(&breaches[0]));
    }

    /// One promise is broken, and the message has this text.
    fn assert_broken(&self, text: &str) {
        let breaches = self.check();
        assert_eq!(breaches.len(), 1, "{breaches:?}");
        assert!(breaches[0].what.contains(text), "{breaches:?}");
    }
}

#[test]
fn one_hit_too_many_is_found_for_every_algorithm() {
    // Hits that come 0.6 s after a full limit, at 0.5 s of the next window, while nothing is too many.
    let fitting = [10, 5, 0, 6];
    for (counting, fitting) in ALL.into_iter().zip(fitting) {
        let full = || history(counter(counting)).admitted(900, 10);
        let fits = (0..fitting).fold(full(), |history, _| history.admitted(1_500, 1));
        fits.assert_kept();
        fits.admitted(1_500, 1).assert_broken("a=b admitted");
        full().admitted(900, 1).assert_broken("a=b admitted 11 hits in 0.000000 s, at most 10 are promised");
        // After the window, or once all has drained, a limit fits again.
        full().admitted(2_900, 10).assert_kept();
    }
}

#[test]
fn a_charge_that_may_have_been_made_in_another_window_is_not_one_too_many() {
    for counting in ALL {
        let spread = history(counter(counting)).admitted(900, 10).call([950, 2_100], 10, Answer::Admitted);
        spread.assert_kept();
        history(counter(counting)).admitted(900, 10).call([910, 990], 10, Answer::Admitted).assert_broken("20 hits");
    }
}

#[test]
fn leased_hits_are_no_excuse_for_more_than_their_share() {
    for counting in ALL.into_iter().filter(|counting| *counting != Counting::SlidingLog) {
        let most = if counting == Counting::FixedWindow { 10 } else { 12 };
        let leased = Counter { leased: 2, leased_for: SECOND, is_one_step: false, ..counter(counting) };
        let full = history(leased).admitted(0, 10).admitted(0, most - 10);
        full.assert_kept();
        full.admitted(0, 1).assert_broken("a=b admitted");
    }
}

#[test]
fn a_lost_master_excuses_a_limit_of_its_own_counters_while_it_is_lost() {
    for counting in ALL {
        let twice = || history(counter(counting)).admitted(100, 10).admitted(300, 10);
        let once = |history: History| history.fault([200, 250], vec![0], None);
        once(twice()).assert_kept();
        once(twice().admitted(400, 10)).assert_broken("a=b admitted");
        twice().fault([200, 250], vec![], None).assert_broken("a=b admitted");
        twice().fault([2_000, 2_500], vec![0], None).assert_broken("a=b admitted");
    }
}

#[test]
fn the_policy_local_may_admit_its_limits_once_more() {
    let local = || history(Counter { policy: "local", is_one_step: false, ..counter(Counting::FixedWindow) });
    // The store its limit, three instances 4 hits each while the store fails, and 10 under overload.
    let full = || local().admitted(0, 10).call([1, 1], 12 + 10, policy("local", true));
    full().assert_kept();
    full().call([2, 2], 1, policy("local", true)).assert_broken("a=b admitted 23 hits");
    full().call([2, 2], 4, policy("local", true)).fault([1, 2], vec![], Some(1)).assert_kept();
}

#[test]
fn a_refusal_where_hits_fit_is_found_for_every_algorithm() {
    for counting in ALL {
        let refused = |used: u64, hits: u64| {
            history(counter(counting)).admitted(500, used).call([600, 610], hits, Answer::Refused)
        };
        refused(10, 1).assert_kept();
        refused(8, 3).assert_kept();
        refused(6, 3).assert_broken("a call is refused, for which there was room");
        refused(0, 1).assert_broken("there was room");
        // A limit that has drained or whose window is over leaves room, and an instance knows it soon.
        let later = |at| history(counter(counting)).admitted(500, 10).call([at; 2], 8, Answer::Refused);
        later(1_100).assert_kept();
        later(3_000).assert_broken("there was room");
        // A call without an answer, or with one by policy, may have been charged.
        for unknown in [policy("closed", false), Answer::Failed(Code::Unavailable)] {
            let error = Counter {
                policy: if unknown == policy("closed", false) { "closed" } else { "error" },
                ..counter(counting)
            };
            history(error).call([500, 510], 10, unknown).call([600, 610], 1, Answer::Refused).assert_kept();
        }
    }
}

#[test]
fn a_request_may_be_refused_by_any_of_its_counters_and_by_no_other() {
    let pair = |full: usize| {
        let mut history = history(counter(Counting::SlidingLog)).admitted(500, 10).call([600; 2], 1, Answer::Refused);
        history.counters.push(counter(Counting::SlidingLog));
        history.calls[0].counters = vec![full];
        history.calls[1].counters = vec![0, 1];
        history
    };
    pair(0).assert_kept();
    pair(1).assert_kept();
    let mut other = pair(1);
    other.calls[1].counters = vec![0];
    other.assert_broken("there was room");
}

#[test]
fn a_refusal_at_rest_is_found_where_hits_may_be_leased_or_given_back() {
    for counting in ALL {
        let shared = Counter { is_one_step: false, leased_for: SECOND, ..counter(counting) };
        let refused = |at| history(shared.clone()).admitted(0, 1).call([at; 2], 10, Answer::Refused);
        refused(2_500).assert_kept();
        refused(4_000).assert_broken("there was room");
    }
}

#[test]
fn answers_that_are_late_or_wrong_are_found() {
    let call = |answer| history(counter(Counting::SlidingLog)).call([0, 1], 1, answer);
    let slow =
        |at| history(counter(Counting::SlidingLog)).call([0, at], 1, Answer::Admitted).admitted(0, 1).admitted(0, 1);
    slow(5_000).assert_kept();
    slow(5_001).assert_broken("answered too late");
    // Where others take a second as well, it may be the machine.
    (0..4).fold(slow(5_001), |history, _| history.call([0, 1_000], 1, Answer::Admitted)).assert_kept();
    call(Answer::Failed(Code::Unavailable)).assert_broken("ends with an error");
    call(policy("open", true)).assert_broken("a policy that its rule does not name");
    call(policy("closed", true)).assert_broken("admitted by the policy `closed`");
    call(policy("closed", false)).assert_kept();
    let of = |policy, answer| history(Counter { policy, ..counter(Counting::SlidingLog) }).call([0, 1], 1, answer);
    of("open", policy("open", false)).assert_broken("refused by the policy `open`");
    of("error", Answer::Failed(Code::Unavailable)).assert_kept();
    of("error", Answer::Failed(Code::Internal)).assert_broken("ends with an error");
    // A caller that gives up has waited too long, unless everybody waits.
    let given_up =
        || history(counter(Counting::SlidingLog)).call([0, 60_000], 1, Answer::Failed(Code::DeadlineExceeded));
    (0..2).fold(given_up(), |history, _| history.admitted(0, 1)).assert_broken("answered too late");
    (0..2).fold(given_up(), |history, _| history.call([0, 6_000], 1, Answer::Admitted)).assert_kept();
    call(Answer::Failed(Code::DeadlineExceeded)).assert_broken("ends with an error");
    // Calls to an instance that is killed fail, and no others.
    let cut = || call(Answer::Failed(Code::Unknown));
    cut().fault([0, 1], vec![], Some(0)).assert_kept();
    cut().fault([0, 1], vec![], Some(1)).assert_broken("ends with an error");
    cut().fault([2, 3], vec![], Some(0)).assert_broken("ends with an error");
}

#[test]
fn a_key_without_an_end_is_found() {
    let endless = History { endless: vec!["{d|a=b}".to_owned()], ..history(counter(Counting::SlidingLog)) };
    endless.assert_broken("{d|a=b} never expires");
}

#[test]
fn an_excerpt_shows_the_calls_and_faults_around_a_breach() {
    let full = history(counter(Counting::SlidingLog)).fault([0, 1], vec![0], None).admitted(0, 1).admitted(3_000, 10);
    let many = (0..100).fold(full, |history, _| history.call([3_050; 2], 1, policy("closed", false)));
    let broken = many.admitted(3_100, 1).admitted(9_000, 1);
    let excerpt = broken.excerpt(&broken.check()[0]);
    assert!(excerpt.starts_with("a=b admitted 11 hits in 0.100000 s, at most 10 are promised\n"), "{excerpt}");
    assert!(excerpt.contains("3.000000 s to 3.000000 s, instance 0, 10 hits of a=b: Admitted, store"), "{excerpt}");
    assert!(excerpt.contains("(42 more calls)"), "{excerpt}");
    assert!(!excerpt.contains("9.000000") && !excerpt.contains("a fault"), "{excerpt}");
    assert!(broken.to_string().contains("0.000000 s to 0.001000 s: a fault; may forget a=b"), "{broken}");
}
