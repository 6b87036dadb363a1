//! A group that this process is a member of: how it is joined, and what was agreed on then.

use super::handle::Engine;
use super::shared::Gradients;
use crate::codec::Momentum;
use crate::collective::assembly::{Assembled, RankDirectory, assemble};
use crate::collective::hierarchical;
use crate::collective::topology::Topology;
use crate::error::{Error, Result};
use crate::gradients::CompressionConfig;
use crate::observe::log::{GroupContext, in_group};
use crate::sync::lock;
use crate::transport::handshake::Key;
use crate::transport::interrupt::Interrupt;
use crate::transport::shm::arena::{Allocation, Arena};
use crate::transport::shm::fd_exchange::FdListener;
use crate::transport::tcp::ConnectError;
use crate::transport::tcp::connector::{Connector, ConnectorConfig, Listener};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Every group of this process, so that all can be closed before the interpreter ends.
static GROUPS: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

/// Where the other ranks of a group that is being made reach this one.
pub struct Endpoint {
    listener: Listener,
    /// Takes the shared memory of ranks on this host; `None` where Unix sockets do not work.
    fd_listener: Option<FdListener>,
}

impl Endpoint {
    pub fn open(address: &str) -> Result<Endpoint> {
        let failed = |why: String| Error::Connect(format!("cannot listen on {address}: {why}"));
        let ip: IpAddr = address.parse().map_err(|_| failed("not an IP address".into()))?;
        let listener = Listener::bind(ip).map_err(|error| failed(error.to_string()))?;
        let fd_listener = FdListener::open()
            .inspect_err(|error| log::info!("no Unix socket to pass memory over: {error}"))
            .ok();
        Ok(Endpoint { listener, fd_listener })
    }

    /// Where it listens for TCP connections.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// The name of its Unix socket, if it has one.
    pub fn fd_socket(&self) -> Option<&str> {
        self.fd_listener.as_ref().map(FdListener::name)
    }
}

/// What a rank has to know to join a group.
pub struct GroupConfig {
    pub name: String,
    pub rank: usize,
    /// How messages name each rank.
    pub labels: Vec<String>,
    /// Where each rank listens.
    pub addresses: Vec<SocketAddr>,
    pub directory: RankDirectory,
    pub key: Key,
    pub timeout: Duration,
    /// How gradients are compressed, if they are.
    pub compression: Option<CompressionConfig>,
    pub momentum: Option<Momentum>,
}

/// One rank's membership in a process group.
pub struct Group {
    pub engine: Arc<Engine>,
    pub topology: Topology,
    /// Whether gradients that cross hosts are compressed.
    pub compresses: bool,
    /// What the user should know about how the group was made; empty if all went well.
    pub notice: String,
    /// The source that this group's log records name.
    pub log_context: Arc<GroupContext>,
    arena: Option<Arc<Arena>>,
}

impl Group {
    /// Connects to all other ranks, agrees with them on who shares memory, and starts the engine.
    pub fn join(endpoint: Endpoint, config: GroupConfig) -> Result<Group> {
        let (group, rank) = (config.name.clone(), config.rank as u32);
        let context = Arc::new(GroupContext { group, rank });
        in_group(&context, || Group::join_logged(endpoint, config, context.clone()))
    }

    fn join_logged(
        endpoint: Endpoint,
        config: GroupConfig,
        log_context: Arc<GroupContext>,
    ) -> Result<Group> {
        let deadline = Instant::now() + config.timeout;
        let interrupt = Interrupt::new()
            .map(Arc::new)
            .map_err(|error| Error::Connect(format!("no event descriptor: {error}")))?;
        let Endpoint { listener, fd_listener } = endpoint;
        let connector = ConnectorConfig {
            rank: config.rank,
            addresses: config.addresses.clone(),
            key: config.key,
            deadline,
            interrupt: interrupt.clone(),
        };
        let connector = Connector::open(listener, connector)
            .map_err(|error| Error::Connect(format!("cannot take connections: {error}")))?;
        let wants_links = config.compression.as_ref().is_some_and(CompressionConfig::may_quantize);
        let Assembled { fabric, links, arena, notice } =
            assemble(connector, fd_listener, &config.directory, wants_links)
                .map_err(|error| unreachable_ranks(&error, &config))?;
        let topology = fabric.topology().clone();
        // Nothing crosses hosts where there is only one, so nothing is compressed.
        let compression = config.compression.filter(|_| topology.hosts() > 1);
        let compresses = compression.is_some();
        let gradients = Gradients::new(compression, config.momentum);
        let engine =
            Engine::start(&config.name, config.labels, fabric, links, gradients, interrupt)?;
        let engine = Arc::new(engine);
        let mut groups = lock(&GROUPS);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&engine));
        Ok(Group { engine, topology, compresses, notice, log_context, arena })
    }

    /// Memory that the ranks of this host can all reach; `None` if they share none.
    pub fn allocate(&self, bytes: usize) -> Option<Allocation> {
        // In a group that has failed, a late rank may still write into memory it was once given.
        let arena = self.arena.as_ref().filter(|_| self.engine.check_usable().is_ok());
        arena.and_then(|arena| arena.allocate(bytes))
    }

    /// The shard of a bucket of this size that this rank carries to other hosts; it may be empty.
    pub fn shard_of(&self, bytes: usize) -> Range<usize> {
        hierarchical::shard_range(&self.topology, bytes).unwrap_or(0..0)
    }

    /// Closes every group of this process that is still open. For the end of the interpreter.
    pub fn close_all() {
        let groups = std::mem::take(&mut *lock(&GROUPS));
        for group in groups.iter().filter_map(Weak::upgrade) {
            group.close_for_good();
        }
    }
}

fn unreachable_ranks(error: &ConnectError, config: &GroupConfig) -> Error {
    let name = |rank: &usize| format!("{} at {}", config.labels[*rank], config.addresses[*rank]);
    let missing: Vec<_> = error.missing.iter().map(name).collect();
    Error::Connect(format!(
        "{} could not connect with {} within {:.1} s ({}). If the addresses are of the wrong \
         network, set GFLOW_IFNAME to the interface that the hosts share; a firewall between \
         them must let all ports through",
        config.labels[config.rank],
        missing.join(", "),
        config.timeout.as_secs_f64(),
        error.last
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_none_is_refused_with_what_came() {
        let text = Endpoint::open("eth0").err().unwrap().to_string();
        assert!(text.contains("cannot listen on eth0: not an IP address"), "{text}");
    }
}
