//! What every TCP socket between ranks is told before it is used.
//!
//! Nothing here may set the size of a socket's buffers: the kernel finds a better one (see
//! `benches/ring.rs`). Nor may it limit how long sent bytes stay unacknowledged: that ends the
//! connection to a peer that is alive and only slow to read, which a peer with data on its way may
//! well be.

use rustix::net::sockopt;
use std::net::TcpStream;
use std::time::Duration;

/// Makes `stream` non-blocking, prompt, and aware of a peer that is gone.
pub fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // A host that vanishes sends no FIN: the kernel asks for it.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}
