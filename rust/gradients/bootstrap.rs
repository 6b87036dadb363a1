//! The NCCL bootstrap: makes the communicators of a device, together with all ranks of the group.
//!
//! The rank that makes a communicator's id sends it over the connections that the group already has. So
//! only ranks that have proved the group's key can join, and the store is no longer needed.
//!
//! NCCL connects the ranks of a communicator in the background, for as long as it likes. Every wait for
//! it here also checks the peers and the deadline.

use super::failure::ExchangeFailure;
use crate::collective::fabric::Fabric;
use crate::collective::message::{Envelope, Tag};
use crate::cuda::{
    self, Communicator, CommunicatorRank, DeviceQueue, Fault, UNIQUE_ID_BYTES, UniqueId,
    close_in_background,
};
use crate::transport::Failure;
use crate::transport::frame::MAX_PAYLOAD;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// This rank's communicators on a device; `None` where it would be the only rank.
#[derive(Clone, Default)]
pub struct Communicators {
    /// With the ranks of this host, by local rank.
    pub within: Option<Arc<Communicator>>,
    /// With the carriers of the same shard on the other hosts, by host.
    pub across: Option<Arc<Communicator>>,
}

impl Communicators {
    /// Aborts them in the background: NCCL may wait for ranks that have not come.
    fn abort(self) {
        drop(close_in_background(self.within.into_iter().chain(self.across), Communicator::abort));
    }
}

/// This rank's membership in a communicator that is being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Membership {
    /// The rank of the group that makes the id.
    maker: usize,
    ranks: usize,
    /// This rank's number in the communicator.
    own: usize,
}

/// Makes the communicators of a device, together with all ranks. `seq` is the collective that needs them.
pub fn bootstrap(
    fabric: &mut Fabric,
    queue: &DeviceQueue,
    seq: u64,
    deadline: Instant,
) -> Result<Communicators, ExchangeFailure> {
    let rank = fabric.rank();
    let here = |fault: Fault| ExchangeFailure::Device { rank, reason: fault.0 };
    let topology = fabric.topology();
    let (local, hosts) = (topology.local_ranks(), topology.hosts());
    let within = Membership { maker: local[0], ranks: local.len(), own: topology.local_rank() };
    let within = (within.ranks > 1).then_some(within);
    let across = topology.is_carrier().then(|| Membership {
        maker: topology.ranks_of(0)[topology.local_rank()],
        ranks: hosts,
        own: topology.host(),
    });
    let across = across.filter(|_| hosts > 1);

    // First, and on every rank: a rank that can't continue must say so before the others wait in NCCL.
    let is_usable = queue.nccl.ensure_non_blocking();
    let make = |membership: Option<Membership>| match membership {
        Some(membership) if membership.maker == rank => queue.nccl.unique_id().map(Some),
        _ => Ok(None),
    };
    let ids = is_usable.and_then(|()| Ok([make(within)?, make(across)?]));
    fabric.swap(&encode(seq, queue.slot, &ids), deadline)?;
    let mut shown = Vec::new();
    for (rank, message) in fabric.inbox().iter().enumerate() {
        // All ranks see the same messages, so all report the same rank.
        shown.push(decode(seq, queue.slot, rank, message)?);
    }
    let id = |membership: Option<Membership>, which: usize| match membership
        .map(|membership| (membership, shown[membership.maker][which]))
    {
        Some((membership, Some(id))) => Ok(Some((membership, id))),
        Some((membership, None)) => {
            let reason = "no id of the communicator that it makes".to_string();
            Err(ExchangeFailure::from(Failure::Garbled { rank: membership.maker, reason }))
        }
        None => Ok(None),
    };
    let (within, across) = (id(within, 0)?, id(across, 1)?);
    let made =
        Communicators { within: connect(fabric, queue, within, deadline, here)?, across: None };
    match connect(fabric, queue, across, deadline, here) {
        Ok(across) => Ok(Communicators { across, ..made }),
        Err(failure) => {
            made.abort();
            Err(failure)
        }
    }
}

/// Waits until NCCL has connected the ranks of a communicator, and checks the peers meanwhile.
fn connect(
    fabric: &mut Fabric,
    queue: &DeviceQueue,
    membership: Option<(Membership, UniqueId)>,
    deadline: Instant,
    here: impl Fn(Fault) -> ExchangeFailure,
) -> Result<Option<Arc<Communicator>>, ExchangeFailure> {
    let Some((membership, id)) = membership else { return Ok(None) };
    let start = Instant::now();
    let own = CommunicatorRank { id, ranks: membership.ranks, rank: membership.own };
    let begun = Communicator::init(queue.nccl, &queue.stream.context, own);
    let communicator = Arc::new(begun.map_err(&here)?);
    let connected = fabric.poll_until(deadline, || communicator.is_ready().map_err(&here));
    let late = || {
        let waited = start.elapsed().as_secs_f64();
        here(Fault(format!(
            "NCCL could not connect the ranks within {waited:.1} s. NCCL_DEBUG=INFO shows what it tries"
        )))
    };
    match connected.and_then(|in_time| in_time.then_some(()).ok_or_else(late)) {
        Ok(()) => {
            log::debug!("NCCL connected {} ranks in {:.2?}", membership.ranks, start.elapsed());
            Ok(Some(communicator))
        }
        Err(failure) => {
            drop(close_in_background([communicator], Communicator::abort));
            Err(failure)
        }
    }
}

