//! Collectives: how the ranks agree on a call, and how they carry it out.
//!
//! A collective begins with [`agreement`], in [`message`]s that carry the [`call`]. A small one is
//! then over, because its tensor travelled with the call. For the others a [`plan`] says how:
//! [`local`] within a host, [`ring`] between hosts, [`hierarchical`] both. All of them use the
//! [`fabric`] that [`assembly`] builds for a new group. Gradients that cannot be summed on the way
//! go over [`links`].

pub mod agreement;
pub mod assembly;
pub mod call;
pub mod fabric;
pub mod hierarchical;
pub mod info;
pub mod links;
pub mod local;
pub mod message;
pub mod partition;
pub mod plan;
pub mod ring;
pub mod span;
pub mod stream;
pub mod topology;
pub mod types;
