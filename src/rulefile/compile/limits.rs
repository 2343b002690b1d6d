//! Compiler for the limits of an item.

use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};

use super::{Compiler, Inherited, MOST_LIMITS};
use crate::algorithm::Limit;
use crate::model::{Delay, InvalidQuota, Leasing, Path, Quota, Unit, Window};
use crate::rulefile::document::{DelayNode, LimitNode, LimitsNode};
use crate::rulefile::problem::{Placed, quoted};
use crate::rules::RuleLimit;
use crate::rules::tree::Position;

/// The limits of a rule, which all rules with equal ones share.
type SameLimits = Arc<[RuleLimit]>;

/// The limits of all rules so far, each list once.
#[derive(Default)]
pub(super) struct SharedLimits(HashSet<SameLimits>);

/// The costs of a file's requests.
#[derive(Default)]
pub(super) struct Costs {
    /// Each `request_cost`, with the first key of its item.
    requests: Vec<(String, Placed<u32>)>,
    /// For each first key of items: the largest cost that fits into the smallest limit, and the line of that limit.
    limits: HashMap<String, (u32, u32)>,
}

impl Costs {
    pub(super) fn add_request(&mut self, path: &Path, cost: &Placed<u32>) {
        self.requests.push((first_key(path).to_owned(), Placed { value: cost.value, place: cost.place }));
    }

    fn add_limit(&mut self, path: &Path, most: u32, line: u32) {
        match self.limits.get_mut(first_key(path)) {
            Some(smallest) => *smallest = (*smallest).min((most, line)),
            None => {
                self.limits.insert(first_key(path).to_owned(), (most, line));
            }
        }
    }
}

/// Returns the key of the first level of a descriptor with this path.
fn first_key(path: &Path) -> &str {
    path.entry_keys().last().unwrap_or_default()
}

impl SharedLimits {
    /// Returns `limits`; those of an earlier rule if they are equal.
    fn of(&mut self, limits: Vec<RuleLimit>) -> SameLimits {
        if let Some(earlier) = self.0.get(limits.as_slice()) {
            return Arc::clone(earlier);
        }
        let limits: SameLimits = limits.into();
        self.0.insert(Arc::clone(&limits));
        limits
    }
}

