//! The messages that ranks swap: one envelope, which says what a message is, and behind it a
//! layout for each tag.
//!
//! Everything is little-endian and laid out by `zerocopy`. Bytes of a peer are never trusted: a
//! length, a tag or a code that is not ours is an error with the reason.

use super::call::{CollectiveKind, View};
use super::types::{DataType, ReduceOp};
use crate::codec::quantizer::Stepping;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tag {
    /// A call that the ranks are to agree on, see [`CallHeader`].
    Call = 1,
    /// The norms of a gradient's chunks.
    Norms = 2,
    /// The ids of NCCL communicators that a rank has made.
    NcclIds = 3,
    /// What a rank has measured, for the choice of how gradients are sent.
    Measures = 4,
}

/// How every message begins.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Envelope {
    seq: U64,
    tag: u8,
    reserved: [u8; 7],
}

impl Envelope {
    /// `seq` is the number of the collective that the message belongs to.
    pub fn new(tag: Tag, seq: u64) -> Envelope {
        Envelope { seq: seq.into(), tag: tag as u8, reserved: [0; 7] }
    }

    /// The envelope of a message, and what is behind it; `None` if it is too short to have one.
    pub fn open(message: &[u8]) -> Option<(&Envelope, &[u8])> {
        Envelope::ref_from_prefix(message).ok()
    }

    pub fn is(&self, tag: Tag, seq: u64) -> bool {
        self.tag == tag as u8 && self.seq == seq
    }

    pub fn seq(&self) -> u64 {
        self.seq.get()
    }
}

/// What a rank tells the others about its call and its tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallHeader {
    pub seq: u64,
    pub view: View,
    /// The sender takes the tensor for a gradient bucket.
    pub gradient: bool,
    /// The sender cannot take part, and will say why.
    pub complains: bool,
    /// Offset of the sender's tensor in its arena, if it is there.
    pub offset: Option<u64>,
    /// Number of the gradient bucket, 0 if the tensor is none.
    pub bucket: u32,
    /// How often that bucket was exchanged before.
    pub step: u64,
    /// A code of the momentum that the sender applies to it.
    pub momentum: u32,
    /// What the sender knows of the optimizer.
    pub stepping: Option<Stepping>,
}

/// A [`CallHeader`] as it is sent.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct CallLayout {
    envelope: Envelope,
    kind: u8,
    flags: u8,
    dtype: U16,
    reduce_op: U16,
    stepping: U16,
    root: U32,
    tensors: U32,
    numel: U64,
    layout: U64,
    offset: U64,
    step: U64,
    bucket: U32,
    momentum: U32,
    device_slot: U32,
    reserved_too: U32,
}

const GRADIENT: u8 = 1;
const COMPLAINS: u8 = 2;
/// In the place of an offset: the tensor is not in the arena. No arena is that large.
const NOT_IN_ARENA: u64 = u64::MAX;
/// A multiple of 16, so that a tensor behind it is aligned.
const CALL_BYTES: usize = size_of::<CallLayout>();
const _: () = assert!(CALL_BYTES == 80);

impl CallHeader {
    pub const BYTES: usize = CALL_BYTES;

    pub fn encode(&self) -> [u8; CALL_BYTES] {
        let view = &self.view;
        let layout = CallLayout {
            envelope: Envelope::new(Tag::Call, self.seq),
            kind: view.kind as u8,
            flags: u8::from(self.gradient) * GRADIENT + u8::from(self.complains) * COMPLAINS,
            dtype: view.dtype.code().into(),
            reduce_op: view.reduce_op.code().into(),
            stepping: self.stepping.map_or(0, |stepping| stepping as u16).into(),
            root: view.root.into(),
            tensors: view.tensors.into(),
            numel: view.numel.into(),
            layout: view.layout.into(),
            offset: self.offset.unwrap_or(NOT_IN_ARENA).into(),
            step: self.step.into(),
            bucket: self.bucket.into(),
            momentum: self.momentum.into(),
            device_slot: view.device_slot.into(),
            reserved_too: 0.into(),
        };
        zerocopy::transmute!(layout)
    }

