//! The fold, written once for every element type, operation and instruction set.
//!
//! A loop vectorises well only if the compiler knows, or can check at run time, that its writes
//! don't overlap its reads. So each shape of call has its own loop over slices that really are
//! disjoint: there must never be two slices of one region at a time.

use super::instruction_set::for_each_instruction_set;
use super::number::Stored;
use super::reduce_op::ReduceOp;
use super::tile::Tile;
use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Folds `bytes` bytes of the sources into every destination, and finishes for `ranks` ranks.
pub type FoldKernel =
    unsafe fn(sources: &[*const u8], destinations: &[*mut u8], bytes: usize, ranks: usize);

for_each_instruction_set! {
    mod fold_kernel = fold; <V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>(
        sources: &[*const u8], destinations: &[*mut u8], bytes: usize, ranks: usize
    )
}
pub use fold_kernel::*;

/// An operation on both vectors and single numbers.
pub trait VectorAndScalarOp<V: Stored, S: Stored>:
    ReduceOp<V::Number> + ReduceOp<S::Number>
{
}

impl<V, S, O> VectorAndScalarOp<V, S> for O
where
    V: Stored,
    S: Stored,
    O: ReduceOp<V::Number> + ReduceOp<S::Number>,
{
}

/// A [`FoldKernel`] that processes elements as vectors `V` while it can, and the tail as single
/// elements `S`.
///
/// # Safety
/// As for `Reducer::fold`, with elements of type `S`; `V` is one of them or an array.
#[inline(always)]
unsafe fn fold<V: Stored, S: Stored, O: VectorAndScalarOp<V, S>>(
    sources: &[*const u8],
    destinations: &[*mut u8],
    bytes: usize,
    ranks: usize,
) {
    let whole = bytes - bytes % size_of::<V>();
    // SAFETY: the caller's promise holds for each part of the range.
    unsafe {
        fold_range::<V, O>(sources, destinations, 0..whole, ranks);
        if V::COUNT > 1 && whole < bytes {
            fold_range::<S, O>(sources, destinations, whole..bytes, ranks);
        }
    }
}

/// # Safety
/// As for [`fold`]; `range` is of bytes, and whole elements.
#[inline(always)]
unsafe fn fold_range<T: Stored, O: ReduceOp<T::Number>>(
    sources: &[*const u8],
    destinations: &[*mut u8],
    range: Range<usize>,
    ranks: usize,
) {
    let count = range.len() / size_of::<T>();
    // SAFETY: the range is inside the region, which is aligned for the element; the borrow ends
    // with the call it is made for.
    let read = |from: *const u8| unsafe { from_raw_parts(from.add(range.start).cast(), count) };
    // SAFETY: as for `read`.
    let write = |to: *mut u8| unsafe { from_raw_parts_mut(to.add(range.start).cast(), count) };
    match (sources, destinations) {
        (&[source], _) if !O::FINISHES => {
            for to in destinations.iter().filter(|to| to.cast_const() != source) {
                // SAFETY: both regions have the range; `copy` would even allow an overlap.
                unsafe { source.add(range.start).copy_to(to.add(range.start), range.len()) };
            }
        }
        // A destination that is a source is only ever touched as the destination.
        (&[a, b], &[to]) if a != b && to.cast_const() == a => {
            into_first::<T, O>(write(to), read(b), ranks);
        }
        (&[a, b], &[to]) if a != b && to.cast_const() == b => {
            into_second::<T, O>(read(a), write(to), ranks);
        }
        (&[a, b], &[to]) if a != b => {
            into_another::<T, O>(write(to), read(a), read(b), ranks);
        }
        (&[a, b], &[to, other]) if a != b && to.cast_const() == a && other.cast_const() == b => {
            into_both::<T, O>(write(to), write(other), ranks);
        }
        (&[a, b], &[other, to]) if a != b && to.cast_const() == a && other.cast_const() == b => {
            into_both::<T, O>(write(to), write(other), ranks);
        }
        _ => {
            // SAFETY: the caller's promise.
            unsafe { by_tiles::<T, O>(sources, destinations, range, ranks) }
        }
    }
}

