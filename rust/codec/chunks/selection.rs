//! Selection: which chunks are sent. All ranks have the same sums and must select the same chunks,
//! so nothing here may depend on chance, time or the rank.

/// Fills `selected` with the indices of the `count` chunks with the largest sums, in ascending order.
/// The lower index wins a tie. A sum that is infinite or NaN ranks below all others, because such a
/// chunk has nothing to send. Takes linear time.
pub fn select(sums: &[f32], count: usize, selected: &mut Vec<u32>) {
    selected.clear();
    let count = count.min(sums.len());
    if count == 0 {
        return;
    }
    // `selected` first holds the sort keys. The smallest key that is selected, and how many are above
    // it, determine everything.
    selected.extend(sums.iter().map(|sum| sort_key(*sum)));
    let least = *selected.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1;
    let mut ties_left = count - selected[..count].iter().filter(|key| **key > least).count();
    selected.clear();
    let is_selected = |(index, sum): (usize, &f32)| {
        let key = sort_key(*sum);
        let wins_tie = key == least && ties_left > 0;
        ties_left -= usize::from(wins_tie);
        (key > least || wins_tie).then_some(index as u32)
    };
    selected.extend(sums.iter().enumerate().filter_map(is_selected));
}

/// An integer that sorts like the sums; 0 for infinity and NaN.
fn sort_key(sum: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    // Adding zero drops the sign of a zero, so that both zeros tie.
    let bits = (sum + 0.0).to_bits();
    match sum.is_finite() {
        false => 0,
        true if bits & SIGN == 0 => bits | SIGN,
        true => !bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::chunks::reference;
    use crate::codec::samples::sums;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_are_selected_and_ties_go_to_the_lower_index(
            sums in sums(), count in 0usize..90
        ) {
            let mut selected = vec![7; 3];
            select(&sums, count, &mut selected);
            prop_assert_eq!(selected, reference::select(&sums, count));
        }
    }

    #[test]
    fn poisoned_chunks_are_selected_last() {
        let sums = [f32::NAN, 0.0, f32::INFINITY, 1.0];
        let mut selected = Vec::new();
        select(&sums, 2, &mut selected);
        assert_eq!(selected, [1, 3]);
        select(&sums, 3, &mut selected);
        assert_eq!(selected, [0, 1, 3]);
        select(&sums, 9, &mut selected);
        assert_eq!(selected, [0, 1, 2, 3]);
        select(&[], 1, &mut selected);
        assert_eq!(selected, []);
    }
}
