//! The region: the ranks of one host, each with a segment that all of them have mapped.
//!
//! Every segment has a control (two counters and a event_count), two slots for messages, some slots for
//! blocks of tensors on their way, and a heap for the tensors that live there. A rank writes into
//! another's segment only where a collective says so, between counters that say when. No wait here
//! is longer than its deadline, and none misses a peer's death by more than [`SLICE`].

use super::arena::Arena;
use super::counter::Counter;
use super::event_count::{EventCount, SpinPolicy};
use super::segment::Segment;
use crate::transport::{Failure, Watch};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest message that ranks of one host can swap.
pub const MESSAGE_BYTES: usize = crate::transport::frame::MAX_PAYLOAD;
/// Blocks of tensors on their way: so many can be filled, summed or emptied at a time.
pub const BLOCK_SLOTS: usize = 4;
/// Small enough that blocks stay in the cache that the ranks share, large enough that a rank which
/// has to wait for a core does not wait often. (25 MiB on 2 cores: with 128 KiB less than half as
/// fast for 2 ranks, with 2 MiB a third slower for 4.)
pub const BLOCK_BYTES: usize = 512 * 1024;

const PAGE: usize = 4096;
const MESSAGE_STRIDE: usize = MESSAGE_BYTES + PAGE;
const MESSAGES_AT: usize = PAGE;
const BLOCKS_AT: usize = MESSAGES_AT + 2 * MESSAGE_STRIDE;
/// Where the heap begins, and the least that a segment must hold.
pub const HEAP_AT: usize = BLOCKS_AT + BLOCK_SLOTS * BLOCK_BYTES;

/// How long a rank sleeps before it looks whether its peers are still there.
const SLICE: Duration = Duration::from_millis(50);

/// Alone on its cache lines (processors fetch them in pairs), so that ranks do not slow each other.
#[repr(C, align(128))]
struct Alone<T>(T);

/// What a rank shows the others. It lies at the start of its segment.
#[repr(C)]
struct ControlBlock {
    posted: Alone<Counter>,
    progress: Alone<Counter>,
    event_count: Alone<EventCount>,
    /// Over zero once the rank has given up: what it posted is void.
    gone: Alone<Counter>,
}

