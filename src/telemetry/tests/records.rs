//! Tests of what an instance remembers of its decisions.

use proptest::prelude::*;

use super::*;
use crate::telemetry::recent::{MOST_OF_RULE, Refusal, RefusalFilter, Refused};
use crate::telemetry::records::Records;
use crate::telemetry::sample::SAMPLE;
use crate::telemetry::top::{Heavy, Listed, Sampled, Top, WINDOW};

/// Telemetry that keeps refusals, and its clock.
fn keeping() -> (Telemetry, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(0));
    let now = Arc::clone(&time);
    let clock = move || Micros::from_secs(now.load(Ordering::Relaxed));
    (
        Telemetry::new(0.8, Micros::ZERO).with_records(Records::new(Arc::new(clock), Micros::from_secs(15 * 60), None)),
        time,
    )
}

/// The values of the refused descriptors, the last first.
fn refused(telemetry: &Telemetry) -> Vec<String> {
    let (refusals, _) = telemetry.records().expect("they are kept").recent.select(&RefusalFilter::default());
    refusals.iter().map(|refusal| refusal.descriptors[0][0].1.to_string()).collect()
}

#[test]
fn the_last_refused_descriptors_of_each_rule_are_kept_and_a_repeated_one_takes_one_place() {
    let (telemetry, time) = keeping();
    let (user, path) = (plain(0, "user"), plain(1, "path"));
    let refuse = |rule: &About, value: &str| {
        time.fetch_add(1, Ordering::Relaxed);
        telemetry.observe(&request(&[("k", value)]), &decision(&[asked(Some(rule), 5, 5, 1)]), None);
    };
    refuse(&path, "quiet");
    for number in 0..200 {
        refuse(&user, &format!("u{number}"));
        refuse(&user, "busy");
    }
    let known = refused(&telemetry);
    assert_eq!(known.len(), MOST_OF_RULE + 1);
    assert_eq!(known[..3], ["busy", "u199", "u198"]);
    assert_eq!(known[127..], ["u73", "quiet"], "another rule does not push it out");
    let (refusals, now) = telemetry
        .records()
        .expect("kept")
        .recent
        .select(&RefusalFilter { entries: vec![("k".into(), "busy".into())], ..RefusalFilter::default() });
    let [busy] = refusals.as_slice() else { panic!("{refusals:?}") };
    assert_eq!((busy.count, busy.first, busy.last.at), (200, Micros::from_secs(3), now));
    telemetry.observe(&request(&[("k", "ok")]), &decision(&[asked(Some(&user), 5, 0, 1)]), None);
    assert_eq!(refused(&telemetry).len(), MOST_OF_RULE + 1, "an admission is none");
}

#[test]
fn shadow_refusals_of_a_rule_are_kept_beside_its_refusals_and_push_none_out() {
    let (telemetry, time) = keeping();
    let user = plain(0, "user");
    telemetry.observe(&request(&[("k", "refused")]), &decision(&[asked(Some(&user), 5, 5, 1)]), None);
    for number in 0..200 {
        time.fetch_add(1, Ordering::Relaxed);
        let answer = Answered { role: Role::Shadow, ..asked(Some(&user), 5, 5, 1) };
        let admitted = Decision { outcome: Outcome::Admitted, ..decision(&[answer]) };
        telemetry.observe(&request(&[("k", &*format!("u{number}"))]), &admitted, None);
    }
    let (kept, _) = telemetry.records().expect("kept").recent.select(&RefusalFilter::default());
    let (shadow, others): (Vec<&Refusal>, Vec<_>) = kept.iter().partition(|refusal| refusal.is_shadow);
    assert_eq!((shadow.len(), others.len()), (MOST_OF_RULE, 1));
    let quota = Quota::new(5, Window::of_unit(Unit::Minute));
    assert!(shadow.iter().all(|refusal| refusal.quota == Some(quota) && refusal.last.hits == 1), "{shadow:?}");
}

