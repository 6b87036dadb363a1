//! Checked wrappers: handles that clean up behind themselves, calls that return [`Fault`]s instead
//! of codes.
//!
//! Work enqueued on a stream runs later. Functions here that touch device memory are `unsafe`
//! where the caller has to promise that the memory is still there by then.
//!
//! [`Fault`]: super::Fault

pub mod communicator;
pub mod context;
pub mod device;
pub mod disk_cache;
pub mod event;
pub mod memory;
pub mod nccl;
pub mod nvrtc;
pub mod pinned;
pub mod stream;
