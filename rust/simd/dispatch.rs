//! Picks the fold kernel for an instruction set, an element type and a reduction.
//!
//! It must never pair a kernel with types of another instruction set: `x86` relies on that for
//! its safety.

use super::element::{Element, Reduction};
use super::fold::{self, FoldKernel, VectorAndScalarOp};
use super::half_precision::{BF16, BF16x2, F16};
use super::instruction_set::InstructionSet;
use super::lanes::Portable;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::number::{Divisible, Stored};
use super::reduce_op::{Average, Max, Min, Product, Sum};
#[cfg(target_arch = "x86_64")]
use super::x86::{F16x16, F16x32};

/// The kernel to call.
pub fn kernel_for(set: InstructionSet, element: Element, reduction: Reduction) -> FoldKernel {
    match set {
        InstructionSet::Portable => for_element::<Portable>(element, reduction),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => for_element::<Avx2>(element, reduction),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => for_element::<Avx512>(element, reduction),
    }
}

/// What folds need from an instruction set.
trait FoldTarget {
    /// Half-precision floats, as many as are best processed at a time.
    type F16: Stored<Number: Divisible>;
    fn kernel<V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>() -> FoldKernel;
}

impl FoldTarget for Portable {
    type F16 = F16;

    fn kernel<V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>() -> FoldKernel {
        fold::portable::<V, S, O>
    }
}

#[cfg(target_arch = "x86_64")]
impl FoldTarget for Avx2 {
    type F16 = F16x16;

    fn kernel<V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>() -> FoldKernel {
        fold::avx2::<V, S, O>
    }
}

#[cfg(target_arch = "x86_64")]
impl FoldTarget for Avx512 {
    type F16 = F16x32;

    fn kernel<V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>() -> FoldKernel {
        fold::avx512::<V, S, O>
    }
}

fn for_element<T: FoldTarget>(element: Element, reduction: Reduction) -> FoldKernel {
    match element {
        Element::F32 => for_types::<T, f32, f32>(reduction),
        Element::F64 => for_types::<T, f64, f64>(reduction),
        Element::F16 => for_types::<T, T::F16, F16>(reduction),
        Element::BF16 => for_types::<T, BF16x2, BF16>(reduction),
        Element::I8 => for_types::<T, i8, i8>(reduction),
        Element::U8 => for_types::<T, u8, u8>(reduction),
        Element::I32 => for_types::<T, i32, i32>(reduction),
        Element::I64 => for_types::<T, i64, i64>(reduction),
    }
}

fn for_types<T, V, S>(reduction: Reduction) -> FoldKernel
where
    T: FoldTarget,
    V: Stored<Number: Divisible>,
    S: Stored<Number: Divisible>,
{
    match reduction {
        Reduction::Sum => T::kernel::<V, S, Sum>(),
        Reduction::Avg => T::kernel::<V, S, Average>(),
        Reduction::Product => T::kernel::<V, S, Product>(),
        Reduction::Min => T::kernel::<V, S, Min>(),
        Reduction::Max => T::kernel::<V, S, Max>(),
    }
}
