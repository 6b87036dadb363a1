//! The instruction sets that the kernels are compiled for. A set must never be used before
//! [`InstructionSet::is_available`] has said yes: the CPU would stop the process.

/// A set of instructions, from the least to the most able.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// What every CPU of this architecture has: SSE2 on x86-64, NEON on aarch64.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    #[cfg(target_arch = "x86_64")]
    pub const ALL: &[InstructionSet] =
        &[InstructionSet::Portable, InstructionSet::Avx2, InstructionSet::Avx512];
    #[cfg(not(target_arch = "x86_64"))]
    pub const ALL: &[InstructionSet] = &[InstructionSet::Portable];

    /// The most able set of this CPU. Cheap: std asks the CPU once and remembers.
    pub fn best() -> InstructionSet {
        let here = InstructionSet::ALL.iter().rev().find(|set| set.is_available());
        here.copied().unwrap_or(InstructionSet::Portable)
    }

    /// Whether this CPU has them, and the operating system lets them be used.
    pub fn is_available(self) -> bool {
        match self {
            InstructionSet::Portable => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                InstructionSet::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }
}

/// Compiles a function body for each instruction set, as `portable`, `avx2` and `avx512` in a
/// module of the given name. The body must be `#[inline(always)]` all the way down, or a part of
/// it stays compiled for the portable set.
macro_rules! for_each_instruction_set {
    (
        mod $module:ident = $body:ident;
        <$($type:ident: $bound:path),*>($($argument:ident: $of:ty),*) $(-> $result:ty)?
    ) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            /// # Safety
            /// As for the body.
            pub unsafe fn portable<$($type: $bound),*>($($argument: $of),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body::<$($type),*>($($argument),*) }
            }

            /// # Safety
            /// As for the body, and `InstructionSet::Avx2` are here.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,fma")]
            pub unsafe fn avx2<$($type: $bound),*>($($argument: $of),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body::<$($type),*>($($argument),*) }
            }

            /// # Safety
            /// As for the body, and `InstructionSet::Avx512` are here.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            pub unsafe fn avx512<$($type: $bound),*>($($argument: $of),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body::<$($type),*>($($argument),*) }
            }
        }
    };
}
pub(crate) use for_each_instruction_set;
