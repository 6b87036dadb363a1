//! Agreement: before a collective touches data, every rank sends its call to every other.
//!
//! Equal calls go ahead. Different calls raise on every rank, with all views in the message; no data
//! has moved by then, so the group stays in step. Whether a tensor is a gradient bucket may differ
//! by rank (one that has run out of data under `join()` sends untagged zeros), so the ranks treat it
//! as one if any rank does.

use super::call::CollectiveKind;
use super::fabric::Fabric;
use super::info::CollectiveInfo;
use super::message::CallHeader;
use crate::codec::quantizer::Stepping;
use crate::error::{Error, Result};
use crate::transport::Failure;
use crate::transport::frame::MAX_PAYLOAD;
use std::time::Instant;

/// What the ranks agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// Every rank treats the tensor as a gradient bucket.
    pub gradient: bool,
    /// The bucket, if any rank knows its number.
    pub bucket: Option<AgreedBucket>,
    /// The offset of the tensor in each rank's arena, if it is there.
    pub offsets: Vec<Option<u64>>,
}

/// A gradient bucket that the ranks agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedBucket {
    pub number: u32,
    /// How often it was exchanged before.
    pub step: u64,
    /// Whether every rank is in the same backward pass. A rank that has run out of data is not, and
    /// cannot know what comes next.
    pub on_all_ranks: bool,
    /// What the optimizer does with it, if all ranks that know the bucket know it and say the same.
    pub stepping: Option<Stepping>,
}

/// What a rank tells the others about its tensor, besides the call.
#[derive(Debug, Clone, Copy, Default)]
pub struct TensorInfo<'a> {
    /// The tensor itself, if it is small.
    pub bytes: &'a [u8],
    /// Its offset in the arena of this rank, if it is there.
    pub offset: Option<u64>,
    /// How often this rank has exchanged this bucket.
    pub step: u64,
    /// A code of the momentum that this rank applies to it.
    pub momentum: u32,
    /// What this rank knows of the optimizer.
    pub stepping: Option<Stepping>,
}

/// How messages name the ranks of a group: "rank 1 (host a, pid 7)".
pub type Labels = [String];

/// Returns once every rank has made the same call as this one. Tensors that travelled with the calls
/// are then in the inbox of the fabric: see [`inline_tensors`].
pub fn agree(
    fabric: &mut Fabric,
    labels: &Labels,
    info: &CollectiveInfo,
    tensor: TensorInfo,
    deadline: Instant,
) -> Result<Agreed> {
    let call = &info.call;
    let mut message =
        Vec::with_capacity(CallHeader::BYTES + 8 * call.sends.len() + tensor.bytes.len());
    message.extend_from_slice(&header(info, &tensor).encode());
    for count in &call.sends {
        message.extend_from_slice(&count.to_le_bytes());
    }
    message.extend_from_slice(tensor.bytes);
    fabric.swap(&message, deadline).map_err(|failure| explain(failure, labels, info))?;
    let headers = decode_all(fabric.inbox(), labels)?;

    compare(&headers, labels, fabric.rank())?;
    let counted =
        matches!(call.view.kind, CollectiveKind::AllToAll | CollectiveKind::AllToAllSingle);
    if counted || headers.iter().any(|header| header.complains) {
        exchange_complaints(fabric, labels, info, deadline)?;
    }
    let gradient = headers.iter().any(|header| header.gradient);
    let bucket = agree_on_bucket(&headers, labels)?;
    let offsets = headers.into_iter().map(|header| header.offset).collect();
    Ok(Agreed { gradient, bucket, offsets })
}

fn header(CollectiveInfo { seq, call }: &CollectiveInfo, tensor: &TensorInfo) -> CallHeader {
    CallHeader {
        seq: *seq,
        view: call.view.clone(),
        gradient: call.gradient,
        complains: !call.complaint.is_empty(),
        offset: tensor.offset,
        bucket: call.bucket,
        step: tensor.step,
        momentum: tensor.momentum,
        stepping: tensor.stepping,
    }
}

