//! The memory that the ranks of one host share: a segment of each rank, mapped by all of them.
//!
//! A rank writes into another's segment only where a collective says so, between counters that say
//! when. No wait here exceeds its deadline, and a dead peer is noticed within [`CHECK_EVERY`].

use super::arena::Arena;
use super::counter::Counter;
use super::event_count::{EventCount, SpinPolicy};
use super::layout::{
    BLOCK_BYTES, BLOCK_SLOTS, BLOCKS_AT, HEAP_AT, MESSAGE_BYTES, MESSAGE_SLOTS, MESSAGE_STRIDE,
    MESSAGES_AT,
};
use super::segment::Segment;
use crate::transport::slow_wait::SlowWait;
use crate::transport::{Failure, Watch};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank sleeps before it checks whether its peers are still there.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// Alone on its cache lines (processors fetch them in pairs), so that ranks do not slow each other.
#[repr(C, align(128))]
struct Padded<T>(T);

/// The state that a rank shows the others, at the start of its segment.
#[repr(C)]
struct ControlBlock {
    /// Messages posted.
    posted: Padded<Counter>,
    /// Steps taken.
    progress: Padded<Counter>,
    /// Wakes this rank.
    wake_up: Padded<EventCount>,
    /// Over zero once the rank has given up: what it posted is void.
    gone: Padded<Counter>,
}

pub struct SharedRegion {
    /// Index of this rank among the ranks of the host.
    local_rank: usize,
    /// The ranks of the group on this host, ascending.
    ranks: Vec<usize>,
    /// Indexed by local rank.
    segments: Vec<Arc<Segment>>,
    arena: Arc<Arena>,
    spin_policy: SpinPolicy,
    /// Messages posted and steps taken so far; equal on all ranks between collectives.
    swaps: u64,
    steps: u64,
}

impl SharedRegion {
    /// `peers` are the segments of the other ranks of this host. Fails if one is too small.
    pub fn new(
        rank: usize,
        arena: Arc<Arena>,
        peers: Vec<(usize, Segment)>,
    ) -> Result<SharedRegion, String> {
        if let Some((rank, peer)) = peers.iter().find(|(_, peer)| peer.bytes() < HEAP_AT) {
            return Err(format!("the memory of rank {rank} has only {} bytes", peer.bytes()));
        }
        let mut all: Vec<_> =
            peers.into_iter().map(|(rank, peer)| (rank, Arc::new(peer))).collect();
        all.push((rank, arena.segment().clone()));
        all.sort_by_key(|(rank, _)| *rank);
        let (ranks, segments): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let local_rank = ranks.iter().position(|other| *other == rank).expect("just added");
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin_policy = SpinPolicy::for_ranks(ranks.len(), cores);
        Ok(SharedRegion { local_rank, ranks, segments, arena, spin_policy, swaps: 0, steps: 0 })
    }

    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The ranks of this host, by local rank.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Shows `message` to the other ranks of this host. No rank may post twice before all others
    /// have posted once: that is why two slots are enough.
    pub fn post(&mut self, message: &[u8]) {
        assert!(message.len() <= MESSAGE_BYTES, "a message of {} bytes", message.len());
        let slot = self.message_slot(self.local_rank, self.swaps);
        // SAFETY: the slot holds MESSAGE_BYTES and a length in front. Nobody reads it now: the
        // others have posted since the message that was here before, so they are done with it.
        unsafe {
            slot.cast::<u64>().write(message.len() as u64);
            slot.add(size_of::<u64>()).copy_from_nonoverlapping(message.as_ptr(), message.len());
        }
        self.swaps += 1;
        self.control(self.local_rank).posted.0.advance_to(self.swaps);
        self.notify_others();
    }

    /// Waits for the messages of the others and puts each into `inbox` at its rank.
    pub fn collect(
        &self,
        inbox: &mut [Vec<u8>],
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.wait(watch, deadline, |local_rank| {
            self.control(local_rank).posted.0.has_reached(self.swaps)
        })?;
        let has_gone = |local_rank| self.control(local_rank).gone.0.has_reached(1);
        if (0..self.ranks.len()).any(has_gone) {
            watch.check()?;
        }
        for local_rank in self.others() {
            let slot = self.message_slot(local_rank, self.swaps - 1);
            let message = &mut inbox[self.ranks[local_rank]];
            message.clear();
            // SAFETY: the owner wrote it before it moved the counter, and reuses this slot only
            // after this rank has posted again. The length is bounded before it is used.
            unsafe {
                let bytes = (slot.cast::<u64>().read() as usize).min(MESSAGE_BYTES);
                message.reserve(bytes);
                slot.add(size_of::<u64>()).copy_to_nonoverlapping(message.as_mut_ptr(), bytes);
                message.set_len(bytes);
            }
        }
        Ok(())
    }

