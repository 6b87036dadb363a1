//! Collectives: their description on the way in, their outcome on the way out.

use super::group::Group;
use super::{milliseconds, torch_codes, types};
use crate::collective::call::{Call, OnDevice, View};
use crate::collective::span::{Memory, Span};
use crate::engine::operation::Operation;
use crate::error::{Error, Result};
use crate::transport::interrupt::Interrupt;
use cxx::SharedPtr;
use std::sync::Arc;

impl Group {
    pub(super) fn submit(
        &self,
        call: types::CallDescription,
        operation: SharedPtr<types::Operation>,
    ) -> Result<u64> {
        self.guard(|| self.0.engine.submit(read_call(call)?, Arc::new(CxxOperation(operation))))
    }

    pub(super) fn submit_and_wait(
        &self,
        call: types::CallDescription,
        operation: SharedPtr<types::Operation>,
    ) -> Result<u64> {
        self.guard(|| {
            self.0.engine.submit_and_wait(read_call(call)?, Arc::new(CxxOperation(operation)))
        })
    }

    /// Runs a send or a receive, which bypasses the queue.
    pub(super) fn submit_aside(&self, operation: SharedPtr<types::Operation>) -> Result<()> {
        self.guard(|| self.0.engine.submit_aside(Arc::new(CxxOperation(operation))))
    }

    /// The backward pass has ended: no more buckets will come.
    pub(super) fn end_of_pass(&self) -> Result<()> {
        self.guard(|| {
            self.0.engine.end_of_pass();
            Ok(())
        })
    }

    /// Exchanges held-back buckets now, because the job waits for one.
    pub(super) fn flush(&self) -> Result<()> {
        self.guard(|| {
            self.0.engine.flush();
            Ok(())
        })
    }
}

fn read_call(call: types::CallDescription) -> Result<Call> {
    let kind = torch_codes::collective_kind(call.kind).ok_or_else(|| {
        Error::Operation(format!("gflow: unknown kind of collective, code {}", call.kind))
    })?;
    let view = View {
        kind,
        dtype: torch_codes::data_type(call.dtype),
        reduce_op: torch_codes::reduce_op(call.reduce_op),
        root: call.root,
        tensors: call.tensors,
        numel: call.numel,
        layout: call.layout,
        // The engine fills it in.
        device_slot: 0,
    };
    Ok(Call {
        view,
        gradient: call.gradient,
        bucket: call.bucket,
        bytes: call.bytes,
        on_device: (call.device >= 0)
            .then_some(OnDevice { device: call.device, stream: call.stream }),
        sends: call.sends,
        receives: call.receives,
        complaint: match call.complaint.as_str() {
            "" => String::new(),
            what => format!("has wrong arguments: {what}"),
        },
        timeout: milliseconds(call.timeout_ms),
    })
}

/// An operation on the C++ side.
struct CxxOperation(SharedPtr<types::Operation>);

impl Operation for CxxOperation {
    fn prepare(&self) -> Result<()> {
        self.0.prepare().map_err(thrown)
    }

    fn open(&self) -> Result<Memory> {
        let spans = self.0.open().map_err(thrown)?;
        let read = |list: Vec<types::TensorSpan>| {
            list.into_iter()
                .map(|span| Span { address: span.address as *mut u8, bytes: span.bytes })
                .collect()
        };
        Ok(Memory { inputs: read(spans.inputs), outputs: read(spans.outputs) })
    }

    fn start(&self, done: Arc<Interrupt>) -> Result<()> {
        self.0.start(Box::new(types::Done(done))).map_err(thrown)
    }

    fn finish(&self) -> Result<()> {
        self.0.finish().map_err(thrown)
    }

    fn broke_connection(&self) -> bool {
        self.0.broke_connection()
    }

    fn complete(&self, error: Option<&Error>) -> bool {
        let text = error.map(Error::to_string).unwrap_or_default();
        // If it throws, there is nothing left to complete.
        self.0.complete(&text, matches!(error, Some(Error::Operation(_)))).unwrap_or(false)
    }

    fn notify(&self) {
        // The Future keeps what its callbacks throw; any other exception has nowhere to go.
        let _ = self.0.notify();
    }
}

fn thrown(exception: cxx::Exception) -> Error {
    Error::Operation(exception.what().to_string())
}