impl Compiler<'_> {
    /// Returns the limits, true if unlimited, and the names that an unlimited item replaces; `None` if it has no limits.
    pub(crate) fn limits(
        &mut self,
        node: LimitsNode,
        (path, request_cost, is_shadow): (&Path, Option<&Placed<u32>>, bool),
        inherited: Inherited<'_>,
    ) -> Option<(SameLimits, bool, Vec<Arc<str>>)> {
        match node {
            LimitsNode::None => None,
            LimitsNode::Unlimited(node) => {
                self.unlimited(&node, inherited);
                let replaces = self.replaces(&node, inherited);
                Some((Arc::default(), true, replaces))
            }
            LimitsNode::Limited(nodes) => {
                if let Some(beyond) = nodes.get(MOST_LIMITS) {
                    let message =
                        format!("a descriptor has at most {MOST_LIMITS} limits: remove this limit and those after it");
                    self.error(inherited.file, beyond.place, message);
                }
                let mut limits: Vec<RuleLimit> = Vec::new();
                let mut lines = Vec::new();
                for node in nodes.into_iter().take(MOST_LIMITS) {
                    let Some(limit) = self.limit(&node, inherited) else { continue };
                    let same = |other: &RuleLimit| {
                        other.is_shadow == node.shadow_mode.is_some()
                            && other.limit.algorithm() == limit.algorithm()
                            && other.limit.quota().window().length() == limit.quota().window().length()
                    };
                    if let Some(first) = limits.iter().position(same) {
                        let message = format!(
                            "this limit and the limit on line {} both use {} over {}, so they would share a counter: keep the smaller one",
                            lines.get(first).copied().unwrap_or_default(),
                            limit.algorithm().name(),
                            limit.quota().window().length()
                        );
                        self.error(inherited.file, node.place, message);
                        continue;
                    }
                    let replaces = self.replaces(&node, inherited);
                    let cost = self.at_least_one(node.cost.as_ref(), inherited.file);
                    let leasing = node.lease.as_ref().map_or(inherited.lease, |lease| lease.value);
                    self.can_fit(
                        (path, &node, is_shadow || node.shadow_mode.is_some()),
                        &limit,
                        (cost, request_cost),
                        inherited,
                    );
                    self.warning_is_possible(&node, &limit, inherited);
                    self.only_watches(&node, inherited);
                    self.note_delay(&node, inherited);
                    lines.push(node.place.line);
                    limits.push(RuleLimit {
                        limit,
                        name: node.name.map(|name| name.value.into()),
                        replaces,
                        cost,
                        delivery: node.delay.and_then(|delay| delay.delivery).unwrap_or_default(),
                        warn_at: node.warn_at.map(|percent| percent.value),
                        is_shadow: node.shadow_mode.is_some(),
                        lease: leasing.terms().filter(|_| limit.can_be_leased().is_ok()),
                    });
                }
                Some((self.shared_limits.of(limits), false, Vec::new()))
            }
        }
    }

    /// Returns the factor in `found`, 1 if there is none. Reports a factor of 0.
    pub(super) fn at_least_one(&mut self, found: Option<&Placed<u32>>, file: usize) -> NonZeroU32 {
        let Some(Placed { value, place }) = found else { return NonZeroU32::MIN };
        NonZeroU32::new(*value).unwrap_or_else(|| {
            let message = "a cost of 0 counts nothing: write at least 1, or write `exempt: true` on the item if its requests are free";
            self.error(file, *place, message.to_owned());
            NonZeroU32::MIN
        })
    }

    fn unlimited(&mut self, node: &LimitNode, inherited: Inherited<'_>) {
        if let Some(unit) = &node.unit {
            if Unit::parse(&unit.value).is_some() {
                let message = "`unit` is not allowed beside `unlimited`: remove one of the two".to_owned();
                self.error(inherited.file, unit.place, message);
            } else {
                let message =
                    format!("{} is not a unit, and an unlimited rule needs no unit: remove it", quoted(&unit.value));
                self.warning(inherited.file, unit.place, message);
            }
        }
        // The reference ignores `requests_per_unit` beside `unlimited`. These keys are ours, and each of them means a limit.
        let places = [
            ("window", node.window.as_ref().map(|window| window.place)),
            ("algorithm", node.algorithm.as_ref().map(|algorithm| algorithm.place)),
            ("burst", node.burst.as_ref().map(|burst| burst.place)),
            ("cost", node.cost.as_ref().map(|cost| cost.place)),
            ("warn_at", node.warn_at.as_ref().map(|percent| percent.place)),
            ("delay", node.delay.as_ref().map(|delay| delay.place)),
            ("lease", node.lease.as_ref().map(|lease| lease.place)),
        ];
        for (key, place) in places {
            if let Some(place) = place {
                let message = format!("`{key}` is not allowed beside `unlimited`: remove one of the two");
                self.error(inherited.file, place, message);
            }
        }
        if node.requests_per_unit > 0 {
            let message = format!(
                "`requests_per_unit: {}` is not enforced beside `unlimited`: remove one of the two",
                node.requests_per_unit
            );
            self.warning(inherited.file, node.place, message);
        }
        if let Some(name) = &node.name {
            let message = format!(
                "the name {} has no effect, because no answer shows the name of an unlimited rule and no limit replaces it: remove it",
                quoted(&name.value)
            );
            self.warning(inherited.file, name.place, message);
        }
    }

    fn limit(&mut self, node: &LimitNode, inherited: Inherited<'_>) -> Option<Limit> {
        limit(node).map_err(|(place, message)| self.error(inherited.file, place, message)).ok()
    }

    /// Warns about a limit that one request of its rule never fits into. Notes the largest cost that fits.
    fn can_fit(
        &mut self,
        (path, node, is_shadow): (&Path, &LimitNode, bool),
        limit: &Limit,
        (cost, request_cost): (NonZeroU32, Option<&Placed<u32>>),
        inherited: Inherited<'_>,
    ) {
        // A delay that grows refuses nothing, and a limit of 0 refuses everything, as it says.
        if limit.is_closed() || matches!(limit.delay(), Some(Delay::Growing { .. })) {
            return;
        }
        let most = limit.capacity() / cost;
        let (of, raise) = match limit.algorithm().has_burst() {
            true => ("a burst", "`burst`"),
            false => ("a limit", "`requests_per_unit`"),
        };
        let refuses = if is_shadow { "would refuse" } else { "refuses" };
        let capacity = limit.capacity();
        if let Some(Placed { place, .. }) = node.cost.as_ref().filter(|_| most == 0) {
            let message = format!(
                "each request costs {cost} hits of {of} of {capacity}, so this limit {refuses} every request: write a smaller `cost` or a larger {raise}"
            );
            self.warning(inherited.file, *place, message);
        } else if let Some(Placed { value, place }) = request_cost.filter(|cost| cost.value > most) {
            let hits = u64::from(*value) * u64::from(cost.get());
            let message = format!(
                "each request costs {hits} hits of {of} of {capacity} on line {}, so that limit {refuses} every request: write a smaller `request_cost` or a larger {raise}",
                node.place.line
            );
            self.warning(inherited.file, *place, message);
        } else if !is_shadow {
            self.costs.add_limit(path, most, node.place.line);
        }
    }

    /// Warns about the items of a file whose requests never fit into the limits of the file.
    pub(super) fn costs_can_fit(&mut self, file: usize) {
        let Costs { requests, limits } = std::mem::take(&mut self.costs);
        for (key, Placed { value, place }) in requests {
            // Items with one key are of different requests.
            let others = limits.iter().filter(|(other, _)| **other != key);
            let Some((most, line)) = others.map(|(_, limit)| *limit).min().filter(|(most, _)| *most < value) else {
                continue;
            };
            let message = format!(
                "the limit on line {line} admits at most {most} such requests at once, and each request of this item counts as {value}: a request that meets \
                 both is always refused. Write a smaller `request_cost` or a larger limit"
            );
            self.warning(file, place, message);
        }
    }

    /// Warns about `warn_at` on a limit of 0, which can never be partly used.
    fn warning_is_possible(&mut self, node: &LimitNode, limit: &Limit, inherited: Inherited<'_>) {
        if let Some(percent) = &node.warn_at
            && limit.is_closed()
        {
            let message = "a limit of 0 admits nothing, so it never sends a warning: remove `warn_at`".to_owned();
            self.warning(inherited.file, percent.place, message);
        }
    }

    /// Reports what a limit that only watches cannot do.
    fn only_watches(&mut self, node: &LimitNode, inherited: Inherited<'_>) {
        if node.shadow_mode.is_none() {
            return;
        }
        let delay = node.delay.as_ref().map(|delay| ("delay", delay.place));
        let warn_at = node.warn_at.as_ref().map(|percent| ("warn_at", percent.place));
        for (key, place) in delay.into_iter().chain(warn_at) {
            let message = format!(
                "`{key}` concerns the client, and a limit with `shadow_mode` only watches: remove one of the two"
            );
            self.error(inherited.file, place, message);
        }
        if let Some(replaced) = node.replaces.first() {
            let message = "`replaces` would take a limit out of force for one that refuses nothing (`shadow_mode`): remove one of the two";
            self.error(inherited.file, replaced.place, message.to_owned());
        }
    }

    fn replaces(&mut self, node: &LimitNode, inherited: Inherited<'_>) -> Vec<Arc<str>> {
        let own = node.name.as_ref().map(|name| name.value.as_str());
        let mut names = Vec::with_capacity(node.replaces.len());
        for replaced in &node.replaces {
            let name = replaced.value.as_str();
            if name.is_empty() {
                let message =
                    "an item of `replaces` has no name: write `name:` with the name of another limit".to_owned();
                self.error(inherited.file, replaced.place, message);
            } else if own == Some(name) {
                let message = format!("the limit {} cannot replace itself: name another limit", quoted(name));
                self.error(inherited.file, replaced.place, message);
            } else {
                if own.is_some_and(|own| inherited.cycles.has(inherited.domain, own, name)) {
                    let message = format!(
                        "this limit and {} replace each other, directly or in a cycle, so both stay in force in a request that meets all \
                         of the cycle: remove one replacement",
                        quoted(name)
                    );
                    self.warning(inherited.file, replaced.place, message);
                }
                names.push(name.into());
            }
        }
        names
    }
}

