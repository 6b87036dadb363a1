//! What a collective is, how the ranks make sure that they all mean the same one, and how their
//! tensors are brought together.
//!
//! A collective begins with [`agreement`]; a small one is over with that, because the tensor
//! travels with the call. [`plan`] says how the others are carried out: [`local`] within a host,
//! [`ring`] between hosts, [`hosts`] both.

pub mod agreement;
pub mod assembly;
pub mod call;
pub mod fabric;
pub mod hierarchical;
pub mod local;
pub mod message;
pub mod partition;
pub mod plan;
pub mod ring;
pub mod span;
pub mod topology;
pub mod types;
