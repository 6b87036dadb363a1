//! Ranks that are threads of one process, for tests.

use super::interrupt::Interrupt;
use super::{Failure, Peers};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

pub struct MemoryPeers {
    rank: usize,
    senders: Vec<Sender<Result<Vec<u8>, String>>>,
    receivers: Vec<Receiver<Result<Vec<u8>, String>>>,
    interrupt: Arc<Interrupt>,
}

/// One `Peers` for each of `size` ranks, with the interrupt of each.
pub fn mesh(size: usize) -> Vec<(MemoryPeers, Arc<Interrupt>)> {
    let mut senders: Vec<Vec<_>> = (0..size).map(|_| Vec::new()).collect();
    let mut receivers: Vec<Vec<_>> = (0..size).map(|_| Vec::new()).collect();
    for receivers_of_rank in &mut receivers {
        for senders_of_peer in &mut senders {
            let (sender, receiver) = channel();
            senders_of_peer.push(sender);
            receivers_of_rank.push(receiver);
        }
    }
    let ranks = senders.into_iter().zip(receivers).enumerate();
    ranks
        .map(|(rank, (senders, receivers))| {
            let interrupt = Arc::new(Interrupt::new().unwrap());
            (MemoryPeers { rank, senders, receivers, interrupt: interrupt.clone() }, interrupt)
        })
        .collect()
}

impl Peers for MemoryPeers {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.senders.len()
    }

    fn swap(
        &mut self,
        message: &dyn Fn(usize) -> Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        for peer in others.clone() {
            // A peer that is gone is reported below, when nothing comes from it.
            let _ = self.senders[peer].send(Ok(message(peer)));
        }
        let mut received = vec![Vec::new(); self.size()];
        for peer in others {
            received[peer] = loop {
                if self.interrupt.is_raised() {
                    return Err(Failure::Interrupted);
                }
                match self.receivers[peer].recv_timeout(Duration::from_millis(2)) {
                    Ok(Ok(bytes)) => break bytes,
                    Ok(Err(reason)) => return Err(Failure::Lost { rank: peer, reason }),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Failure::Lost { rank: peer, reason: "it is gone".into() });
                    }
                    Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                    Err(RecvTimeoutError::Timeout) => return Err(Failure::Late(vec![peer])),
                }
            };
        }
        Ok(received)
    }

    fn find_lost(&mut self, _limit: Duration) -> Option<(usize, String)> {
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        let mut lost = others.filter_map(|peer| match self.receivers[peer].try_recv() {
            Ok(Err(reason)) => Some((peer, reason)),
            Err(TryRecvError::Disconnected) => Some((peer, "it is gone".to_string())),
            _ => None,
        });
        lost.next()
    }

    fn say_goodbye(&mut self, reason: &str) {
        for sender in &self.senders {
            let _ = sender.send(Err(reason.to_string()));
        }
    }
}