/// Returns the limit of `node`.
///
/// # Errors
/// The place of the first part that does not fit, and the reason.
pub(crate) fn limit(node: &LimitNode) -> Result<Limit, (Position, String)> {
    let window = window(node)?;
    let algorithm = node.algorithm.as_ref().map(|algorithm| algorithm.value).unwrap_or_default();
    let mut quota = Quota::new(node.requests_per_unit, window);
    if let Some(burst) = &node.burst {
        if !algorithm.has_burst() {
            let message = format!(
                "{} has no burst: remove `burst`, or choose an algorithm that has one ({})",
                algorithm.name(),
                with_burst()
            );
            return Err((burst.place, message));
        }
        quota = quota.with_burst(burst.value);
    }
    let limit = Limit::new(algorithm, quota).map_err(|error| {
        let place = match &error {
            InvalidQuota::Burst { .. } => node.burst.as_ref().map(|burst| burst.place),
            InvalidQuota::Ticks { .. } => node.window.as_ref().map(|window| window.place),
            _ => None,
        };
        (place.unwrap_or(node.place), format!("{}: {error}", algorithm.name()))
    })?;
    let limit = if node.count_refused { limit.counting_refused() } else { limit };
    let limit = node.delay.as_ref().map_or(Ok(limit), |node| delay(node, limit))?;
    let limit = match node.refuse_peek_at_limit {
        Some(place) if limit.delay().is_some() => {
            let message = "`refuse_peek_at_limit` refuses a request that a limit with `delay` would let wait: remove one of the two";
            return Err((place, message.to_owned()));
        }
        Some(_) => limit.refusing_full_peek(),
        None => limit,
    };
    if let Some(lease) = node.lease.as_ref().filter(|lease| lease.value != Leasing::Off) {
        limit.can_be_leased().map_err(|error| (lease.place, error.to_string()))?;
    }
    Ok(limit)
}

