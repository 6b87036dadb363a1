//! Slices of 16-bit floats to and from f32. Rounding is to nearest, ties to even; a NaN stays a
//! NaN. A slice must be as long as the other: a difference is a bug of the caller, and panics.

use super::instructions::{Instructions, for_each_instruction_set};
use super::number::Stored;
#[cfg(target_arch = "x86_64")]
use super::packed::{F16x16, F16x32};
use super::sixteen::{BF16, BF16x2, F16};

/// Widens half-precision floats, given as their bits.
pub fn widen_f16(to: &mut [f32], from: &[u16]) {
    widen_f16_with(Instructions::best(), to, from);
}

/// Narrows to half-precision floats, given as their bits.
pub fn narrow_f16(to: &mut [u16], from: &[f32]) {
    narrow_f16_with(Instructions::best(), to, from);
}

/// Widens bfloat16 floats, given as their bits.
pub fn widen_bf16(to: &mut [f32], from: &[u16]) {
    widen_bf16_with(Instructions::best(), to, from);
}

/// Narrows to bfloat16 floats, given as their bits.
pub fn narrow_bf16(to: &mut [u16], from: &[f32]) {
    narrow_bf16_with(Instructions::best(), to, from);
}

fn widen_f16_with(instructions: Instructions, to: &mut [f32], from: &[u16]) {
    assert!(instructions.are_here());
    // SAFETY: the instructions are here, and the types are the set's own.
    unsafe {
        match instructions {
            Instructions::Portable => widen_for::portable::<F16, F16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => widen_for::avx2::<F16x16, F16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => widen_for::avx512::<F16x32, F16>(to, from),
        }
    }
}

fn narrow_f16_with(instructions: Instructions, to: &mut [u16], from: &[f32]) {
    assert!(instructions.are_here());
    // SAFETY: the instructions are here, and the types are the set's own.
    unsafe {
        match instructions {
            Instructions::Portable => narrow_for::portable::<F16, F16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => narrow_for::avx2::<F16x16, F16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => narrow_for::avx512::<F16x32, F16>(to, from),
        }
    }
}

fn widen_bf16_with(instructions: Instructions, to: &mut [f32], from: &[u16]) {
    assert!(instructions.are_here());
    // SAFETY: the instructions are here.
    unsafe {
        match instructions {
            Instructions::Portable => widen_for::portable::<BF16x2, BF16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => widen_for::avx2::<BF16x2, BF16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => widen_for::avx512::<BF16x2, BF16>(to, from),
        }
    }
}

fn narrow_bf16_with(instructions: Instructions, to: &mut [u16], from: &[f32]) {
    assert!(instructions.are_here());
    // SAFETY: the instructions are here.
    unsafe {
        match instructions {
            Instructions::Portable => narrow_for::portable::<BF16x2, BF16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => narrow_for::avx2::<BF16x2, BF16>(to, from),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => narrow_for::avx512::<BF16x2, BF16>(to, from),
        }
    }
}

for_each_instruction_set! {
    mod widen_for = widen; <P: Stored, S: Stored>(to: &mut [f32], from: &[u16])
}

for_each_instruction_set! {
    mod narrow_for = narrow; <P: Stored, S: Stored>(to: &mut [u16], from: &[f32])
}

/// # Safety
/// `S` is a 16-bit float with f32 for a number, and `P` is one of them or an array.
#[inline(always)]
unsafe fn widen<P: Stored, S: Stored>(to: &mut [f32], from: &[u16]) {
    assert_eq!(to.len(), from.len(), "gflow: a slice must widen to one of its length");
    let packs = from.len() / P::COUNT;
    // SAFETY: as many elements as both slices have. Neither type is more aligned in memory than
    // its element is, or else it is written unaligned.
    unsafe {
        let (stored, numbers) = (from.as_ptr().cast::<P>(), to.as_mut_ptr().cast::<P::Number>());
        for i in 0..packs {
            numbers.add(i).write_unaligned(stored.add(i).read().widen());
        }
        let (stored, numbers) = (from.as_ptr().cast::<S>(), to.as_mut_ptr().cast::<S::Number>());
        for i in packs * P::COUNT..from.len() {
            numbers.add(i).write(stored.add(i).read().widen());
        }
    }
}

