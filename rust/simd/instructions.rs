//! The instruction sets that the kernels are compiled for. A set must never be used before
//! [`Instructions::are_here`] has said yes: the CPU would stop the process.

/// A set of instructions, from the least to the most able.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// What every CPU of this architecture has: SSE2 on x86-64, NEON on aarch64.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    #[cfg(target_arch = "x86_64")]
    pub const ALL: &[Instructions] =
        &[Instructions::Portable, Instructions::Avx2, Instructions::Avx512];
    #[cfg(not(target_arch = "x86_64"))]
    pub const ALL: &[Instructions] = &[Instructions::Portable];

    /// The most able set of this CPU. Cheap: std asks the CPU once and remembers.
    pub fn best() -> Instructions {
        let here = Instructions::ALL.iter().rev().find(|set| set.are_here());
        here.copied().unwrap_or(Instructions::Portable)
    }

    /// Whether this CPU has them, and the operating system lets them be used.
    pub fn are_here(self) -> bool {
        match self {
            Instructions::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                Instructions::Avx2.are_here()
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
            /// As for the body, and `Instructions::Avx2` are here.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,fma")]
            pub unsafe fn avx2<$($type: $bound),*>($($argument: $of),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body::<$($type),*>($($argument),*) }
            }

            /// # Safety
            /// As for the body, and `Instructions::Avx512` are here.
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
