//! Logs, once per wait, which ranks keep this one waiting. Costs nothing when debug records are off.

use std::time::{Duration, Instant};

/// A wait that is longer is worth a record.
const SLOW: Duration = Duration::from_secs(1);

pub struct SlowWait {
    /// When to report; `None` if that is done or logging is off.
    report_at: Option<Instant>,
    reported: Option<Instant>,
}

impl SlowWait {
    pub fn start() -> SlowWait {
        let is_wanted = log::log_enabled!(log::Level::Debug);
        SlowWait { report_at: is_wanted.then(|| Instant::now() + SLOW), reported: None }
    }

    /// The moment until which a wait may sleep: `deadline`, or earlier if a report is due.
    pub fn wake_by(&self, deadline: Instant) -> Instant {
        self.report_at.map_or(deadline, |at| at.min(deadline))
    }

    /// Call it whenever the wait wakes up and some ranks are still missing.
    pub fn check(&mut self, missing: impl FnOnce() -> Vec<usize>) {
        let Some(at) = self.report_at else { return };
        if Instant::now() >= at {
            let seconds = SLOW.as_secs();
            log::debug!("still waiting after {seconds} s for {}", named_ranks(&missing()));
            (self.report_at, self.reported) = (None, Some(at));
        }
    }

    /// Call it once all ranks are there.
    pub fn end(self) {
        if let Some(at) = self.reported {
            let waited = SLOW + at.elapsed();
            log::debug!("the slow ranks have come, after {:.1} s", waited.as_secs_f64());
        }
    }
}

/// "rank 3" or "ranks 1, 4".
pub fn named_ranks(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}