    /// The header that `message` begins with, or what the message is instead.
    pub fn decode(message: &[u8]) -> Result<CallHeader, String> {
        if let Some((envelope, _)) = Envelope::open(message) {
            expect_call(envelope)?;
        }
        let Ok((layout, _)) = CallLayout::ref_from_prefix(message) else {
            return Err(format!("a header of {} bytes, expected {CALL_BYTES}", message.len()));
        };
        let unknown = |what: &str, code: u16| format!("an unknown {what}, code {code}");
        let flags = layout.flags;
        if flags & !(GRADIENT | COMPLAINS) != 0 {
            return Err(format!("unknown flags {flags:#010b}"));
        }
        let (dtype, reduce_op) = (layout.dtype.get(), layout.reduce_op.get());
        let view = View {
            kind: CollectiveKind::from_code(layout.kind)
                .ok_or_else(|| unknown("collective", layout.kind.into()))?,
            dtype: DataType::from_code(dtype).ok_or_else(|| unknown("element type", dtype))?,
            reduce_op: ReduceOp::from_code(reduce_op)
                .ok_or_else(|| unknown("reduction", reduce_op))?,
            root: layout.root.get(),
            tensors: layout.tensors.get(),
            numel: layout.numel.get(),
            layout: layout.layout.get(),
            device_slot: layout.device_slot.get(),
        };
        Ok(CallHeader {
            seq: layout.envelope.seq(),
            view,
            gradient: flags & GRADIENT != 0,
            complains: flags & COMPLAINS != 0,
            offset: Some(layout.offset.get()).filter(|offset| *offset != NOT_IN_ARENA),
            bucket: layout.bucket.get(),
            step: layout.step.get(),
            momentum: layout.momentum.get(),
            stepping: Stepping::from_code(layout.stepping.get()),
        })
    }
}

/// Fails with what the message is, if it is no call.
fn expect_call(envelope: &Envelope) -> Result<(), String> {
    const CALL: u8 = Tag::Call as u8;
    const NORMS: u8 = Tag::Norms as u8;
    const NCCL_IDS: u8 = Tag::NcclIds as u8;
    const MEASURES: u8 = Tag::Measures as u8;
    let seq = envelope.seq();
    match envelope.tag {
        CALL => Ok(()),
        NORMS => Err(format!(
            "the norms of gradients that it has held back since #{seq}, and this rank is at \
             something else: a rank waited for a gradient in the middle of a backward pass, \
             or called another collective there"
        )),
        NCCL_IDS => Err(format!(
            "the ids of NCCL communicators, because it is opening its GPU for the group in \
             #{seq}, and this rank is at something else: every rank must make the same call in \
             the same order"
        )),
        MEASURES => Err(format!(
            "what it has measured, because it chooses how to send gradients before #{seq}, and this \
             rank is at something else: every rank must make the same call in the same order"
        )),
        tag => Err(format!("a message of an unknown kind, tag {tag}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> impl Strategy<Value = CallHeader> {
        let kind = (0..CollectiveKind::ALL.len()).prop_map(|index| CollectiveKind::ALL[index]);
        let dtype = any::<u16>().prop_filter_map("no type", |code| DataType::from_code(code % 512));
        let op = any::<u16>().prop_filter_map("no op", |code| ReduceOp::from_code(code % 512));
        let codes = (kind, dtype, op, any::<bool>(), any::<bool>());
        let sizes = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>());
        let stepping = (0..3u16).prop_map(Stepping::from_code);
        let bucket = (any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>(), stepping);
        (any::<u64>(), codes, sizes, bucket).prop_map(|(seq, codes, sizes, bucket)| {
            let (bucket, step, momentum, device_slot, stepping) = bucket;
            let (kind, dtype, reduce_op, gradient, complains) = codes;
            let (root, tensors, numel, layout, offset) = sizes;
            let view = View { kind, dtype, reduce_op, root, tensors, numel, layout, device_slot };
            let offset = Some(offset).filter(|offset| *offset != NOT_IN_ARENA);
            CallHeader { seq, view, gradient, complains, offset, bucket, step, momentum, stepping }
        })
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(header in header()) {
            prop_assert_eq!(CallHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn no_bytes_make_the_header_decoder_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..2 * CALL_BYTES), is_call in any::<bool>()
        ) {
            let mut bytes = bytes;
            if is_call && let Some(tag) = bytes.get_mut(8) {
                *tag = Tag::Call as u8;
            }
            let _ = CallHeader::decode(&bytes);
        }
    }

    #[test]
    fn a_message_that_is_no_call_is_told_by_what_it_is() {
        let reason = |tag: Tag| CallHeader::decode(Envelope::new(tag, 7).as_bytes()).unwrap_err();
        assert!(reason(Tag::Norms).starts_with("the norms of gradients"), "{}", reason(Tag::Norms));
        let ids = reason(Tag::NcclIds);
        assert!(ids.contains("it is opening its GPU for the group in #7"), "{ids}");
        assert_eq!(reason(Tag::Call), "a header of 16 bytes, expected 80");
        let unknown = CallHeader::decode(&[254; 16]).unwrap_err();
        assert_eq!(unknown, "a message of an unknown kind, tag 254");
        assert_eq!(CallHeader::decode(&[1; 3]).unwrap_err(), "a header of 3 bytes, expected 80");
    }
}
