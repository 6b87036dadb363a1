//! The exchange: one loop that drives all channels until every tape is done.
//!
//! It sleeps when nothing moves, but never for long without checking the peers.

use super::channel::{Broken, Neighbour, RingChannel, Turn};
use super::tape::Tape;
use crate::collective::topology::Neighbours;
use crate::transport::{Failure, Watch, loss_reason, reason_of_loss};
use rustix::event::{Timespec, poll};
use std::time::{Duration, Instant};

/// How often the watch is checked. Only this notices a death elsewhere in the ring.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// A slow link wakes a rank for every few packets. If a turn received less than this and much is
/// still missing, the loop pauses to let more arrive: that saves wake-ups, and socket buffers keep
/// the link busy meanwhile. A fast link delivers more per turn and is not affected.
const SMALL_TURN: usize = 128 * 1024;
const SLOW_LINK_PAUSE: Duration = Duration::from_millis(1);

/// Returns when all bytes have arrived and been handed to the sockets. With fewer tapes than
/// channels, the last channels stay idle.
pub fn run(
    channels: &mut [RingChannel],
    tapes: &mut [Tape],
    neighbours: Neighbours,
    watch: &mut dyn Watch,
    deadline: Instant,
) -> Result<(), Failure> {
    let mut next_check = Instant::now() + CHECK_EVERY;
    loop {
        let mut turn = Turn { received: 0, is_drained: true };
        for (channel, tape) in channels.iter_mut().zip(&mut *tapes) {
            let one =
                channel.take_turn(tape).map_err(|broken| explain(broken, neighbours, watch))?;
            turn.received += one.received;
            turn.is_drained &= one.is_drained;
        }
        if tapes.iter().all(|tape| tape.all_arrived() && tape.all_sent()) {
            return Ok(());
        }
        let now = Instant::now();
        if now >= next_check {
            watch.check()?;
            next_check = now + CHECK_EVERY;
        }
        if now >= deadline {
            let missing = tapes.iter().any(|tape| !tape.all_arrived());
            return Err(match missing {
                // With two hosts it can only be the other one.
                true if neighbours.previous != neighbours.next => {
                    Failure::Stalled { through: neighbours.previous }
                }
                true => Failure::Late(vec![neighbours.previous]),
                false => Failure::Late(vec![neighbours.next]),
            });
        }
        if turn.is_drained {
            let missing: usize = tapes.iter().map(Tape::missing).sum();
            if (1..SMALL_TURN).contains(&turn.received) && missing > SMALL_TURN * 8 {
                std::thread::sleep(SLOW_LINK_PAUSE);
            }
            sleep(channels, tapes, next_check.min(deadline).saturating_duration_since(now));
        }
    }
}

/// Sleeps until something can move, or for `limit`.
fn sleep(channels: &[RingChannel], tapes: &[Tape], limit: Duration) {
    let mut waits: Vec<_> =
        channels.iter().zip(tapes).flat_map(|(channel, tape)| channel.waits_for(tape)).collect();
    let limit = Timespec::try_from(limit).expect("shorter than an age");
    // After an error (a signal, say) the caller's loop comes back here.
    let _ = poll(&mut waits, Some(&limit));
}

fn explain(broken: Broken, neighbours: Neighbours, watch: &mut dyn Watch) -> Failure {
    let rank = match broken.neighbour {
        Neighbour::Next => neighbours.next,
        Neighbour::Previous => neighbours.previous,
    };
    reason_of_loss(Failure::Lost { rank, reason: loss_reason(&broken.error) }, watch)
}
