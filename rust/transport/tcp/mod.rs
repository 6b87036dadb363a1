//! TCP between the ranks of a group.
//!
//! Every rank listens at one address, where all its connections arrive. The [`mesh`] is one
//! connection between any two ranks, for messages and to notice the death of a peer; [`channels`]
//! are further connections between neighbours in a ring, for tensors. The [`connector`] makes both.

pub mod channels;
pub mod connector;
pub mod mesh;

pub use connector::ConnectError;
