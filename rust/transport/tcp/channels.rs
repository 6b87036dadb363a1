//! Channels: the connections of one rank to its neighbours in a ring of hosts.

use super::connector::{ConnectError, Connector};
use std::net::TcpStream;

/// One connection out and one in, so that both directions of a link are in use between two hosts.
pub struct ChannelSockets {
    pub to_next: TcpStream,
    pub from_previous: TcpStream,
}

/// Makes `count` channels. With two hosts, `next` and `previous` are the same rank.
pub fn connect(
    connector: &mut Connector,
    next: usize,
    previous: usize,
    count: usize,
) -> Result<Vec<ChannelSockets>, ConnectError> {
    // Channel 0 is the mesh.
    let numbers = 1..=count as u32;
    let outgoing: Vec<_> =
        numbers.clone().map(|channel| connector.reach(next, channel)).collect::<Result<_, _>>()?;
    let mut channels = Vec::with_capacity(count);
    for (channel, to_next) in numbers.zip(outgoing) {
        let mut from_previous = connector.receive(&[previous], channel)?;
        channels.push(ChannelSockets { to_next, from_previous: from_previous.remove(0) });
    }
    Ok(channels)
}
