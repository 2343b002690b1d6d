//! Glossary of plain values: no I/O, no async, no clock.
//!
//! | word | meaning |
//! |---|---|
//! | domain, descriptor, entry | as in Envoy's rate limit protocol |
//! | hits | the cost of a request |
//! | quota | a number of hits per window, with a burst where the algorithm has one |
//! | counter key | the identity of one counted thing, never its current value |
//! | role | the effect of a refusal of one charge on the request |
//! | verdict | the answer for one charge |
//! | decision | the answer for the request: one part per descriptor in order, and the outcome |

pub mod caller;
pub mod deciding;
pub mod decision;
pub mod delay;
pub mod descriptor;
pub mod key;
pub mod lease;
pub mod peer_name;
pub mod policy;
pub mod quota;
pub mod rule;
pub mod text;
pub mod time;
pub mod verdict;

pub use caller::{CallerGrants, CallerName, Callers, Grant, GrantedDomains, Rights};
pub use deciding::{Deciding, MOST_SHADOW_REFUSALS, Origin, ShadowRefusal};
pub use decision::{Answered, Decision, Finding, Hidden, LimitedPart, Part, Ruling, Tightest, UsageWarning, Wait};
pub use delay::{Delay, Delivery, InvalidDelay};
pub use descriptor::{Descriptor, Entry, Hits, InvalidEntry, InvalidRequest, Override, Request, readable};
pub use key::CounterKey;
pub use lease::{LeaseTerms, Leasing};
pub use peer_name::PeerName;
pub use policy::{ChargeOutcome, Charging, Colocation, FailurePolicy, Role, StorePolicies};
pub use quota::{InvalidQuota, Quota, Unit, Window};
pub use rule::{About, Metadata, Path, RuleId, Series, Shown};
pub use text::counted;
pub use time::{Clock, Micros};
pub use verdict::{Outcome, Provenance, Verdict};
