//! Measurements of an exchange on the device: the times of its stages, and the norms that were sent
//! or kept. The host reads them once the exchange is complete; nothing here waits for that.

use super::shard_layout::ShardLayout;
use crate::codec::ExchangeNorms;
use crate::cuda::kernels::NOT_SELECTED;
use crate::cuda::safe::event::Event;
use crate::cuda::safe::pinned::PinnedBuffer;
use crate::cuda::safe::stream::Stream;
use crate::cuda::sys::fault::Result;
use std::ops::Range;
use std::sync::Arc;

pub struct DeviceReport {
    stream: Arc<Stream>,
    has_times: bool,
    start: Arc<Event>,
    /// The end of each stage so far.
    ends: Vec<Arc<Event>>,
    norms: Option<Norms>,
}

/// Norms on their way to the host. The buffer has three words per chunk: first all own norms, then
/// all norms of the gradient, then all slots on the wire, if there are any.
struct Norms {
    buffer: PinnedBuffer,
    chunks: usize,
    has_slots: bool,
    /// The chunks of each shard.
    shards: Vec<Range<usize>>,
}

/// Where the norms of all shards are on the device, those of one shard after those of another.
pub(super) struct DeviceNorms {
    /// Of what could be sent, or of what is left.
    pub own: u64,
    pub gradient: u64,
    /// How many each shard has.
    pub counts: Vec<usize>,
}

impl DeviceReport {
    /// Reports on what is enqueued from now on.
    pub fn start(stream: &Arc<Stream>) -> Result<DeviceReport> {
        let has_times = Event::supports_timing()?;
        let start = record(stream, has_times)?;
        Ok(DeviceReport { stream: stream.clone(), has_times, start, ends: Vec::new(), norms: None })
    }

    /// Ends a stage: what was enqueued since the last call.
    pub fn end_stage(&mut self) -> Result<()> {
        self.ends.push(record(&self.stream, self.has_times)?);
        Ok(())
    }

    /// The event that completes with the last stage so far.
    pub fn end(&self) -> Arc<Event> {
        self.ends.last().unwrap_or(&self.start).clone()
    }

    /// Copies this rank's norms. Call it before they are summed over all ranks.
    pub(super) fn copy_norms(&mut self, norms: &DeviceNorms) -> Result<()> {
        let mut chunks = 0;
        let next = |count: &usize| {
            let start = chunks;
            chunks += count;
            start..chunks
        };
        let shards: Vec<_> = norms.counts.iter().map(next).collect();
        if chunks == 0 {
            return Ok(());
        }
        let mut buffer = PinnedBuffer::acquire(&self.stream.context, 3 * chunks)?;
        // SAFETY: the norms of all shards are contiguous in the scratch memory of the exchange.
        unsafe {
            buffer.copy_from_device(&self.stream, 0, chunks, norms.own)?;
            buffer.copy_from_device(&self.stream, chunks, chunks, norms.gradient)?;
        }
        self.norms = Some(Norms { buffer, chunks, has_slots: false, shards });
        Ok(())
    }

    /// Copies which chunks are sent. Call it after the selection.
    pub(super) fn copy_slots(&mut self, layouts: &[ShardLayout]) -> Result<()> {
        let (Some(norms), Some(first)) = (&mut self.norms, layouts.first()) else {
            return Ok(());
        };
        let chunks = norms.chunks;
        norms.has_slots = true;
        // SAFETY: so are their slots.
        unsafe { norms.buffer.copy_from_device(&self.stream, 2 * chunks, chunks, first.slots) }
    }

    /// The device time of each stage in seconds, and the norms of each shard. Both are empty if the
    /// stages are not complete, or cannot be measured.
    pub fn read(self) -> (Vec<f64>, Vec<ExchangeNorms>) {
        if !self.end().is_complete().unwrap_or(false) {
            return Default::default();
        }
        let starts = std::iter::once(&self.start).chain(&self.ends);
        let stages = starts.zip(&self.ends).filter(|_| self.has_times);
        let times: Result<Vec<_>> = stages.map(|(start, end)| end.seconds_since(start)).collect();
        let exchange_norms = self.norms.map(|norms| {
            // SAFETY: all copies come before the end, which is complete.
            let words =
                unsafe { norms.buffer.words((2 + usize::from(norms.has_slots)) * norms.chunks) };
            let exchange_norms = exchange_norms(words, norms.chunks, &norms.shards);
            norms.buffer.release();
            exchange_norms
        });
        (times.unwrap_or_default(), exchange_norms.unwrap_or_default())
    }
}

fn record(stream: &Stream, has_time: bool) -> Result<Arc<Event>> {
    Ok(Arc::new(if has_time { stream.record_with_time()? } else { stream.record()? }))
}

/// The norms of each shard, from the words of [`Norms`]. Without slots no chunk was sent.
fn exchange_norms(words: &[u32], chunks: usize, shards: &[Range<usize>]) -> Vec<ExchangeNorms> {
    let is_sent =
        |chunk: &usize| words.get(2 * chunks + chunk).is_some_and(|slot| *slot != NOT_SELECTED);
    // As on the CPU: only finite norms count.
    let norm = |index: usize| {
        Some(f64::from(f32::from_bits(words[index]))).filter(|norm| norm.is_finite())
    };
    let one = |shard: &Range<usize>| ExchangeNorms {
        gradient: shard.clone().filter_map(|chunk| norm(chunks + chunk)).sum(),
        unsent: shard.clone().filter(|chunk| !is_sent(chunk)).filter_map(norm).sum(),
    };
    shards.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_finite_norms_count_and_sent_chunks_are_not_unsent() {
        let own = [1.0, f32::NAN, 3.0, 8.0f32].map(f32::to_bits);
        let gradient = [0.5, 2.0, f32::INFINITY, 4.0f32].map(f32::to_bits);
        let slots = [NOT_SELECTED, NOT_SELECTED, 0, NOT_SELECTED];
        let words = [own, gradient, slots].concat();
        let expected = [
            ExchangeNorms { gradient: 2.5, unsent: 1.0 },
            ExchangeNorms { gradient: 4.0, unsent: 8.0 },
        ];
        assert_eq!(exchange_norms(&words, 4, &[0..3, 3..4]), expected[..]);
        let all_unsent = [
            ExchangeNorms { gradient: 2.5, unsent: 4.0 },
            ExchangeNorms { gradient: 4.0, unsent: 8.0 },
        ];
        assert_eq!(exchange_norms(&words[..8], 4, &[0..3, 3..4]), all_unsent);
    }
}
