//! Lanes: the connections of one rank to its neighbours in a ring of hosts.

use super::ConnectError;
use super::reception::Reception;
use std::net::TcpStream;

/// One connection out and one in: between two hosts both directions of a link are in use.
pub struct LaneSockets {
    pub to_next: TcpStream,
    pub from_previous: TcpStream,
}

/// Makes `count` lanes. With two hosts, `next` and `previous` are the same rank.
pub fn connect(
    reception: &mut Reception,
    next: usize,
    previous: usize,
    count: usize,
) -> Result<Vec<LaneSockets>, ConnectError> {
    // Lane 0 is the mesh.
    let numbers = 1..=count as u32;
    let outgoing: Vec<_> =
        numbers.clone().map(|lane| reception.reach(next, lane)).collect::<Result<_, _>>()?;
    let mut lanes = Vec::with_capacity(count);
    for (lane, to_next) in numbers.zip(outgoing) {
        let mut from_previous = reception.receive(&[previous], lane)?;
        lanes.push(LaneSockets { to_next, from_previous: from_previous.remove(0) });
    }
    Ok(lanes)
}