/// # Safety
/// As for [`widen`].
#[inline(always)]
unsafe fn narrow<P: Stored, S: Stored>(to: &mut [u16], from: &[f32]) {
    assert_eq!(to.len(), from.len(), "gflow: a slice must narrow to one of its length");
    let packs = from.len() / P::COUNT;
    // SAFETY: as for `widen`.
    unsafe {
        let (stored, numbers) = (to.as_mut_ptr().cast::<P>(), from.as_ptr().cast::<P::Number>());
        for i in 0..packs {
            stored.add(i).write(P::narrow(numbers.add(i).read_unaligned()));
        }
        let (stored, numbers) = (to.as_mut_ptr().cast::<S>(), from.as_ptr().cast::<S::Number>());
        for i in packs * P::COUNT..from.len() {
            stored.add(i).write(S::narrow(numbers.add(i).read()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    fn sets_here() -> impl Iterator<Item = Instructions> {
        Instructions::ALL.iter().copied().filter(|set| set.are_here())
    }

    fn assert_same(ours: f32, theirs: f32, from: u16) {
        let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
        assert!(same, "{from:#06x}: {ours} instead of {theirs}");
    }

    #[test]
    fn every_f16_widens_as_in_half_and_comes_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for set in sets_here() {
            let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
            widen_f16_with(set, &mut wide, &all);
            narrow_f16_with(set, &mut back, &wide);
            for (from, (wide, back)) in all.iter().zip(wide.into_iter().zip(back)) {
                assert_same(wide, f16::from_bits(*from).to_f32_const(), *from);
                let is_nan = f16::from_bits(*from).is_nan();
                assert!(back == *from || (is_nan && f16::from_bits(back).is_nan()), "{from:#06x}");
            }
        }
    }

    #[test]
    fn every_bf16_widens_as_in_half_and_comes_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for set in sets_here() {
            let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
            widen_bf16_with(set, &mut wide, &all);
            narrow_bf16_with(set, &mut back, &wide);
            for (from, (wide, back)) in all.iter().zip(wide.into_iter().zip(back)) {
                assert_same(wide, bf16::from_bits(*from).to_f32_const(), *from);
                let is_nan = bf16::from_bits(*from).is_nan();
                assert!(back == *from || (is_nan && bf16::from_bits(back).is_nan()), "{from:#06x}");
            }
        }
    }

    /// Narrows with every instruction set, at every place in a register and in the tail.
    fn assert_narrows_as_half(numbers: &[f32]) {
        let mut narrow = vec![0; numbers.len()];
        for set in sets_here() {
            narrow_f16_with(set, &mut narrow, numbers);
            for (from, to) in numbers.iter().zip(&narrow) {
                let (ours, theirs) = (f16::from_bits(*to), f16::from_f32_const(*from));
                let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && from.is_nan());
                assert!(same, "{set:?}, f16 of {:#010x}: {ours:?}", from.to_bits());
            }
            narrow_bf16_with(set, &mut narrow, numbers);
            for (from, to) in numbers.iter().zip(&narrow) {
                let (ours, theirs) = (bf16::from_bits(*to), bf16::from_f32_const(*from));
                let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && from.is_nan());
                assert!(same, "{set:?}, bf16 of {:#010x}: {ours:?}", from.to_bits());
            }
        }
    }

    #[test]
    fn ties_limits_and_nans_narrow_as_in_half() {
        // Every exponent, with each mantissa that is or is beside a tie of either type or a
        // carry, or that keeps a NaN's payload only in bits that are lost.
        let mut mantissas = vec![0x40_0000, 0x7f_ffff, 0x7f_f000, 0x7f_8000];
        for bit in 0..23 {
            let tie: u32 = 1 << bit;
            mantissas.extend([tie, tie - 1, tie + 1, (tie * 3) & 0x7f_ffff, 0x7f_ffff - tie]);
        }
        let bits = (0..512).flat_map(|top| mantissas.iter().map(move |low| (top << 23) | low));
        let numbers: Vec<f32> = bits.chain([0, 1 << 31]).map(f32::from_bits).collect();
        assert_narrows_as_half(&numbers);
        // The tail, which goes one by one.
        for short in numbers.chunks(7) {
            assert_narrows_as_half(short);
        }
    }

    proptest! {
        #[test]
        fn random_numbers_narrow_as_in_half(
            bits in prop::collection::vec(any::<u32>(), 0..300),
            near in prop::collection::vec(-70000.0f32..70000.0, 0..100),
            small in prop::collection::vec(-1e-4f32..1e-4, 0..100),
        ) {
            let mut numbers: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            numbers.extend(near);
            numbers.extend(small);
            assert_narrows_as_half(&numbers);
        }
    }

    #[test]
    #[should_panic(expected = "of its length")]
    fn slices_of_different_lengths_are_refused() {
        widen_f16(&mut [0.0; 3], &[0; 4]);
    }
}
