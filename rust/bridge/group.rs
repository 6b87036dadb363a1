//! A process group as C++ holds it: joining it, its condition, closing it.

use super::endpoint::Endpoint;
use super::{guard, milliseconds, types};
use crate::codec::{Momentum, Schedule, Wire};
use crate::collective::assembly::RankDirectory;
use crate::engine::group;
use crate::error::{Error, Result};
use crate::gradients::{CompressionConfig, MaxNoise, Method};
use crate::observe::log::in_group;
use crate::transport::handshake::KEY_BYTES;
use std::net::SocketAddr;

/// One rank's membership in a process group.
pub(super) struct Group(pub(super) group::Group);

pub(super) fn join_group(
    endpoint: Box<Endpoint>,
    config: &types::GroupConfig,
) -> Result<Box<Group>> {
    guard(|| Ok(Box::new(Group(group::Group::join(endpoint.0, read_config(config)?)?))))
}

pub(super) fn close_all_groups() -> Result<()> {
    guard(|| {
        group::Group::close_all();
        Ok(())
    })
}

fn read_config(config: &types::GroupConfig) -> Result<group::GroupConfig> {
    let key = config.key.as_slice().try_into().map_err(|_| {
        let length = config.key.len();
        Error::Connect(format!("a group key of {length} bytes, expected {KEY_BYTES}"))
    })?;
    Ok(group::GroupConfig {
        name: config.name.clone(),
        rank: config.rank as usize,
        labels: config.labels.clone(),
        addresses: parse_addresses(&config.addresses)?,
        directory: RankDirectory {
            hosts: config.hosts.clone(),
            fd_listeners: config.fd_sockets.clone(),
        },
        key,
        timeout: milliseconds(config.timeout_ms),
        compression: read_compression(&config.compression)?,
        momentum: read_momentum(config.compression.momentum, false),
    })
}

fn parse_addresses(addresses: &[String]) -> Result<Vec<SocketAddr>> {
    let parse = |address: &String| {
        address.parse().map_err(|_| Error::Connect(format!("not an address: {address:?}")))
    };
    addresses.iter().map(parse).collect()
}

fn read_compression(compression: &types::Compression) -> Result<Option<CompressionConfig>> {
    if !compression.enabled {
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
    let method = Method::from_name(&compression.method).ok_or_else(|| {
        Error::Connect(format!("{:?} is no method of compression", compression.method))
    })?;
    let max_noise = MaxNoise::from_name(&compression.max_noise).ok_or_else(|| {
        Error::Connect(format!("{:?} is no limit of noise", compression.max_noise))
    })?;
    Ok(Some(CompressionConfig {
        method,
        schedule,
        chunk,
        wire,
        fusion_bytes,
        max_noise,
        audit_steps: compression.audit_steps,
        cores_are_busy: compression.cores_are_busy,
    }))
}

/// C++ has no `Option`: a factor of zero stands for no momentum.
pub(super) fn read_momentum(factor: f32, nesterov: bool) -> Option<Momentum> {
    (factor != 0.0).then_some(Momentum { factor, nesterov })
}

impl Group {
    /// Runs an entry from C++ that concerns this group, and attributes its log records to it.
    pub(super) fn guard<T>(&self, entry: impl FnOnce() -> Result<T>) -> Result<T> {
        in_group(&self.0.log_context, || guard(entry))
    }

    pub(super) fn name(&self) -> String {
        self.0.log_context.group.clone()
    }

    pub(super) fn notice(&self) -> String {
        self.0.notice.clone()
    }

    /// Whether gradients that cross hosts are compressed. If so, every all-reduce of one dense
    /// tensor on a device must be submitted here; otherwise none.
    pub(super) fn compresses(&self) -> bool {
        self.0.compresses
    }

    /// Prepares a device before its first call. The engine works on `stream`, a raw handle that
    /// must stay valid as long as the group. Waits for no other rank.
    pub(super) fn open_device(&self, device: i32, stream: u64) -> Result<()> {
        self.guard(|| self.0.engine.open_device(device, stream))
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        self.guard(|| self.0.engine.check_usable())
    }

    /// Waits until every collective submitted so far is complete.
    pub(super) fn fence(&self, timeout_ms: u64) -> Result<()> {
        self.guard(|| self.0.engine.fence(milliseconds(timeout_ms)))
    }

    pub(super) fn seq(&self) -> Result<u64> {
        self.guard(|| Ok(self.0.engine.seq()))
    }

    pub(super) fn position(&self) -> Result<types::Position> {
        self.guard(|| {
            let topology = &self.0.topology;
            Ok(types::Position {
                hosts: topology.hosts(),
                carriers: topology.carriers(),
                host: topology.host(),
                local_rank: topology.local_rank(),
            })
        })
    }

    pub(super) fn abort(&self, why: &str) -> Result<()> {
        self.guard(|| {
            self.0.engine.abort(why);
            Ok(())
        })
    }

    pub(super) fn close(&self) -> Result<()> {
        self.guard(|| {
            self.0.engine.close();
            Ok(())
        })
    }
}
