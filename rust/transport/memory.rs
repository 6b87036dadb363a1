//! Ranks that are threads of one process, for tests.

use super::frame::Goodbye;
use super::interrupt::Interrupt;
use super::peers::{Failure, Peers, Watch};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

pub struct MemoryPeers {
    rank: usize,
    senders: Vec<Sender<Result<Vec<u8>, Goodbye>>>,
    receivers: Vec<Receiver<Result<Vec<u8>, Goodbye>>>,
    interrupt: Arc<Interrupt>,
    /// Messages that arrived while this rank was watching, for the next swap.
    early: Vec<VecDeque<Result<Vec<u8>, Goodbye>>>,
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
            let early = (0..size).map(|_| VecDeque::new()).collect();
            let peers =
                MemoryPeers { rank, senders, receivers, interrupt: interrupt.clone(), early };
            (peers, interrupt)
        })
        .collect()
}

impl MemoryPeers {
    /// The first goodbye counts: a rank that gave up says goodbye again when it leaves.
    fn goodbye_of(&self, rank: usize) -> Option<&Goodbye> {
        self.early[rank].iter().find_map(|came| came.as_ref().err())
    }
}

impl Watch for MemoryPeers {
    fn check(&mut self) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            return Err(Failure::Interrupted);
        }
        for rank in (0..self.size()).filter(|peer| *peer != self.rank) {
            self.early[rank].extend(self.receivers[rank].try_iter());
            if let Some(Goodbye { gave_up: true, reason }) = self.goodbye_of(rank) {
                return Err(Failure::Lost { rank, reason: reason.clone() });
            }
        }
        Ok(())
    }

    fn left(&self, rank: usize) -> Option<String> {
        self.goodbye_of(rank).map(|goodbye| goodbye.reason.clone())
    }
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
        message: &[u8],
        with: &[usize],
        inbox: &mut [Vec<u8>],
        deadline: Instant,
    ) -> Result<(), Failure> {
        for peer in with {
            // A peer that is gone is reported below, when nothing arrives from it.
            let _ = self.senders[*peer].send(Ok(message.to_vec()));
        }
        for peer in with.iter().copied() {
            inbox[peer] = loop {
                if self.interrupt.is_raised() {
                    return Err(Failure::Interrupted);
                }
                let came = match self.early[peer].pop_front() {
                    Some(early) => Ok(early),
                    None => self.receivers[peer].recv_timeout(Duration::from_millis(2)),
                };
                match came {
                    Ok(Ok(bytes)) => break bytes,
                    Ok(Err(goodbye)) => {
                        return Err(Failure::Lost { rank: peer, reason: goodbye.reason });
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Failure::Lost { rank: peer, reason: "it is gone".into() });
                    }
                    Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                    Err(RecvTimeoutError::Timeout) => return Err(Failure::Late(vec![peer])),
                }
            };
        }
        Ok(())
    }

    fn watch_until(&mut self, done: &Interrupt, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        while !done.is_raised() && Instant::now() < deadline {
            self.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn say_goodbye(&mut self, goodbye: Goodbye) {
        for sender in &self.senders {
            let _ = sender.send(Err(goodbye.clone()));
        }
    }
}