pub struct SharedRegion {
    /// This rank's local_rank among the ranks of the host.
    own: usize,
    /// The ranks of the group that are here, ascending.
    ranks: Vec<usize>,
    /// One per local_rank.
    segments: Vec<Arc<Segment>>,
    arena: Arc<Arena>,
    spin_policy: SpinPolicy,
    /// Messages posted so far, and steps taken; the same on every rank between collectives.
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
        let mut local_ranks: Vec<_> =
            peers.into_iter().map(|(rank, peer)| (rank, Arc::new(peer))).collect();
        local_ranks.push((rank, arena.segment().clone()));
        local_ranks.sort_by_key(|(rank, _)| *rank);
        let (ranks, segments): (Vec<_>, Vec<_>) = local_ranks.into_iter().unzip();
        let own = ranks.iter().position(|other| *other == rank).expect("it was put there");
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin_policy = SpinPolicy::for_ranks(ranks.len(), cores);
        Ok(SharedRegion { own, ranks, segments, arena, spin_policy, swaps: 0, steps: 0 })
    }

    pub fn local_rank(&self) -> usize {
        self.own
    }

    /// The ranks of this host, by local_rank.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Shows `message` to the others of this host. They and this rank must all post before any of
    /// them posts again but one: that is what makes two slots enough.
    pub fn post(&mut self, message: &[u8]) {
        assert!(message.len() <= MESSAGE_BYTES, "a message of {} bytes", message.len());
        let slot = self.message_slot(self.own, self.swaps);
        // SAFETY: the slot holds MESSAGE_BYTES and a length before them. Nobody reads it now: the
        // others have posted since the message that was here before, so they are done with it.
        unsafe {
            slot.cast::<u64>().write(message.len() as u64);
            slot.add(size_of::<u64>()).copy_from_nonoverlapping(message.as_ptr(), message.len());
        }
        self.swaps += 1;
        self.control(self.own).posted.0.advance_to(self.swaps);
        self.notify_others();
    }

    /// Waits for the others' messages and puts each where its rank is in `inbox`.
    pub fn collect(
        &self,
        inbox: &mut [Vec<u8>],
        watch: &mut dyn Watch,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.wait(watch, deadline, |local_rank| {
            self.control(local_rank).posted.0.has_reached(self.swaps)
        })?;
        if (0..self.ranks.len()).any(|local_rank| self.control(local_rank).gone.0.has_reached(1)) {
            watch.check()?;
        }
        for (local_rank, rank) in
            self.ranks.iter().enumerate().filter(|(local_rank, _)| *local_rank != self.own)
        {
            let slot = self.message_slot(local_rank, self.swaps - 1);
            let message = &mut inbox[*rank];
            message.clear();
            // SAFETY: the owner wrote it before the counter said so, and writes this slot again
            // only after this rank has posted once more. A length is bounded before it is used.
            unsafe {
                let bytes = (slot.cast::<u64>().read() as usize).min(MESSAGE_BYTES);
                message.reserve(bytes);
                slot.add(size_of::<u64>()).copy_to_nonoverlapping(message.as_mut_ptr(), bytes);
                message.set_len(bytes);
            }
        }
        Ok(())
    }

    /// Says that this rank takes part in nothing any more, not even in what it has posted.
    pub fn give_up(&self) {
        self.control(self.own).gone.0.advance_to(1);
    }

    /// How many steps the ranks have taken together. A collective counts from here.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Says that this rank has taken one step more.
    pub fn step(&mut self) {
        self.steps += 1;
        self.control(self.own).progress.0.advance_to(self.steps);
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

    /// The memory of a block on its way: BLOCK_BYTES of the segment of `local_rank`.
    pub fn block(&self, local_rank: usize, number: usize) -> *mut u8 {
        let offset = BLOCKS_AT + (number % BLOCK_SLOTS) * BLOCK_BYTES;
        // SAFETY: within the segment, whose size was checked when it was made or adopted.
        unsafe { self.segments[local_rank].base().add(offset) }
    }

    /// The memory of a tensor in the heap of `local_rank`, if those bytes are there.
    pub fn tensor(&self, local_rank: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let segment = &self.segments[local_rank];
        let start = usize::try_from(offset).ok().filter(|start| *start >= HEAP_AT)?;
        let end = start.checked_add(bytes)?;
        // SAFETY: just checked to be within the segment.
        (end <= segment.bytes()).then(|| unsafe { segment.base().add(start) })
    }

    fn wait(
        &self,
        watch: &mut dyn Watch,
        deadline: Instant,
        has_come: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        let local_ranks = 0..self.ranks.len();
        let all_have_come =
            || local_ranks.clone().all(|local_rank| local_rank == self.own || has_come(local_rank));
        let event_count = &self.control(self.own).event_count.0;
        let mut next_look = Instant::now() + SLICE;
        loop {
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let until_look = next_look.saturating_duration_since(now);
            if event_count.wait(self.spin_policy, left.min(until_look), all_have_come) {
                return Ok(());
            }
            // Woken by a rank that is not the last one: there is nothing else to see yet.
            let now = Instant::now();
            if now < next_look && now < deadline {
                continue;
            }
            next_look = now + SLICE;
            let mut failure = watch.check().err();
            let missing = |local_rank: &usize| *local_rank != self.own && !has_come(*local_rank);
            if failure.is_none() {
                let gone = local_ranks.clone().filter(missing).find_map(|local_rank| {
                    let rank = self.ranks[local_rank];
                    watch.left(rank).map(|reason| Failure::Lost { rank, reason })
                });
                failure = gone;
            }
            if failure.is_none() && now >= deadline {
                let late = local_ranks
                    .clone()
                    .filter(missing)
                    .map(|local_rank| self.ranks[local_rank])
                    .collect();
                failure = Some(Failure::Late(late));
            }
            // Once more: a rank may have done its part and then left, while this one looked.
            match failure {
                Some(_) if all_have_come() => return Ok(()),
                Some(failure) => return Err(failure),
                None => {}
            }
        }
    }

    fn notify_others(&self) {
        for local_rank in (0..self.ranks.len()).filter(|local_rank| *local_rank != self.own) {
            self.control(local_rank).event_count.0.notify();
        }
    }

    fn control(&self, local_rank: usize) -> &ControlBlock {
        // SAFETY: every segment begins with a control, which only holds atomics that are valid
        // whatever their value, and lives as long as the segment.
        unsafe { &*self.segments[local_rank].base().cast::<ControlBlock>() }
    }

    fn message_slot(&self, local_rank: usize, number: u64) -> *mut u8 {
        let offset = MESSAGES_AT + (number % 2) as usize * MESSAGE_STRIDE;
        // SAFETY: within the segment, whose size was checked when it was made or adopted.
        unsafe { self.segments[local_rank].base().add(offset) }
    }
}
