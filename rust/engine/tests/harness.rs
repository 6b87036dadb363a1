//! Groups whose ranks are threads of this process, with tensors and operations for them.

use crate::collective::assembly::{Assembled, RankDirectory, assemble};
use crate::collective::call::{Call, CollectiveKind, View};
use crate::collective::fabric::Fabric;
use crate::collective::ring::{Ring, RingChannel};
use crate::collective::span::{Memory, Span};
use crate::collective::topology::{Neighbours, Topology};
use crate::collective::types::{DataType, ReduceOp};
use crate::engine::Engine;
use crate::engine::operation::Operation;
use crate::engine::shared::Gradients;
use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use crate::transport::memory;
use crate::transport::shm::arena::{Allocation, Arena};
use crate::transport::shm::fd_exchange::FdListener;
use crate::transport::tcp::connector::Connector;
use crate::transport::tcp::connector::tests::connectors;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub struct Member {
    pub engine: Engine,
    pub arena: Option<Arc<Arena>>,
}

fn labels(size: usize) -> Vec<String> {
    (0..size).map(|rank| format!("rank {rank}")).collect()
}

/// The same, with these gradients on each rank.
pub fn group_that_compresses(
    hosts: &[usize],
    gradients: &(dyn Fn() -> Gradients + Sync),
) -> Vec<Member> {
    let (members, notices) = group_without_listeners(hosts, &[], gradients);
    assert_eq!(notices.concat(), "");
    members
}

/// The same, with ranks `closed` that cannot receive memory; also the notice of each for the user.
pub fn group_without_listeners(
    hosts: &[usize],
    closed: &[usize],
    gradients: &(dyn Fn() -> Gradients + Sync),
) -> (Vec<Member>, Vec<String>) {
    let listeners: Vec<_> = hosts.iter().map(|_| FdListener::open().unwrap()).collect();
    let name = |(rank, listener): (usize, &FdListener)| match closed.contains(&rank) {
        true => String::new(),
        false => listener.name().to_string(),
    };
    let directory = Arc::new(RankDirectory {
        hosts: hosts.iter().map(usize::to_string).collect(),
        fd_listeners: listeners.iter().enumerate().map(name).collect(),
    });
    let join = |(connector, listener): (Connector, FdListener)| {
        let (directory, gradients) = (directory.clone(), gradients());
        std::thread::spawn(move || {
            let interrupt = connector.config().interrupt.clone();
            let Assembled { fabric, links, arena, notice } =
                assemble(connector, Some(listener), &directory, true)
                    .unwrap_or_else(|error| panic!("{error:?}"));
            let size = fabric.size();
            let engine =
                Engine::start("test", labels(size), fabric, links, gradients, interrupt).unwrap();
            (Member { engine, arena }, notice)
        })
    };
    let ranks: Vec<_> = connectors(hosts.len()).into_iter().zip(listeners).map(join).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).unzip()
}

/// A group that is connected through the memory of this process alone.
pub fn memory_group(size: usize) -> Vec<Member> {
    let hosts: Vec<_> = (0..size).collect();
    let mut pipes: Vec<_> = hosts.iter().map(|_| UnixStream::pair().unwrap()).map(Some).collect();
    for (left, right) in pipes.iter().flatten() {
        left.set_nonblocking(true).unwrap();
        right.set_nonblocking(true).unwrap();
    }
    // The pipe of each rank leads to the next rank.
    let (mut outs, mut ins): (Vec<_>, Vec<_>) =
        pipes.iter_mut().map(|pipe| pipe.take().unwrap()).map(|(l, r)| (Some(l), Some(r))).unzip();
    memory::mesh(size)
        .into_iter()
        .enumerate()
        .map(|(rank, (mesh, interrupt))| {
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let neighbours = Neighbours { next, previous };
            let channel = RingChannel::new(
                Box::new(outs[rank].take().unwrap()),
                Box::new(ins[previous].take().unwrap()),
            );
            let ring = (size > 1).then(|| Ring::new(rank, size, neighbours, vec![channel]));
            let topology = Topology::new(&hosts, rank);
            let fabric = Fabric::new(Box::new(mesh), topology, None, ring);
            let gradients = Gradients::new(None, None);
            let engine =
                Engine::start("test", labels(size), fabric, None, gradients, interrupt).unwrap();
            Member { engine, arena: None }
        })
        .collect()
}

