//! The permits of a request that is sent to several nodes.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Batch;
use super::concurrency::{CallPriority, Permit};
use super::script::Mode;
use crate::store::StoreError;

/// One permit for each batch, or why there is none.
type Permits = SmallVec<[Result<Permit, StoreError>; 4]>;

/// Takes a permit of each node before anything is sent, in the order of the nodes, so that no two requests wait for each other.
/// Sorts the batches in that order.
///
/// If one node has no permit in time, a request that is charged whole gets no permit at all. Any other request uses only the nodes
/// that have had room for every call in the last 100 ms. So where capacity is short, the nodes decide some requests whole, and not
/// pieces of many requests.
pub(super) async fn take(batches: &mut SmallVec<[Batch<'_>; 4]>, mode: Mode, until: Instant) -> Permits {
    if mode == Mode::Later {
        return take_spare(batches, until).await;
    }
    batches.sort_by_key(|batch| batch.node.number());
    let mut permits = Permits::new();
    let mut is_shed = false;
    for Batch { node, groups, .. } in batches.iter() {
        let turn = if is_shed { CallPriority::AtOnce } else { CallPriority::InOrder };
        let permit = node.permit(Instant::now(), groups.len(), until, turn).await;
        is_shed |= matches!(permit, Err(StoreError::Overloaded));
        if is_shed && mode == Mode::Take {
            return batches.iter().map(|_| Err(StoreError::Overloaded)).collect();
        }
        permits.push(permit);
    }
    if is_shed {
        for (Batch { node, .. }, permit) in batches.iter().zip(&mut permits) {
            if permit.is_ok() && !node.has_capacity_to_spare() {
                *permit = Err(StoreError::Overloaded);
            }
        }
    }
    permits
}

/// Takes a permit of each node for as many scripts as it has room for, and drops the other groups.
async fn take_spare(batches: &mut [Batch<'_>], until: Instant) -> Permits {
    let mut permits = Permits::new();
    for Batch { node, groups, .. } in batches {
        groups.truncate(node.room().max(1));
        permits.push(node.permit(Instant::now(), groups.len(), until, CallPriority::Spare).await);
    }
    permits
}
