//! The charges of one request by the script that charges them, and what the scripts of a refused request give back.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::Instances;
use super::script::{ChargeRow, ChargeRows, Mode};
use crate::algorithm::{Charge, Refusals};
use crate::model::{Charging, Micros, Outcome, Role, Unit};

/// The most counters of one script whose charges are independent: 100, which occupy a server for
/// about 0.7 ms (`INFO commandstats` after 1,152 charges: 6.6 us each), and for 1.2 to 8 ms where all are logs (the longer and
/// the more refusals they record, the more).
pub(super) const MOST_PER_SCRIPT: usize = 100;
/// The most counters that one script charges together: 1,000, about 7 ms, and a tenth of that where all are logs, of which each takes
/// up to ten times as long. A request with more charges them like counters of several slots.
pub(super) const MOST_TOGETHER: usize = 1_000;

/// The charges of one request that one script charges: those of one slot.
pub(super) struct SlotGroup {
    pub(super) is_per_second: bool,
    pub(super) slot: u16,
    pub(super) mode: Mode,
    /// Indices of the charges in the request.
    pub(super) members: SmallVec<[usize; 4]>,
}

/// The script that charges a charge, and the index of the charge in the request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    is_per_second: bool,
    slot: u16,
    /// The first charge with its key, if a script has one key.
    first: usize,
    /// The [`Charging::Group`] whose charges have scripts of their own.
    apart: Option<u32>,
    member: usize,
}

/// Hits that were taken for the charges of one charging mode, and that are given back if these are refused.
pub(super) struct Taken {
    pub(super) charging: Charging,
    /// For each charge: its index, and the remaining hits and the reset of its counter after that.
    pub(super) left: SmallVec<[(usize, u32, Micros); 4]>,
    pub(super) scripts: Vec<ScriptTaken>,
}

/// Hits that one script gives back: each charge with the time at which it was made.
pub(super) struct ScriptTaken {
    pub(super) is_per_second: bool,
    pub(super) slot: u16,
    pub(super) charges: Vec<(Charge, Micros)>,
}

impl Instances {
    /// Groups the charges by Redis instance and slot, in order, for scripts of this mode. Limits of 0 have no counter and join any group.
    ///
    /// Charges of a [`Charging::Group`] that one script cannot charge together are a part of their own in each script, in
    /// [`Mode::Take`]. If `mode` is that already, the other groups are charged beside it.
    pub(super) fn groups(&self, charges: &[Charge], mode: Mode) -> SmallVec<[SlotGroup; 1]> {
        let has_groups = charges.iter().any(|charge| charge.group().is_some());
        let mut places: SmallVec<[Place; 4]> = SmallVec::with_capacity(charges.len());
        let mut firsts = HashMap::new();
        for (member, charge) in charges.iter().enumerate().filter(|(_, charge)| !charge.limit.is_closed()) {
            let is_per_second =
                self.per_second.is_some() && charge.limit.quota().window().length() == Unit::Second.length();
            let servers = self.servers(is_per_second);
            let slot = servers.slot(&self.prefix, charge.key.as_bytes());
            let first = if servers.is_together() { 0 } else { *firsts.entry(&charge.key).or_insert(member) };
            places.push(Place { is_per_second, slot, first, apart: None, member });
        }
        if let Some(&any) = places.first() {
            for (member, charge) in charges.iter().enumerate().filter(|(_, charge)| charge.limit.is_closed()) {
                let group = charge.group();
                let same = places.iter().find(|place| group.is_some() && charges[place.member].group() == group);
                let place = Place { member, ..*same.unwrap_or(&any) };
                places.push(place);
            }
        }
        let mut split: SmallVec<[u32; 2]> = SmallVec::new();
        if has_groups {
            let mut scripts = HashMap::new();
            for place in &places {
                let Some(group) = charges[place.member].group() else { continue };
                if *scripts.entry(group).or_insert(place.script()) != place.script() {
                    split.push(group);
                }
            }
            for place in &mut places {
                let group = charges[place.member].group();
                place.apart = group.filter(|group| mode == Mode::Take || split.contains(group));
            }
        }
        places.sort_unstable();
        let mut groups: SmallVec<[SlotGroup; 1]> = SmallVec::new();
        for places in places.chunk_by(|one, other| one.script() == other.script()) {
            // A bounded script does not hold up others for long.
            let is_together = matches!(mode, Mode::All | Mode::Take);
            let most = if is_together { MOST_TOGETHER } else { MOST_PER_SCRIPT };
            let (mut cost_of_script, mut before) = (0, None);
            for &Place { is_per_second, slot, apart, member, .. } in places {
                let cost = if is_together { charges[member].limit.algorithm().script_cost() } else { 1 };
                // The charges of a group belong to one descriptor.
                let may_end = !has_groups || before != Some(charges[member].descriptor);
                if before.is_none() || (may_end && cost_of_script + cost > most) {
                    let mode = match apart {
                        Some(group) if split.contains(&group) => Mode::Take,
                        Some(_) => Mode::Group,
                        None => mode,
                    };
                    groups.push(SlotGroup { is_per_second, slot, mode, members: SmallVec::new() });
                    cost_of_script = 0;
                }
                before = Some(charges[member].descriptor);
                cost_of_script += cost;
                if let Some(group) = groups.last_mut() {
                    group.members.push(member);
                }
            }
        }
        groups
    }

