//! The exchange of norms, after which every carrier of a shard knows the norm of each chunk over all hosts,
//! so that all select the same chunks.
//!
//! Norms travel as messages, not round the ring, because the ring may be busy with the exchange before.
//! Every rank adds them in the order of hosts, so all get the same sums to the bit.

use crate::codec::add_norms;
use crate::collective::fabric::Fabric;
use crate::collective::message::{Envelope, Tag};
use crate::transport::Failure;
use crate::transport::frame::MAX_PAYLOAD;
use std::time::Instant;
use zerocopy::byteorder::little_endian::F32;
use zerocopy::{FromBytes, IntoBytes};

const NORMS_PER_MESSAGE: usize = (MAX_PAYLOAD - size_of::<Envelope>()) / size_of::<f32>();

/// Replaces `norms` by their sums over all hosts. `seq` is the number of the exchange's first
/// collective. Returns how many bytes this rank sent.
pub fn sum_over_hosts(
    fabric: &mut Fabric,
    seq: u64,
    norms: &mut [f32],
    deadline: Instant,
) -> Result<u64, Failure> {
    let carriers = fabric.carriers_of_this_shard();
    let mut sent = 0;
    for part in norms.chunks_mut(NORMS_PER_MESSAGE) {
        let message = encode(seq, part);
        fabric.swap_across(&message, deadline)?;
        sent += (message.len() * (carriers.len() - 1)) as u64;
        part.fill(0.0);
        for rank in &carriers {
            let theirs = decode(seq, part.len(), &fabric.inbox()[*rank])
                .map_err(|reason| Failure::Garbled { rank: *rank, reason })?;
            add_norms(part, &theirs);
        }
    }
    Ok(sent)
}

fn encode(seq: u64, norms: &[f32]) -> Vec<u8> {
    let mut message = Vec::with_capacity(size_of::<Envelope>() + size_of_val(norms));
    message.extend_from_slice(Envelope::new(Tag::Norms, seq).as_bytes());
    message.extend(norms.iter().flat_map(|norm| norm.to_le_bytes()));
    message
}

fn decode(seq: u64, count: usize, message: &[u8]) -> Result<Vec<f32>, String> {
    let Some((envelope, norms)) = Envelope::open(message) else {
        return Err(format!("{} bytes, expected the norms of {count} chunks", message.len()));
    };
    let norms = <[F32]>::ref_from_bytes_with_elems(norms, count).ok();
    let Some(norms) = norms.filter(|_| envelope.is(Tag::Norms, seq)) else {
        return Err(format!(
            "it is at something else (#{}) while this rank exchanges the gradients that it \
             has held back since #{seq}: a rank waited for one of them before the end of the \
             backward pass, or called another collective",
            envelope.seq()
        ));
    };
    Ok(norms.iter().map(|norm| norm.get()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::fabric::tests::fabrics;
    use proptest::prelude::*;
    use std::time::Duration;

    fn sum_on_all(ranks: Vec<Vec<f32>>) -> Vec<Result<Vec<f32>, Failure>> {
        std::thread::scope(|scope| {
            let sums: Vec<_> = fabrics(ranks.len())
                .into_iter()
                .zip(ranks)
                .map(|((mut fabric, _interrupt), mut norms)| {
                    let deadline = Instant::now() + Duration::from_secs(10);
                    scope.spawn(move || {
                        sum_over_hosts(&mut fabric, 3, &mut norms, deadline).map(|_| norms)
                    })
                })
                .collect();
            sums.into_iter().map(|sum| sum.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_same_sums_of_few_and_of_many_norms() {
        for (size, count) in
            [(1, 5), (2, 1), (3, NORMS_PER_MESSAGE), (2, 3 * NORMS_PER_MESSAGE + 1)]
        {
            let norms = |rank: usize| (0..count).map(|i| (rank * i) as f32 + 0.5).collect();
            let expected: Vec<f32> = (0..count)
                .map(|i| (0..size).map(|rank: usize| (rank * i) as f32 + 0.5).sum())
                .collect();
            for sums in sum_on_all((0..size).map(norms).collect()) {
                assert_eq!(sums.as_ref(), Ok(&expected));
            }
        }
    }

    #[test]
    fn what_is_not_finite_on_one_rank_is_not_finite_on_all() {
        let sums = sum_on_all(vec![vec![1.0, f32::INFINITY, 2.0], vec![f32::NAN, 1.0, 3.0]]);
        for sums in sums {
            let sums = sums.unwrap();
            assert!(sums[0].is_nan() && sums[1] == f32::INFINITY && sums[2] == 5.0, "{sums:?}");
        }
    }

    #[test]
    fn a_rank_that_is_at_something_else_is_told_so() {
        let outcome = sum_on_all(vec![vec![1.0; 4], vec![1.0; 5]]);
        for (rank, outcome) in outcome.into_iter().enumerate() {
            let Err(Failure::Garbled { rank: named, reason }) = outcome else { panic!("accepted") };
            assert_eq!(named, 1 - rank);
            assert!(reason.contains("#3"), "{reason}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_of_norms_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64), count in 0usize..20
        ) {
            let _ = decode(3, count, &bytes);
        }

        #[test]
        fn norms_survive_the_wire(norms in proptest::collection::vec(any::<f32>(), 0..50)) {
            let back = decode(9, norms.len(), &encode(9, &norms)).unwrap();
            prop_assert!(norms.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}