/// The ids that a rank has made: of its host's communicator, and of the one across hosts.
type Ids = [Option<UniqueId>; 2];

/// The start of a rank's message. [`IdsLayout`] follows, or the reason why there are no ids.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct IdsHeader {
    envelope: Envelope,
    device_slot: U32,
    outcome: u8,
    reserved: [u8; 3],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct IdsLayout([IdLayout; 2]);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct IdLayout {
    is_there: u8,
    id: [u8; UNIQUE_ID_BYTES],
}

const MADE: u8 = 1;
const FAILED: u8 = 2;

fn encode(seq: u64, device_slot: u32, ids: &cuda::Result<Ids>) -> Vec<u8> {
    let header = IdsHeader {
        envelope: Envelope::new(Tag::NcclIds, seq),
        device_slot: device_slot.into(),
        outcome: if ids.is_ok() { MADE } else { FAILED },
        reserved: [0; 3],
    };
    let mut message = header.as_bytes().to_vec();
    match ids {
        Ok(ids) => {
            let layout = |id: Option<UniqueId>| IdLayout {
                is_there: id.is_some().into(),
                id: id.map_or([0; UNIQUE_ID_BYTES], |id| id.0),
            };
            message.extend_from_slice(IdsLayout(ids.map(layout)).as_bytes());
        }
        Err(fault) => message.extend_from_slice(fault.0.as_bytes()),
    }
    message.truncate(MAX_PAYLOAD);
    message
}

/// The ids that `rank` has made, from its message. Fails if it could not make them.
fn decode(seq: u64, device_slot: u32, rank: usize, message: &[u8]) -> Result<Ids, ExchangeFailure> {
    let garbled = |reason| ExchangeFailure::from(Failure::Garbled { rank, reason });
    let Ok((header, body)) = IdsHeader::ref_from_prefix(message) else {
        let reason = format!("{} bytes, expected the ids of communicators", message.len());
        return Err(garbled(reason));
    };
    if !header.envelope.is(Tag::NcclIds, seq) || header.device_slot != device_slot {
        return Err(garbled(format!(
            "it is at something else while this rank opens its GPU for the group, in #{seq}"
        )));
    }
    match (header.outcome, IdsLayout::ref_from_bytes(body)) {
        (FAILED, _) => Err(ExchangeFailure::Device {
            rank,
            reason: String::from_utf8_lossy(body).into_owned(),
        }),
        (MADE, Ok(ids)) => {
            let id = |one: &IdLayout| (one.is_there != 0).then_some(UniqueId(one.id));
            Ok([id(&ids.0[0]), id(&ids.0[1])])
        }
        _ => Err(garbled(format!("{} bytes of ids of communicators", body.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids() -> impl Strategy<Value = Ids> {
        let id =
            || proptest::option::of(any::<u8>().prop_map(|byte| UniqueId([byte; UNIQUE_ID_BYTES])));
        [id(), id()]
    }

    proptest! {
        #[test]
        fn ids_and_reasons_survive_the_wire(seq in any::<u64>(), slot in any::<u32>(), ids in ids()) {
            let made = encode(seq, slot, &Ok(ids));
            prop_assert_eq!(decode(seq, slot, 7, &made), Ok(ids));
            let failed = encode(seq, slot, &Err(Fault("no NCCL here".to_string())));
            let failure = ExchangeFailure::Device { rank: 7, reason: "no NCCL here".to_string() };
            prop_assert_eq!(decode(seq, slot, 7, &failed), Err(failure));
            for decoded in [decode(seq ^ 1, slot, 7, &made), decode(seq, slot ^ 1, 7, &made)] {
                let is_garbled = matches!(
                    decoded,
                    Err(ExchangeFailure::Transport(Failure::Garbled { rank: 7, .. }))
                );
                prop_assert!(is_garbled, "{decoded:?}");
            }
        }

        #[test]
        fn no_bytes_make_the_decoder_of_ids_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let _ = decode(3, 1, 0, &bytes);
            let mut message = encode(3, 1, &Ok([None; 2]));
            message.truncate(size_of::<IdsHeader>());
            message.extend(bytes);
            let _ = decode(3, 1, 0, &message);
        }
    }
}