/// The bucket that the ranks name, if any does. Ranks that name different ones, or are at different
/// steps, would select different chunks.
fn agree_on_bucket(headers: &[CallHeader], labels: &Labels) -> Result<Option<AgreedBucket>> {
    let mut named = headers.iter().zip(labels).filter(|(header, _)| header.bucket != 0);
    let Some((first, first_label)) = named.next() else { return Ok(None) };
    let same = |header: &CallHeader| (header.bucket, header.step) == (first.bucket, first.step);
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
    let on_all_ranks = headers.iter().all(|header| header.bucket != 0);
    let mut named = headers.iter().filter(|header| header.bucket != 0);
    let says_the_same = named.all(|header| header.stepping == first.stepping);
    let stepping = first.stepping.filter(|_| says_the_same);
    Ok(Some(AgreedBucket { number: first.bucket, step: first.step, on_all_ranks, stepping }))
}

/// The first of these ranks that named a bucket in the last agreement.
pub fn first_with_bucket(fabric: &Fabric, ranks: &[usize]) -> Option<usize> {
    let names_one = |rank: &usize| {
        let header = fabric.inbox().get(*rank).map(|message| CallHeader::decode(message));
        header.is_some_and(|header| header.is_ok_and(|header| header.bucket != 0))
    };
    ranks.iter().copied().find(names_one)
}

/// The tensors that travelled with the calls, by rank. `expected` is the size that each must have.
pub fn inline_tensors<'a>(
    fabric: &'a Fabric,
    labels: &Labels,
    expected: impl Fn(usize) -> usize,
) -> Result<Vec<&'a [u8]>> {
    let tensor = |(rank, message): (usize, &'a Vec<u8>)| {
        let bytes = &message[CallHeader::BYTES..];
        if bytes.len() == expected(rank) {
            return Ok(bytes);
        }
        let (came, due) = (bytes.len(), expected(rank));
        Err(Error::Protocol(format!("{came} bytes of a tensor of {due}, from {}", labels[rank])))
    };
    fabric.inbox().iter().enumerate().map(tensor).collect()
}

/// Some errors only one rank can see: its own arguments are wrong, or, in an all-to-all, a peer
/// sends what it does not expect. A second swap tells the others, so that all of them raise and none
/// waits for a rank that has left the collective.
fn exchange_complaints(
    fabric: &mut Fabric,
    labels: &Labels,
    info: &CollectiveInfo,
    deadline: Instant,
) -> Result<()> {
    let call = &info.call;
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
        .map_err(|failure| explain(failure, labels, info))?;
    let complaints: Vec<_> = fabric
        .inbox()
        .iter()
        .filter(|verdict| !verdict.is_empty())
        .map(|verdict| String::from_utf8_lossy(verdict).into_owned())
        .collect();
    if complaints.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch(format!("{info}: {}. No data was exchanged", complaints.join("; "))))
}

/// How many elements the sender of `message` has for `rank` in an all-to-all.
fn count_for(message: &[u8], rank: usize) -> Option<u64> {
    let counts = message.get(CallHeader::BYTES..)?.as_chunks().0;
    counts.get(rank).map(|count| u64::from_le_bytes(*count))
}

fn decode_all(messages: &[Vec<u8>], labels: &Labels) -> Result<Vec<CallHeader>> {
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        CallHeader::decode(bytes)
            .map_err(|what| Error::Protocol(format!("{what}, from {}", labels[rank])))
    };
    messages.iter().enumerate().map(decode).collect()
}

/// Fails unless all views are equal to this rank's, with each view and the ranks that have it.
fn compare(headers: &[CallHeader], labels: &Labels, own: usize) -> Result<()> {
    let same =
        |left: &CallHeader, right: &CallHeader| left.seq == right.seq && left.view == right.view;
    if headers.iter().all(|header| same(header, &headers[own])) {
        return Ok(());
    }
    let mut views: Vec<(&CallHeader, Vec<&str>)> = Vec::new();
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

/// The error for a failure, with the names of ranks and the collective.
pub fn explain(failure: Failure, labels: &Labels, info: &CollectiveInfo) -> Error {
    let doing = info.to_string();
    match failure {
        Failure::Late(ranks) => Error::TimedOut {
            missing: ranks.into_iter().map(|rank| labels[rank].clone()).collect(),
            doing,
            waited: info.call.timeout,
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
            waited: info.call.timeout,
        },
        Failure::Broken(reason) => Error::Panic(format!("{reason} during {doing}")),
        Failure::Interrupted => Error::Closed(format!("the group was aborted during {doing}")),
    }
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