#[test]
fn refusals_of_the_same_entries_have_the_same_digest_if_rule_limit_quota_and_domain_are_the_same() {
    let (telemetry, _) = keeping();
    let recent = &telemetry.records().expect("kept").recent;
    let request = request(&[("k", "v")]);
    let (user, path, same) = (plain(0, "user"), plain(1, "path"), plain(7, "user"));
    let of = |rule| decision(&[asked(rule, 5, 5, 1)]);
    let quota = Quota::new(5, Window::of_unit(Unit::Minute));
    let by = |name, quota| {
        let mut decision = of(Some(&user));
        if let Finding::Limited(tightest) = &mut decision.parts[0].finding {
            (tightest.name, tightest.quota) = (name, quota);
        }
        decision
    };
    let wait = Wait { hold: Micros::from_secs(1), ..Wait::default() };
    let different = [
        of(Some(&user)),
        of(Some(&path)),
        of(None),
        Decision { domain: Some("inner"), ..of(None) },
        Decision { domain: None, ..of(None) },
        by(None, quota.with_limit(6)),
        by(None, quota.with_burst(6)),
        by(None, Quota::new(5, Window::of_unit(Unit::Hour))),
        by(Some("burst"), quota),
        by(Some("steady"), quota),
        Decision { wait, ..of(Some(&user)) },
    ];
    let digest_of = |request: &Request, decision: &Decision<'_>| {
        let deciding = decision.deciding();
        recent.digest(request, decision, deciding, &Refused::of(decision, deciding))
    };
    let digest = |decision: &Decision<'_>| digest_of(&request, decision);
    for (number, one) in different.iter().enumerate() {
        let other = different[..number].iter().position(|other| digest(one) == digest(other));
        assert_eq!(other, None, "decision {number}");
    }
    let other = self::request(&[("k", "w")]);
    let user_of_other = digest_of(&other, &different[0]);
    assert_ne!(digest(&different[0]), user_of_other, "other entries");
    assert_eq!(digest(&of(Some(&user))), digest(&Decision { generation: 2, ..of(Some(&same)) }), "after a reload");
}

#[test]
fn refusals_are_forgotten_after_their_time_and_beyond_their_memory() {
    let (telemetry, time) = keeping();
    let rules: Vec<About> = (0..1_000).map(|id| plain(id, "user")).collect();
    let long = "x".repeat(5_000);
    let entries: Vec<(String, String)> = (0..40).map(|n| (format!("{n}{long}"), long.clone())).collect();
    let entries: Vec<(&str, &str)> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let mut number = 0;
    for rule in &rules {
        for _ in 0..20 {
            number += 1;
            let value = number.to_string();
            let all = [&[("k", value.as_str())], &entries[..]].concat();
            telemetry.observe(&request(&all), &decision(&[asked(Some(rule), 5, 5, 1)]), None);
        }
    }
    let recent = &telemetry.records().expect("kept").recent;
    let known = recent.select(&RefusalFilter::default()).0;
    let text = |known: &[Refusal]| -> usize {
        known
            .iter()
            .flat_map(|refusal| refusal.descriptors.iter().flatten())
            .map(|(key, value)| key.len() + value.len())
            .sum()
    };
    assert!(text(&known) < 16 << 20 && known.len() > 5_000, "{} of {}", text(&known), known.len());
    assert!(known.iter().all(|refusal| refusal.is_cut && text(std::slice::from_ref(refusal)) <= 1_024));
    assert!(refused(&telemetry).contains(&number.to_string()), "the last is kept");
    time.store(15 * 60, Ordering::Relaxed);
    assert_eq!(recent.select(&RefusalFilter::default()).0.len(), known.len());
    time.store(15 * 60 + 1, Ordering::Relaxed);
    assert_eq!(recent.select(&RefusalFilter::default()).0.len(), 0);
}

