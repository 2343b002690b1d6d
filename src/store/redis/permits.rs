//! The permits of a request that is sent to several nodes.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Batch;
use super::node::NodePermit;
use super::script::Mode;
use crate::store::StoreError;

/// Takes a permit of each node before anything is sent, in the order of the nodes, so that no two requests wait for each other.
/// Sorts the batches in that order. Where a permit cannot be had in time, a request that is charged whole gets none. Any other gives
/// back the permits that other calls wait for, and uses the rest.
pub(super) async fn take(
    batches: &mut SmallVec<[Batch<'_>; 4]>,
    mode: Mode,
    until: Instant,
) -> SmallVec<[Result<NodePermit, StoreError>; 4]> {
    if mode == Mode::Later {
        return batches.iter().map(|batch| batch.node.spare_permit()).collect();
    }
    batches.sort_by_key(|batch| batch.node.number());
    let mut permits: SmallVec<[Result<NodePermit, StoreError>; 4]> = SmallVec::new();
    for Batch { node, .. } in batches.iter() {
        let permit = node.permit(until, false).await;
        let is_overloaded = matches!(permit, Err(StoreError::Overloaded));
        if is_overloaded && mode == Mode::Take {
            return batches.iter().map(|_| Err(StoreError::Overloaded)).collect();
        }
        permits.push(permit);
    }
    if permits.iter().any(|permit| matches!(permit, Err(StoreError::Overloaded))) {
        for (Batch { node, .. }, permit) in batches.iter().zip(&mut permits) {
            if permit.is_ok() && node.is_waited_for() {
                *permit = Err(StoreError::Overloaded);
            }
        }
    }
    permits
}
