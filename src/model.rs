//! The words: plain values without I/O, async or a clock.
//!
//! | word | meaning |
//! |---|---|
//! | domain, descriptor, entry | as in Envoy's rate limit protocol |
//! | hits | what a request costs |
//! | quota | so many hits per window, with a burst where the algorithm has one |
//! | counter key | the identity of one counted thing, never its reading |
//! | role | what a refusal of one charge means for the request |
//! | verdict | the answer for one charge |
//! | decision | the answer for the request: one part per descriptor in order, and the outcome |

pub mod decision;
pub mod delay;
pub mod descriptor;
pub mod key;
pub mod policy;
pub mod quota;
pub mod rule;
pub mod time;
pub mod verdict;

pub use decision::{Answered, Decision, Finding, Hidden, Metadata, Part, Ruling, Tightest, Wait, Warning};
pub use delay::{Delay, Delivery, InvalidDelay};
pub use descriptor::{Descriptor, Entry, Hits, InvalidRequest, Override, Request};
pub use key::CounterKey;
pub use policy::{Ballot, Charging, Colocation, FailurePolicy, Role, StorePolicies};
pub use quota::{InvalidQuota, Quota, Unit, Window};
pub use rule::{About, Path, RuleId, Series, Shown};
pub use time::{Clock, Micros};
pub use verdict::{Outcome, Provenance, Verdict};
