//! Agreement: before a collective touches data, every rank shows every other its call.
//!
//! What the ranks do must not depend on what one rank thinks. Equal calls go ahead; different
//! calls raise on every rank, with all views in the message, and no data has moved, so the group
//! stays in step. Whether a tensor is a gradient bucket is rank-local (a rank that has run out of
//! data under `join()` sends untagged zeros), so the ranks settle on "yes" if any rank says yes.

use super::call::{Call, CollectiveKind, View};
use super::fabric::Fabric;
use crate::error::{Error, Result};
use crate::transport::Failure;
use crate::transport::frame::MAX_PAYLOAD;
use std::time::Instant;

/// What the ranks agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// Handled as a gradient bucket, on every rank.
    pub gradient: bool,
    /// Which bucket, if the ranks that hold it to be one know its number.
    pub bucket: Option<AgreedBucket>,
    /// By rank: where the tensor is in that rank's arena, if it is there.
    pub offsets: Vec<Option<u64>>,
}

/// A gradient bucket that the ranks agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedBucket {
    pub number: u32,
    /// How often it was exchanged before.
    pub step: u64,
    /// Whether every rank is in the backward pass that it comes from. One that has run out of data
    /// is not, and does not know what comes next.
    pub by_all: bool,
}

/// What a rank shows of its tensor, besides the call.
#[derive(Debug, Clone, Copy, Default)]
pub struct TensorInfo<'a> {
    /// The tensor itself, if it is small.
    pub bytes: &'a [u8],
    /// Where it is in the arena of this rank, if it is there.
    pub offset: Option<u64>,
    /// How often this rank has exchanged the bucket that it is.
    pub step: u64,
    /// The momentum that this rank applies to it, in some code.
    pub momentum: u32,
}

/// The names of the ranks of a group, for messages: "rank 1 (host a, pid 7)".
pub type Labels = [String];

/// Returns once every rank has made the same call as this one. What the others showed of their
/// tensors is then in the inbox of the fabric: see [`shown`].
pub fn agree(
    fabric: &mut Fabric,
    labels: &Labels,
    seq: u64,
    call: &Call,
    own: TensorInfo,
    deadline: Instant,
) -> Result<Agreed> {
    let mut message = Vec::with_capacity(HEADER_BYTES + 8 * call.sends.len() + own.bytes.len());
    message.extend_from_slice(&Header::of(seq, call, &own).encode());
    for count in &call.sends {
        message.extend_from_slice(&count.to_le_bytes());
    }
    message.extend_from_slice(own.bytes);
    fabric.swap(&message, deadline).map_err(|failure| explain(failure, labels, seq, call))?;
    let headers = decode_all(fabric.inbox(), labels)?;

    compare(&headers, labels, fabric.rank())?;
    let counted =
        matches!(call.view.kind, CollectiveKind::AllToAll | CollectiveKind::AllToAllSingle);
    if counted || headers.iter().any(|header| header.complains) {
        hear_complaints(fabric, labels, seq, call, deadline)?;
    }
    let gradient = headers.iter().any(|header| header.gradient);
    let bucket = agree_on_bucket(&headers, labels)?;
    let offsets = headers.into_iter().map(|header| header.offset).collect();
    Ok(Agreed { gradient, bucket, offsets })
}

/// The bucket that the ranks name, if any does. Ranks that name another one, or have exchanged it
/// another number of times, would send other chunks of it.
fn agree_on_bucket(headers: &[Header], labels: &Labels) -> Result<Option<AgreedBucket>> {
    let mut named = headers.iter().zip(labels).filter(|(header, _)| header.bucket != 0);
    let Some((first, first_label)) = named.next() else { return Ok(None) };
    let same = |header: &Header| (header.bucket, header.step) == (first.bucket, first.step);
    if let Some((other, label)) = named.find(|(header, _)| !same(header)) {
        return Err(Error::Mismatch(format!(
            "{first_label} exchanges gradient bucket {} for the {}th time, {label} bucket {} for \
             the {}th. Make the same models in the same order on every rank, and load gflow's \
             state of the same step on all of them",
            first.bucket,
            first.step + 1,
            other.bucket,
            other.step + 1
        )));
    }
    let mut named = headers.iter().zip(labels).filter(|(header, _)| header.bucket != 0);
    if let Some((_, label)) = named.find(|(header, _)| header.momentum != first.momentum) {
        return Err(Error::Mismatch(format!(
            "{first_label} and {label} apply different momentum to gradient bucket {}. Call \
             gflow.take_momentum alike on every rank",
            first.bucket
        )));
    }
    let by_all = headers.iter().all(|header| header.bucket != 0);
    Ok(Some(AgreedBucket { number: first.bucket, step: first.step, by_all }))
}

