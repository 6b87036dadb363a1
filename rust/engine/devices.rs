//! The devices of a group on this rank: the lanes that were opened, and the watchdog that looks after what
//! is put on them. It may be asked at any time by any thread, and never waits for another rank.

use super::gradients::Doing;
use super::watched::WatchedGroup;
use crate::collective::call::OnDevice;
use crate::cuda::Fault;
use crate::cuda::event::Event;
use crate::cuda::lane::Lane;
use crate::cuda::watchdog::Watchdog;
use crate::error::Error;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Devices {
    lanes: Mutex<Lanes>,
    pub watchdog: Arc<Watchdog<Arc<Doing>>>,
}

#[derive(Default)]
struct Lanes {
    /// In the order in which they were opened; the first has number 1.
    open: Vec<Arc<Lane>>,
    /// Why a device could not be opened.
    closed: BTreeMap<i32, Fault>,
}

/// What a call's tensors need to be worked on: where they are, and what has to be over before.
pub struct Arrival {
    pub lane: Arc<Lane>,
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
        if lanes.open.iter().any(|lane| lane.device == device) {
            return;
        }
        let opened = Lane::open(lanes.next(), device, stream);
        match opened.and_then(|lane| self.watchdog.start(group).map(|()| lane)) {
            Ok(lane) => {
                lanes.closed.remove(&device);
                lanes.open.push(Arc::new(lane));
            }
            Err(fault) => drop(lanes.closed.insert(device, fault)),
        }
    }

    /// Marks, on the caller's thread, what the caller has put on its stream so far.
    pub fn arrive(&self, at: OnDevice) -> Result<Arrival, Obstacle> {
        let lanes = self.lock();
        let found = lanes.open.iter().find(|lane| lane.device == at.device).cloned();
        let Some(lane) = found else {
            let why = match lanes.closed.get(&at.device) {
                Some(fault) => fault.to_string(),
                None => "it was not opened for this group".to_string(),
            };
            let error = Error::Operation(format!("GPU {} cannot be used: {why}", at.device));
            return Err(Obstacle::Unable { lane: lanes.next(), error });
        };
        drop(lanes);
        let mark = match lane.is_captured(at.stream) {
            Ok(true) => {
                return Err(Obstacle::Refused(Error::Operation(format!(
                    "gflow: a call on GPU {} is refused: this stream is being captured into a CUDA graph, \
                     and an exchange of gradients cannot be part of one: the ranks agree on each anew. \
                     Call it outside of the capture",
                    at.device
                ))));
            }
            Ok(false) => lane.mark(at.stream),
            Err(fault) => Err(fault),
        };
        match mark {
            Ok(mark) => Ok(Arrival { lane, mark }),
            Err(fault) => {
                let error = Error::Operation(format!("GPU {}: {fault}", at.device));
                Err(Obstacle::Unable { lane: lane.number, error })
            }
        }
    }

    /// The lane with this number.
    pub fn lane(&self, number: u32) -> Option<Arc<Lane>> {
        self.lock().open.get((number as usize).checked_sub(1)?).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lanes {
    /// The number of the next one that is opened.
    fn next(&self) -> u32 {
        self.open.len() as u32 + 1
    }
}
