//! A report: what the device measures of what is put on a stream, for the host to read when it is over.
//! Nothing here waits for that.

use super::driver;
use super::event::Event;
use super::exchange::ShardLayout;
use super::fault::Result;
use super::kernels::NOT_CHOSEN;
use super::pinned::PinnedBuffer;
use super::stream::Stream;
use crate::codec::ExchangeNorms;
use std::ops::Range;
use std::sync::Arc;

/// Times between events are asked for by a function that the driver has since CUDA 12.8.
const TIMES_SINCE: i32 = 12080;

pub struct DeviceReport {
    stream: Arc<Stream>,
    has_times: bool,
    beginning: Arc<Event>,
    /// The ends of the stages so far.
    ends: Vec<Arc<Event>>,
    weighed: Option<Weighed>,
}

/// Norms on their way to the host: own ones, those of the gradient, and which chunk is sent where.
struct Weighed {
    numbers: PinnedBuffer,
    chunks: usize,
    /// The chunks of each shard.
    shards: Vec<Range<usize>>,
}

impl DeviceReport {
    /// Of what is put on the stream from now on.
    pub fn start(stream: &Arc<Stream>) -> Result<DeviceReport> {
        let has_times = driver::version()? >= TIMES_SINCE;
        let beginning = mark(stream, has_times)?;
        let (stream, ends) = (stream.clone(), Vec::new());
        Ok(DeviceReport { stream, has_times, beginning, ends, weighed: None })
    }

    /// What was put on the stream since the last call was one stage.
    pub fn end_stage(&mut self) -> Result<()> {
        self.ends.push(mark(&self.stream, self.has_times)?);
        Ok(())
    }

    /// What is reached when all of the stages so far are over.
    pub fn end(&self) -> Arc<Event> {
        self.ends.last().unwrap_or(&self.beginning).clone()
    }

    /// Before the norms of these shards become those of all ranks.
    pub(super) fn read_norms(&mut self, placed: &[ShardLayout]) -> Result<()> {
        let Some(first) = placed.first() else { return Ok(()) };
        let mut end = 0;
        let mut next = |one: &ShardLayout| {
            let start = end;
            end += one.chunks as usize;
            start..end
        };
        let shards: Vec<_> = placed.iter().map(&mut next).collect();
        let chunks = end;
        let mut numbers = PinnedBuffer::take(&self.stream.context, 3 * chunks)?;
        // SAFETY: the norms of all shards are one after the other, in the scratch of the exchange.
        unsafe {
            numbers.fill(&self.stream, 0, chunks, first.norms)?;
            numbers.fill(&self.stream, chunks, chunks, first.gradient_norms)?;
        }
        self.weighed = Some(Weighed { numbers, chunks, shards });
        Ok(())
    }

    /// Once it is known which chunks are sent.
    pub(super) fn read_choice(&mut self, placed: &[ShardLayout]) -> Result<()> {
        let (Some(weighed), Some(first)) = (&mut self.weighed, placed.first()) else {
            return Ok(());
        };
        let chunks = weighed.chunks;
        // SAFETY: so are the places of their chunks.
        unsafe { weighed.numbers.fill(&self.stream, 2 * chunks, chunks, first.slots) }
    }

    /// How long the stages took on the device, in seconds, and how much was in each shard, once all are
    /// over; what cannot be known is left out.
    pub fn read(self) -> (Vec<f64>, Vec<ExchangeNorms>) {
        if !self.end().is_complete().unwrap_or(false) {
            return Default::default();
        }
        let starts = std::iter::once(&self.beginning).chain(&self.ends);
        let stages = starts.zip(&self.ends).filter(|_| self.has_times);
        let times: Result<Vec<_>> = stages.map(|(start, end)| end.seconds_since(start)).collect();
        let weights = self.weighed.map(|weighed| {
            // SAFETY: the end was reached, and all of them come before it.
            let words = unsafe { weighed.numbers.words(3 * weighed.chunks) };
            let weights = weights(words, &weighed.shards);
            weighed.numbers.keep();
            weights
        });
        (times.unwrap_or_default(), weights.unwrap_or_default())
    }
}

fn mark(stream: &Stream, has_time: bool) -> Result<Arc<Event>> {
    Ok(Arc::new(if has_time { stream.record_with_time()? } else { stream.record()? }))
}

/// The weights of shards, of own norms, norms of the gradient, and places of the chunks.
fn weights(words: &[u32], shards: &[Range<usize>]) -> Vec<ExchangeNorms> {
    let chunks = words.len() / 3;
    // As on the CPU: what is not finite is no weight.
    let norm =
        |at: usize| Some(f64::from(f32::from_bits(words[at]))).filter(|norm| norm.is_finite());
    let weight = |shard: &Range<usize>| ExchangeNorms {
        gradient: shard.clone().filter_map(|chunk| norm(chunks + chunk)).sum(),
        unsent: shard
            .clone()
            .filter(|chunk| words[2 * chunks + chunk] == NOT_CHOSEN)
            .filter_map(norm)
            .sum(),
    };
    shards.iter().map(weight).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_or_not_finite_is_no_weight() {
        let own = [1.0, f32::NAN, 3.0, 8.0f32].map(f32::to_bits);
        let gradient = [0.5, 2.0, f32::INFINITY, 4.0f32].map(f32::to_bits);
        let slots = [NOT_CHOSEN, NOT_CHOSEN, 0, NOT_CHOSEN];
        let words = [own, gradient, slots].concat();
        let expected = [
            ExchangeNorms { gradient: 2.5, unsent: 1.0 },
            ExchangeNorms { gradient: 4.0, unsent: 8.0 },
        ];
        assert_eq!(weights(&words, &[0..3, 3..4]), expected[..]);
    }
}