/// Returns `limit` with the delay of `node`.
fn delay(node: &DelayNode, limit: Limit) -> Result<Limit, (Position, String)> {
    const EXAMPLE: &str = "`delay: {step: 100ms, max: 5s, beyond: admit}`";
    let found = match (&node.max, &node.step, node.beyond) {
        (None, ..) => Err((
            node.place,
            "the delay has no longest wait: write `max:` with a length of time such as `2s`".to_owned(),
        )),
        (Some(_), Some(step), None) => Err((
            step.place,
            format!("a delay with `step` never refuses a request, so it needs `beyond: admit`: write {EXAMPLE}"),
        )),
        (Some(_), None, Some(beyond)) => Err((
            beyond,
            format!(
                "`beyond: admit` needs a delay with `step`: write {EXAMPLE}, or remove `beyond` and use the algorithm `gcra` or `leaky_bucket`"
            ),
        )),
        (Some(max), Some(step), Some(_)) => Ok(Delay::Growing { step: step.value, max: max.value }),
        (Some(max), None, None) => Ok(Delay::Slot { max: max.value }),
    };
    found.and_then(|delay| limit.delaying(delay).map_err(|error| (node.place, error.to_string())))
}

fn window(node: &LimitNode) -> Result<Window, (Position, String)> {
    match (&node.window, &node.unit) {
        (Some(window), None) => {
            if let Some(multiplier) = &node.unit_multiplier {
                let message =
                    "`unit_multiplier` is not allowed beside `window`: write the whole length in `window`".to_owned();
                return Err((multiplier.place, message));
            }
            Window::of_length(window.value).map_err(|error| (window.place, error.to_string()))
        }
        (Some(window), Some(_)) => {
            Err((window.place, "the limit has both `window` and `unit`: remove one of the two".to_owned()))
        }
        (None, Some(unit)) => match (Unit::parse(&unit.value), &node.unit_multiplier) {
            (None, _) => Err((unit.place, unknown_unit(&unit.value))),
            (Some(unit), None) => Ok(Window::of_unit(unit)),
            (Some(unit), Some(multiplier)) => Window::of_units(unit, multiplier.value).map_err(|error| {
                (multiplier.place, format!("`unit_multiplier: {}` is not valid: {error}", multiplier.value))
            }),
        },
        (None, None) => Err((node.place, unknown_unit(""))),
    }
}

fn unknown_unit(found: &str) -> String {
    let units = Unit::ALL.map(Unit::name).join(", ");
    if found.is_empty() {
        format!(
            "the rate limit has no unit: write `unit:` with one of {units}, or `window:` with a length such as 250ms"
        )
    } else {
        format!(
            "invalid rate limit unit {}: write one of {units}, or `window:` with a length such as 250ms",
            quoted(found)
        )
    }
}

fn with_burst() -> String {
    let names = crate::algorithm::Algorithm::ALL.iter().filter(|(_, algorithm)| algorithm.has_burst());
    names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}
