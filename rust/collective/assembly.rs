//! Assembly: how the fabric of a new group is put together.
//!
//! First the mesh, which reaches everybody. Then the ranks of each host try to share memory, tell
//! all others over the mesh whether it worked, and so agree on the topology: where it did not, the
//! ranks of that host are hosts of their own. Last the rings. Every wait is bounded by the
//! deadline of the connector.

use super::fabric::Fabric;
use super::ring::{Ring, RingChannel};
use super::topology::Topology;
use crate::fork::Unshared;
use crate::transport::handshake::Key;
use crate::transport::shm::arena::Arena;
use crate::transport::shm::fd_exchange::{FdListener, exchange};
use crate::transport::shm::region::SharedRegion;
use crate::transport::tcp::connector::Connector;
use crate::transport::tcp::{ConnectError, channels, mesh};
use crate::transport::{Failure, Peers};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections to each neighbour in the ring. (Measured: benches/ring.rs.)
const CHANNELS: usize = 1;
/// Sharing memory takes milliseconds; a host where it does not work must not hold up the group.
const SHARING_LIMIT: Duration = Duration::from_secs(5);

/// What is known of the ranks of a new group, by rank.
pub struct RankDirectory {
    /// Ranks with the same word share memory if they can.
    pub hosts: Vec<String>,
    /// Where each can be given descriptors; empty if it cannot.
    pub fd_listeners: Vec<String>,
}

/// A fabric, and what came of making it.
pub struct Assembled {
    pub fabric: Fabric,
    /// Where tensors live that the ranks of this host share, if there are several.
    pub arena: Option<Arc<Arena>>,
    /// What the user should know; empty if all went as it should.
    pub notice: String,
}

/// Makes the fabric of this rank, together with all others.
pub fn assemble(
    mut connector: Connector,
    listener: Option<FdListener>,
    directory: &RankDirectory,
    key: &Key,
    deadline: Instant,
) -> Result<Assembled, ConnectError> {
    let rank = connector.rank();
    let mut mesh = mesh::connect(&mut connector)?;
    let hoped_for = Topology::new(&directory.hosts, rank);
    let locals = hoped_for.local_ranks();

    let mut sharing = Ok(None);
    if locals.len() > 1 {
        let soon = deadline.min(Instant::now() + SHARING_LIMIT);
        sharing = share_memory(listener, rank, locals, directory, key, soon, &connector).map(Some);
    }
    let mut complaints = vec![String::new(); directory.hosts.len()];
    if hoped_for.hosts() < directory.hosts.len() {
        let own = sharing.as_ref().err().cloned().unwrap_or_default();
        complaints = tell_all(&mut mesh, &own, deadline)?;
    }
    let failed: Vec<_> = locals.iter().filter(|rank| !complaints[**rank].is_empty()).collect();
    // One rank tells the user for its host.
    let tells = locals[0] == rank;
    let notice = failed.first().filter(|_| tells).map_or(String::new(), |first| {
        let ranks: Vec<_> = locals.iter().map(usize::to_string).collect();
        format!(
            "ranks {} of this host cannot share memory ({}), so they use TCP",
            ranks.join(", "),
            complaints[**first]
        )
    });
    let region = sharing.ok().flatten().filter(|_| failed.is_empty());

    let topology = Topology::new(&actual_hosts(directory, &complaints), rank);
    let mut ring = None;
    if topology.hosts() > 1 && topology.is_carrier() {
        let (next, previous) = topology.neighbours();
        let sockets = channels::connect(&mut connector, next, previous, CHANNELS)?;
        let channels = sockets
            .into_iter()
            .map(|channel| {
                let [to_next, from_previous] =
                    [channel.to_next, channel.from_previous].map(Unshared::new);
                RingChannel::new(Box::new(to_next), Box::new(from_previous))
            })
            .collect();
        ring = Some(Ring::new(topology.host(), topology.hosts(), channels, next, previous));
    }
    let arena = region.as_ref().map(|region| region.arena().clone());
    let fabric = Fabric::new(Box::new(mesh), topology, region, ring);
    Ok(Assembled { fabric, arena, notice })
}

fn share_memory(
    listener: Option<FdListener>,
    rank: usize,
    locals: &[usize],
    directory: &RankDirectory,
    key: &Key,
    deadline: Instant,
    connector: &Connector,
) -> Result<SharedRegion, String> {
    let listener = listener.ok_or("no Unix socket to pass memory over")?;
    if let Some(closed) = locals.iter().find(|rank| directory.fd_listeners[**rank].is_empty()) {
        return Err(format!("rank {closed} has no Unix socket to pass memory over"));
    }
    let arena = Arena::create(address_space() / locals.len()).map_err(|error| error.to_string())?;
    let names: Vec<_> =
        locals.iter().map(|rank| (*rank, directory.fd_listeners[*rank].clone())).collect();
    let interrupt = connector.interrupt();
    let peers = exchange(listener, rank, &names, key, arena.segment(), deadline, interrupt)
        .map_err(|error| error.to_string())?;
    SharedRegion::new(rank, arena, peers)
}

/// How much address space the arenas of a host's ranks may take, all together: they cannot fill
/// more than all memory. It costs nothing, but a program may have a limit, or many groups.
fn address_space() -> usize {
    const MOST: u64 = 256 << 30;
    let memory = rustix::system::sysinfo();
    let total = memory.totalram as u64 * u64::from(memory.mem_unit);
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    total.min(MOST).min(limit.unwrap_or(u64::MAX) / 8) as usize
}

/// Tells every rank what went wrong here, if anything did, and returns what went wrong anywhere.
fn tell_all(
    mesh: &mut mesh::Mesh,
    complaint: &str,
    deadline: Instant,
) -> Result<Vec<String>, ConnectError> {
    let others: Vec<_> = (0..mesh.size()).filter(|rank| *rank != mesh.rank()).collect();
    let mut inbox = vec![Vec::new(); mesh.size()];
    mesh.swap(complaint.as_bytes(), &others, &mut inbox, deadline).map_err(|failure| {
        let (missing, last) = match failure {
            Failure::Late(ranks) => (ranks, "no answer".to_string()),
            Failure::Lost { rank, reason }
            | Failure::Garbled { rank, reason }
            | Failure::Device { rank, reason } => (vec![rank], reason),
            Failure::Stalled { through } => (vec![through], "no answer".to_string()),
            Failure::Interrupted => (Vec::new(), "the group was aborted".to_string()),
            Failure::Broken(reason) => (Vec::new(), reason),
        };
        ConnectError { missing, last }
    })?;
    inbox[mesh.rank()] = complaint.as_bytes().to_vec();
    Ok(inbox.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect())
}

/// A word for the host of each rank, after those that cannot share memory were taken apart.
fn actual_hosts(directory: &RankDirectory, complaints: &[String]) -> Vec<(String, usize)> {
    let ranks = 0..directory.hosts.len();
    let shares = |host: &str| {
        ranks
            .clone()
            .filter(|rank| directory.hosts[*rank] == host)
            .all(|r| complaints[r].is_empty())
    };
    ranks
        .clone()
        .map(|rank| {
            let host = &directory.hosts[rank];
            (host.clone(), if shares(host) { 0 } else { rank + 1 })
        })
        .collect()
}
