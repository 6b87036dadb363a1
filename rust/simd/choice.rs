//! The choice of a kernel for an instruction set, an element type and a reduction. It must never
//! pair a kernel with types of another instruction set: `packed` relies on that.

use super::element::{Element, Reduction};
use super::instructions::Instructions;
use super::kernel::{self, Both, Kernel};
use super::number::{Divisible, Stored};
use super::operation::{Average, Max, Min, Product, Sum};
#[cfg(target_arch = "x86_64")]
use super::packed::{F16x16, F16x32};
use super::sixteen::{BF16, BF16x2, F16};

/// The kernel to call.
pub fn kernel_for(instructions: Instructions, element: Element, reduction: Reduction) -> Kernel {
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
    type F16: Stored<Number: Divisible>;
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

fn for_element<I: InstructionSet>(element: Element, reduction: Reduction) -> Kernel {
    match element {
        Element::F32 => for_types::<I, f32, f32>(reduction),
        Element::F64 => for_types::<I, f64, f64>(reduction),
        Element::F16 => for_types::<I, I::F16, F16>(reduction),
        Element::BF16 => for_types::<I, BF16x2, BF16>(reduction),
        Element::I8 => for_types::<I, i8, i8>(reduction),
        Element::U8 => for_types::<I, u8, u8>(reduction),
        Element::I32 => for_types::<I, i32, i32>(reduction),
        Element::I64 => for_types::<I, i64, i64>(reduction),
    }
}

fn for_types<I, P, S>(reduction: Reduction) -> Kernel
where
    I: InstructionSet,
    P: Stored<Number: Divisible>,
    S: Stored<Number: Divisible>,
{
    match reduction {
        Reduction::Sum => I::kernel::<P, S, Sum>(),
        Reduction::Avg => I::kernel::<P, S, Average>(),
        Reduction::Product => I::kernel::<P, S, Product>(),
        Reduction::Min => I::kernel::<P, S, Min>(),
        Reduction::Max => I::kernel::<P, S, Max>(),
    }
}