    /// Groups charges to give back by slot.
    pub(super) fn dated(&self, charges: &[Charge], taken: &[Option<Micros>]) -> Vec<ScriptTaken> {
        let taken = charges.iter().zip(taken).filter_map(|(charge, at)| at.map(|at| (charge.clone(), at)));
        let (charges, times): (Vec<Charge>, Vec<Micros>) = taken.unzip();
        let script = |SlotGroup { is_per_second, slot, members, .. }: SlotGroup| {
            let charges = members.iter().map(|&member| (charges[member].clone(), times[member])).collect();
            ScriptTaken { is_per_second, slot, charges }
        };
        self.groups(&charges, Mode::All).into_iter().map(script).collect()
    }
}

impl SlotGroup {
    /// Returns the charges of this group that its script has recorded or admitted and that are not recorded if what they are decided with
    /// refuses, each with its row, and true if its hits have to be given back then.
    pub(super) fn taken<'a>(
        &'a self,
        charges: &'a [Charge],
        rows: &'a ChargeRows,
    ) -> impl Iterator<Item = (usize, ChargeRow, bool)> + 'a {
        let members = || self.members.iter().map(|&member| (member, &charges[member])).zip(rows.iter());
        let outcomes = members().filter_map(|((_, charge), row)| Some((charge, row.answer?.outcome)));
        let refusals = Refusals::new(outcomes.clone());
        // A part of a request, or of a group, refuses alone if it enforces.
        let is_part = self.mode == Mode::Take;
        let has_refused =
            is_part && outcomes.clone().any(|(charge, outcome)| charge.role == Role::Enforce && outcome.is_refused());
        members().filter_map(move |((member, charge), row)| {
            let is_spared = if is_part { has_refused } else { refusals.spare(charge) };
            if is_spared || charge.limit.is_closed() || charge.is_always_recorded() {
                return None;
            }
            let is_admitted = row.answer.is_some_and(|verdict| verdict.outcome == Outcome::Admitted);
            Some((member, row, is_admitted && !row.is_unrecorded && charge.hits.taken() > 0))
        })
    }
}

impl Place {
    fn script(&self) -> (bool, u16, usize, Option<u32>) {
        (self.is_per_second, self.slot, self.first, self.apart)
    }
}

impl Taken {
    /// Adds the hits that the script of `group` took at `at`, by the charging mode of their charges.
    pub(super) fn add(
        taken: &mut SmallVec<[Self; 1]>,
        group: &SlotGroup,
        charges: &[Charge],
        (at, rows): (Micros, &ChargeRows),
    ) {
        let SlotGroup { is_per_second, slot, .. } = *group;
        let begun = taken.iter().map(|taken| taken.scripts.len()).collect::<SmallVec<[usize; 1]>>();
        for (member, row, is_taken) in group.taken(charges, rows) {
            let charge = &charges[member];
            let place = taken.iter().position(|taken| taken.charging == charge.charging).unwrap_or(taken.len());
            if place == taken.len() {
                taken.push(Self { charging: charge.charging, left: SmallVec::new(), scripts: Vec::new() });
            }
            let Self { left, scripts, .. } = &mut taken[place];
            // A policy answers for a charge without an answer, from another counter.
            left.extend(row.answer.and(row.left).map(|(remaining, reset)| (member, remaining, reset)));
            if is_taken {
                if scripts.len() == begun.get(place).copied().unwrap_or(0) {
                    scripts.push(ScriptTaken { is_per_second, slot, charges: Vec::new() });
                }
                scripts.iter_mut().last().into_iter().for_each(|script| script.charges.push((charge.clone(), at)));
            }
        }
    }
}

/// Returns the mode of charges none of which is all-or-nothing.
pub(super) fn each(charges: &[Charge]) -> Mode {
    if charges.iter().any(|charge| charge.group().is_some()) { Mode::Group } else { Mode::Each }
}
