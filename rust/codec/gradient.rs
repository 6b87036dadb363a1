//! A gradient: a mutable slice of one of the element types that can be compressed.

use crate::simd::blocks::{Upcoming, bytes_of_mut, elements_of_mut};
use crate::simd::element::Element;
use crate::simd::half_precision::{BF16, F16};
use crate::simd::number::Stored;
use std::ops::Range;

/// A gradient or a part of one. 16-bit floats are stored as their bits.
#[derive(Debug)]
pub enum Gradient<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    BF16(&'a mut [u16]),
}

impl<'a> Gradient<'a> {
    /// The gradient in these bytes; None if this element type isn't compressed, or if the bytes
    /// aren't aligned or not a whole number of elements.
    pub fn from_bytes(bytes: &'a mut [u8], element: Element) -> Option<Gradient<'a>> {
        match element {
            Element::F32 => elements_of_mut(bytes).map(Gradient::F32),
            Element::F16 => elements_of_mut(bytes).map(Gradient::F16),
            Element::BF16 => elements_of_mut(bytes).map(Gradient::BF16),
            _ => None,
        }
    }

    pub fn element(&self) -> Element {
        match self {
            Gradient::F32(_) => Element::F32,
            Gradient::F16(_) => Element::F16,
            Gradient::BF16(_) => Element::BF16,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Gradient::F32(numbers) => numbers.len(),
            Gradient::F16(bits) | Gradient::BF16(bits) => bits.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in this range.
    pub fn part(&mut self, range: Range<usize>) -> Gradient<'_> {
        match self {
            Gradient::F32(numbers) => Gradient::F32(&mut numbers[range]),
            Gradient::F16(bits) => Gradient::F16(&mut bits[range]),
            Gradient::BF16(bits) => Gradient::BF16(&mut bits[range]),
        }
    }

    /// Keeps the elements before `middle` and returns the others.
    pub fn split_off(&mut self, middle: usize) -> Gradient<'a> {
        const WITHIN: &str = "the middle is within the gradient";
        match self {
            Gradient::F32(numbers) => Gradient::F32(numbers.split_off_mut(middle..).expect(WITHIN)),
            Gradient::F16(bits) => Gradient::F16(bits.split_off_mut(middle..).expect(WITHIN)),
            Gradient::BF16(bits) => Gradient::BF16(bits.split_off_mut(middle..).expect(WITHIN)),
        }
    }

    /// Its elements as 32-bit floats.
    pub fn widened(&self) -> Vec<f32> {
        match self {
            Gradient::F32(numbers) => numbers.to_vec(),
            Gradient::F16(bits) => bits.iter().map(|bits| F16(*bits).widen()).collect(),
            Gradient::BF16(bits) => bits.iter().map(|bits| BF16(*bits).widen()).collect(),
        }
    }

    /// As much memory right after it, in so many parts.
    pub(super) fn upcoming(&self, parts: usize) -> Upcoming {
        match self {
            Gradient::F32(numbers) => Upcoming::after(numbers, parts),
            Gradient::F16(bits) | Gradient::BF16(bits) => Upcoming::after(bits, parts),
        }
    }

    /// The sum of the magnitudes of its elements that are finite.
    pub fn l1_norm(&self) -> f64 {
        let finite = |number: f32| if number.is_finite() { f64::from(number.abs()) } else { 0.0 };
        match self {
            Gradient::F32(numbers) => numbers.iter().map(|number| finite(*number)).sum(),
            Gradient::F16(bits) => bits.iter().map(|bits| finite(F16(*bits).widen())).sum(),
            Gradient::BF16(bits) => bits.iter().map(|bits| finite(BF16(*bits).widen())).sum(),
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Gradient::F32(numbers) => bytes_of_mut(numbers),
            Gradient::F16(bits) | Gradient::BF16(bits) => bytes_of_mut(bits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gradient_is_made_of_whole_aligned_floats_only() {
        let mut memory = [0u64; 4];
        // SAFETY: plain memory, as bytes.
        let (_, bytes, _) = unsafe { memory.align_to_mut::<u8>() };
        for element in Element::ALL {
            let made = Gradient::from_bytes(bytes, element).map(|gradient| gradient.len());
            let expected = match element {
                Element::F32 => Some(8),
                Element::F16 | Element::BF16 => Some(16),
                _ => None,
            };
            assert_eq!(made, expected, "{element:?}");
        }
        assert!(Gradient::from_bytes(&mut bytes[2..6], Element::F32).is_none());
        assert!(Gradient::from_bytes(&mut bytes[..6], Element::F32).is_none());
        assert!(Gradient::from_bytes(&mut bytes[1..5], Element::F16).is_none());
        assert!(Gradient::from_bytes(&mut bytes[2..6], Element::BF16).is_some());
    }

    #[test]
    fn a_part_is_of_the_same_kind_and_of_the_same_memory() {
        let mut bits = [1, 2, 3, 4, 5];
        let mut gradient = Gradient::BF16(&mut bits);
        let mut part = gradient.part(1..4);
        assert_eq!((part.element(), part.len()), (Element::BF16, 3));
        if let Gradient::BF16(bits) = part.part(1..2) {
            bits[0] = 9;
        }
        assert_eq!(bits, [1, 2, 9, 4, 5]);
        assert!(Gradient::F32(&mut []).is_empty());
    }
}
