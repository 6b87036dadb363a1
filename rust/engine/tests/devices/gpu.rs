//! A GPU of a rank, as a training job uses it: a stream of its own, tensors, and operations on them. It
//! does with the driver alone what csrc does with torch's streams.

use super::LIMIT;
use crate::collective::call::{Call, CollectiveKind, OnDevice};
use crate::collective::span::{Memory as Tensors, Span};
use crate::cuda::{Context, DeviceMemory, Event, Stream};
use crate::engine::operation::Operation;
use crate::engine::tests::gradient_case::{Case, data_type, encode};
use crate::engine::tests::harness::{Member, OnTensors, Tensor, call};
use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use cudarc::driver::result::{self, stream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Memory that the driver reads or writes later, so it must not move until then.
type Bytes = Vec<u8>;

pub struct Gpu {
    pub device: i32,
    pub context: Arc<Context>,
    /// The job's stream, and the engine's.
    pub stream: Arc<Stream>,
    pub engine_stream: Arc<Stream>,
}

impl Gpu {
    pub fn new(device: usize) -> Gpu {
        let device = device as i32;
        let context = Arc::new(Context::primary(device).unwrap());
        let stream = || {
            let _entered = context.enter().unwrap();
            // They live until the process ends, like those of torch's pool.
            let handle = stream::create(stream::StreamKind::NonBlocking).unwrap();
            Arc::new(Stream::borrowed(&context, handle as u64))
        };
        let (of_job, of_engine) = (stream(), stream());
        Gpu { device, context, stream: of_job, engine_stream: of_engine }
    }

    pub fn open(&self, member: &Member) -> Result<()> {
        member.engine.open_device(self.device, self.engine_stream.raw())
    }

    pub fn at(&self) -> OnDevice {
        OnDevice { device: self.device, stream: self.stream.raw() }
    }
}

/// A GPU for each rank, open for its group.
pub fn gpus(members: &[Member]) -> Vec<Gpu> {
    open_from(members, 0)
}

/// Another GPU for each rank.
pub fn more_gpus(members: &[Member]) -> Vec<Gpu> {
    open_from(members, members.len())
}

fn open_from(members: &[Member], first: usize) -> Vec<Gpu> {
    let open = |(rank, member): (usize, &Member)| {
        let gpu = Gpu::new(first + rank);
        gpu.open(member).unwrap();
        gpu
    };
    members.iter().enumerate().map(open).collect()
}

/// A collective on a tensor of a GPU.
pub struct OnGpu {
    span: Span,
    engine_stream: Arc<Stream>,
    /// The event that the job's stream has to wait for, once the operation is complete.
    end: Mutex<Option<Event>>,
    completed: Mutex<Option<Sender<Option<String>>>>,
}

impl Operation for OnGpu {
    fn prepare(&self) -> Result<()> {
        Ok(())
    }
    fn open(&self) -> Result<Tensors> {
        Ok(Tensors { inputs: Vec::new(), outputs: vec![self.span] })
    }
    fn start(&self, done: Arc<Interrupt>) -> Result<()> {
        done.raise();
        Ok(())
    }
    fn finish(&self) -> Result<()> {
        let end = self.engine_stream.record().map_err(|fault| Error::Operation(fault.0))?;
        *self.end.lock().unwrap() = Some(end);
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

/// A tensor that is being exchanged.
pub enum Pending {
    OnGpu {
        stream: Arc<Stream>,
        memory: DeviceMemory,
        operation: Arc<OnGpu>,
        completed: Receiver<Option<String>>,
        _from: Bytes,
    },
    OnHost {
        tensor: Tensor,
        completed: Receiver<Option<String>>,
    },
}

impl Pending {
    /// The outcome, as the host sees it.
    pub fn outcome(&self) -> Option<String> {
        let (Pending::OnGpu { completed, .. } | Pending::OnHost { completed, .. }) = self;
        completed.recv_timeout(Duration::from_secs(60)).expect("completed within 60 s")
    }

    /// Waits until it is complete for the host, without an error.
    pub fn completed(self) -> Pending {
        assert_eq!(self.outcome(), None);
        self
    }

    /// The content of the tensor, when the job's stream gets to it.
    pub fn content(self) -> Bytes {
        match self {
            Pending::OnHost { tensor, .. } => tensor.content(),
            Pending::OnGpu { stream, memory, operation, .. } => {
                let end = operation.end.lock().unwrap().take().expect("it was finished");
                stream.wait(&end).unwrap();
                let mut bytes = vec![0u8; memory.bytes()];
                let _entered = stream.context.enter().unwrap();
                // SAFETY: the bytes stay until the stream was there.
                unsafe {
                    result::memcpy_dtoh_async(&mut bytes, memory.address(), stream.raw() as _)
                }
                .unwrap();
                stream.synchronize(LIMIT).unwrap();
                bytes
            }
        }
    }
}

/// A tensor on a GPU, as soon as the job's stream gets there.
pub struct Brought {
    memory: DeviceMemory,
    from: Bytes,
}

/// Brings a tensor to a GPU, on the job's stream.
pub fn bring(gpu: &Gpu, content: Bytes) -> Brought {
    let memory = DeviceMemory::new(&gpu.stream, content.len(), true).unwrap();
    let _entered = gpu.context.enter().unwrap();
    let stream = gpu.stream.raw() as _;
    // SAFETY: the content stays with the tensor.
    unsafe { result::memcpy_htod_async(memory.address(), &content, stream) }.unwrap();
    Brought { memory, from: content }
}

/// Brings a tensor to a GPU, and begins a call with it.
pub fn submit(gpu: &Gpu, member: &Member, call: Call, content: Bytes) -> Result<Pending> {
    submit_brought(gpu, member, call, bring(gpu, content))
}

/// Begins a call with a tensor.
pub fn submit_brought(gpu: &Gpu, member: &Member, call: Call, tensor: Brought) -> Result<Pending> {
    let Brought { memory, from } = tensor;
    let span = Span { address: memory.address() as *mut u8, bytes: from.len() };
    let (sender, completed) = channel();
    let operation = Arc::new(OnGpu {
        span,
        engine_stream: gpu.engine_stream.clone(),
        end: Mutex::new(None),
        completed: Mutex::new(Some(sender)),
    });
    let call = Call { on_device: Some(gpu.at()), ..call };
    member.engine.submit(call, operation.clone())?;
    Ok(Pending::OnGpu { stream: gpu.stream.clone(), memory, operation, completed, _from: from })
}

/// The call for a bucket of a case; the first is 0.
pub fn call_for(case: &Case, bucket: usize, is_tagged: bool) -> Call {
    let mut call =
        call(CollectiveKind::AllReduce, data_type(case.element), 0, case.buckets[bucket]);
    if is_tagged {
        (call.gradient, call.bucket) = (true, bucket as u32 + 1);
    }
    call
}

/// Begins the exchange of one rank's buckets, which the backward pass ends.
pub fn begin(
    case: &Case,
    member: &Member,
    gpu: &Gpu,
    gradients: &[Vec<f32>],
    is_tagged: bool,
) -> Vec<Pending> {
    let one = |(bucket, gradient): (usize, &Vec<f32>)| {
        let call = call_for(case, bucket, is_tagged);
        submit(gpu, member, call, encode(case.element, gradient)).unwrap()
    };
    let pending = gradients.iter().enumerate().map(one).collect();
    if is_tagged {
        member.engine.end_of_pass();
    }
    pending
}

/// Exchanges one rank's buckets.
pub fn exchange(
    case: &Case,
    member: &Member,
    gpu: &Gpu,
    gradients: &[Vec<f32>],
    is_tagged: bool,
) -> Vec<Bytes> {
    let pending = begin(case, member, gpu, gradients, is_tagged);
    pending.into_iter().map(|one| one.completed().content()).collect()
}

/// The same, with each bucket on a GPU of its own or in host memory.
pub fn exchange_on(
    case: &Case,
    member: &Member,
    places: &[Option<&Gpu>],
    gradients: &[Vec<f32>],
) -> Vec<Bytes> {
    let pending = begin_on(case, member, places, gradients);
    pending.into_iter().map(|one| one.completed().content()).collect()
}

/// Begins it.
pub fn begin_on(
    case: &Case,
    member: &Member,
    places: &[Option<&Gpu>],
    gradients: &[Vec<f32>],
) -> Vec<Pending> {
    let one = |(bucket, (gradient, place)): (usize, (&Vec<f32>, &Option<&Gpu>))| {
        let (call, content) = (call_for(case, bucket, true), encode(case.element, gradient));
        match place {
            Some(gpu) => submit(gpu, member, call, content).unwrap(),
            None => {
                let tensor = Tensor::new(&content, 64, None);
                let memory = Tensors { inputs: Vec::new(), outputs: vec![tensor.span()] };
                let (sender, completed) = channel();
                let complete = Mutex::new(Some(sender));
                let operation = OnTensors { memory, obstacle: None, completed: complete };
                member.engine.submit(call, Arc::new(operation)).unwrap();
                Pending::OnHost { tensor, completed }
            }
        }
    };
    let pending = gradients.iter().zip(places).enumerate().map(one).collect();
    member.engine.end_of_pass();
    pending
}
