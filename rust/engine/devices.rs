//! The devices of a group on this rank: the lanes that were opened, and the watchdog that looks after what
//! is put on them. It may be asked at any time by any thread, and never waits for another rank.

use super::watched::WatchedGroup;
use crate::collective::call::OnDevice;
use crate::cuda::{DeviceQueue, Event, Fault, Watchdog};
use crate::error::Error;
use crate::gradients::Doing;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Devices {
    /// In the order in which they were first to be opened; the first has number 1. Those that could not
    /// be keep their number: the other ranks count them too.
    lanes: Mutex<Vec<Opened>>,
    pub watchdog: Arc<Watchdog<Arc<Doing>>>,
}

/// A device that was to be opened, and the lane there or why there is none.
struct Opened {
    device: i32,
    lane: Result<Arc<DeviceQueue>, Fault>,
}

/// What a call's tensors need to be worked on: where they are, and what has to be over before.
pub struct Arrival {
    pub lane: Arc<DeviceQueue>,
    pub mark: Event,
}

/// Why a call cannot begin on a device.
#[derive(Debug)]
pub enum Obstacle {
    /// It must not: the caller is told, and it is as if nobody had called.
    Refused(Error),
    /// This rank cannot take part, which the others have to be told. They know the device as `lane`.
    Unable { lane: u32, error: Error },
}

impl Devices {
    /// Makes a device ready. Done again it does nothing, but for one that could not be made ready: that
    /// is tried again. Why it could not is what the next call there meets.
    pub fn open(&self, device: i32, stream: u64, group: WatchedGroup) {
        let mut lanes = self.lock();
        let known = lanes.iter().position(|one| one.device == device);
        let place = known.unwrap_or(lanes.len());
        if lanes.get(place).is_some_and(|one| one.lane.is_ok()) {
            return;
        }
        let lane = DeviceQueue::open(place as u32 + 1, device, stream)
            .and_then(|lane| self.watchdog.start(group).map(|()| Arc::new(lane)));
        match lanes.get_mut(place) {
            Some(one) => one.lane = lane,
            None => lanes.push(Opened { device, lane }),
        }
    }

    /// Marks, on the caller's thread, what the caller has put on its stream so far.
    pub fn arrive(&self, at: OnDevice) -> Result<Arrival, Obstacle> {
        let lanes = self.lock();
        let found = lanes.iter().position(|one| one.device == at.device);
        let number = found.unwrap_or(lanes.len()) as u32 + 1;
        let lane = match found.map(|place| lanes[place].lane.clone()) {
            Some(Ok(lane)) => lane,
            other => {
                let why = match other {
                    Some(Err(fault)) => fault.to_string(),
                    _ => "it was not opened for this group".to_string(),
                };
                let error = Error::Operation(format!("GPU {} cannot be used: {why}", at.device));
                return Err(Obstacle::Unable { lane: number, error });
            }
        };
        drop(lanes);
        let mark = match lane.is_capturing(at.stream) {
            Ok(true) => {
                return Err(Obstacle::Refused(Error::Operation(format!(
                    "gflow: a call on GPU {} is refused: this stream is being captured into a CUDA graph, \
                     and an exchange of gradients cannot be part of one: the ranks agree on each anew. \
                     Call it outside of the capture",
                    at.device
                ))));
            }
            Ok(false) => lane.record(at.stream),
            Err(fault) => Err(fault),
        };
        match mark {
            Ok(mark) => Ok(Arrival { lane, mark }),
            Err(fault) => {
                let error = Error::Operation(format!("GPU {}: {fault}", at.device));
                Err(Obstacle::Unable { lane: lane.slot, error })
            }
        }
    }

    /// The lane with this number.
    pub fn lane(&self, number: u32) -> Option<Arc<DeviceQueue>> {
        self.lock().get((number as usize).checked_sub(1)?)?.lane.clone().ok()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Opened>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
