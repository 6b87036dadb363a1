//! The choice of a kernel for an instruction set, an element type and a reduction. It must never
//! pair a kernel with types of another instruction set: `packed` relies on that.

use super::element::{Element, Reduction};
use super::instructions::Instructions;
use super::kernel::{self, Both, Kernel};
use super::number::{Real, Stored};
use super::operation::{Average, Max, Min, Product, Sum};
#[cfg(target_arch = "x86_64")]
use super::packed::{F16x16, F16x32};
use super::sixteen::{BF16, BF16x2, F16};

/// The kernel to call, or None for an average of integers.
pub fn kernel_for(
    instructions: Instructions,
    element: Element,
    reduction: Reduction,
) -> Option<Kernel> {
    match instructions {
        Instructions::Portable => for_element::<Portable>(element, reduction),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => for_element::<Avx2>(element, reduction),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => for_element::<Avx512>(element, reduction),
    }
}

trait InstructionSet {
    /// Half-precision floats, by as many as are best taken at a time.
    type F16: Stored<Number: Real>;
    fn kernel<P: Stored, S: Stored, O: Both<P, S>>() -> Kernel;
}

struct Portable;
#[cfg(target_arch = "x86_64")]
struct Avx2;
#[cfg(target_arch = "x86_64")]
struct Avx512;

impl InstructionSet for Portable {
    type F16 = F16;

    fn kernel<P: Stored, S: Stored, O: Both<P, S>>() -> Kernel {
        kernel::portable::<P, S, O>
    }
}

#[cfg(target_arch = "x86_64")]
impl InstructionSet for Avx2 {
    type F16 = F16x16;

    fn kernel<P: Stored, S: Stored, O: Both<P, S>>() -> Kernel {
        kernel::avx2::<P, S, O>
    }
}

#[cfg(target_arch = "x86_64")]
impl InstructionSet for Avx512 {
    type F16 = F16x32;

    fn kernel<P: Stored, S: Stored, O: Both<P, S>>() -> Kernel {
        kernel::avx512::<P, S, O>
    }
}

fn for_element<I: InstructionSet>(element: Element, reduction: Reduction) -> Option<Kernel> {
    match element {
        Element::F32 => Some(for_real::<I, f32, f32>(reduction)),
        Element::F64 => Some(for_real::<I, f64, f64>(reduction)),
        Element::F16 => Some(for_real::<I, I::F16, F16>(reduction)),
        Element::BF16 => Some(for_real::<I, BF16x2, BF16>(reduction)),
        Element::I8 => for_integer::<I, i8>(reduction),
        Element::U8 => for_integer::<I, u8>(reduction),
        Element::I32 => for_integer::<I, i32>(reduction),
        Element::I64 => for_integer::<I, i64>(reduction),
    }
}

fn for_real<I, P, S>(reduction: Reduction) -> Kernel
where
    I: InstructionSet,
    P: Stored<Number: Real>,
    S: Stored<Number: Real>,
{
    match reduction {
        Reduction::Sum => I::kernel::<P, S, Sum>(),
        Reduction::Avg => I::kernel::<P, S, Average>(),
        Reduction::Product => I::kernel::<P, S, Product>(),
        Reduction::Min => I::kernel::<P, S, Min>(),
        Reduction::Max => I::kernel::<P, S, Max>(),
    }
}

fn for_integer<I: InstructionSet, T: Stored>(reduction: Reduction) -> Option<Kernel> {
    match reduction {
        Reduction::Sum => Some(I::kernel::<T, T, Sum>()),
        Reduction::Avg => None,
        Reduction::Product => Some(I::kernel::<T, T, Product>()),
        Reduction::Min => Some(I::kernel::<T, T, Min>()),
        Reduction::Max => Some(I::kernel::<T, T, Max>()),
    }
}
