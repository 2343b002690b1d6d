//! The rules of a run, and how they change.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Micros, Quota, Window};

/// A limit that no run reaches, of a year: it counts what is charged.
const COUNTED: u32 = 9_000;

/// The rules of a run.
#[derive(Clone)]
pub struct Rules {
    /// Lines above the descriptors.
    head: String,
    pub charging: &'static str,
    /// The policies while the store fails, and while it is overloaded, where a descriptor sets none.
    pub policies: [&'static str; 2],
    /// The part of a limit that may be leased, in percent.
    pub leased: u32,
    /// The most hits of a limit.
    most: u32,
    /// The limits, by the key of their descriptor.
    pub limits: BTreeMap<String, Limit>,
}

/// The settings of a descriptor beside its limit.
fn settings(key: &str) -> &'static str {
    match key {
        "list" | "counted" | "refunded" => ", lease: off, on_store_failure: closed, on_store_overload: closed",
        "later" => ", lease: off, on_store_failure: local, on_store_overload: local",
        "shadowed" => ", shadow_mode: true",
        "quota" => ", quota_mode: true",
        "sliding_log" => ", lease: off",
        _ => "",
    }
}

impl Rules {
    pub fn new(random: &mut fastrand::Rng) -> Self {
        let policies = ["closed", "closed", "closed", "error", "open", "local"];
        let mut policy = || policies[random.usize(..policies.len())];
        let [failure, overload] = [policy(), policy()];
        let charging = if random.bool() { "each" } else { "all_or_nothing" };
        let (leased, most) = if random.u8(..3) == 0 { (random.u32(10..=50), 200) } else { (0, 20) };
        let lease = if leased > 0 { format!("{{ share: {leased}%, ttl: 1s }}") } else { "off".to_owned() };
        let head = format!(
            "domain: d\ncharging: {charging}\non_store_failure: {failure}\non_store_overload: {overload}\nlease: {lease}\n"
        );
        let mut limits = BTreeMap::new();
        let own = Algorithm::ALL.map(|(name, algorithm)| (name, algorithm, [1, 2, 5, 10][random.usize(..4)]));
        let others = [
            ("list", Algorithm::FixedWindow, 2),
            ("shadowed", Algorithm::FixedWindow, 2),
            ("quota", Algorithm::Gcra, 1),
            ("refunded", Algorithm::FixedWindow, 31_536_000),
        ];
        for (key, algorithm, window) in own.into_iter().chain(others) {
            let window = Window::of_length(Micros::from_secs(window)).expect("a window");
            let quota = Quota::new(random.u32(1..=most), window);
            limits.insert(key.to_owned(), Limit::new(algorithm, quota).expect("a limit"));
        }
        Self { head, charging, policies: [failure, overload], leased, most, limits }
    }

    /// Returns the policies of a key.
    pub fn policies_of(&self, key: &str) -> [&'static str; 2] {
        match key {
            "list" | "counted" | "refunded" => ["closed"; 2],
            "later" => ["local"; 2],
            _ => self.policies,
        }
    }

    /// Returns other rules: some limits are larger or smaller, and some are gone or back.
    pub fn changed(&self, random: &mut fastrand::Rng) -> Self {
        let mut limits = self.limits.clone();
        for (_, algorithm) in Algorithm::ALL {
            let key = algorithm.name();
            if random.u8(..6) == 0 {
                limits.remove(key);
            } else if let Some(limit) = limits.get_mut(key).filter(|_| random.bool()) {
                let quota = Quota::new(random.u32(1..=self.most), limit.quota().window());
                *limit = Limit::new(algorithm, quota).expect("a limit");
            }
        }
        Self { limits, ..self.clone() }
    }

    pub fn text(&self) -> String {
        let mut text = format!("{}descriptors:\n", self.head);
        let year = format!("{{ unit: year, requests_per_unit: {COUNTED} }}");
        for (key, limit) in &self.limits {
            let (quota, algorithm) = (limit.quota(), limit.algorithm().name());
            let seconds = quota.window().length().get() / 1_000_000;
            let own = format!("{{ window: {seconds}s, requests_per_unit: {}, algorithm: {algorithm} }}", quota.limit());
            let limits =
                if key == "list" { format!("rate_limits: [{own}, {year}]") } else { format!("rate_limit: {own}") };
            let _ = writeln!(text, "  - {{ key: {key}{}, {limits} }}", settings(key));
        }
        for key in ["counted", "later"] {
            let _ = writeln!(text, "  - {{ key: {key}{}, rate_limit: {year} }}", settings(key));
        }
        text
    }
}
