//! TCP between the ranks of a group: who connects to whom, and what goes over the connections.
//!
//! Every rank listens at one address, where all its connections come in. The mesh is one
//! connection between any two ranks, for messages and for noticing the end of a peer; channels are
//! further connections to the neighbours in a ring, for tensors.

pub mod channels;
pub mod connector;
pub mod mesh;

/// Why connections could not be made: with whom, and what happened last.
#[derive(Debug)]
pub struct ConnectError {
    pub missing: Vec<usize>,
    pub last: String,
}
