//! The kernels of kernels.cu and quantizer.cu by name.

use crate::codec::Wire;
use crate::cuda::sys::fault::{Fault, Result};
use crate::simd::element::Element;
use std::ffi::CStr;

/// A floating-point type that a kernel reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    F32,
    F16,
    BF16,
}

impl Float {
    pub const ALL: [Float; 3] = [Float::F32, Float::F16, Float::BF16];

    /// None if gradients of this type are not compressed.
    pub fn of(element: Element) -> Option<Float> {
        match element {
            Element::F32 => Some(Float::F32),
            Element::F16 => Some(Float::F16),
            Element::BF16 => Some(Float::BF16),
            _ => None,
        }
    }

    /// Errors if gradients of this type are not compressed.
    pub fn try_of(element: Element) -> Result<Float> {
        Float::of(element).ok_or_else(|| Fault(format!("{element:?} is not compressed")))
    }
}

impl From<Wire> for Float {
    fn from(wire: Wire) -> Float {
        match wire {
            Wire::F16 => Float::F16,
            Wire::BF16 => Float::BF16,
            Wire::F32 => Float::F32,
        }
    }
}

/// A kernel. Its source and `codec` say what each one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    Accumulate(Float),
    Select,
    Pack(Float),
    Unpack {
        wire: Float,
        gradient: Float,
    },
    AddVelocity(Float),
    Rescale,
    /// Of the quantiser, for gradients of this type.
    Send(Float),
    Sum(Float),
    Deliver(Float),
    Follow(Float),
    ScaleSizes,
}

impl Kernel {
    pub fn all() -> impl Iterator<Item = Kernel> {
        let of_one = |float| {
            [
                Kernel::Accumulate(float),
                Kernel::Pack(float),
                Kernel::AddVelocity(float),
                Kernel::Send(float),
                Kernel::Sum(float),
                Kernel::Deliver(float),
                Kernel::Follow(float),
            ]
        };
        let of_two = |wire| Float::ALL.map(|gradient| Kernel::Unpack { wire, gradient });
        let floats = || Float::ALL.into_iter();
        let others = [Kernel::Select, Kernel::Rescale, Kernel::ScaleSizes];
        floats().flat_map(of_one).chain(floats().flat_map(of_two)).chain(others)
    }

    /// Its name in the source.
    pub fn name(self) -> &'static CStr {
        use Float::{BF16, F16, F32};
        match self {
            Kernel::Accumulate(F32) => c"gflow_accumulate_f32",
            Kernel::Accumulate(F16) => c"gflow_accumulate_f16",
            Kernel::Accumulate(BF16) => c"gflow_accumulate_bf16",
            Kernel::Select => c"gflow_select",
            Kernel::Pack(F32) => c"gflow_pack_f32",
            Kernel::Pack(F16) => c"gflow_pack_f16",
            Kernel::Pack(BF16) => c"gflow_pack_bf16",
            Kernel::Unpack { wire: F16, gradient: F32 } => c"gflow_unpack_f16_f32",
            Kernel::Unpack { wire: F16, gradient: F16 } => c"gflow_unpack_f16_f16",
            Kernel::Unpack { wire: F16, gradient: BF16 } => c"gflow_unpack_f16_bf16",
            Kernel::Unpack { wire: BF16, gradient: F32 } => c"gflow_unpack_bf16_f32",
            Kernel::Unpack { wire: BF16, gradient: F16 } => c"gflow_unpack_bf16_f16",
            Kernel::Unpack { wire: BF16, gradient: BF16 } => c"gflow_unpack_bf16_bf16",
            Kernel::Unpack { wire: F32, gradient: F32 } => c"gflow_unpack_f32_f32",
            Kernel::Unpack { wire: F32, gradient: F16 } => c"gflow_unpack_f32_f16",
            Kernel::Unpack { wire: F32, gradient: BF16 } => c"gflow_unpack_f32_bf16",
            Kernel::AddVelocity(F32) => c"gflow_add_velocity_f32",
            Kernel::AddVelocity(F16) => c"gflow_add_velocity_f16",
            Kernel::AddVelocity(BF16) => c"gflow_add_velocity_bf16",
            Kernel::Rescale => c"gflow_rescale",
            Kernel::Send(F32) => c"gflow_send_f32",
            Kernel::Send(F16) => c"gflow_send_f16",
            Kernel::Send(BF16) => c"gflow_send_bf16",
            Kernel::Sum(F32) => c"gflow_sum_f32",
            Kernel::Sum(F16) => c"gflow_sum_f16",
            Kernel::Sum(BF16) => c"gflow_sum_bf16",
            Kernel::Deliver(F32) => c"gflow_deliver_f32",
            Kernel::Deliver(F16) => c"gflow_deliver_f16",
            Kernel::Deliver(BF16) => c"gflow_deliver_bf16",
            Kernel::Follow(F32) => c"gflow_follow_f32",
            Kernel::Follow(F16) => c"gflow_follow_f16",
            Kernel::Follow(BF16) => c"gflow_follow_bf16",
            Kernel::ScaleSizes => c"gflow_scale_sizes",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        let mut names: Vec<_> = Kernel::all().map(Kernel::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!((count, names.len()), (33, 33));
    }
}
