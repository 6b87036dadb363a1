//! Assembly: builds the fabric of a new group.
//!
//! First the mesh, which connects all ranks. Then the ranks of each host try to share memory and
//! tell all others over the mesh whether it worked, so that all agree on the topology: where it
//! failed, each rank counts as a host of its own. Last the rings. Every wait is bounded by the
//! deadline of the connector.

use super::fabric::Fabric;
use super::links::Links;
use super::ring::{Ring, RingChannel};
use super::stream::Stream;
use super::topology::Topology;
use crate::fork::Unshared;
use crate::transport::shm::arena::Arena;
use crate::transport::shm::fd_exchange::{FdExchange, FdListener};
use crate::transport::shm::region::SharedRegion;
use crate::transport::tcp::connector::{ConnectError, Connector};
use crate::transport::tcp::{channels, mesh};
use crate::transport::{Failure, Peers, named_ranks};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections to each neighbour in the ring. (Measured: benches/ring.rs.)
const CHANNELS: usize = 1;
/// Sharing memory takes milliseconds; a host where it fails must not hold up the group.
const SHARING_LIMIT: Duration = Duration::from_secs(5);

/// Information about the ranks of a new group, indexed by rank.
pub struct RankDirectory {
    /// Ranks with the same word here share memory if they can.
    pub hosts: Vec<String>,
    /// Names of the sockets at which ranks receive descriptors; empty for a rank without one.
    pub fd_listeners: Vec<String>,
}

/// A new fabric, and how building it went.
pub struct Assembled {
    pub fabric: Fabric,
    /// The links of this rank, if they were asked for, there are several hosts and it is a carrier.
    pub links: Option<Links>,
    /// Where the shared tensors of this host live, if it has several ranks.
    pub arena: Option<Arc<Arena>>,
    /// A notice for the user; empty if all went well.
    pub notice: String,
}

