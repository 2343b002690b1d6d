//! Requests that are charged part by part.

use super::{Guard, TakenCharge, is_local, learn};
use crate::algorithm::Charge;
use crate::model::{Charging, Micros, Provenance, Verdict};
use crate::store::deadline::CallerTime;
use crate::store::{Taken, Verdicts};

impl Guard {
    /// Charges a part of a request, as [`Guard::charge`] charges a whole one. If the request is refused, [`Guard::give_back`] gives the
    /// hits back.
    pub async fn take(&self, charges: &[Charge], timeout: CallerTime) -> (Verdicts, Vec<Option<TakenCharge>>) {
        if charges.iter().all(|charge| charge.charging != Charging::AllOrNothing) {
            return (self.charge(charges, timeout).await, vec![None; charges.len()]);
        }
        if charges.iter().any(|charge| charge.group().is_some()) {
            // Groups do not depend on the rest of the request.
            let of = |in_group: bool| -> Vec<Charge> {
                charges.iter().filter(|charge| charge.group().is_some() == in_group).cloned().collect()
            };
            let mut groups = self.charge(&of(true), timeout).await.into_iter();
            let (verdicts, taken) = Box::pin(self.take(&of(false), timeout)).await;
            let mut rest = verdicts.into_iter().zip(taken);
            let next = |charge: &Charge| match charge.group() {
                Some(_) => groups.next().map(|verdict| (verdict, None)),
                None => rest.next(),
            };
            return charges.iter().filter_map(next).unzip();
        }
        let known = self.known_now();
        let Taken { mut answers, taken } = match self.budget(timeout) {
            Some(budget) => self.store.take(charges, budget).await,
            None => Taken { answers: self.untimely(charges), taken: vec![None; charges.len()] },
        };
        self.want_leases(charges, &answers);
        self.recall(charges, &mut answers);
        let mut verdicts: Verdicts =
            charges.iter().zip(&answers).map(|(charge, answer)| self.verdict(charge, *answer)).collect();
        learn(known, charges, &mut verdicts);
        let given = |at: Option<Micros>| at.map(|at| TakenCharge { at, is_local: false });
        let mut taken: Vec<_> = taken.into_iter().map(given).collect();
        let is_local = |index: usize| is_local(&charges[index], &answers[index]);
        let local: Vec<usize> = (0..charges.len()).filter(|&index| is_local(index)).collect();
        if !local.is_empty() {
            let shared: Vec<_> = local.iter().map(|&index| self.shared(&charges[index])).collect();
            local.iter().for_each(|&index| self.share_remaining(&charges[index], answers[index]));
            let (decided, own) = self.local.take_now(&shared);
            for ((&index, verdict), at) in local.iter().zip(decided).zip(own) {
                verdicts[index] = Verdict { provenance: Provenance::Local, ..verdict };
                taken[index] = at.map(|at| TakenCharge { at, is_local: true });
            }
        }
        (verdicts, taken)
    }

    /// Gives back the hits that [`Guard::take`] took.
    pub async fn give_back(&self, charges: &[Charge], taken: &[Option<TakenCharge>]) {
        let of = |wanted: bool| -> Vec<Option<Micros>> {
            taken.iter().map(|given| given.filter(|given| given.is_local == wanted).map(|given| given.at)).collect()
        };
        let (store, local) = (of(false), of(true));
        if local.iter().any(Option::is_some) {
            let shared: Vec<_> = charges.iter().map(|charge| self.shared(charge)).collect();
            self.local.give_back_now(&shared, &local);
        }
        if store.iter().any(Option::is_some) {
            self.forget_refusals(charges.iter().zip(&store).filter(|(_, taken)| taken.is_some()));
            self.store.give_back(charges, &store).await;
        }
    }
}
