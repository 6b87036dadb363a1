//! A byte stream between two ranks that moves what can be moved now, and never waits.

use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::AsFd;

/// A non-blocking byte stream, such as a non-blocking `TcpStream`.
pub trait Stream: Read + Write + AsFd + Send {}
impl<T: Read + Write + AsFd + Send> Stream for T {}

/// Reads what the stream has now, 0 bytes if nothing. The end of the stream is an error.
pub fn read_now(stream: &mut dyn Stream, into: &mut [u8]) -> Result<usize> {
    loop {
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Writes as much as the stream takes now, 0 bytes if it is full.
pub fn write_now(stream: &mut dyn Stream, bytes: &[u8]) -> Result<usize> {
    loop {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => return Ok(written),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
