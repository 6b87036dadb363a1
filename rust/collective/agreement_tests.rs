//! Agreement between ranks that are threads of this process.

use super::*;
use crate::collective::call::Call;
use crate::collective::call::tests::all_reduce;
use crate::collective::fabric::tests::fabrics;
use crate::collective::message::{Envelope, Tag};
use crate::transport::frame::Goodbye;
use std::time::Duration;
use zerocopy::IntoBytes;

fn labels(size: usize) -> Vec<String> {
    (0..size).map(|rank| format!("rank {rank}")).collect()
}

fn agree_on(fabric: &mut Fabric, seq: u64, call: &Call) -> Result<Agreed> {
    agree_with(fabric, seq, call, TensorInfo::default())
}

fn agree_with(fabric: &mut Fabric, seq: u64, call: &Call, tensor: TensorInfo) -> Result<Agreed> {
    let deadline = Instant::now() + call.timeout;
    let info = CollectiveInfo { seq, call: call.clone() };
    agree(fabric, &labels(fabric.size()), &info, tensor, deadline)
}

/// Runs `agree` once on every rank, each with its own call, and returns what each rank got.
fn agree_all(calls: Vec<Call>) -> Vec<Result<Agreed>> {
    agree_all_with(calls.into_iter().map(|call| (call, TensorInfo::default())).collect())
}

