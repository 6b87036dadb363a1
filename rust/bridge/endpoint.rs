//! The sockets at which the other ranks of a new group reach this one.

use super::guard;
use crate::engine::group;
use crate::error::Result;

pub(super) struct Endpoint(pub(super) group::Endpoint);

pub(super) fn open_endpoint(address: &str) -> Result<Box<Endpoint>> {
    guard(|| Ok(Box::new(Endpoint(group::Endpoint::open(address)?))))
}

impl Endpoint {
    pub(super) fn address(&self) -> String {
        self.0.address().to_string()
    }

    /// The name of its Unix socket; empty if it has none.
    pub(super) fn fd_socket(&self) -> String {
        self.0.fd_socket().unwrap_or_default().to_string()
    }
}