#[test]
fn what_else_was_in_a_request_is_of_one_of_the_last_requests_within_the_same_memory() {
    let (telemetry, time) = keeping();
    time.store(10, Ordering::Relaxed);
    let recent = &telemetry.records().expect("kept").recent;
    let rules: Vec<About> = (0..100).map(|id| plain(id, "user")).collect();
    let refuse_all = |other: &str, entries: usize| {
        for (rule, number) in rules.iter().flat_map(|rule| (0..100).map(move |number| (rule, number))) {
            let value = number.to_string();
            let (own, beside) = (request(&[("k", value.as_str())]), request(&vec![("other", other); entries]));
            let both = own.with([own.descriptors(), beside.descriptors()].concat());
            telemetry.observe(&both, &decision(&[asked(Some(rule), 5, 5, 1)]), None);
        }
        recent.select(&RefusalFilter::default()).0
    };
    let text = |known: &[Refusal]| -> usize {
        let entries = known.iter().flat_map(|refusal| refusal.descriptors.iter().flatten());
        entries.map(|(key, value)| key.len() + value.len()).sum()
    };
    let small = refuse_all("", 1);
    assert!(small.iter().all(|refusal| *refusal.descriptors[1][0].1 == *""));
    let known = refuse_all("x", 1);
    assert!(known.iter().all(|refusal| *refusal.descriptors[1][0].1 == *""), "within a second they stay");
    time.store(11, Ordering::Relaxed);
    let long = "x".repeat(100);
    let known = refuse_all(&long, 30);
    assert!(known.iter().all(|refusal| *refusal.descriptors[1][0].1 == *long && refusal.described.get() == 11_000_000));
    assert!(small.len() == 10_000 && (2_000..9_000).contains(&known.len()), "{} of {}", known.len(), small.len());
    assert!(text(&known) < 16 << 20, "{}", text(&known));
}

/// Refuses a request of one entry by this rule.
fn refuse(telemetry: &Telemetry, rule: &About, value: &str) {
    telemetry.observe(&request(&[("k", value)]), &decision(&[asked(Some(rule), 5, 5, 1)]), None);
}

#[test]
fn the_most_refused_of_a_million_are_found_although_they_come_late() {
    let (telemetry, _) = keeping();
    let user = plain(0, "user");
    let mut heavy = 0;
    for number in 0..1_000_000 {
        refuse(&telemetry, &user, &format!("u{number}"));
        if number > 900_000 && number % 10 == 0 {
            refuse(&telemetry, &user, &format!("heavy{}", heavy % 100));
            heavy += 1;
        }
    }
    let mut found = telemetry.records().expect("kept").top.select(|_| true).heavy;
    found.sort_by_key(|found| std::cmp::Reverse(found.refused.most - found.refused.error));
    let is_heavy = |found: &&Heavy| found.entries[0].1.starts_with("heavy");
    let first: Vec<_> = found.iter().take(100).filter(is_heavy).collect();
    assert!(first.len() >= 95, "{} of them are found", first.len());
    let is_within = |found: &&Heavy| {
        let true_count = heavy / 100;
        found.refused.most + 1 >= true_count && found.refused.most - found.refused.error <= true_count + 1
    };
    assert!(first.iter().all(is_within), "{first:?}");
    let text: usize = found.iter().map(|found| found.entries[0].1.len()).sum();
    assert!(found.len() <= 8_192 && text < 1 << 20);
}

#[test]
fn counts_of_the_top_are_those_of_the_last_minute() {
    let (telemetry, time) = keeping();
    let user = plain(0, "user");
    let counts = |telemetry: &Telemetry| -> Vec<(u64, u64)> {
        let found = telemetry.records().expect("kept").top.select(|_| true).heavy;
        found.iter().map(|found| (found.refused.most, found.asked.estimate)).collect()
    };
    for _ in 0..160 {
        telemetry.observe(&request(&[("k", "one")]), &decision(&[asked(Some(&user), 5, 0, 1)]), None);
    }
    let [(0, samples)] = *counts(&telemetry) else { panic!("one") };
    assert!((128..=192).contains(&samples), "one of sixteen is counted sixteen times: {samples}");
    refuse(&telemetry, &user, "one");
    let [(1, first)] = *counts(&telemetry) else { panic!("one") };
    time.store(90, Ordering::Relaxed);
    assert_eq!(counts(&telemetry), [(1, first.div_ceil(2))], "half of the window before is older than a minute");
    time.store(120, Ordering::Relaxed);
    assert_eq!(counts(&telemetry), []);
}

