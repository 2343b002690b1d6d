//! Compiler for `deny` and `exempt`, and advice about items that stand twice.

use super::Compiler;
use crate::rulefile::document::{DescriptorNode, LimitsNode};
use crate::rules::Action;

impl Compiler<'_> {
    /// Returns the decision of an item for the whole request. Reports keys that such a decision makes useless.
    pub(super) fn action(&mut self, item: &DescriptorNode, file: usize) -> Option<Action> {
        let (action, word, place) = match (item.deny, item.exempt) {
            (None, None) => return None,
            (Some(_), Some(place)) => {
                let message = "the item has both `deny` and `exempt`: remove one of the two".to_owned();
                self.error(file, place, message);
                return None;
            }
            (Some(place), None) => (Action::Deny, "deny", place),
            (None, Some(place)) => (Action::Exempt, "exempt", place),
        };
        let beside = [
            (!matches!(item.limits, LimitsNode::None), "a limit"),
            (!item.descriptors.is_empty(), "`descriptors`"),
            (item.request_cost.is_some(), "`request_cost`"),
            (item.quota_mode, "`quota_mode`"),
            (item.share_threshold.is_some(), "`share_threshold`"),
            (item.shadow_mode, "`shadow_mode`"),
            (action == Action::Exempt && item.message.is_some(), "`message`"),
        ];
        for (_, what) in beside.into_iter().filter(|(is_there, _)| *is_there) {
            let message =
                format!("`{word}` decides the whole request, so {what} beside it has no effect: remove one of the two");
            self.error(file, place, message);
        }
        Some(action)
    }
}

/// Returns advice for two items with the same key and value. Of each: true if it has a rule, and if the rule decides the whole request.
pub(super) fn twice(later: (bool, bool), earlier: (bool, bool)) -> &'static str {
    match (later, earlier) {
        ((_, true), _) | (_, (_, true)) => "`deny` and `exempt` decide alone, so remove one of the two",
        ((true, _), (true, _)) => {
            "remove one of the two, or write both limits in one item (in a rule file: in a list `rate_limits`)"
        }
        ((false, _), (false, _)) => "write the `descriptors` of both below one item",
        _ => "write the limit of the one and the `descriptors` of the other in one item",
    }
}
