//! Fields of `apply`, set on the limits of a document one by one. A field that does not fit a limit is skipped.

use super::target::{self, Step};
use super::{Layer, Laying};
use crate::rulefile::compile;
use crate::rulefile::document::{ApplyNode, DescriptorNode, Document, LimitNode, LimitsNode};
use crate::rulefile::problem::Placed;
use crate::rules::changes::Changes;
use crate::rules::tree::Position;

/// An item of `apply` that matches a limit.
#[derive(Clone, Copy)]
struct Item<'a> {
    layer: usize,
    index: usize,
    file: usize,
    node: &'a ApplyNode,
}

/// The limit that is being changed.
struct Changing<'a> {
    limit: &'a mut LimitNode,
    /// Index of the limit in its rule.
    index: usize,
    /// The other limits of its rule.
    others: Vec<LimitNode>,
    is_exposed: bool,
    /// Place of the rule, for messages.
    label: &'a str,
    /// Record of the fields that are set.
    changes: &'a mut Changes,
}

impl Laying<'_> {
    /// Sets the fields of all items of `layers` on the rules of `document`. Marks the items that match a limit in `used`.
    pub(super) fn apply(&mut self, document: &mut Document, layers: &[(usize, &Layer)], used: &mut [Vec<bool>]) {
        let items: Vec<Item<'_>> = layers
            .iter()
            .flat_map(|(layer, of)| {
                let item = |(index, node)| Item { layer: *layer, index, file: of.file, node };
                of.apply.iter().enumerate().map(item)
            })
            .collect();
        if !items.is_empty() {
            let mut path = Vec::new();
            self.walk(&document.domain.value, &mut document.descriptors, &mut path, &items, used);
        }
    }

    fn walk(
        &mut self,
        domain: &str,
        rules: &mut [DescriptorNode],
        path: &mut Vec<Step>,
        items: &[Item<'_>],
        used: &mut [Vec<bool>],
    ) {
        for rule in rules {
            let text = |placed: &Option<Placed<String>>| placed.as_ref().map(|placed| placed.value.clone());
            path.push((text(&rule.key).unwrap_or_default(), text(&rule.value)));
            let met: Vec<_> =
                items.iter().copied().filter(|item| target::is_item(&item.node.target, path, rule)).collect();
            if !met.is_empty() {
                self.rule(&label(domain, path), rule, &met, used);
            }
            self.walk(domain, &mut rule.descriptors, path, items, used);
            path.pop();
        }
    }

    /// Sets the fields of `items` on the limits of `rule` that they match.
    fn rule(&mut self, label: &str, rule: &mut DescriptorNode, items: &[Item<'_>], used: &mut [Vec<bool>]) {
        let LimitsNode::Limited(written) = &rule.limits else { return };
        let met = |item: &Item<'_>| written.iter().any(|limit| target::is_limit(&item.node.target, limit));
        let items: Vec<_> = items.iter().copied().filter(met).collect();
        for item in &items {
            used[item.layer][item.index] = true;
            self.set_rule(label, rule, item);
        }
        let is_exposed = rule.unexposed.is_none();
        let DescriptorNode { limits, changes, .. } = rule;
        let LimitsNode::Limited(limits) = limits else { return };
        // Items match the limits as written by the source, not as changed by other items.
        let written = limits.clone();
        for (index, limit) in written.iter().enumerate() {
            let of_limit: Vec<_> =
                items.iter().copied().filter(|item| target::is_limit(&item.node.target, limit)).collect();
            let mut others = limits.clone();
            let Some(limit) = limits.get_mut(index).filter(|limit| compile::limit(limit).is_ok()) else { continue };
            others.remove(index);
            let changes = changes.get_or_insert_default();
            self.limit(&mut Changing { limit, index, others, is_exposed, label, changes }, &of_limit);
        }
        changes.take_if(|changes| **changes == Changes::default());
    }

    fn limit(&mut self, changing: &mut Changing<'_>, items: &[Item<'_>]) {
        let at = changing.limit.place;
        if let Some((item, found)) = last(items, |fields| fields.algorithm.as_ref()) {
            let change = |limit: &mut LimitNode| limit.algorithm = Some(Placed { value: found.value, place: at });
            self.set(changing, ("algorithm", item, found.place), change);
        }
        if let Some((item, found)) = last(items, |fields| fields.window.as_ref()) {
            let change = |limit: &mut LimitNode| {
                limit.window = Some(Placed { value: found.value, place: at });
                (limit.unit, limit.unit_multiplier) = (None, None);
            };
            self.set(changing, ("window", item, found.place), change);
        }
        if let Some((item, found)) = last(items, |fields| fields.unit_multiplier.as_ref()) {
            let change = |limit: &mut LimitNode| limit.unit_multiplier = Some(Placed { value: found.value, place: at });
            self.set(changing, ("unit_multiplier", item, found.place), change);
        }
        if let Some((item, found)) = last(items, |fields| fields.burst.as_ref()) {
            let change = |limit: &mut LimitNode| limit.burst = Some(Placed { value: found.value, place: at });
            self.set(changing, ("burst", item, found.place), change);
        }
        let only_watches = changing.limit.shadow_mode.is_some();
        if let Some((item, found)) = last(items, |fields| fields.delay.as_ref()).filter(|_| only_watches) {
            self.unfit(
                changing,
                ("delay", item, found.place),
                "the limit has `shadow_mode`, so no request waits for it",
            );
        } else if let Some((item, found)) = last(items, |fields| fields.delay.as_ref()) {
            let change = |limit: &mut LimitNode| limit.delay = Some(found.clone());
            self.set(changing, ("delay", item, found.place), change);
        }
        if let Some((item, found)) = last(items, |fields| fields.lease.as_ref()) {
            let change = |limit: &mut LimitNode| limit.lease = Some(Placed { value: found.value, place: at });
            self.set(changing, ("lease", item, found.place), change);
        }
        if let Some(item) = items.iter().rev().find(|item| item.node.limit.count_refused) {
            changing.limit.count_refused = true;
            self.record(changing, "count_refused", item);
        }
        if let Some((item, place)) = last(items, |fields| fields.refuse_peek_at_limit.as_ref()) {
            let change = |limit: &mut LimitNode| limit.refuse_peek_at_limit = Some(at);
            self.set(changing, ("refuse_peek_at_limit", item, *place), change);
        }
        if let Some((item, found)) = last(items, |fields| fields.cost.as_ref()) {
            changing.limit.cost = Some(Placed { value: found.value, place: at });
            self.record(changing, "cost", item);
        }
        if let Some((item, found)) = last(items, |fields| fields.warn_at.as_ref()) {
            if only_watches {
                self.unfit(
                    changing,
                    ("warn_at", item, found.place),
                    "the limit has `shadow_mode`, so nobody is warned",
                );
            } else if changing.is_exposed && changing.limit.requests_per_unit > 0 {
                changing.limit.warn_at = Some(Placed { value: found.value, place: at });
                self.record(changing, "warn_at", item);
            } else {
                self.unfit(changing, ("warn_at", item, found.place), "the limit is 0 or not exposed");
            }
        }
    }

    /// Records that `item` has set a field of the limit.
    fn record(&self, changing: &mut Changing<'_>, field: &'static str, item: &Item<'_>) {
        let file = self.first_file + item.file;
        changing.changes.set(field, Some(changing.index), file, item.node.place_of(field));
    }

    /// Sets one field. Takes it back if the limit cannot have it.
    fn set(
        &mut self,
        changing: &mut Changing<'_>,
        field: (&'static str, &Item<'_>, Position),
        change: impl FnOnce(&mut LimitNode),
    ) {
        let before = changing.limit.clone();
        change(changing.limit);
        let is_shadow = changing.limit.shadow_mode.is_some();
        let why = match compile::limit(changing.limit) {
            Err((_, why)) => Some(why),
            Ok(limit) => {
                let shares = |other: &LimitNode| {
                    compile::limit(other).is_ok_and(|other| {
                        other.algorithm() == limit.algorithm()
                            && other.quota().window().length() == limit.quota().window().length()
                    })
                };
                let mut others = changing.others.iter().filter(|other| other.shadow_mode.is_some() == is_shadow);
                let is_shared = others.any(shares);
                is_shared.then(|| {
                    "another limit of the rule has this algorithm and window, so both would share a counter".to_owned()
                })
            }
        };
        match why {
            None => self.record(changing, field.0, field.1),
            Some(why) => {
                *changing.limit = before;
                self.unfit(changing, field, &why);
            }
        }
    }

    /// Sets the fields of a rule. All of them fit every rule that has a limit.
    fn set_rule(&mut self, label: &str, rule: &mut DescriptorNode, item: &Item<'_>) {
        let (place, fields) = (rule.place, &item.node.rule);
        rule.charging = fields.charging.or(rule.charging);
        rule.on_store_failure = fields.on_store_failure.or(rule.on_store_failure);
        rule.on_store_overload = fields.on_store_overload.or(rule.on_store_overload);
        rule.remember_refusals = fields.remember_refusals.or(rule.remember_refusals);
        if let Some(cost) = &fields.request_cost {
            rule.request_cost = Some(Placed { value: cost.value, place });
        }
        if let Some(message) = &fields.message {
            rule.message = Some(Placed { value: message.value.clone(), place });
        }
        if fields.unexposed.is_some() {
            rule.unexposed = Some(place);
            self.hide_warnings(label, rule, item);
        }
        let set = [
            ("charging", fields.charging.is_some()),
            ("on_store_failure", fields.on_store_failure.is_some()),
            ("on_store_overload", fields.on_store_overload.is_some()),
            ("remember_refusals", fields.remember_refusals.is_some()),
            ("request_cost", fields.request_cost.is_some()),
            ("message", fields.message.is_some()),
            ("expose", fields.unexposed.is_some()),
        ];
        for (field, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            let changes = rule.changes.get_or_insert_default();
            changes.set(field, None, self.first_file + item.file, item.node.place_of(field));
        }
    }

    /// Removes `warn_at` of the source from the limits of a rule that the overlay hides, with a warning: a hidden limit sends none.
    fn hide_warnings(&mut self, label: &str, rule: &mut DescriptorNode, item: &Item<'_>) {
        let LimitsNode::Limited(limits) = &mut rule.limits else { return };
        for warn_at in limits.iter_mut().filter_map(|limit| limit.warn_at.take()) {
            self.reports[item.file].warning(item.node.place_of("expose"), || {
                format!(
                    "`expose: false` hides the limit of {label}, so `warn_at` on line {} of its source has no effect: remove one of the two",
                    warn_at.place.line
                )
            });
        }
    }

    fn unfit(&mut self, changing: &Changing<'_>, (name, item, place): (&'static str, &Item<'_>, Position), why: &str) {
        let file = item.file;
        let (label, line) = (changing.label, changing.limit.place.line);
        self.skipped(file, place, || {
            format!(
                "`{name}` does not fit the limit of {label} (line {line} of its source), which stays without it: {why}"
            )
        });
    }
}

/// Returns the last item that sets a field, and the value.
fn last<'i, 'a, T>(
    items: &'i [Item<'a>],
    field: impl Fn(&'a LimitNode) -> Option<&'a T>,
) -> Option<(&'i Item<'a>, &'a T)> {
    items.iter().rev().find_map(|item| field(&item.node.limit).map(|found| (item, found)))
}

fn label(domain: &str, path: &[Step]) -> String {
    path.iter().fold(domain.to_owned(), |label, (key, value)| match value {
        Some(value) => format!("{label}.{key}_{value}"),
        None => format!("{label}.{key}"),
    })
}