#[test]
fn a_number_of_requests_is_at_least_that_of_the_samples_and_of_the_refusals() {
    let (telemetry, time) = keeping();
    let user = plain(0, "user");
    let asked_of = |value: &str| {
        let found = telemetry.records().expect("kept").top.select(|_| true).heavy;
        found.iter().find(|found| &*found.entries[0].1 == value).map(|found| found.asked)
    };
    // The first request is a sample.
    telemetry.observe(&request(&[("k", "one")]), &decision(&[asked(Some(&user), 5, 0, 1)]), None);
    assert_eq!(asked_of("one"), Some(Sampled { least: 1, estimate: 16 }));
    (0..2).for_each(|_| refuse(&telemetry, &user, "two"));
    assert_eq!(asked_of("two"), Some(Sampled { least: 2, estimate: 2 }));
    (0..160).for_each(|_| refuse(&telemetry, &user, "three"));
    let three = asked_of("three").expect("it is listed");
    assert!(three.least == 160 && three.estimate >= 160, "{three:?}");
    time.store(90, Ordering::Relaxed);
    assert_eq!(asked_of("one"), Some(Sampled { least: 1, estimate: 8 }), "half of the window before");
}

#[test]
fn a_value_of_128_bytes_is_listed_whole_and_a_longer_one_is_cut_and_marked() {
    let (telemetry, _) = keeping();
    let user = plain(0, "user");
    for length in [128, 129] {
        refuse(&telemetry, &user, &"x".repeat(length));
    }
    let found = telemetry.records().expect("kept").top.select(|_| true).heavy;
    let mut values: Vec<&str> = found.iter().map(|found| &*found.entries[0].1).collect();
    values.sort_unstable();
    let whole = "x".repeat(128);
    assert_eq!(values, [whole.as_str(), &format!("{whole}…")]);
}

#[test]
fn a_descriptor_keeps_its_count_when_the_rules_are_reloaded_and_is_shown_as_the_new_rules_say() {
    let (telemetry, _) = keeping();
    let path = |value| about(0, &[("k", value, Shown::Word)], Series::Rule);
    refuse(&telemetry, &path(None), "one");
    let reloaded = path(None);
    let answers = [asked(Some(&reloaded), 5, 5, 1)];
    let digest = Hidden { descriptor: 0, entry: 0, digest: "f00d".into() };
    let decision = Decision { generation: 2, hidden: vec![digest], ..decision(&answers) };
    telemetry.observe(&request(&[("k", "one")]), &decision, None);
    // Two other rules, whose paths are written the same.
    for levels in [&[("k_one", None, Shown::Word)][..], &[("k", Some("one"), Shown::Word)]] {
        refuse(&telemetry, &about(1, levels, Series::Rule), "two");
    }
    let found = telemetry.records().expect("kept").top.select(|_| true).heavy;
    let mut found: Vec<_> = found.iter().map(|heavy| (&*heavy.entries[0].1, heavy.refused.most)).collect();
    found.sort_unstable();
    assert_eq!(found, [("f00d", 2), ("two", 1), ("two", 1)]);
}

