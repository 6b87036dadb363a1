//! The room in which a lane's exchanges are prepared: norms, choice and what goes over the wire. One
//! exchange comes after the other on the stream, so all use the same memory. It grows and never shrinks.

use super::fault::Result;
use super::lane::Lane;
use super::memory::Memory;

#[derive(Debug, Default)]
pub struct Room {
    pub norms: Part,
    pub gradient_norms: Part,
    pub chosen: Part,
    pub slots: Part,
    pub wire: Part,
}

/// Some memory, as large as was ever asked for.
#[derive(Debug, Default)]
pub struct Part(Option<Memory>);

impl Part {
    /// Makes it so large at least, and returns its address. What was in it is gone if it grows.
    pub fn fit(&mut self, lane: &Lane, bytes: usize) -> Result<u64> {
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // First: so both are never there at a time. It is given back in the order of the stream.
            self.0 = None;
            self.0 = Some(lane.memory(bytes)?);
        }
        Ok(self.0.as_ref().map_or(0, Memory::address))
    }
}
