//! The instruction sets that kernels are compiled for. Never use a set before checking
//! [`InstructionSet::is_available`]: an unknown instruction kills the process.

/// An instruction set, in ascending order of capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// The architecture's baseline: SSE2 on x86-64, NEON on aarch64.
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

    /// The most capable set of this CPU. Cheap: std queries the CPU once and caches the answer.
    pub fn best() -> InstructionSet {
        let best = InstructionSet::ALL.iter().rev().find(|set| set.is_available());
        best.copied().unwrap_or(InstructionSet::Portable)
    }

    /// Whether this CPU has the instructions and the operating system enables them.
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
/// module of the given name. The body must be `#[inline(always)]` all the way down; anything that
/// isn't stays compiled for the portable set.
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
            /// As for the body, and `InstructionSet::Avx2` is available.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,fma")]
            pub unsafe fn avx2<$($type: $bound),*>($($argument: $of),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body::<$($type),*>($($argument),*) }
            }

            /// # Safety
            /// As for the body, and `InstructionSet::Avx512` is available.
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
