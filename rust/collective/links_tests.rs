//! Links over sockets: messages arrive whole, in order, whatever the pieces; strange bytes are refused.

use super::*;
use crate::transport::interrupt::Interrupt;
use proptest::prelude::*;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// The links of `hosts` hosts, which are ranks 0, 1, …, over Unix sockets.
pub fn connected(hosts: usize) -> Vec<Links> {
    let mut peers: Vec<Vec<Option<(usize, Box<dyn Stream>)>>> =
        (0..hosts).map(|_| (0..hosts).map(|_| None).collect()).collect();
    for one in 0..hosts {
        for other in one + 1..hosts {
            let (here, there) = UnixStream::pair().unwrap();
            here.set_nonblocking(true).unwrap();
            there.set_nonblocking(true).unwrap();
            peers[one][other] = Some((other, Box::new(here)));
            peers[other][one] = Some((one, Box::new(there)));
        }
    }
    peers.into_iter().map(Links::new).collect()
}

fn receive_all(links: &mut [Links], count: usize) -> Vec<Vec<Arrived>> {
    let never = Interrupt::new().unwrap();
    let mut arrived: Vec<Vec<Arrived>> = links.iter().map(|_| Vec::new()).collect();
    let limit = Instant::now() + Duration::from_secs(20);
    while arrived.iter().any(|arrived| arrived.len() < count) {
        assert!(Instant::now() < limit, "messages are missing");
        let mut has_moved = false;
        for (links, arrived) in links.iter_mut().zip(&mut arrived) {
            has_moved |= links.take_turn(arrived).unwrap();
        }
        if !has_moved {
            links[0].sleep(never.as_fd(), Duration::from_millis(1));
        }
    }
    arrived
}

#[test]
fn messages_of_every_size_arrive_at_all_hosts_in_order() {
    let mut links = connected(3);
    let sizes = [0, 1, HEADER_BYTES, 70_000, 0, 3 << 20];
    for sender in 0..3 {
        for receiver in (0..3).filter(|receiver| *receiver != sender) {
            for (part, size) in sizes.into_iter().enumerate() {
                let bytes = vec![(sender * 16 + receiver) as u8; size];
                let label = Label { exchange: 7, part: part as u32 };
                links[sender].send(receiver, label, Arc::new(bytes));
            }
        }
    }
    for (receiver, arrived) in receive_all(&mut links, 2 * sizes.len()).into_iter().enumerate() {
        for sender in (0..3).filter(|sender| *sender != receiver) {
            let from: Vec<_> = arrived.iter().filter(|one| one.host == sender).collect();
            for ((part, size), one) in sizes.into_iter().enumerate().zip(from) {
                assert_eq!(one.label, Label { exchange: 7, part: part as u32 });
                assert_eq!(one.bytes, vec![(sender * 16 + receiver) as u8; size]);
            }
        }
    }
    let each = sizes.iter().map(|size| (size + HEADER_BYTES) as u64).sum::<u64>();
    assert!(links.iter().all(|links| links.sent() == 2 * each && !links.is_sending(7)));
}

#[test]
fn what_a_host_sent_before_it_left_arrives_and_then_it_is_named_by_its_rank() {
    let mut links = connected(3);
    let label = Label { exchange: 7, part: 1 };
    links[1].send(0, label, Arc::new(vec![5; 1000]));
    links[1].take_turn(&mut Vec::new()).unwrap();
    links.remove(1);
    let mut arrived = Vec::new();
    assert_eq!(links[0].take_turn(&mut arrived), Ok(true));
    assert_eq!(arrived, [Arrived { host: 1, label, bytes: vec![5; 1000] }]);
    let loss = links[0].loss_of(1);
    assert!(matches!(loss, Some(Failure::Lost { rank: 1, .. })), "{loss:?}");
    // The others are still there, and nothing waits for the one that has left.
    assert_eq!(links[0].loss_of(2), None);
    links[0].send(1, label, Arc::new(vec![5; 1000]));
    assert_eq!(links[0].take_turn(&mut arrived), Ok(false));
    assert!(!links[0].is_sending(7));
}

proptest! {
    #[test]
    fn strange_bytes_are_refused_or_wait_for_more_and_never_take_much_memory(
        bytes in proptest::collection::vec(any::<u8>(), 0..200)
    ) {
        let (here, mut there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let mut links = Links::new(vec![None, Some((1, Box::new(here) as Box<dyn Stream>))]);
        there.write_all(&bytes).unwrap();
        let mut arrived = Vec::new();
        match links.take_turn(&mut arrived) {
            Ok(_) => prop_assert!(arrived.iter().all(|one| one.bytes.len() <= bytes.len())),
            Err(Failure::Garbled { rank, reason }) => {
                prop_assert!(rank == 1 && reason.contains("the most"), "{}", reason);
            }
            Err(other) => prop_assert!(false, "{:?}", other),
        }
    }
}
