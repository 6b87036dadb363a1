//! The devices of a group on this rank: the lanes that were opened, and the watchdog that looks after what
//! is put on them. It may be asked at any time by any thread, and never waits for another rank.

use super::gradients::Doing;
use crate::collective::call::OnDevice;
use crate::cuda::event::Event;
use crate::cuda::lane::Lane;
use crate::cuda::watchdog::Watchdog;
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Devices {
    /// In the order in which they were opened; the first has number 1.
    lanes: Mutex<Vec<Arc<Lane>>>,
    pub watchdog: Arc<Watchdog<Arc<Doing>>>,
}

/// What a call's tensors need to be worked on: where they are, and what has to be over before.
pub struct Arrival {
    pub lane: Arc<Lane>,
    pub mark: Event,
}

impl Devices {
    /// Makes a device ready. Done again it does nothing.
    pub fn open(&self, device: i32, stream: u64) -> Result<()> {
        let mut lanes = self.lock();
        if lanes.iter().any(|lane| lane.device == device) {
            return Ok(());
        }
        let number = lanes.len() as u32 + 1;
        let lane = Lane::open(number, device, stream).map_err(|fault| {
            Error::Operation(format!("gflow: GPU {device} cannot be used: {fault}"))
        })?;
        lanes.push(Arc::new(lane));
        Ok(())
    }

    /// Marks, on the caller's thread, what the caller has put on its stream so far.
    pub fn arrive(&self, at: OnDevice) -> Result<Arrival> {
        let found = self.lock().iter().find(|lane| lane.device == at.device).cloned();
        let Some(lane) = found else {
            let what = format!("gflow: GPU {} was not opened for this group", at.device);
            return Err(Error::Operation(what));
        };
        let mark = lane.mark(at.stream).map_err(|fault| {
            Error::Operation(format!("gflow: a call on GPU {} is refused: {fault}", at.device))
        })?;
        Ok(Arrival { lane, mark })
    }

    /// The lane with this number.
    pub fn lane(&self, number: u32) -> Option<Arc<Lane>> {
        self.lock().get((number as usize).checked_sub(1)?).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
