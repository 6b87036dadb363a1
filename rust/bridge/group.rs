//! A process group as C++ holds it: joining it, asking how it is, closing it.

use super::listener::Door;
use super::state::momentum;
use super::{ffi, guard, milliseconds};
use crate::codec::{Schedule, Wire};
use crate::collective::assembly::{Assembled, RankDirectory, assemble};
use crate::collective::topology::Topology;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::gradients::{Gradients, Method};
use crate::transport::handshake::{KEY_BYTES, Key};
use crate::transport::interrupt::Interrupt;
use crate::transport::shm::arena::Arena;
use crate::transport::tcp::ConnectError;
use crate::transport::tcp::connector::Connector;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// One rank's part of a process group.
pub(super) struct Group {
    pub(super) engine: Arc<Engine>,
    pub(super) topology: Topology,
    pub(super) arena: Option<Arc<Arena>>,
    notice: String,
    pub(super) compresses: bool,
}

/// Every group of this process, so that all can be closed before the interpreter ends.
static GROUPS: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

pub(super) fn join_group(door: Box<Door>, membership: &ffi::Membership) -> Result<Box<Group>> {
    guard(|| {
        let timeout = milliseconds(membership.timeout_ms);
        let interrupt = Interrupt::new()
            .map(Arc::new)
            .map_err(|error| Error::Connect(format!("no event descriptor: {error}")))?;
        let addresses = parse_addresses(&membership.addresses)?;
        let key: Key = membership.key.as_slice().try_into().map_err(|_| {
            let length = membership.key.len();
            Error::Connect(format!("a group key of {length} bytes, expected {KEY_BYTES}"))
        })?;
        let rank = membership.rank as usize;
        let deadline = Instant::now() + timeout;
        let Door { listener, entrance } = *door;
        let connector =
            Connector::open(listener, rank, addresses, key, deadline, interrupt.clone())
                .map_err(|error| Error::Connect(format!("cannot take connections: {error}")))?;
        let directory = RankDirectory {
            hosts: membership.hosts.clone(),
            fd_listeners: membership.entrances.clone(),
        };
        let Assembled { fabric, arena, notice } =
            assemble(connector, entrance, &directory, &key, deadline)
                .map_err(|error| unreachable_ranks(&error, membership, timeout))?;
        let topology = fabric.topology().clone();
        let labels = membership.labels.clone();
        let method = read_method(&membership.compression, topology.hosts())?;
        let compresses = method.is_some();
        let gradients = Gradients::new(method, momentum(membership.compression.momentum, false));
        let engine = Engine::start(&membership.group, labels, fabric, gradients, interrupt)?;
        let engine = Arc::new(engine);
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&engine));
        Ok(Box::new(Group { engine, topology, arena, notice, compresses }))
    })
}

/// How gradients are exchanged between so many hosts, if they are to be compressed there.
fn read_method(compression: &ffi::Compression, hosts: usize) -> Result<Option<Method>> {
    if !compression.is_on || hosts == 1 {
        return Ok(None);
    }
    let wire = Wire::from_name(&compression.wire).ok_or_else(|| {
        Error::Connect(format!("{:?} is no element type for the wire", compression.wire))
    })?;
    let schedule = Schedule {
        density: compression.density,
        warmup_steps: compression.warmup_steps,
        ramp_steps: compression.ramp_steps,
    };
    let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let (chunk, fusion_bytes) = (size(compression.chunk).max(1), size(compression.fusion_bytes));
    Ok(Some(Method { schedule, chunk, wire, fusion_bytes }))
}

fn parse_addresses(addresses: &[String]) -> Result<Vec<SocketAddr>> {
    let parse = |address: &String| {
        address.parse().map_err(|_| Error::Connect(format!("not an address: {address:?}")))
    };
    addresses.iter().map(parse).collect()
}

fn unreachable_ranks(
    error: &ConnectError,
    membership: &ffi::Membership,
    timeout: Duration,
) -> Error {
    let name =
        |rank: &usize| format!("{} at {}", membership.labels[*rank], membership.addresses[*rank]);
    let missing: Vec<_> = error.missing.iter().map(name).collect();
    Error::Connect(format!(
        "{} could not connect with {} within {:.1} s ({}). If the addresses are of the wrong \
         network, set GFLOW_IFNAME to the interface that the hosts share; a firewall between \
         them must let all ports through",
        membership.labels[membership.rank as usize],
        missing.join(", "),
        timeout.as_secs_f64(),
        error.last
    ))
}

/// Closes whatever groups are still open. For the end of the interpreter.
pub(super) fn close_all_groups() -> Result<()> {
    guard(|| {
        let groups = std::mem::take(&mut *GROUPS.lock().unwrap_or_else(PoisonError::into_inner));
        for group in groups.iter().filter_map(Weak::upgrade) {
            group.close_for_good();
        }
        Ok(())
    })
}

impl Group {
    pub(super) fn notice(&self) -> String {
        self.notice.clone()
    }

    /// Whether gradients that cross hosts are compressed. If so, every all-reduce of one dense
    /// tensor on a device comes here, else none does.
    pub(super) fn compresses(&self) -> bool {
        self.compresses
    }

    /// Makes a device ready, once, before its first call. The exchanges go on `stream`, a raw
    /// handle that stays valid as long as the group. It waits for no other rank.
    pub(super) fn open_device(&self, device: i32, stream: u64) -> Result<()> {
        guard(|| self.engine.open_device(device, stream))
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        guard(|| self.engine.check_usable())
    }

    pub(super) fn fence(&self, timeout_ms: u64) -> Result<()> {
        guard(|| self.engine.fence(milliseconds(timeout_ms)))
    }

    pub(super) fn seq(&self) -> Result<u64> {
        guard(|| Ok(self.engine.seq()))
    }

    pub(super) fn topology(&self) -> Result<ffi::Place> {
        guard(|| {
            Ok(ffi::Place {
                hosts: self.topology.hosts(),
                carriers: self.topology.carriers(),
                host: self.topology.host(),
                place: self.topology.local_rank(),
            })
        })
    }

    pub(super) fn abort(&self, why: &str) -> Result<()> {
        guard(|| {
            self.engine.abort(why);
            Ok(())
        })
    }

    pub(super) fn close(&self) -> Result<()> {
        guard(|| {
            self.engine.close();
            Ok(())
        })
    }
}
