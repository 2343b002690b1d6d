//! Runs one test case.

use super::answer::Answer;
use crate::app::simulator::Simulator;
use crate::cli::descriptor;
use crate::model::{Decision, Micros, Outcome};
use crate::rulefile::cases::{Case, Expected, Step};
use crate::rules::RuleSet;

/// Start of every case: 15,330 days after the epoch, 22 December 2011. It is the first moment at which a window of every unit
/// begins: 15,330 is the smallest multiple of 7, 30 and 365.
const START: Micros = Micros::from_secs(15_330 * 86_400);

/// Result of a case.
#[derive(Clone, Debug)]
pub(super) struct CaseResult {
    /// Name of its file.
    pub(super) file: String,
    /// Line of the case in its file.
    pub(super) line: u32,
    /// Name of the case.
    pub(super) name: String,
    /// Steps with another answer than expected.
    pub(super) failures: Vec<Failure>,
}

/// A step with another answer than expected.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// Line of the step in its file.
    pub(super) line: u32,
    /// The step as text: its number, its time and its request.
    pub(super) step: String,
    /// The differences, and the rule that decided.
    pub(super) lines: Vec<String>,
}

impl CaseResult {
    /// Returns true if every answer is as expected.
    pub(super) fn is_passed(&self) -> bool {
        self.failures.is_empty()
    }
}

/// Runs `case` of the file `file` on a simulator with empty counters.
pub(super) async fn run_case(file: &str, case: &Case, simulator: &Simulator) -> CaseResult {
    let rules = simulator.rules();
    let mut failures = Vec::new();
    for (index, step) in case.steps.iter().enumerate() {
        failures.extend(run_step(index + 1, step, simulator, &rules).await);
    }
    CaseResult { file: file.to_owned(), line: case.place.line, name: case.name.clone(), failures }
}

/// Sends the request of a step, and returns the differences between its answers and the expected ones. The code is that of every
/// answer, all else that of the last one.
async fn run_step(number: usize, step: &Step, simulator: &Simulator, rules: &RuleSet) -> Option<Failure> {
    let now = START.saturating_add(step.at);
    let (mut admitted, mut last, mut wrong) = (0, None, None);
    for time in 1..=step.times {
        let decision = simulator.decide(rules, &step.request, now).await;
        admitted += u32::from(decision.outcome == Outcome::Admitted);
        let answer = Answer::of_request(&decision);
        if wrong.is_none() && step.expected.as_ref().is_some_and(|expected| !answer.has_code(expected)) {
            wrong = Some((time, answer));
        } else if time == step.times {
            last = Some((answer, decision));
        }
    }
    let expected = step.expected.as_ref()?;
    let (time, lines) = match (wrong, last) {
        (Some((time, answer)), _) => {
            let code = Expected { code: expected.code.clone(), ..Expected::default() };
            let fields = if time == step.times { expected } else { &code };
            (time, with_decided(answer.differences(fields, ""), &answer))
        }
        (None, Some((answer, decision))) => {
            let mut lines = counted(expected, admitted, step.times);
            lines.extend(answer.differences(expected, ""));
            lines.extend(of_descriptors(expected, &decision));
            (step.times, with_decided(lines, &answer))
        }
        (None, None) => return None,
    };
    let answer = if step.times > 1 { format!(", answer {time} of {}", step.times) } else { String::new() };
    let request = step.request.descriptors().iter().map(descriptor::spelled).collect::<Vec<_>>().join("; ");
    (!lines.is_empty()).then(|| Failure {
        line: step.place.line,
        step: format!("step {number} at {}{answer}: {request}", step.at),
        lines,
    })
}

/// Returns a line if another number of requests was admitted than expected.
fn counted(expected: &Expected, admitted: u32, times: u32) -> Vec<String> {
    let wanted = expected.admitted.as_ref().map(|wanted| wanted.value).filter(|wanted| *wanted != admitted);
    wanted.map(|wanted| format!("admitted: expected {wanted} of {times}, got {admitted}")).into_iter().collect()
}

fn of_descriptors(expected: &Expected, decision: &Decision<'_>) -> Vec<String> {
    let descriptors = expected.descriptors.as_ref().map(|descriptors| descriptors.value.as_slice()).unwrap_or_default();
    let parts = descriptors.iter().zip(&decision.parts).enumerate();
    parts
        .flat_map(|(index, (expected, part))| {
            let answer = Answer::of_part(part);
            let lines = answer.differences(expected, &format!("descriptor {}, ", index + 1));
            with_decided(lines, &answer)
        })
        .collect()
}

/// Adds the rule that decided to the differences, if there are some.
fn with_decided(mut lines: Vec<String>, answer: &Answer) -> Vec<String> {
    if !lines.is_empty() {
        lines.push(answer.decided_by());
    }
    lines
}