/// What the ranks have shown of their tensors, by rank; `expected` says how much each should.
pub fn shown<'a>(
    fabric: &'a Fabric,
    labels: &Labels,
    expected: impl Fn(usize) -> usize,
) -> Result<Vec<&'a [u8]>> {
    let part = |(rank, message): (usize, &'a Vec<u8>)| {
        let bytes = &message[HEADER_BYTES..];
        if bytes.len() == expected(rank) {
            return Ok(bytes);
        }
        let (came, due) = (bytes.len(), expected(rank));
        Err(Error::Protocol(format!("{came} bytes of a tensor of {due}, from {}", labels[rank])))
    };
    fabric.inbox().iter().enumerate().map(part).collect()
}

/// What only one rank can see: that its own arguments are wrong, or (the counts of an all-to-all
/// differ by rank) that a peer sends it what it does not expect. A second swap tells the others,
/// so that all raise instead of waiting for a rank that has left the collective.
fn hear_complaints(
    fabric: &mut Fabric,
    labels: &Labels,
    seq: u64,
    call: &Call,
    deadline: Instant,
) -> Result<()> {
    let own = fabric.rank();
    let complaint =
        (!call.complaint.is_empty()).then(|| format!("{} {}", labels[own], call.complaint));
    let counts = || {
        fabric.inbox().iter().enumerate().find_map(|(peer, message)| {
            let expected = *call.receives.get(peer)?;
            let sends = count_for(message, own);
            (sends != Some(expected)).then(|| {
                let sends = sends.map_or("an unknown number of".into(), |count| count.to_string());
                format!(
                    "{} sends {sends} elements to {}, which expects {expected}",
                    labels[peer], labels[own]
                )
            })
        })
    };
    let verdict = complaint.or_else(counts).unwrap_or_default().into_bytes();
    fabric
        .swap(&verdict[..verdict.len().min(MAX_PAYLOAD)], deadline)
        .map_err(|failure| explain(failure, labels, seq, call))?;
    let complaints: Vec<_> = fabric
        .inbox()
        .iter()
        .filter(|verdict| !verdict.is_empty())
        .map(|verdict| String::from_utf8_lossy(verdict).into_owned())
        .collect();
    if complaints.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch(format!(
        "{} #{seq}: {}. No data was exchanged",
        call.view,
        complaints.join("; ")
    )))
}

/// How many elements the sender of `message` has for `rank`, in an all-to-all.
fn count_for(message: &[u8], rank: usize) -> Option<u64> {
    let counts = message.get(HEADER_BYTES..)?.as_chunks().0;
    counts.get(rank).map(|count| u64::from_le_bytes(*count))
}

fn decode_all(messages: &[Vec<u8>], labels: &Labels) -> Result<Vec<Header>> {
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        Header::decode(bytes)
            .map_err(|what| Error::Protocol(format!("{what}, from {}", labels[rank])))
    };
    messages.iter().enumerate().map(decode).collect()
}

/// Fails unless every rank's view is this rank's, naming each different view and who has it.
fn compare(headers: &[Header], labels: &Labels, own: usize) -> Result<()> {
    let same = |left: &Header, right: &Header| left.seq == right.seq && left.view == right.view;
    if headers.iter().all(|header| same(header, &headers[own])) {
        return Ok(());
    }
    let mut views: Vec<(&Header, Vec<&str>)> = Vec::new();
    for (header, label) in headers.iter().zip(labels) {
        match views.iter_mut().find(|(view, _)| same(view, header)) {
            Some((_, ranks)) => ranks.push(label),
            None => views.push((header, vec![label])),
        }
    }
    let described: Vec<_> = views
        .iter()
        .map(|(header, ranks)| {
            format!("{} called {} as #{}", ranks.join(", "), header.view, header.seq)
        })
        .collect();
    Err(Error::Mismatch(format!(
        "{}. Every rank must make the same call in the same order; no data was exchanged",
        described.join("; ")
    )))
}

