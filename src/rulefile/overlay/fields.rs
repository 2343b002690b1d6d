//! Fields of `apply`, set on the limits of a document one by one. A field that does not fit a limit is skipped.

use super::target::{self, Step};
use super::{Layer, Laying};
use crate::rulefile::compile;
use crate::rulefile::document::{ApplyNode, DescriptorNode, Document, LimitNode, LimitsNode};
use crate::rulefile::problem::Placed;
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
    /// The other limits of its rule.
    others: Vec<LimitNode>,
    is_exposed: bool,
    /// Place of the rule, for messages.
    label: &'a str,
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
            set_rule(rule, &item.node.rule);
        }
        let is_exposed = rule.unexposed.is_none();
        let LimitsNode::Limited(limits) = &mut rule.limits else { return };
        // Items match the limits as written by the source, not as changed by other items.
        let written = limits.clone();
        for (index, limit) in written.iter().enumerate() {
            let of_limit: Vec<_> =
                items.iter().copied().filter(|item| target::is_limit(&item.node.target, limit)).collect();
            let mut others = limits.clone();
            let Some(limit) = limits.get_mut(index).filter(|limit| compile::limit(limit).is_ok()) else { continue };
            others.remove(index);
            self.limit(&mut Changing { limit, others, is_exposed, label }, &of_limit);
        }
    }

    fn limit(&mut self, changing: &mut Changing<'_>, items: &[Item<'_>]) {
        let at = changing.limit.place;
        if let Some((file, found)) = last(items, |fields| fields.algorithm.as_ref()) {
            let change = |limit: &mut LimitNode| limit.algorithm = Some(Placed { value: found.value, place: at });
            self.set(changing, ("algorithm", file, found.place), change);
        }
        if let Some((file, found)) = last(items, |fields| fields.window.as_ref()) {
            let change = |limit: &mut LimitNode| {
                limit.window = Some(Placed { value: found.value, place: at });
                (limit.unit, limit.unit_multiplier) = (None, None);
            };
            self.set(changing, ("window", file, found.place), change);
        }
        if let Some((file, found)) = last(items, |fields| fields.unit_multiplier.as_ref()) {
            let change = |limit: &mut LimitNode| limit.unit_multiplier = Some(Placed { value: found.value, place: at });
            self.set(changing, ("unit_multiplier", file, found.place), change);
        }
        if let Some((file, found)) = last(items, |fields| fields.burst.as_ref()) {
            let change = |limit: &mut LimitNode| limit.burst = Some(Placed { value: found.value, place: at });
            self.set(changing, ("burst", file, found.place), change);
        }
        if let Some((file, found)) = last(items, |fields| fields.delay.as_ref()) {
            let change = |limit: &mut LimitNode| limit.delay = Some(found.clone());
            self.set(changing, ("delay", file, found.place), change);
        }
        changing.limit.count_refused |= items.iter().any(|item| item.node.limit.count_refused);
        if let Some((_, found)) = last(items, |fields| fields.cost.as_ref()) {
            changing.limit.cost = Some(Placed { value: found.value, place: at });
        }
        if let Some((file, found)) = last(items, |fields| fields.warn_at.as_ref()) {
            if changing.is_exposed && changing.limit.requests_per_unit > 0 {
                changing.limit.warn_at = Some(Placed { value: found.value, place: at });
            } else {
                self.unfit(changing, ("warn_at", file, found.place), "the limit is 0 or not exposed");
            }
        }
    }

    /// Sets one field. Takes it back if the limit cannot have it.
    fn set(
        &mut self,
        changing: &mut Changing<'_>,
        field: (&str, usize, Position),
        change: impl FnOnce(&mut LimitNode),
    ) {
        let before = changing.limit.clone();
        change(changing.limit);
        let why = match compile::limit(changing.limit) {
            Err((_, why)) => Some(why),
            Ok(limit) => {
                let shares = |other: &LimitNode| {
                    compile::limit(other).is_ok_and(|other| {
                        other.algorithm() == limit.algorithm()
                            && other.quota().window().length() == limit.quota().window().length()
                    })
                };
                let is_shared = changing.others.iter().any(shares);
                is_shared.then(|| {
                    "another limit of the rule has this algorithm and window, so both would share a counter".to_owned()
                })
            }
        };
        if let Some(why) = why {
            *changing.limit = before;
            self.unfit(changing, field, &why);
        }
    }

    fn unfit(&mut self, changing: &Changing<'_>, (name, file, place): (&str, usize, Position), why: &str) {
        let (label, line) = (changing.label, changing.limit.place.line);
        self.skipped(file, place, || {
            format!(
                "`{name}` does not fit the limit of {label} (line {line} of its source), which stays without it: {why}"
            )
        });
    }
}

/// Returns the value of the last item that sets a field, and the file of the item.
fn last<'a, T>(items: &[Item<'a>], field: impl Fn(&'a LimitNode) -> Option<&'a T>) -> Option<(usize, &'a T)> {
    items.iter().rev().find_map(|item| field(&item.node.limit).map(|found| (item.file, found)))
}

/// Sets the fields of a rule. All of them fit every rule that has a limit.
fn set_rule(rule: &mut DescriptorNode, fields: &DescriptorNode) {
    let place = rule.place;
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
    let has_warning =
        matches!(&rule.limits, LimitsNode::Limited(limits) if limits.iter().any(|limit| limit.warn_at.is_some()));
    if fields.unexposed.is_some() {
        rule.unexposed = Some(place);
        // A hidden limit sends no warning, so `expose: false` of the overlay takes away `warn_at` of the source.
        if has_warning && let LimitsNode::Limited(limits) = &mut rule.limits {
            limits.iter_mut().for_each(|limit| limit.warn_at = None);
        }
    }
}

fn label(domain: &str, path: &[Step]) -> String {
    path.iter().fold(domain.to_owned(), |label, (key, value)| match value {
        Some(value) => format!("{label}.{key}_{value}"),
        None => format!("{label}.{key}"),
    })
}
