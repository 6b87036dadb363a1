//! Channels: the connections of one rank to its neighbours in a ring of hosts, and its links to the
//! carriers of its shard on all other hosts.

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

/// The channel number of links: far above those of any ring.
const LINK_CHANNEL: u32 = 1 << 16;

/// Connects each of `ranks` with every other. Returns the other ranks, in any order, with this rank's
/// connection to each. The lower rank of a pair reaches out.
pub fn connect_links(
    connector: &mut Connector,
    ranks: &[usize],
) -> Result<Vec<(usize, TcpStream)>, ConnectError> {
    let own = connector.rank();
    let (below, above): (Vec<usize>, Vec<usize>) =
        ranks.iter().filter(|rank| **rank != own).partition(|rank| **rank < own);
    let reached: Vec<_> =
        above.iter().map(|rank| connector.reach(*rank, LINK_CHANNEL)).collect::<Result<_, _>>()?;
    let accepted = connector.receive(&below, LINK_CHANNEL)?;
    Ok(below.into_iter().zip(accepted).chain(above.into_iter().zip(reached)).collect())
}