/// The failure of a transport, in words: who, and during what.
pub fn explain(failure: Failure, labels: &Labels, seq: u64, call: &Call) -> Error {
    let doing = format!("{} #{seq}", call.view);
    match failure {
        Failure::Late(ranks) => Error::TimedOut {
            missing: ranks.into_iter().map(|rank| labels[rank].clone()).collect(),
            doing,
            waited: call.timeout,
        },
        Failure::Lost { rank, reason } => {
            Error::PeerLost { peer: labels[rank].clone(), doing, reason }
        }
        Failure::Garbled { rank, reason } => {
            Error::Protocol(format!("{reason}, from {} during {doing}", labels[rank]))
        }
        Failure::Stalled { through } => Error::TimedOut {
            missing: vec![format!("bytes that come through {}", labels[through])],
            doing,
            waited: call.timeout,
        },
        Failure::Broken(reason) => Error::Panic(format!("{reason} during {doing}")),
        Failure::Device { rank, reason } => {
            Error::Device { rank: labels[rank].clone(), doing, reason }
        }
        Failure::Interrupted => Error::Closed(format!("the group was aborted during {doing}")),
    }
}

/// What one rank shows another before a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Header {
    seq: u64,
    view: View,
    gradient: bool,
    /// The sender cannot take part, and will say why.
    complains: bool,
    /// Where the sender's tensor is in its arena.
    offset: Option<u64>,
    /// The gradient bucket that it is, and how often that was exchanged; 0 if it is none.
    bucket: u32,
    step: u64,
    momentum: u32,
}

const GRADIENT: u8 = 1;
const COMPLAINS: u8 = 2;
/// What the fields need, and such that a tensor behind it is aligned.
const HEADER_BYTES: usize = 64;
/// What norms have where a call has its kind, so that neither is ever taken for the other.
pub const NORMS_CODE: u8 = u8::MAX;
/// The same for the ids of communicators.
pub const IDS_CODE: u8 = u8::MAX - 1;
/// Stands for "not in the arena"; no arena is that large.
const NOWHERE: u64 = u64::MAX;

impl Header {
    fn of(seq: u64, call: &Call, own: &TensorInfo) -> Header {
        Header {
            seq,
            view: call.view.clone(),
            gradient: call.gradient,
            complains: !call.complaint.is_empty(),
            offset: own.offset,
            bucket: call.bucket,
            step: own.step,
            momentum: own.momentum,
        }
    }

