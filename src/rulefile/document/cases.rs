//! A file of test cases as written: requests, their times, and the expected answers.

use crate::model::{Micros, Outcome, Request};
use crate::rulefile::problem::Placed;
use crate::rules::tree::Position;

/// A file of test cases.
#[derive(Clone, Debug, Default)]
pub struct CaseFile {
    /// Paths of rule files and directories, relative to the file of test cases.
    pub rules: Vec<Placed<String>>,
    /// The cases, in file order.
    pub cases: Vec<Case>,
}

/// One test case. It begins with empty counters.
#[derive(Clone, Debug)]
pub struct Case {
    /// Position of the item's first character.
    pub place: Position,
    /// Name of the case.
    pub name: String,
    /// Steps in the order of their times.
    pub steps: Vec<Step>,
}

/// One request of a case, sent once or several times at one moment.
#[derive(Clone, Debug)]
pub struct Step {
    /// Position of the item's first character.
    pub place: Position,
    /// Time from the start of the case.
    pub at: Micros,
    /// The request.
    pub request: Request,
    /// Number of times that the request is sent; at least 1.
    pub times: u32,
    /// Expected answer, if any.
    pub expected: Option<Expected>,
}

/// The expected answer for a request or for one of its descriptors. A field that is not written matches every answer.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Outcome of every answer.
    pub code: Option<Placed<Outcome>>,
    /// Number of admitted requests, if the request is sent several times.
    pub admitted: Option<Placed<u32>>,
    /// Path of the deciding rule; [`NO_RULE`] if none decides.
    pub rule: Option<Placed<String>>,
    /// Name of the deciding limit.
    pub limit: Option<Placed<String>>,
    /// Remaining hits of the deciding limit.
    pub remaining: Option<Placed<u32>>,
    /// Time after which a refused request would be admitted.
    pub retry_after: Option<Placed<Micros>>,
    /// Time after which the deciding counter is idle.
    pub reset_after: Option<Placed<Micros>>,
    /// Wait of an admitted request.
    pub delay: Option<Placed<Micros>>,
    /// Expected answers for the descriptors, in request order.
    pub descriptors: Option<Placed<Vec<Self>>>,
}

impl Expected {
    /// Returns true if it matches every answer.
    pub(in crate::rulefile) fn is_empty(&self) -> bool {
        let Self { code, admitted, rule, limit, remaining, retry_after, reset_after, delay, descriptors } = self;
        let has_number = admitted.is_some() || remaining.is_some();
        let has_time = retry_after.is_some() || reset_after.is_some() || delay.is_some();
        let has_text = code.is_some() || rule.is_some() || limit.is_some();
        let of_descriptors = descriptors.iter().flat_map(|descriptors| &descriptors.value);
        !has_number && !has_time && !has_text && of_descriptors.into_iter().all(Self::is_empty)
    }
}

/// Word for the absence of a rule in [`Expected::rule`]. The path of a rule has at least one dot.
pub const NO_RULE: &str = "none";
