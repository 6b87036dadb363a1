//! The allocator against a heap of flags, one per page.

use super::*;
use proptest::prelude::*;

const PAGE: usize = BLOCK_ALIGNMENT;

#[derive(Debug, Clone)]
enum Step {
    Take(usize),
    /// Gives back one of the blocks that are taken.
    GiveBack(prop::sample::Index),
    GiveBackAnything(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..9 * PAGE).prop_map(Step::Take),
        2 => any::<prop::sample::Index>().prop_map(Step::GiveBack),
        1 => (0..40usize).prop_map(|half_pages| Step::GiveBackAnything(half_pages * PAGE / 2)),
    ];
    proptest::collection::vec(step, 0..80)
}

/// The same heap as one flag for each page, with the blocks in a list.
struct Model {
    pages: Vec<bool>,
    blocks: Vec<(usize, usize)>,
}

impl Model {
    fn longest_free_pages(&self) -> usize {
        self.pages.split(|taken| *taken).map(<[bool]>::len).max().unwrap_or(0)
    }

    fn take(&mut self, offset: usize, size: usize) {
        let pages = &mut self.pages[offset / PAGE..(offset + size) / PAGE];
        assert!(pages.iter().all(|taken| !taken), "{offset} is taken already");
        pages.fill(true);
        self.blocks.push((offset, size));
    }

    fn give_back(&mut self, offset: usize) -> Option<usize> {
        let at = self.blocks.iter().position(|block| block.0 == offset)?;
        let (_, size) = self.blocks.swap_remove(at);
        self.pages[offset / PAGE..(offset + size) / PAGE].fill(false);
        Some(size)
    }
}

proptest! {
    #[test]
    fn blocks_never_overlap_and_leave_no_trace(bytes in 0..30 * PAGE, steps in steps()) {
        let mut blocks = Blocks::new(bytes);
        let mut model = Model { pages: vec![false; bytes / PAGE], blocks: Vec::new() };
        for step in steps {
            let offset = match step {
                Step::Take(wanted) => {
                    let pages = wanted.max(1).div_ceil(PAGE);
                    let offset = blocks.take(wanted);
                    prop_assert_eq!(offset.is_some(), pages <= model.longest_free_pages());
                    if let Some(offset) = offset {
                        prop_assert_eq!(offset % PAGE, 0);
                        model.take(offset, pages * PAGE);
                    }
                    continue;
                }
                Step::GiveBack(_) if model.blocks.is_empty() => continue,
                Step::GiveBack(index) => index.get(&model.blocks).0,
                Step::GiveBackAnything(offset) => offset,
            };
            prop_assert_eq!(blocks.give_back(offset), model.give_back(offset));
            let taken: usize = model.blocks.iter().map(|block| block.1).sum();
            prop_assert_eq!(blocks.taken(), taken);
        }
        for (offset, size) in std::mem::take(&mut model.blocks) {
            prop_assert_eq!(blocks.give_back(offset), Some(size));
        }
        prop_assert_eq!(blocks.taken(), 0);
        let whole = bytes / PAGE * PAGE;
        prop_assert_eq!(blocks.take(whole + 1), None);
        prop_assert_eq!(blocks.take(whole), (whole > 0).then_some(0));
    }
}

#[test]
fn the_smallest_range_that_fits_is_taken_and_of_these_the_first() {
    let mut blocks = Blocks::new(100 * PAGE);
    let offsets: Vec<_> = [3, 1, 2, 1, 2, 1].map(|pages| blocks.take(pages * PAGE)).into();
    let offset = |block: usize| offsets[block].unwrap();
    for block in [0, 2, 4] {
        blocks.give_back(offset(block)).unwrap();
    }
    assert_eq!(blocks.take(2 * PAGE), Some(offset(2)));
    assert_eq!(blocks.take(2 * PAGE), Some(offset(4)));
    assert_eq!(blocks.take(2 * PAGE), Some(offset(0)));
}

#[test]
fn sizes_beyond_reason_are_not_to_be_had() {
    let mut blocks = Blocks::new(usize::MAX);
    assert_eq!(blocks.take(usize::MAX), None);
    assert_eq!(blocks.take(usize::MAX - 2 * PAGE), Some(0));
    assert_eq!(Blocks::new(PAGE - 1).take(0), None);
}
