//! The engine's interface to the gradients of its group.

use super::bucket::BucketState;
use super::config::CompressionConfig;
use super::courier::Courier;
use super::devices::Devices;
use super::exchanger::Exchanger;
use super::fused_bucket::Tensor;
use super::fusion::{Fusion, Progress};
use super::method::Method;
use super::notice::Notice;
use super::ring_route::RingRoute;
use super::two_legs::{LinkRoute, TwoLegs};
use super::unused::ModelLayout;
use crate::codec::Momentum;
use crate::codec::quantizer::Stepping;
use crate::collective::agreement::AgreedBucket;
use crate::collective::fabric::Fabric;
use crate::collective::links::Links;
use crate::collective::ring::Ring;
use crate::cuda;
use crate::observe::gradient_counters::GradientCounters;
use crate::observe::overlap::OverlapTimer;
use crate::transport::Watch;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The gradients of one group on one rank: those that are being exchanged, and what is kept of them from
/// step to step. Every collective comes with a ticket `T`, and its caller gets it back on completion.
pub struct Gradients<T> {
    exchanger: Exchanger,
    fusion: Fusion<T>,
}

impl<T> Gradients<T> {
    /// Without a `config` every gradient is exchanged exactly.
    pub fn new(config: Option<CompressionConfig>, momentum: Option<Momentum>) -> Gradients<T> {
        Gradients { exchanger: Exchanger::new(config, momentum), fusion: Fusion::default() }
    }

    /// Sets how parcels go round the ring of hosts, while `watch` is checked. A rank without a ring
    /// carries nothing to other hosts.
    pub fn set_ring(&mut self, ring: Arc<Mutex<Ring>>, watch: Box<dyn Watch + Send>) {
        self.exchanger.paths.set_courier(Courier::new(RingRoute { ring, watch }));
    }

    /// Sets the links to the carriers of the same shard, over which quantised gradients go.
    pub fn set_links(&mut self, links: Links, watch: Box<dyn Watch + Send>) -> std::io::Result<()> {
        let (hosts, host) = (links.hosts(), links.host());
        let courier = Courier::new(LinkRoute::new(links, watch)?);
        self.exchanger.paths.set_two_legs(TwoLegs::new(courier, hosts, host));
        Ok(())
    }

    /// Sets the devices that gradients may be on.
    pub fn set_devices(&mut self, devices: Arc<Devices>) {
        self.exchanger.paths.set_devices(devices);
    }

    pub fn counters(&self) -> &Arc<GradientCounters> {
        &self.exchanger.counters
    }

    /// Whether buckets are ever compressed, and so have to come here with their number.
    pub fn compresses(&self) -> bool {
        self.exchanger.config().is_some()
    }

    /// Takes a bucket that the ranks have agreed on, and exchanges it now or together with others.
    /// This one may be complete only after a later call.
    pub fn exchange(
        &mut self,
        fabric: &mut Fabric,
        bucket: AgreedBucket,
        tensor: Tensor,
        ticket: T,
    ) -> Progress<T> {
        self.fusion.exchange(&mut self.exchanger, fabric, bucket, tensor, ticket)
    }

    /// Exchanges and completes all buckets that were taken and are not complete.
    pub fn flush(&mut self, fabric: &mut Fabric) -> Progress<T> {
        self.fusion.flush(&mut self.exchanger, fabric)
    }

    /// What the user has to be told, once.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.fusion.take_notices()
    }

    /// When gradients were called and waited for.
    pub fn overlap(&self) -> &Arc<OverlapTimer> {
        &self.exchanger.overlap
    }

    /// What `method="auto"` stands for now; `None` with another method.
    pub fn chosen_method(&self) -> Option<Method> {
        self.exchanger.chosen_method()
    }

    /// Continues with what `method="auto"` stood for when a state was saved.
    pub fn set_chosen_method(&mut self, method: Method) {
        self.exchanger.set_chosen_method(method);
    }

    /// How often this bucket was exchanged.
    pub fn step_of(&self, bucket: u32) -> u64 {
        self.exchanger.store.step_of(bucket)
    }

    /// The momentum that this rank applies, as a code that ranks can compare; 0 for none.
    pub fn momentum_code(&self) -> u32 {
        self.exchanger.momentum.map_or(0, |momentum| {
            momentum.factor.to_bits() ^ (u32::from(momentum.nesterov) << (u32::BITS - 1))
        })
    }

    /// What the optimizer does with a bucket, as far as this rank knows.
    pub fn stepping_of(&self, bucket: u32) -> Option<Stepping> {
        self.exchanger.store.stepping_of(bucket)
    }

    /// Sets what the optimizer does with these buckets; without any, what it does with all, whatever is
    /// said of single ones. The ranks agree on it with every bucket.
    pub fn set_stepping(&mut self, buckets: &[u32], stepping: Option<Stepping>) {
        self.exchanger.store.set_stepping(buckets, stepping);
    }

    /// Takes over the momentum from the optimizer, or gives it back.
    pub fn set_momentum(&mut self, momentum: Option<Momentum>) {
        self.exchanger.momentum = momentum;
    }

    /// Where the parameters of a model are whose steps may leave some unused.
    pub fn add_layout(&mut self, layout: ModelLayout) {
        self.exchanger.store.add_layout(layout);
    }

    /// Takes back what was delivered for parameters that no rank used, of the model with this bucket.
    /// `used` counts the ranks that used each parameter. One of the hosts that carry a shard `keeps_sum`.
    ///
    /// # Safety
    /// The model's Reducer waits for these counts: it does not touch what it takes for unused meanwhile.
    pub unsafe fn take_back_unused(&mut self, bucket: u32, used: &[i32], keeps_sum: bool) {
        // SAFETY: as the caller guarantees.
        unsafe { self.exchanger.store.take_back_unused(bucket, used, keeps_sum) };
    }

    /// Drops the state of buckets that are gone.
    pub fn forget(&mut self, buckets: &[u32]) {
        self.exchanger.store.forget(buckets);
        self.exchanger.counters.retire(buckets);
    }

    /// Whether exchanges can be undone from now on. It takes as much memory as there is state.
    pub fn keep_for_undo(&mut self, is_wanted: bool) {
        self.exchanger.store.keep_for_undo(is_wanted);
    }

    /// From now on, the state of the last complete step is known even after a failure. It takes as much
    /// memory as there is state.
    pub fn keep_last_step(&mut self) {
        self.exchanger.store.keep_last_step();
    }

    /// The training job has decided about the gradients exchanged since the last call, and changed their
    /// unit by `factor`. If it `skipped` the step, they were not used, so their exchanges are undone.
    pub fn record_step(&mut self, skipped: bool, factor: f32) -> cuda::Result<()> {
        self.exchanger.store.record_step(skipped, factor)
    }

    /// For a group that has failed: the newest state of a bucket after at most `step` exchanges, all
    /// complete. If that is not remembered, the state as it is.
    pub fn state_until(
        &self,
        bucket: u32,
        step: u64,
        limit: Duration,
    ) -> cuda::Result<BucketState> {
        self.exchanger.store.state_until(bucket, step, limit)
    }

    /// The state of a bucket; empty if it was never exchanged. May wait for a device.
    pub fn state_of(&self, bucket: u32, limit: Duration) -> cuda::Result<BucketState> {
        self.exchanger.store.state_of(bucket, limit)
    }

    /// Replaces the state of a bucket by one that was saved. It `owes` if some rank keeps a residual of
    /// it; all ranks say the same.
    pub fn load(&mut self, bucket: u32, state: BucketState, owes: bool) {
        self.exchanger.store.load(bucket, state, owes);
    }
}
