//! The paths of a group on this rank: one through host memory, one for each device.

use super::courier::Courier;
use super::device_path::DevicePath;
use super::devices::Devices;
use super::exchange_path::ExchangePath;
use super::failure::ExchangeFailure;
use super::host_path::HostPath;
use super::parcel::Parcel;
use super::two_legs::TwoLegs;
use crate::transport::Failure;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

#[derive(Default)]
pub struct Paths {
    host: HostPath,
    /// Indexed by device slot; made when a device is first used.
    devices: BTreeMap<u32, DevicePath>,
    opened: Arc<Devices>,
}

impl Paths {
    pub fn set_courier(&mut self, courier: Courier<Parcel>) {
        self.host.courier = Some(courier);
    }

    pub fn set_two_legs(&mut self, two_legs: TwoLegs) {
        self.host.two_legs = Some(two_legs);
    }

    pub fn set_devices(&mut self, devices: Arc<Devices>) {
        self.opened = devices;
    }

    /// The path of `rank` for tensors in this device slot.
    pub fn select(
        &mut self,
        device_slot: u32,
        rank: usize,
    ) -> Result<&mut dyn ExchangePath, ExchangeFailure> {
        if device_slot == 0 {
            return Ok(&mut self.host);
        }
        match self.devices.entry(device_slot) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(unknown) => {
                let Some(queue) = self.opened.queue(device_slot) else {
                    return Err(Failure::Broken(format!("no device in slot {device_slot}")).into());
                };
                let watchdog = self.opened.watchdog.clone();
                Ok(unknown.insert(DevicePath::new(queue, watchdog, rank)))
            }
        }
    }
}