/// Builds the fabric of this rank, together with all other ranks; with links if all ranks ask for them.
pub fn assemble(
    mut connector: Connector,
    fd_listener: Option<FdListener>,
    directory: &RankDirectory,
    wants_links: bool,
) -> Result<Assembled, ConnectError> {
    let start = Instant::now();
    let rank = connector.rank();
    let mut mesh = mesh::connect(&mut connector)?;
    let intended = Topology::new(&directory.hosts, rank);
    let locals = intended.local_ranks();

    let mut sharing = Ok(None);
    if locals.len() > 1 {
        sharing = share_memory(&connector, fd_listener, locals, directory).map(Some);
    }
    let mut complaints = vec![String::new(); directory.hosts.len()];
    if intended.hosts() < directory.hosts.len() {
        let own = sharing.as_ref().err().cloned().unwrap_or_default();
        complaints = tell_all(&mut mesh, &own, connector.config().deadline)?;
    }
    let failed: Vec<_> = locals.iter().filter(|rank| !complaints[**rank].is_empty()).collect();
    for rank in &failed {
        log::info!("rank {rank} cannot share memory: {}", complaints[**rank]);
    }
    // One rank of each host tells the user.
    let is_speaker = locals[0] == rank;
    let notice = failed.first().filter(|_| is_speaker).map_or(String::new(), |first| {
        let ranks: Vec<_> = locals.iter().map(usize::to_string).collect();
        format!(
            "ranks {} of this host cannot share memory ({}), so they use TCP",
            ranks.join(", "),
            complaints[**first]
        )
    });
    let region = sharing.ok().flatten().filter(|_| failed.is_empty());
    if region.is_some() {
        log::debug!("{} of this host share memory", named_ranks(locals));
    }

    let topology = Topology::new(&actual_hosts(directory, &complaints), rank);
    let ring = connect_ring(&mut connector, &topology)?;
    let links = match wants_links {
        true => connect_links(&mut connector, &topology)?,
        false => None,
    };
    log::info!("{topology}; connected in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    let arena = region.as_ref().map(|region| region.arena().clone());
    let fabric = Fabric::new(Box::new(mesh), topology, region, ring);
    Ok(Assembled { fabric, links, arena, notice })
}

/// The ring of this rank, if there are several hosts and it is a carrier.
fn connect_ring(
    connector: &mut Connector,
    topology: &Topology,
) -> Result<Option<Ring>, ConnectError> {
    if topology.hosts() == 1 || !topology.is_carrier() {
        return Ok(None);
    }
    let neighbours = topology.neighbours();
    let sockets = channels::connect(connector, neighbours.next, neighbours.previous, CHANNELS)?;
    let channels = sockets
        .into_iter()
        .map(|channel| {
            let [to_next, from_previous] =
                [channel.to_next, channel.from_previous].map(Unshared::new);
            RingChannel::new(Box::new(to_next), Box::new(from_previous))
        })
        .collect();
    Ok(Some(Ring::new(topology.host(), topology.hosts(), neighbours, channels)))
}

/// The links of this rank, if there are several hosts and it is a carrier.
fn connect_links(
    connector: &mut Connector,
    topology: &Topology,
) -> Result<Option<Links>, ConnectError> {
    if topology.hosts() == 1 || !topology.is_carrier() {
        return Ok(None);
    }
    let carriers = topology.carriers_of_own_shard();
    let mut sockets: HashMap<_, _> =
        channels::connect_links(connector, &carriers)?.into_iter().collect();
    let link_to = |rank| {
        let stream: Box<dyn Stream> = Box::new(Unshared::new(sockets.remove(&rank)?));
        Some((rank, stream))
    };
    Ok(Some(Links::new(carriers.into_iter().map(link_to).collect())))
}

/// Shares memory with the other ranks of this host, or says why that failed.
fn share_memory(
    connector: &Connector,
    fd_listener: Option<FdListener>,
    locals: &[usize],
    directory: &RankDirectory,
) -> Result<SharedRegion, String> {
    let fd_listener = fd_listener.ok_or("no Unix socket to pass memory over")?;
    if let Some(closed) = locals.iter().find(|rank| directory.fd_listeners[**rank].is_empty()) {
        return Err(format!("rank {closed} has no Unix socket to pass memory over"));
    }
    let arena = Arena::create(address_space() / locals.len()).map_err(|error| error.to_string())?;
    let names: Vec<_> =
        locals.iter().map(|rank| (*rank, directory.fd_listeners[*rank].clone())).collect();
    let config = connector.config();
    let exchange = FdExchange {
        rank: config.rank,
        locals: &names,
        key: &config.key,
        segment: arena.segment(),
        deadline: config.deadline.min(Instant::now() + SHARING_LIMIT),
        interrupt: &config.interrupt,
    };
    let peers = exchange.run(fd_listener).map_err(|error| error.to_string())?;
    SharedRegion::new(config.rank, arena, peers)
}

/// How much address space the arenas of a host may take together: no more than its memory. It
/// costs nothing, but a process may have a limit, or many groups.
fn address_space() -> usize {
    const MOST: u64 = 256 << 30;
    let memory = rustix::system::sysinfo();
    let total = memory.totalram as u64 * u64::from(memory.mem_unit);
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    total.min(MOST).min(limit.unwrap_or(u64::MAX) / 8) as usize
}

/// Tells every rank what went wrong here, if anything, and returns what went wrong on each.
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
            Failure::Lost { rank, reason } | Failure::Garbled { rank, reason } => {
                (vec![rank], reason)
            }
            Failure::Stalled { through } => (vec![through], "no answer".to_string()),
            Failure::Interrupted => (Vec::new(), "the group was aborted".to_string()),
            Failure::Broken(reason) => (Vec::new(), reason),
        };
        ConnectError { missing, last }
    })?;
    inbox[mesh.rank()] = complaint.as_bytes().to_vec();
    Ok(inbox.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect())
}

/// A word for the host of each rank: on a host that cannot share memory, another one for each.
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
