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

/// Norms on their way to the host.
struct Norms {
    buffer: PinnedBuffer,
    kind: Kind,
    /// How many there are of them, and which are those of each shard.
    count: usize,
    shards: Vec<Range<usize>>,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The buffer has three words per chunk: first all own norms, then all norms of the gradient, then
    /// all slots on the wire.
    Chunks,
    /// It has two words per sampled block of the quantiser: the norms of the gradient and of what is
    /// left.
    Samples,
}

impl Kind {
    fn words(self) -> usize {
        match self {
            Kind::Chunks => 3,
            Kind::Samples => 2,
        }
    }
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
    pub(super) fn copy_norms(&mut self, layouts: &[ShardLayout]) -> Result<()> {
        let Some(first) = layouts.first() else { return Ok(()) };
        let chunks_of: Vec<usize> = layouts.iter().map(|layout| layout.chunks as usize).collect();
        let (shards, chunks) = ranges(&chunks_of);
        let mut buffer = PinnedBuffer::acquire(&self.stream.context, 3 * chunks)?;
        // SAFETY: the norms of all shards are contiguous in the scratch memory of the exchange.
        unsafe {
            buffer.copy_from_device(&self.stream, 0, chunks, first.norms)?;
            buffer.copy_from_device(&self.stream, chunks, chunks, first.gradient_norms)?;
        }
        self.norms = Some(Norms { buffer, kind: Kind::Chunks, count: chunks, shards });
        Ok(())
    }

    /// Copies the norms of sampled blocks from this address on: so many of each shard.
    pub(super) fn copy_samples(&mut self, samples: &[usize], from: u64) -> Result<()> {
        let (shards, count) = ranges(samples);
        let words = Kind::Samples.words() * count;
        let mut buffer = PinnedBuffer::acquire(&self.stream.context, words)?;
        // SAFETY: the norms of all shards are contiguous in the scratch memory of the exchange.
        unsafe { buffer.copy_from_device(&self.stream, 0, words, from) }?;
        self.norms = Some(Norms { buffer, kind: Kind::Samples, count, shards });
        Ok(())
    }

    /// Copies which chunks are sent. Call it after the selection.
    pub(super) fn copy_slots(&mut self, layouts: &[ShardLayout]) -> Result<()> {
        let (Some(norms), Some(first)) = (&mut self.norms, layouts.first()) else {
            return Ok(());
        };
        let chunks = norms.count;
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
            let words = unsafe { norms.buffer.words(norms.kind.words() * norms.count) };
            let exchange_norms = match norms.kind {
                Kind::Chunks => norms_of_chunks(words, &norms.shards),
                Kind::Samples => norms_of_samples(words, &norms.shards),
            };
            norms.buffer.release();
            exchange_norms
        });
        (times.unwrap_or_default(), exchange_norms.unwrap_or_default())
    }
}

fn record(stream: &Stream, has_time: bool) -> Result<Arc<Event>> {
    Ok(Arc::new(if has_time { stream.record_with_time()? } else { stream.record()? }))
}

/// The range of each of several counts, and the end of the last.
fn ranges(counts: &[usize]) -> (Vec<Range<usize>>, usize) {
    let mut end = 0;
    let mut next = |count: &usize| {
        let start = end;
        end += count;
        start..end
    };
    let ranges = counts.iter().map(&mut next).collect();
    (ranges, end)
}

/// A norm. As on the CPU, only finite ones count.
fn finite_norm(word: u32) -> Option<f64> {
    Some(f64::from(f32::from_bits(word))).filter(|norm| norm.is_finite())
}

/// The norms of each shard, from the words of [`Kind::Samples`].
fn norms_of_samples(words: &[u32], shards: &[Range<usize>]) -> Vec<ExchangeNorms> {
    let (samples, _) = words.as_chunks::<2>();
    let sum = |shard: &Range<usize>, which: usize| {
        samples[shard.clone()].iter().filter_map(|sample| finite_norm(sample[which])).sum()
    };
    let one = |shard| ExchangeNorms { gradient: sum(shard, 0), unsent: sum(shard, 1) };
    shards.iter().map(one).collect()
}

/// The norms of each shard, from the words of [`Kind::Chunks`].
fn norms_of_chunks(words: &[u32], shards: &[Range<usize>]) -> Vec<ExchangeNorms> {
    let chunks = words.len() / 3;
    let norm = |index: usize| finite_norm(words[index]);
    let one = |shard: &Range<usize>| ExchangeNorms {
        gradient: shard.clone().filter_map(|chunk| norm(chunks + chunk)).sum(),
        unsent: shard
            .clone()
            .filter(|chunk| words[2 * chunks + chunk] == NOT_SELECTED)
            .filter_map(norm)
            .sum(),
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
        assert_eq!(norms_of_chunks(&words, &[0..3, 3..4]), expected[..]);
    }

    #[test]
    fn the_norms_of_samples_belong_to_their_shards() {
        let words = [1.0, 0.5, 2.0, 0.25, f32::INFINITY, 4.0f32].map(f32::to_bits);
        let expected = [
            ExchangeNorms { gradient: 3.0, unsent: 0.75 },
            ExchangeNorms { gradient: 0.0, unsent: 0.0 },
            ExchangeNorms { gradient: 0.0, unsent: 4.0 },
        ];
        let (shards, count) = ranges(&[2, 0, 1]);
        assert_eq!((norms_of_samples(&words, &shards), count), (expected.to_vec(), 3));
    }
}