    fn encode(&self) -> [u8; HEADER_BYTES] {
        let view = &self.view;
        let flags = u8::from(self.gradient) * GRADIENT + u8::from(self.complains) * COMPLAINS;
        let codes = [view.kind as u8, view.dtype, view.reduce_op, flags];
        let mut bytes = [0; HEADER_BYTES];
        let mut rest = &mut bytes[..];
        let mut put = |part: &[u8]| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(part.len());
            now.copy_from_slice(part);
            rest = later;
        };
        put(&self.seq.to_le_bytes());
        put(&codes);
        put(&view.root.to_le_bytes());
        put(&view.tensors.to_le_bytes());
        put(&view.numel.to_le_bytes());
        put(&view.layout.to_le_bytes());
        put(&self.offset.unwrap_or(NOWHERE).to_le_bytes());
        put(&self.bucket.to_le_bytes());
        put(&self.step.to_le_bytes());
        put(&self.momentum.to_le_bytes());
        put(&view.device_slot.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> std::result::Result<Header, String> {
        let Some(mut rest) = bytes.get(..HEADER_BYTES) else {
            return Err(format!("a header of {} bytes, expected {HEADER_BYTES}", bytes.len()));
        };
        fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
            let (now, later) = rest.split_first_chunk::<N>().expect("HEADER_BYTES is their sum");
            *rest = later;
            *now
        }
        let seq = u64::from_le_bytes(take(&mut rest));
        let [kind, dtype, reduce_op, flags] = take(&mut rest);
        if kind == NORMS_CODE {
            return Err(format!(
                "the norms of gradients that it has held back since #{seq}, and this rank is at \
                 something else: a rank waited for a gradient in the middle of a backward pass, \
                 or called another collective there"
            ));
        }
        let kind = CollectiveKind::from_code(kind)
            .ok_or_else(|| format!("an unknown collective, code {kind}"))?;
        if flags & !(GRADIENT | COMPLAINS) != 0 {
            return Err(format!("unknown flags {flags:#010b}"));
        }
        let view = View {
            kind,
            dtype,
            reduce_op,
            root: u32::from_le_bytes(take(&mut rest)),
            tensors: u32::from_le_bytes(take(&mut rest)),
            numel: u64::from_le_bytes(take(&mut rest)),
            layout: u64::from_le_bytes(take(&mut rest)),
            device_slot: 0,
        };
        let mut header = Header {
            seq,
            view,
            gradient: flags & GRADIENT != 0,
            complains: flags & COMPLAINS != 0,
            offset: Some(u64::from_le_bytes(take(&mut rest))).filter(|at| *at != NOWHERE),
            bucket: u32::from_le_bytes(take(&mut rest)),
            step: u64::from_le_bytes(take(&mut rest)),
            momentum: u32::from_le_bytes(take(&mut rest)),
        };
        header.view.device_slot = u32::from_le_bytes(take(&mut rest));
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::call::tests::all_reduce;
    use crate::collective::fabric::tests::fabrics;
    use crate::transport::frame::Goodbye;
    use proptest::prelude::*;
    use std::time::Duration;

    fn labels(size: usize) -> Vec<String> {
        (0..size).map(|rank| format!("rank {rank}")).collect()
    }

    fn agree_on(fabric: &mut Fabric, seq: u64, call: &Call) -> Result<Agreed> {
        let deadline = Instant::now() + call.timeout;
        agree(fabric, &labels(fabric.size()), seq, call, TensorInfo::default(), deadline)
    }

    /// Runs `agree` once on every rank, each with its own call, and returns what each rank got.
    fn agree_all(calls: Vec<Call>) -> Vec<Result<Agreed>> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = fabrics(calls.len())
                .into_iter()
                .zip(calls)
                .map(|((mut fabric, _interrupt), call)| {
                    scope.spawn(move || agree_on(&mut fabric, 7, &call))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn header() -> impl Strategy<Value = Header> {
        let kind = (0..CollectiveKind::ALL.len()).prop_map(|index| CollectiveKind::ALL[index]);
        let codes = (kind, any::<u8>(), any::<u8>(), any::<bool>(), any::<bool>());
        let sizes = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>());
        let bucket = (any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>());
        (any::<u64>(), codes, sizes, bucket).prop_map(|(seq, codes, sizes, bucket)| {
            let (bucket, step, momentum, device_slot) = bucket;
            let (kind, dtype, reduce_op, gradient, complains) = codes;
            let (root, tensors, numel, layout, offset) = sizes;
            let view = View { kind, dtype, reduce_op, root, tensors, numel, layout, device_slot };
            let offset = Some(offset).filter(|offset| *offset != NOWHERE);
            Header { seq, view, gradient, complains, offset, bucket, step, momentum }
        })
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(header in header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn no_bytes_make_the_header_decoder_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64)
        ) {
            let _ = Header::decode(&bytes);
        }
    }

    #[test]
    fn equal_calls_go_ahead_for_every_world_size() {
        for size in 1..=8 {
            let outcomes = agree_all(vec![all_reduce(4); size]);
            let agreed = Agreed { gradient: false, bucket: None, offsets: vec![None; size] };
            assert!(outcomes.iter().all(|o| *o == Ok(agreed.clone())), "{outcomes:?}");
        }
    }

    #[test]
    fn one_rank_that_says_gradient_decides_for_all() {
        let mut calls = vec![all_reduce(4); 3];
        calls[1].gradient = true;
        for outcome in agree_all(calls) {
            assert!(outcome.unwrap().gradient);
        }
    }

    #[test]
    fn a_rank_without_a_bucket_learns_its_number_from_the_others() {
        let mut calls = vec![all_reduce(4); 3];
        calls[0].bucket = 5;
        calls[2].bucket = 5;
        for outcome in agree_all(calls.clone()) {
            let expected = AgreedBucket { number: 5, step: 0, by_all: false };
            assert_eq!(outcome.unwrap().bucket, Some(expected));
        }
        calls[1].bucket = 5;
        assert!(agree_all(calls).iter().all(|o| o.as_ref().unwrap().bucket.unwrap().by_all));
    }

    #[test]
    fn ranks_whose_tensors_are_in_different_places_are_told_so() {
        let mut calls = vec![all_reduce(4); 2];
        for (device_slot, expected) in
            [(0, "SUM as #7"), (2, "on the 2. GPU that it uses in this group")]
        {
            (calls[0].view.device_slot, calls[1].view.device_slot) = (1, device_slot);
            for outcome in agree_all(calls.clone()) {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains("rank 0 called all_reduce of 4 elements"), "{text}");
                assert!(text.contains("on its GPU") && text.contains(expected), "{text}");
            }
        }
    }

