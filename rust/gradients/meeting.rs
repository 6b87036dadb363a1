//! How the ranks meet in NCCL: who makes a communicator shows its id to the others over the connections
//! that the group has, so only ranks that have proved the group's key get in, and no store has to live on.
//!
//! NCCL then takes as long as it likes until all ranks of a communicator are there. It is asked from time
//! to time; nothing here waits for it but with an eye on the peers and the deadline.

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

/// This rank's communicators on a lane; those of one rank alone are not there.
#[derive(Clone, Default)]
pub struct Communicators {
    /// With the ranks of this host, in the order of their places.
    pub within: Option<Arc<Communicator>>,
    /// With the carriers of equal place on the other hosts, in the order of hosts.
    pub across: Option<Arc<Communicator>>,
}

impl Communicators {
    /// Ends them, aside: that may wait for the ranks that have not come.
    fn abort(self) {
        drop(close_in_background(self.within.into_iter().chain(self.across), Communicator::abort));
    }
}

/// A place in a communicator that is being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seat {
    /// The rank of the group that makes the id.
    maker: usize,
    ranks: usize,
    own: usize,
}

/// Makes the communicators of a lane, together with all ranks. `seq` is the collective that needs them.
pub fn meet(
    fabric: &mut Fabric,
    lane: &DeviceQueue,
    seq: u64,
    deadline: Instant,
) -> Result<Communicators, Failure> {
    let rank = fabric.rank();
    let here = |fault: Fault| Failure::Device { rank, reason: fault.0 };
    let topology = fabric.topology();
    let (local, hosts) = (topology.local_ranks(), topology.hosts());
    let within = Seat { maker: local[0], ranks: local.len(), own: topology.local_rank() };
    let within = (within.ranks > 1).then_some(within);
    let across = topology.is_carrier().then(|| Seat {
        maker: topology.ranks_of(0)[topology.local_rank()],
        ranks: hosts,
        own: topology.host(),
    });
    let across = across.filter(|_| hosts > 1);

    // First and on every rank: what one cannot do must be known before the others wait for it in NCCL.
    let is_usable = lane.nccl.ensure_non_blocking();
    let make = |seat: Option<Seat>| match seat {
        Some(seat) if seat.maker == rank => lane.nccl.unique_id().map(Some),
        _ => Ok(None),
    };
    let ids = is_usable.and_then(|()| Ok([make(within)?, make(across)?]));
    fabric.swap(&encode(seq, lane.slot, &ids), deadline)?;
    let mut shown = Vec::new();
    for (rank, message) in fabric.inbox().iter().enumerate() {
        shown.push(match decode(seq, lane.slot, message) {
            Ok(Ok(ids)) => ids,
            // The same on all ranks, so all know what is wrong and with whom.
            Ok(Err(reason)) => return Err(Failure::Device { rank, reason }),
            Err(reason) => return Err(Failure::Garbled { rank, reason }),
        });
    }
    let id = |seat: Option<Seat>, which: usize| match seat
        .map(|seat| (seat, shown[seat.maker][which]))
    {
        Some((seat, Some(id))) => Ok(Some((seat, id))),
        Some((seat, None)) => {
            let reason = "no id of the communicator that it makes".to_string();
            Err(Failure::Garbled { rank: seat.maker, reason })
        }
        None => Ok(None),
    };
    let (within, across) = (id(within, 0)?, id(across, 1)?);
    let met =
        Communicators { within: take_seat(fabric, lane, within, deadline, here)?, across: None };
    match take_seat(fabric, lane, across, deadline, here) {
        Ok(across) => Ok(Communicators { across, ..met }),
        Err(failure) => {
            met.abort();
            Err(failure)
        }
    }
}

/// Waits until NCCL has brought the ranks of a communicator together, and looks after the peers meanwhile.
fn take_seat(
    fabric: &mut Fabric,
    lane: &DeviceQueue,
    seat: Option<(Seat, UniqueId)>,
    deadline: Instant,
    here: impl Fn(Fault) -> Failure,
) -> Result<Option<Arc<Communicator>>, Failure> {
    let Some((seat, id)) = seat else { return Ok(None) };
    let start = Instant::now();
    let own = CommunicatorRank { id, ranks: seat.ranks, rank: seat.own };
    let begun = Communicator::init(lane.nccl, &lane.stream.context, own);
    let communicator = Arc::new(begun.map_err(&here)?);
    let met = fabric.ask_until(deadline, || communicator.is_ready().map_err(&here));
    let late = || {
        let waited = start.elapsed().as_secs_f64();
        here(Fault(format!(
            "NCCL could not connect the ranks within {waited:.1} s. NCCL_DEBUG=INFO shows what it tries"
        )))
    };
    match met.and_then(|in_time| in_time.then_some(()).ok_or_else(late)) {
        Ok(()) => Ok(Some(communicator)),
        Err(failure) => {
            drop(close_in_background([communicator], Communicator::abort));
            Err(failure)
        }
    }
}

/// The ids that a rank has made: of its host's communicator, and of the one across hosts.
type Ids = [Option<UniqueId>; 2];

/// What the message of a rank begins with. Behind it are [`IdsLayout`], or why there are none.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct IdsHeader {
    envelope: Envelope,
    lane: U32,
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

fn encode(seq: u64, lane: u32, ids: &cuda::Result<Ids>) -> Vec<u8> {
    let header = IdsHeader {
        envelope: Envelope::new(Tag::NcclIds, seq),
        lane: lane.into(),
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

/// What another rank has made, or why it could not; an error if the message is something else.
fn decode(seq: u64, lane: u32, message: &[u8]) -> Result<Result<Ids, String>, String> {
    let Ok((header, body)) = IdsHeader::ref_from_prefix(message) else {
        return Err(format!("{} bytes, expected the ids of communicators", message.len()));
    };
    if !header.envelope.is(Tag::NcclIds, seq) || header.lane != lane {
        return Err(format!(
            "it is at something else while this rank opens its GPU for the group, in #{seq}"
        ));
    }
    match (header.outcome, IdsLayout::ref_from_bytes(body)) {
        (FAILED, _) => Ok(Err(String::from_utf8_lossy(body).into_owned())),
        (MADE, Ok(ids)) => {
            let id = |one: &IdLayout| (one.is_there != 0).then_some(UniqueId(one.id));
            Ok(Ok([id(&ids.0[0]), id(&ids.0[1])]))
        }
        _ => Err(format!("{} bytes of ids of communicators", body.len())),
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
        fn ids_and_reasons_survive_the_wire(seq in any::<u64>(), lane in any::<u32>(), ids in ids()) {
            let made = Ok(ids);
            prop_assert_eq!(decode(seq, lane, &encode(seq, lane, &made)), Ok(Ok(ids)));
            let failed = Err(Fault("no NCCL here".to_string()));
            let decoded = decode(seq, lane, &encode(seq, lane, &failed));
            prop_assert_eq!(decoded, Ok(Err("no NCCL here".to_string())));
            prop_assert!(decode(seq ^ 1, lane, &encode(seq, lane, &made)).is_err());
            prop_assert!(decode(seq, lane ^ 1, &encode(seq, lane, &made)).is_err());
        }

        #[test]
        fn no_bytes_make_the_decoder_of_ids_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let _ = decode(3, 1, &bytes);
            let mut message = encode(3, 1, &Ok([None; 2]));
            message.truncate(size_of::<IdsHeader>());
            message.extend(bytes);
            let _ = decode(3, 1, &message);
        }
    }
}