/// The same, with what each rank tells of its tensor.
fn agree_all_with(calls: Vec<(Call, TensorInfo<'static>)>) -> Vec<Result<Agreed>> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = fabrics(calls.len())
            .into_iter()
            .zip(calls)
            .map(|((mut fabric, _interrupt), (call, tensor))| {
                scope.spawn(move || agree_with(&mut fabric, 7, &call, tensor))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn equal_calls_go_ahead_for_every_world_size() {
    for size in 1..=8 {
        let outcomes = agree_all(vec![all_reduce(4); size]);
        let agreed = Agreed { gradient: false, bucket: None, offsets: vec![None; size] };
        assert!(outcomes.iter().all(|o| *o == Ok(agreed.clone())), "{outcomes:?}");
    }
}

#[test]
fn one_rank_that_says_gradient_decides_for_all() {
    let mut calls = vec![all_reduce(4); 3];
    calls[1].gradient = true;
    for outcome in agree_all(calls) {
        assert!(outcome.unwrap().gradient);
    }
}

#[test]
fn a_rank_without_a_bucket_learns_its_number_from_the_others() {
    let mut calls = vec![all_reduce(4); 3];
    calls[0].bucket = 5;
    calls[2].bucket = 5;
    for outcome in agree_all(calls.clone()) {
        let expected = AgreedBucket { number: 5, step: 0, on_all_ranks: false, stepping: None };
        assert_eq!(outcome.unwrap().bucket, Some(expected));
    }
    calls[1].bucket = 5;
    assert!(agree_all(calls).iter().all(|o| o.as_ref().unwrap().bucket.unwrap().on_all_ranks));
}

#[test]
fn what_the_optimizer_does_is_known_only_if_all_ranks_that_know_the_bucket_say_the_same() {
    let (adam, sgd) = (Some(Stepping::Normalized), Some(Stepping::Proportional));
    // The last rank may have run out of data: then it names no bucket, and what it says does not count.
    for (said, last_names_it, expected) in [
        ([adam, adam, adam], true, adam),
        ([sgd, sgd, sgd], true, sgd),
        ([adam, sgd, adam], true, None),
        ([adam, adam, sgd], true, None),
        ([None, adam, adam], true, None),
        ([adam, adam, None], true, None),
        ([adam, adam, None], false, adam),
        ([adam, adam, sgd], false, adam),
        ([adam, sgd, None], false, None),
        ([None, None, None], true, None),
    ] {
        let call = |(rank, stepping)| {
            let bucket = if rank < 2 || last_names_it { 5 } else { 0 };
            (Call { bucket, ..all_reduce(4) }, TensorInfo { stepping, ..TensorInfo::default() })
        };
        for outcome in agree_all_with(said.into_iter().enumerate().map(call).collect()) {
            assert_eq!(outcome.unwrap().bucket.unwrap().stepping, expected, "{said:?}");
        }
    }
}

#[test]
fn ranks_whose_tensors_are_in_different_places_are_told_so() {
    let mut calls = vec![all_reduce(4); 2];
    for (device_slot, expected) in
        [(0, "SUM as #7"), (2, "on the 2. GPU that it uses in this group")]
    {
        (calls[0].view.device_slot, calls[1].view.device_slot) = (1, device_slot);
        for outcome in agree_all(calls.clone()) {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("rank 0 called all_reduce of 4 elements"), "{text}");
            assert!(text.contains("on its GPU") && text.contains(expected), "{text}");
        }
    }
}

#[test]
fn ranks_that_name_different_buckets_are_told_so() {
    let mut calls = vec![all_reduce(4); 2];
    calls[0].bucket = 5;
    calls[1].bucket = 6;
    for outcome in agree_all(calls) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 0 exchanges gradient bucket 5"), "{text}");
        assert!(text.contains("rank 1 bucket 6"), "{text}");
    }
}

#[test]
fn different_calls_raise_on_every_rank_with_every_view() {
    let mut calls = vec![all_reduce(4); 4];
    calls[2].view.numel = 5;
    for outcome in agree_all(calls) {
        let text = outcome.unwrap_err().to_string();
        let expected = "rank 0, rank 1, rank 3 called all_reduce of 4 elements of float32 \
                        with SUM as #7; rank 2 called all_reduce of 5 elements";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn split_sizes_that_do_not_fit_raise_on_third_ranks_too() {
    let mut calls: Vec<Call> = (0..3).map(|_| all_reduce(0)).collect();
    for call in &mut calls {
        call.view.kind = CollectiveKind::AllToAllSingle;
        call.sends = vec![2, 2, 2];
        call.receives = vec![2, 2, 2];
    }
    assert!(agree_all(calls.clone()).iter().all(Result::is_ok));
    calls[0].sends[1] = 3;
    for outcome in agree_all(calls) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 0 sends 3 elements to rank 1, which expects 2"), "{text}");
    }
}

#[test]
fn wrong_arguments_of_one_rank_raise_on_every_rank() {
    let mut calls = vec![all_reduce(4); 3];
    calls[1].complaint = "has wrong arguments: two tensors, expected one".into();
    for outcome in agree_all(calls) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 1 has wrong arguments: two tensors, expected one"), "{text}");
    }
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    let mut ranks = fabrics(2);
    let (mut peers, _interrupt) = ranks.remove(0);
    let mut call = all_reduce(4);
    call.timeout = Duration::from_millis(30);
    let error = agree_on(&mut peers, 0, &call).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("Timed out") && text.contains("rank 1"), "{text}");
    assert!(!error.leaves_group_usable());
}

#[test]
fn a_peer_that_leaves_is_named_with_its_reason() {
    let mut ranks = fabrics(2);
    let (mut leaving, _) = ranks.pop().unwrap();
    let (mut peers, _) = ranks.pop().unwrap();
    leaving.say_goodbye(Goodbye { gave_up: false, reason: "it was shut down".into() });
    let error = agree_on(&mut peers, 0, &all_reduce(4)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("lost rank 1") && text.contains("it was shut down"), "{text}");
}

#[test]
fn an_interrupt_ends_the_wait() {
    let mut ranks = fabrics(2);
    let (mut peers, interrupt) = ranks.remove(0);
    let waiting = std::thread::spawn(move || agree_on(&mut peers, 0, &all_reduce(4)));
    interrupt.raise();
    assert!(matches!(waiting.join().unwrap(), Err(Error::Closed(_))));
}

#[test]
fn a_rank_that_opens_its_gpu_meanwhile_is_told_by_what_it_does() {
    let mut ranks = fabrics(2);
    let (mut opening, _) = ranks.pop().unwrap();
    let (mut calling, _) = ranks.pop().unwrap();
    let ids = std::thread::spawn(move || {
        let message = Envelope::new(Tag::NcclIds, 3);
        opening.swap(message.as_bytes(), Instant::now() + Duration::from_secs(10))
    });
    let text = agree_on(&mut calling, 3, &all_reduce(4)).unwrap_err().to_string();
    assert!(text.contains("it is opening its GPU for the group in #3"), "{text}");
    assert!(text.contains("from rank 1"), "{text}");
    ids.join().unwrap().unwrap();
}
