//! The devices of a group on this rank: one queue for each device that was opened, and the watchdog over
//! all that is enqueued there. Any thread may ask at any time; nothing here waits for another rank.

use crate::collective::call::OnDevice;
use crate::collective::info::CollectiveInfo;
use crate::cuda::{DeviceQueue, Event, Fault, Watchdog, WatchdogClient};
use crate::error::Error;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Watches the device queues of a group, and names the collective that something went wrong with.
pub type DeviceWatchdog = Watchdog<Arc<CollectiveInfo>>;

#[derive(Default)]
pub struct Devices {
    /// In the order in which they were first opened; device slot 1 is the first. A device that could not
    /// be opened keeps its slot, because the other ranks count it too.
    opened: Mutex<Vec<OpenedDevice>>,
    pub watchdog: Arc<DeviceWatchdog>,
}

/// A device and its queue, or why it has none.
struct OpenedDevice {
    device: i32,
    queue: Result<Arc<DeviceQueue>, Fault>,
}

/// Where a call's tensors are, and the event after which they may be used.
pub struct DeviceTicket {
    pub queue: Arc<DeviceQueue>,
    pub ready: Event,
}

/// Why a call cannot begin on a device.
#[derive(Debug)]
pub enum Obstacle {
    /// The caller gets the error, and it is as if there had been no call.
    Refused(Error),
    /// This rank cannot take part, and has to tell the others, which know the device by its slot.
    Unable { device_slot: u32, error: Error },
}

impl Devices {
    /// Opens a device, unless it is open. A device that could not be opened is tried again. If it fails,
    /// the next call on the device gets the reason.
    pub fn open(
        &self,
        device: i32,
        stream: u64,
        group: impl WatchdogClient<Arc<CollectiveInfo>> + 'static,
    ) {
        let mut opened = lock(&self.opened);
        let known = opened.iter().position(|one| one.device == device);
        let index = known.unwrap_or(opened.len());
        if opened.get(index).is_some_and(|one| one.queue.is_ok()) {
            return;
        }
        let queue = DeviceQueue::open(index as u32 + 1, device, stream)
            .and_then(|queue| self.watchdog.start(group).map(|()| Arc::new(queue)));
        if let Err(fault) = &queue {
            log::info!("GPU {device} cannot be opened: {fault}");
        }
        match opened.get_mut(index) {
            Some(one) => one.queue = queue,
            None => opened.push(OpenedDevice { device, queue }),
        }
    }

    /// Records, on the caller's thread, what the caller has put on its stream so far.
    pub fn ticket(&self, at: OnDevice) -> Result<DeviceTicket, Obstacle> {
        let opened = lock(&self.opened);
        let found = opened.iter().position(|one| one.device == at.device);
        let device_slot = found.unwrap_or(opened.len()) as u32 + 1;
        let queue = match found.map(|index| opened[index].queue.clone()) {
            Some(Ok(queue)) => queue,
            other => {
                let why = match other {
                    Some(Err(fault)) => fault.to_string(),
                    _ => "it was not opened for this group".to_string(),
                };
                let error = Error::Operation(format!("GPU {} cannot be used: {why}", at.device));
                return Err(Obstacle::Unable { device_slot, error });
            }
        };
        drop(opened);
        let ready = match queue.is_capturing(at.stream) {
            Ok(true) => {
                return Err(Obstacle::Refused(Error::Operation(format!(
                    "gflow: a call on GPU {} is refused: this stream is being captured into a CUDA graph, \
                     and an exchange of gradients cannot be part of one: the ranks agree on each anew. \
                     Call it outside of the capture",
                    at.device
                ))));
            }
            Ok(false) => queue.record(at.stream),
            Err(fault) => Err(fault),
        };
        match ready {
            Ok(ready) => Ok(DeviceTicket { queue, ready }),
            Err(fault) => {
                let error = Error::Operation(format!("GPU {}: {fault}", at.device));
                Err(Obstacle::Unable { device_slot, error })
            }
        }
    }

    /// The queue of the device in this slot.
    pub fn queue(&self, device_slot: u32) -> Option<Arc<DeviceQueue>> {
        lock(&self.opened).get((device_slot as usize).checked_sub(1)?)?.queue.clone().ok()
    }
}
