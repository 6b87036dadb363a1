//! The sockets at which the other ranks of a new group reach this one.

use super::guard;
use crate::error::{Error, Result};
use crate::transport::shm::fd_exchange::FdListener;
use crate::transport::tcp::connector::Listener;
use std::net::IpAddr;

/// Where the ranks of a group that is being made can come in.
pub(super) struct Door {
    pub(super) listener: Listener,
    /// For the memory of ranks of the same host; none where there are no such sockets.
    pub(super) entrance: Option<FdListener>,
}

pub(super) fn open_door(address: &str) -> Result<Box<Door>> {
    guard(|| {
        let failed = |why: String| Error::Connect(format!("cannot listen on {address}: {why}"));
        let ip: IpAddr = address.parse().map_err(|_| failed("not an IP address".into()))?;
        let listener = Listener::bind(ip).map_err(|error| failed(error.to_string()))?;
        Ok(Box::new(Door { listener, entrance: FdListener::open().ok() }))
    })
}

impl Door {
    pub(super) fn address(&self) -> String {
        self.listener.address().to_string()
    }

    pub(super) fn entrance(&self) -> String {
        self.entrance.as_ref().map_or(String::new(), |entrance| entrance.name().to_string())
    }
}
