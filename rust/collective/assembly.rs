//! Assembly: how the fabric of a new group is put together.
//!
//! First the mesh, which reaches everybody. Then the ranks of each host try to share memory, tell
//! all others over the mesh whether it worked, and so agree on the topology: where it did not, the
//! ranks of that host are hosts of their own. Last the rings. Every wait is bounded by the
//! deadline of the reception.

use super::fabric::Fabric;
use super::ring::{Lane, Ring};
use super::topology::Topology;
use crate::fork::Unshared;
use crate::transport::handshake::Key;
use crate::transport::shm::arena::Arena;
use crate::transport::shm::hall::Hall;
use crate::transport::shm::passing::{Entrance, exchange};
use crate::transport::tcp::reception::Reception;
use crate::transport::tcp::{ConnectError, lanes, mesh};
use crate::transport::{Failure, Peers};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections to each neighbour in the ring. (Measured: benches/ring.rs.)
const LANES: usize = 1;
/// Sharing memory takes milliseconds; a host where it does not work must not hold up the group.
const SHARING_LIMIT: Duration = Duration::from_secs(5);

/// What is known of the ranks of a new group, by rank.
pub struct Census {
    /// Ranks with the same word share memory if they can.
    pub hosts: Vec<String>,
    /// Where each can be given descriptors; empty if it cannot.
    pub entrances: Vec<String>,
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
    mut reception: Reception,
    entrance: Option<Entrance>,
    census: &Census,
    key: &Key,
    deadline: Instant,
) -> Result<Assembled, ConnectError> {
    let rank = reception.rank();
    let mut mesh = mesh::connect(&mut reception)?;
    let hoped_for = Topology::new(&census.hosts, rank);
    let locals = hoped_for.local_ranks();

    let mut sharing = Ok(None);
    if locals.len() > 1 {
        let soon = deadline.min(Instant::now() + SHARING_LIMIT);
        sharing = share_memory(entrance, rank, locals, census, key, soon, &reception).map(Some);
    }
    let mut complaints = vec![String::new(); census.hosts.len()];
    if hoped_for.hosts() < census.hosts.len() {
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
    let hall = sharing.ok().flatten().filter(|_| failed.is_empty());

    let topology = Topology::new(&actual_hosts(census, &complaints), rank);
    let mut ring = None;
    if topology.hosts() > 1 && topology.is_carrier() {
        let (next, previous) = topology.neighbours();
        let sockets = lanes::connect(&mut reception, next, previous, LANES)?;
        let lanes = sockets
            .into_iter()
            .map(|lane| {
                let [to_next, from_previous] =
                    [lane.to_next, lane.from_previous].map(Unshared::new);
                Lane::new(Box::new(to_next), Box::new(from_previous))
            })
            .collect();
        ring = Some(Ring::new(topology.host(), topology.hosts(), lanes, next, previous));
    }
    let arena = hall.as_ref().map(|hall| hall.arena().clone());
    let fabric = Fabric::new(Box::new(mesh), topology, hall, ring);
    Ok(Assembled { fabric, arena, notice })
}

fn share_memory(
    entrance: Option<Entrance>,
    rank: usize,
    locals: &[usize],
    census: &Census,
    key: &Key,
    deadline: Instant,
    reception: &Reception,
) -> Result<Hall, String> {
    let entrance = entrance.ok_or("no Unix socket to pass memory over")?;
    if let Some(closed) = locals.iter().find(|rank| census.entrances[**rank].is_empty()) {
        return Err(format!("rank {closed} has no Unix socket to pass memory over"));
    }
    let arena = Arena::create(address_space() / locals.len()).map_err(|error| error.to_string())?;
    let names: Vec<_> =
        locals.iter().map(|rank| (*rank, census.entrances[*rank].clone())).collect();
    let interrupt = reception.interrupt();
    let peers = exchange(entrance, rank, &names, key, arena.segment(), deadline, interrupt)
        .map_err(|error| error.to_string())?;
    Hall::new(rank, arena, peers)
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
fn actual_hosts(census: &Census, complaints: &[String]) -> Vec<(String, usize)> {
    let ranks = 0..census.hosts.len();
    let shares = |host: &str| {
        ranks.clone().filter(|rank| census.hosts[*rank] == host).all(|r| complaints[r].is_empty())
    };
    ranks
        .clone()
        .map(|rank| {
            let host = &census.hosts[rank];
            (host.clone(), if shares(host) { 0 } else { rank + 1 })
        })
        .collect()
}
