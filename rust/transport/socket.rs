//! Options for every TCP socket between ranks.
//!
//! Socket buffers are left to the kernel, which picks better sizes (see `benches/ring.rs`). There
//! is no TCP_USER_TIMEOUT either: on a connection that carries tensors it would cut off a peer that
//! is alive but slow to read.

use rustix::net::sockopt;
use std::net::TcpStream;
use std::time::Duration;

/// Makes `stream` non-blocking, without delay, and able to detect a dead peer.
pub fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // A host that vanishes sends no FIN, so the kernel has to probe.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}