#[inline(always)]
fn combine<T: Stored, O: ReduceOp<T::Number>>(first: T, second: T, ranks: usize) -> T {
    T::narrow(O::finish(O::combine(first.widen(), second.widen()), ranks))
}

#[inline(always)]
fn into_first<T: Stored, O: ReduceOp<T::Number>>(a: &mut [T], b: &[T], ranks: usize) {
    for (a, b) in a.iter_mut().zip(b) {
        *a = combine::<T, O>(*a, *b, ranks);
    }
}

#[inline(always)]
fn into_second<T: Stored, O: ReduceOp<T::Number>>(a: &[T], b: &mut [T], ranks: usize) {
    for (a, b) in a.iter().zip(b) {
        *b = combine::<T, O>(*a, *b, ranks);
    }
}

#[inline(always)]
fn into_another<T: Stored, O: ReduceOp<T::Number>>(to: &mut [T], a: &[T], b: &[T], ranks: usize) {
    for (to, (a, b)) in to.iter_mut().zip(a.iter().zip(b)) {
        *to = combine::<T, O>(*a, *b, ranks);
    }
}

#[inline(always)]
fn into_both<T: Stored, O: ReduceOp<T::Number>>(a: &mut [T], b: &mut [T], ranks: usize) {
    for (a, b) in a.iter_mut().zip(b) {
        let combined = combine::<T, O>(*a, *b, ranks);
        *a = combined;
        *b = combined;
    }
}

/// Any number of sources and destinations, a tile at a time. All sources are read before any
/// destination is written, so it doesn't matter which of them are the same.
///
/// # Safety
/// As for [`fold_range`].
#[inline(always)]
unsafe fn by_tiles<T: Stored, O: ReduceOp<T::Number>>(
    sources: &[*const u8],
    destinations: &[*mut u8],
    range: Range<usize>,
    ranks: usize,
) {
    let Some((first, later)) = sources.split_first() else { return };
    let mut tile = Tile::new();
    let step = Tile::capacity::<T::Number>() * size_of::<T>();
    for start in range.clone().step_by(step) {
        let count = step.min(range.end - start) / size_of::<T>();
        // SAFETY: inside the region and aligned; while it is borrowed, only the tile is written.
        let read = |from: &*const u8| unsafe { from_raw_parts(from.add(start).cast::<T>(), count) };
        // Two sources at a time: the tile is read and written half as often.
        let (folded, later) = match later {
            [] => (tile.fill(read(first).iter().map(|a| a.widen())), later),
            [second, later @ ..] => {
                let pairs = read(first).iter().zip(read(second));
                (tile.fill(pairs.map(|(a, b)| O::combine(a.widen(), b.widen()))), later)
            }
        };
        let (pairs, last) = later.as_chunks::<2>();
        for [a, b] in pairs {
            for (folded, (a, b)) in folded.iter_mut().zip(read(a).iter().zip(read(b))) {
                *folded = O::combine(O::combine(*folded, a.widen()), b.widen());
            }
        }
        for a in last {
            for (folded, a) in folded.iter_mut().zip(read(a)) {
                *folded = O::combine(*folded, a.widen());
            }
        }
        if O::FINISHES {
            for folded in folded.iter_mut() {
                *folded = O::finish(*folded, ranks);
            }
        }
        // SAFETY: inside the region and aligned; no source is still borrowed, and destinations
        // don't overlap.
        let write = |to: &*mut u8| unsafe { from_raw_parts_mut(to.add(start).cast::<T>(), count) };
        // Two at a time again. Copying from the first destination to the others would call memcpy,
        // which on some CPUs is ten times slower at this size.
        let (pairs, last) = destinations.as_chunks::<2>();
        for [to, other] in pairs {
            for (folded, (to, other)) in folded.iter().zip(write(to).iter_mut().zip(write(other))) {
                let narrow = T::narrow(*folded);
                *to = narrow;
                *other = narrow;
            }
        }
        for to in last {
            for (folded, to) in folded.iter().zip(write(to)) {
                *to = T::narrow(*folded);
            }
        }
    }
}