    #[test]
    fn ranks_that_name_different_buckets_are_told_so() {
        let mut calls = vec![all_reduce(4); 2];
        calls[0].bucket = 5;
        calls[1].bucket = 6;
        for outcome in agree_all(calls) {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("rank 0 exchanges gradient bucket 5"), "{text}");
            assert!(text.contains("rank 1 bucket 6"), "{text}");
        }
    }

    #[test]
    fn different_calls_raise_on_every_rank_with_every_view() {
        let mut calls = vec![all_reduce(4); 4];
        calls[2].view.numel = 5;
        for outcome in agree_all(calls) {
            let text = outcome.unwrap_err().to_string();
            let expected = "rank 0, rank 1, rank 3 called all_reduce of 4 elements of float32 \
                            with SUM as #7; rank 2 called all_reduce of 5 elements";
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn split_sizes_that_do_not_fit_raise_on_third_ranks_too() {
        let mut calls: Vec<Call> = (0..3).map(|_| all_reduce(0)).collect();
        for call in &mut calls {
            call.view.kind = CollectiveKind::AllToAllSingle;
            call.sends = vec![2, 2, 2];
            call.receives = vec![2, 2, 2];
        }
        assert!(agree_all(calls.clone()).iter().all(Result::is_ok));
        calls[0].sends[1] = 3;
        for outcome in agree_all(calls) {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("rank 0 sends 3 elements to rank 1, which expects 2"), "{text}");
        }
    }

    #[test]
    fn wrong_arguments_of_one_rank_raise_on_every_rank() {
        let mut calls = vec![all_reduce(4); 3];
        calls[1].complaint = "has wrong arguments: two tensors, expected one".into();
        for outcome in agree_all(calls) {
            let text = outcome.unwrap_err().to_string();
            assert!(
                text.contains("rank 1 has wrong arguments: two tensors, expected one"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_rank_that_never_calls_is_named_at_the_deadline() {
        let mut ranks = fabrics(2);
        let (mut peers, _interrupt) = ranks.remove(0);
        let mut call = all_reduce(4);
        call.timeout = Duration::from_millis(30);
        let error = agree_on(&mut peers, 0, &call).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("Timed out") && text.contains("rank 1"), "{text}");
        assert!(!error.leaves_group_usable());
    }

    #[test]
    fn a_peer_that_leaves_is_named_with_its_reason() {
        let mut ranks = fabrics(2);
        let (mut leaving, _) = ranks.pop().unwrap();
        let (mut peers, _) = ranks.pop().unwrap();
        leaving.say_goodbye(Goodbye { gave_up: false, reason: "it was shut down".into() });
        let error = agree_on(&mut peers, 0, &all_reduce(4)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("lost rank 1") && text.contains("it was shut down"), "{text}");
    }

    #[test]
    fn an_interrupt_ends_the_wait() {
        let mut ranks = fabrics(2);
        let (mut peers, interrupt) = ranks.remove(0);
        let waiting = std::thread::spawn(move || agree_on(&mut peers, 0, &all_reduce(4)));
        interrupt.raise();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Closed(_))));
    }
}