    /// Declares that this rank takes no further part, not even in what it has posted.
    pub fn give_up(&self) {
        self.control(self.local_rank).gone.0.advance_to(1);
    }

    /// How many steps the ranks have taken together. A collective counts from here.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Declares that this rank has taken one more step.
    pub fn step(&mut self) {
        self.steps += 1;
        self.control(self.local_rank).progress.0.advance_to(self.steps);
        self.notify_others();
    }

    /// Waits until every rank has taken `steps` steps.
    pub fn await_steps(
        &self,
        steps: u64,
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.wait(watch, deadline, |local_rank| {
            self.control(local_rank).progress.0.has_reached(steps)
        })
    }

    /// The slot for block `number` of a tensor: BLOCK_BYTES in the segment of `local_rank`.
    pub fn block(&self, local_rank: usize, number: usize) -> *mut u8 {
        let offset = BLOCKS_AT + (number % BLOCK_SLOTS) * BLOCK_BYTES;
        // SAFETY: within the segment, whose size was checked when it was created or adopted.
        unsafe { self.segments[local_rank].base().add(offset) }
    }

    /// A tensor in the heap of `local_rank`; `None` if these bytes are not all there.
    pub fn tensor(&self, local_rank: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let segment = &self.segments[local_rank];
        let start = usize::try_from(offset).ok().filter(|start| *start >= HEAP_AT)?;
        let end = start.checked_add(bytes)?;
        // SAFETY: just checked to be within the segment.
        (end <= segment.bytes()).then(|| unsafe { segment.base().add(start) })
    }

    /// Waits until `has_arrived` is true of all other local ranks.
    fn wait(
        &self,
        watch: &mut dyn Watch,
        deadline: Instant,
        has_arrived: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        let all_arrived = || self.others().all(&has_arrived);
        let missing = || self.others().filter(|local_rank| !has_arrived(*local_rank));
        let missing_ranks = || missing().map(|local_rank| self.ranks[local_rank]).collect();
        let wake_up = &self.control(self.local_rank).wake_up.0;
        let mut slow = SlowWait::start();
        let mut next_check = Instant::now() + CHECK_EVERY;
        loop {
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let until_check = next_check.saturating_duration_since(now);
            if wake_up.wait(self.spin_policy, left.min(until_check), all_arrived) {
                slow.end();
                return Ok(());
            }
            // Woken by a rank that is not the last one: nothing else to look at yet.
            let now = Instant::now();
            if now < next_check && now < deadline {
                continue;
            }
            next_check = now + CHECK_EVERY;
            slow.check(missing_ranks);
            let mut failure = watch.check().err();
            if failure.is_none() {
                failure = missing().find_map(|local_rank| {
                    let rank = self.ranks[local_rank];
                    watch.left(rank).map(|reason| Failure::Lost { rank, reason })
                });
            }
            if failure.is_none() && now >= deadline {
                failure = Some(Failure::Late(missing_ranks()));
            }
            // Look again: a rank may have done its part and then left in the meantime.
            match failure {
                Some(_) if all_arrived() => return Ok(()),
                Some(failure) => return Err(failure),
                None => {}
            }
        }
    }

    /// The other local ranks.
    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.local_rank;
        (0..self.ranks.len()).filter(move |local_rank| *local_rank != own)
    }

    fn notify_others(&self) {
        for local_rank in self.others() {
            self.control(local_rank).wake_up.0.notify();
        }
    }

    fn control(&self, local_rank: usize) -> &ControlBlock {
        // SAFETY: every segment begins with a control block, which consists of atomics that are
        // valid whatever their value, and lives as long as the segment.
        unsafe { &*self.segments[local_rank].base().cast::<ControlBlock>() }
    }

    fn message_slot(&self, local_rank: usize, number: u64) -> *mut u8 {
        let offset = MESSAGES_AT + (number % MESSAGE_SLOTS as u64) as usize * MESSAGE_STRIDE;
        // SAFETY: within the segment, whose size was checked when it was created or adopted.
        unsafe { self.segments[local_rank].base().add(offset) }
    }
}
