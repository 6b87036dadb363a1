//! Meshes of ranks that are threads, over loopback.

use super::*;
use crate::transport::tcp::connector::tests::{connectors, soon};

/// The meshes of `size` ranks on loopback.
pub fn meshes(size: usize) -> Vec<Mesh> {
    let connect = |mut connector| std::thread::spawn(move || connect(&mut connector).unwrap());
    let ranks: Vec<_> = connectors(size).into_iter().map(connect).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Swaps `message` with all others and returns what they sent.
fn swap_all(mesh: &mut Mesh, message: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, Failure> {
    let others: Vec<_> = (0..mesh.size()).filter(|peer| *peer != mesh.rank).collect();
    let mut inbox = vec![Vec::new(); mesh.size()];
    mesh.swap(message, &others, &mut inbox, deadline).map(|()| inbox)
}

#[test]
fn every_rank_gets_what_every_other_sent_it_round_after_round() {
    for size in 1..=5 {
        let ranks: Vec<_> = meshes(size)
            .into_iter()
            .map(|mut mesh| {
                std::thread::spawn(move || {
                    for round in 0..50u8 {
                        let own = mesh.rank() as u8;
                        let got = swap_all(&mut mesh, &[own, round], soon());
                        for (peer, message) in got.unwrap().into_iter().enumerate() {
                            if peer as u8 != own {
                                assert_eq!(message, [peer as u8, round]);
                            }
                        }
                    }
                    mesh.say_goodbye(Goodbye { gave_up: false, reason: "done".into() });
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }
}

#[test]
fn a_rank_that_is_gone_is_noticed_at_once() {
    let mut meshes = meshes(3);
    let never = Interrupt::new().unwrap();
    let limit = Duration::from_secs(10);
    assert_eq!(meshes[0].watch_until(&never, Duration::ZERO), Ok(()));
    drop(meshes.remove(1));
    let failure = meshes[0].watch_until(&never, limit).unwrap_err();
    assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
    let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
    assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
}

#[test]
fn a_rank_that_dies_after_it_has_answered_does_not_let_the_others_wait() {
    let mut meshes = meshes(3);
    let _late = meshes.pop().unwrap();
    let mut dying = meshes.pop().unwrap();
    // It sends its message, gets nothing, and ends without a word.
    assert!(swap_all(&mut dying, &[1], Instant::now()).is_err());
    drop(dying);
    let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
    assert!(matches!(failure, Failure::Lost { rank: 1, .. }), "{failure:?}");
}

#[test]
fn a_goodbye_is_told_even_behind_a_message() {
    let mut meshes = meshes(2);
    let mut leaving = meshes.pop().unwrap();
    let past = Instant::now();
    assert_eq!(swap_all(&mut leaving, &[1], past), Err(Failure::Late(vec![0])));
    leaving.say_goodbye(Goodbye { gave_up: true, reason: "it gave up".into() });
    let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
    assert_eq!(failure, Failure::Lost { rank: 1, reason: "it gave up".into() });
}

#[test]
fn a_peer_that_left_in_order_is_not_lost_to_what_it_took_part_in() {
    let mut meshes = meshes(2);
    let mut leaving = meshes.pop().unwrap();
    assert!(swap_all(&mut leaving, &[1], Instant::now()).is_err());
    leaving.say_goodbye(Goodbye { gave_up: false, reason: "it left".into() });
    drop(leaving);
    assert_eq!(swap_all(&mut meshes[0], &[1], soon()), Ok(vec![Vec::new(), vec![1]]));
    let never = Interrupt::new().unwrap();
    assert_eq!(meshes[0].watch_until(&never, Duration::from_millis(50)), Ok(()));
    let failure = swap_all(&mut meshes[0], &[1], soon()).unwrap_err();
    assert_eq!(failure, Failure::Lost { rank: 1, reason: "it left".into() });
}

#[test]
fn an_interrupt_ends_a_wait_at_once() {
    let mut meshes = meshes(2);
    let mut waiting = meshes.remove(0);
    let interrupt = waiting.interrupt.clone();
    let wait = std::thread::spawn(move || swap_all(&mut waiting, &[1], soon()));
    std::thread::sleep(Duration::from_millis(20));
    interrupt.raise();
    assert_eq!(wait.join().unwrap(), Err(Failure::Interrupted));
}