#[test]
fn a_count_of_the_top_is_never_too_small_and_too_large_by_at_most_its_error() {
    let (telemetry, time) = keeping();
    let user = plain(0, "user");
    let mut counts = std::collections::BTreeMap::<String, u64>::new();
    let mut random = fastrand::Rng::with_seed(7);
    for number in 0..400_000_u32 {
        // Light ones come and go, and come back.
        let value = format!("u{}", random.u32(..20_000).min(random.u32(..20_000)).min(random.u32(..40_000)));
        refuse(&telemetry, &user, &value);
        *counts.entry(value).or_default() += 1;
        if number == 200_000 {
            time.store(59, Ordering::Relaxed);
        }
    }
    let found = telemetry.records().expect("kept").top.select(|_| true).heavy;
    assert!(found.len() > 4_000, "{}", found.len());
    for heavy in found {
        let (true_count, refused) = (counts[&*heavy.entries[0].1], heavy.refused);
        assert!(refused.most >= true_count && refused.most - refused.error <= true_count, "{true_count}: {heavy:?}");
    }
}

/// Events of a descriptor by window, counted exactly.
#[derive(Clone, Copy, Default)]
struct Exact {
    window: u64,
    now: u64,
    before: u64,
}

impl Exact {
    fn move_to(&mut self, window: u64) {
        self.before = match window - self.window {
            0 => return,
            1 => self.now,
            _ => 0,
        };
        (self.window, self.now) = (window, 0);
    }

    /// Returns the events of the last minute, as the top has them.
    fn last_minute(mut self, now: Micros) -> u64 {
        self.move_to(now.get() / WINDOW.get());
        let left = WINDOW.get() - now.get() % WINDOW.get();
        self.now + (self.before * left).div_ceil(WINDOW.get())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn each_descriptor_is_within_the_bounds_of_the_top_whether_it_is_listed_or_not(
        seed: u64,
        // More than the 8,192 places.
        descriptors in 9_000_usize..20_000,
        pauses in prop::collection::vec(0_u64..70, 4),
        shown in prop::sample::select(vec![5, 1_000, usize::MAX]),
    ) {
        let time = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&time);
        let top = Top::new(Arc::new(move || Micros::from_secs(clock.load(Ordering::Relaxed))));
        let user = plain(0, "user");
        let decision = decision(&[asked(Some(&user), 5, 5, 1)]);
        let mut exact = vec![[Exact::default(); 2]; descriptors];
        let mut random = fastrand::Rng::with_seed(seed);
        for pause in pauses {
            time.fetch_add(pause, Ordering::Relaxed);
            let now = Micros::from_secs(time.load(Ordering::Relaxed));
            for _ in 0..20_000 {
                let number = random.usize(..descriptors).min(random.usize(..descriptors));
                let request = request(&[("k", &number.to_string())]);
                let is_asked = random.u8(..4) == 0;
                let (counted, events) = match is_asked {
                    true => (&mut exact[number][1], u64::from(SAMPLE)),
                    false => (&mut exact[number][0], 1),
                };
                counted.move_to(now.get() / WINDOW.get());
                counted.now += events;
                let count = if is_asked { Top::asked } else { Top::refused };
                count(&top, (&request, &decision, 0), &user.path, number as u64, now);
            }
        }
        let now = Micros::from_secs(time.load(Ordering::Relaxed));
        let Listed { mut heavy, mut unlisted } = top.select(|_| true);
        let cut = heavy.split_off(shown.min(heavy.len()));
        unlisted = cut.iter().map(|heavy| heavy.refused.most).fold(unlisted, u64::max);
        let mut is_listed = vec![false; descriptors];
        for Heavy { entries, refused, asked, .. } in heavy {
            let number: usize = entries[0].1.parse().unwrap();
            is_listed[number] = true;
            let [exact, sampled] = exact[number].map(|exact| exact.last_minute(now));
            prop_assert!(refused.most - refused.error <= exact && exact <= refused.most, "{}: {:?}", exact, refused);
            // A refusal is not counted as a request here.
            prop_assert!(asked.least <= sampled.div_ceil(u64::from(SAMPLE)).max(exact), "{}: {:?}", sampled, asked);
            prop_assert!(asked.estimate <= sampled.max(exact), "{}: {:?}", sampled, asked);
        }
        for (number, [refused, _]) in exact.into_iter().enumerate().filter(|(number, _)| !is_listed[*number]) {
            prop_assert!(refused.last_minute(now) <= unlisted, "{}: {}", number, unlisted);
        }
    }
}

