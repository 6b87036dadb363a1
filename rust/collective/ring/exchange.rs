//! The exchange: one loop that drives all channels until every tape has run through.
//!
//! It sleeps when nothing moves, and must never do so for long without looking after the peers.

use super::channel::{Broken, Neighbour, RingChannel, Turn};
use super::tape::Tape;
use crate::transport::{Failure, Watch, ended};
use rustix::event::{Timespec, poll};
use std::time::{Duration, Instant};

/// How often the watch is asked. Only this notices a death elsewhere in the ring.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long the watch may take to know the reason for which a channel ended.
const REASON_LIMIT: Duration = Duration::from_millis(100);
const REASON_PAUSE: Duration = Duration::from_millis(2);

/// A slow link wakes a rank for every few packets. If a turn brought less than this and much is
/// still missing, more is let come first: that saves wake-ups, and the buffers of the sockets keep
/// the link busy meanwhile. A fast link brings more, so nothing is lost there.
const SMALL_TURN: usize = 128 * 1024;
const SLOW_LINK_PAUSE: Duration = Duration::from_millis(1);

/// The ranks at the other ends of the channels.
#[derive(Debug, Clone, Copy)]
pub struct Ranks {
    pub next: usize,
    pub previous: usize,
}

/// Returns when all bytes have arrived and all have been handed to the sockets. There may be fewer
/// tapes than channels; the channels without one rest.
pub fn run(
    channels: &mut [RingChannel],
    tapes: &mut [Tape],
    ranks: Ranks,
    watch: &mut dyn Watch,
    deadline: Instant,
) -> Result<(), Failure> {
    let mut next_look = Instant::now() + LOOK_EVERY;
    loop {
        let mut turn = Turn { received: 0, is_drained: true };
        for (channel, tape) in channels.iter_mut().zip(&mut *tapes) {
            let one = channel.take_turn(tape).map_err(|broken| explain(broken, ranks, watch))?;
            turn.received += one.received;
            turn.is_drained &= one.is_drained;
        }
        if tapes.iter().all(|tape| tape.all_arrived() && tape.all_sent()) {
            return Ok(());
        }
        let now = Instant::now();
        if now >= next_look {
            watch.check()?;
            next_look = now + LOOK_EVERY;
        }
        if now >= deadline {
            let missing = tapes.iter().any(|tape| !tape.all_arrived());
            return Err(match missing {
                // Of two hosts it can only be the other.
                true if ranks.previous != ranks.next => {
                    Failure::Stalled { through: ranks.previous }
                }
                true => Failure::Late(vec![ranks.previous]),
                false => Failure::Late(vec![ranks.next]),
            });
        }
        if turn.is_drained {
            let missing: usize = tapes.iter().map(Tape::missing).sum();
            if (1..SMALL_TURN).contains(&turn.received) && missing > SMALL_TURN * 8 {
                std::thread::sleep(SLOW_LINK_PAUSE);
            }
            sleep(channels, tapes, next_look.min(deadline).saturating_duration_since(now));
        }
    }
}

/// Until something can move, or the limit.
fn sleep(channels: &[RingChannel], tapes: &[Tape], limit: Duration) {
    let mut waits: Vec<_> =
        channels.iter().zip(tapes).flat_map(|(channel, tape)| channel.waits_for(tape)).collect();
    let limit = Timespec::try_from(limit).expect("shorter than an age");
    // An error here (a signal, say) only means another round of the caller's loop.
    let _ = poll(&mut waits, Some(&limit));
}

/// A channel that ended says little: a neighbour that leaves because of a third rank ends it as well.
/// The watch has the reason, as soon as that has come.
fn explain(broken: Broken, ranks: Ranks, watch: &mut dyn Watch) -> Failure {
    let limit = Instant::now() + REASON_LIMIT;
    loop {
        if let Err(failure) = watch.check() {
            return failure;
        }
        if Instant::now() >= limit {
            break;
        }
        std::thread::sleep(REASON_PAUSE);
    }
    let rank = match broken.neighbour {
        Neighbour::Next => ranks.next,
        Neighbour::Previous => ranks.previous,
    };
    Failure::Lost { rank, reason: ended(&broken.error) }
}