/// A tensor of a rank, with bytes before and after it that nothing may touch.
pub struct Tensor {
    address: *mut u8,
    bytes: usize,
    guard: usize,
    _heap: Vec<u64>,
    _shared: Option<Allocation>,
}

// SAFETY: the memory belongs to the tensor, wherever that goes.
unsafe impl Send for Tensor {}

const GUARD: u8 = 0xa5;

impl Tensor {
    /// With `guard` bytes before and after, a multiple of the size of an element.
    pub fn new(content: &[u8], guard: usize, arena: Option<&Arc<Arena>>) -> Tensor {
        let total = content.len() + 2 * guard;
        let shared = arena.map(|arena| arena.allocate(total).unwrap());
        let mut heap = vec![0u64; if shared.is_some() { 0 } else { total.div_ceil(8) }];
        let start = shared.as_ref().map_or(heap.as_mut_ptr().cast(), Allocation::address);
        // SAFETY: `total` bytes are allocated and not shared yet.
        let address = unsafe {
            start.write_bytes(GUARD, total);
            let address = start.add(guard);
            content.as_ptr().copy_to_nonoverlapping(address, content.len());
            address
        };
        Tensor { address, bytes: content.len(), guard, _heap: heap, _shared: shared }
    }

    pub fn span(&self) -> Span {
        Span { address: self.address, bytes: self.bytes }
    }

    pub fn content(&self) -> Vec<u8> {
        let whole = Span {
            // SAFETY: the guard is part of the allocation.
            address: unsafe { self.address.sub(self.guard) },
            bytes: self.bytes + 2 * self.guard,
        };
        // SAFETY: no collective is under way.
        let whole = unsafe { whole.as_slice() };
        let (before, rest) = whole.split_at(self.guard);
        let (content, after) = rest.split_at(self.bytes);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "touched what is not ours");
        content.to_vec()
    }
}

/// A collective on some tensors.
pub struct OnTensors {
    pub memory: Memory,
    /// Why it fails to get ready, if it does.
    pub obstacle: Option<&'static str>,
    pub completed: Mutex<Option<Sender<Option<String>>>>,
}

impl Operation for OnTensors {
    fn prepare(&self) -> Result<()> {
        self.obstacle.map_or(Ok(()), |what| Err(Error::Operation(what.into())))
    }
    fn open(&self) -> Result<Memory> {
        Ok(self.memory.clone())
    }
    fn start(&self, _done: Arc<Interrupt>) -> Result<()> {
        Err(Error::Operation("there is no inner backend".into()))
    }
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    fn broke_connection(&self) -> bool {
        false
    }
    fn complete(&self, error: Option<&Error>) -> bool {
        if let Some(completed) = self.completed.lock().unwrap().take() {
            let _ = completed.send(error.map(Error::to_string));
        }
        false
    }
    fn notify(&self) {}
}

pub fn call(kind: CollectiveKind, dtype: DataType, root: usize, numel: usize) -> Call {
    let view = View {
        kind,
        dtype,
        reduce_op: ReduceOp::Sum,
        root: root as u32,
        tensors: 1,
        numel: numel as u64,
        layout: 0,
        device_slot: 0,
    };
    Call {
        view,
        gradient: false,
        bucket: 0,
        bytes: 0,
        on_device: None,
        sends: Vec::new(),
        receives: Vec::new(),
        complaint: String::new(),
        timeout: Duration::from_secs(30),
    }
}