#[test]
fn what_is_old_is_erased_without_a_reader() {
    let (telemetry, time) = keeping();
    let user = plain(0, "user");
    refuse(&telemetry, &user, "one");
    let records = telemetry.records().expect("kept");
    let kept = || format!("{:?} {:?}", records.recent, records.top);
    let full = kept();
    for (seconds, is_erased) in [(119, false), (120, false), (15 * 60, false), (15 * 60 + 1, true)] {
        time.store(seconds, Ordering::Relaxed);
        records.forget_old();
        assert_eq!(kept().contains("kept: 0") && !kept().contains("kept: 1"), is_erased, "{seconds}: {}", kept());
    }
    assert!(full.contains("kept: 1"), "{full}");
}

#[test]
fn the_highest_share_of_each_key_in_each_window_is_counted() {
    let (telemetry, time) = keeping();
    let records = telemetry.records().expect("kept");
    let user = plain(0, "user");
    // About one request of 16 is seen. The limit is 10 in a minute; 4 are left, then 1, and in the next minute 9.
    let ask = |value: &str, used: u32| {
        for _ in 0..64 {
            telemetry.observe(&request(&[("user", value)]), &decision(&[asked(Some(&user), 10, used - 1, 1)]), None);
        }
    };
    ask("a", 6);
    ask("b", 2);
    ask("a", 9);
    records.forget_old();
    assert!(!telemetry.page().contains("tidegate_key_peak_share_count"), "the minute is not over");
    time.store(60, Ordering::Relaxed);
    ask("a", 1);
    records.forget_old();
    time.store(120, Ordering::Relaxed);
    records.forget_old();
    let page = telemetry.page();
    let line = |rest: &str| page.contains(&format!("tidegate_key_peak_share{rest}\n"));
    assert!(line("_count{domain=\"edge\",rule=\"edge.user\"} 3"), "{page}");
    let upto = |bound: &str, count: u32| {
        line(&format!("_bucket{{domain=\"edge\",rule=\"edge.user\",le=\"{bound}\"}} {count}"))
    };
    assert!(upto("0.1", 1) && upto("0.25", 2) && upto("0.75", 2) && upto("0.9", 3), "{page}");
}

#[test]
fn each_of_the_first_requests_under_loaded_rules_is_examined_for_keys_and_a_share_of_those_after_them() {
    let (telemetry, _) = keeping();
    let records = telemetry.records().expect("kept");
    let (user, path) = (plain(0, "user"), plain(1, "path"));
    for generation in [1, 2] {
        telemetry.rules_loaded(generation, &["edge"], [&user, &path].into_iter(), Micros::ZERO);
        // What other rules decided, or has a domain that they do not know, is not one of the first.
        for _ in 0..2_000 {
            let before = Decision { generation: generation - 1, ..decision(&[asked(Some(&user), 5, 0, 1)]) };
            telemetry.observe(&request(&[("user", "a")]), &before, None);
            let unknown = Decision { generation, domain: None, ..decision(&[]) };
            telemetry.observe(&request(&[("user", "a")]), &unknown, None);
        }
        let examined = |number: u32| {
            for _ in 0..number {
                let decision = Decision { generation, ..decision(&[asked(Some(&user), 5, 0, 1)]) };
                telemetry.observe(&request(&[("user", "a")]), &decision, None);
            }
            let absent = records.unmatched.now().absent;
            let [path] = absent.as_slice() else { panic!("{absent:?}") };
            assert_eq!((&*path.key, path.without), ("path", path.examined));
            path.examined
        };
        assert_eq!((examined(1), examined(1_023)), (1, 1_024), "load {generation}");
        let later = examined(6_400) - 1_024;
        assert!((80..=120).contains(&later), "about one of 64: {later} of 6,400");
    }
}
