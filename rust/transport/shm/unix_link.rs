//! A Unix socket between two ranks of a host, over which they pass descriptors.
//!
//! It never waits past its deadline or past an interrupt, whatever the other end does, and closes
//! every descriptor that was not asked for.

use crate::transport::interrupt::Interrupt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a wait may take: until a deadline, or until one of these interrupts is raised.
#[derive(Debug, Clone, Copy)]
pub struct WaitBounds<'a> {
    pub deadline: Instant,
    pub interrupts: &'a [&'a Interrupt],
}

#[derive(Debug)]
pub struct UnixLink<'a> {
    stream: OwnedFd,
    bounds: WaitBounds<'a>,
}

impl<'a> UnixLink<'a> {
    /// Connects to the abstract socket `name`. Does not retry, not even if its backlog is full.
    pub fn connect(name: &str, bounds: WaitBounds<'a>) -> Result<UnixLink<'a>> {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&stream, &address) {
            Ok(()) => Ok(UnixLink { stream, bounds }),
            Err(errno @ (Errno::CONNREFUSED | Errno::NOENT)) => Err(Error::new(
                errno.kind(),
                "nobody listens at its socket, as if it had another network namespace",
            )),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A connection that was accepted. `stream` must be non-blocking.
    pub fn accepted(stream: OwnedFd, bounds: WaitBounds<'a>) -> UnixLink<'a> {
        UnixLink { stream, bounds }
    }

    /// Passes a duplicate of `descriptor` to the other end.
    pub fn send_fd(&mut self, descriptor: BorrowedFd<'_>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let descriptors = [descriptor];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The space is large enough for one.
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        // Descriptors can only be sent along with data.
        let byte = [IoSlice::new(&[0])];
        self.retry(PollFlags::OUT, |stream| {
            rustix::net::sendmsg(stream, &byte, &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Receives the one descriptor that the other end passes.
    pub fn receive_fd(&mut self) -> Result<OwnedFd> {
        // The kernel rounds the space up to two anyway, so look for a second one.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let message = self.retry(PollFlags::IN, |stream| {
            let byte = &mut [IoSliceMut::new(&mut byte)];
            rustix::net::recvmsg(stream, byte, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        if message.bytes == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "it hung up"));
        }
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let mut passed: Vec<OwnedFd> = rights.flatten().collect();
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(refused("it passed many descriptors, or this process may open no more"));
        }
        match (passed.pop(), passed.len()) {
            (Some(descriptor), 0) => Ok(descriptor),
            (None, _) => Err(refused("it passed no descriptor")),
            _ => Err(refused("it passed many descriptors")),
        }
    }

    /// Repeats `attempt` whenever the stream is ready, until it does not block.
    fn retry<T>(
        &self,
        ready: PollFlags,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> Result<T> {
        loop {
            match attempt(self.stream.as_fd()) {
                Err(Errno::AGAIN) => {
                    self.bounds.check()?;
                    self.bounds.wait(&self.stream, ready, Duration::MAX);
                }
                Err(Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }
}

impl Read for UnixLink<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        self.retry(PollFlags::IN, |stream| {
            rustix::net::recv(stream, &mut *bytes, RecvFlags::empty()).map(|(read, _)| read)
        })
    }
}

impl Write for UnixLink<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.retry(PollFlags::OUT, |stream| rustix::net::send(stream, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl WaitBounds<'_> {
    /// Errors on deadline or interrupt.
    pub fn check(&self) -> Result<()> {
        // Not `ErrorKind::Interrupted`, which means "try again".
        if self.interrupts.iter().any(|interrupt| interrupt.is_raised()) {
            return Err(Error::new(ErrorKind::ConnectionAborted, "the group was aborted"));
        }
        if Instant::now() >= self.deadline {
            return Err(Error::new(ErrorKind::TimedOut, "the deadline came first"));
        }
        Ok(())
    }

    /// Sleeps until `socket` may be ready, for `limit` at most and within these bounds.
    pub fn wait(&self, socket: &impl AsFd, ready: PollFlags, limit: Duration) {
        self.sleep(Some((socket.as_fd(), ready)), limit);
    }

    /// Sleeps for `limit`, within these bounds.
    pub fn pause(&self, limit: Duration) {
        self.sleep(None, limit);
    }

    fn sleep(&self, socket: Option<(BorrowedFd<'_>, PollFlags)>, limit: Duration) {
        let interrupts = self.interrupts.iter().map(|i| (i.as_fd(), PollFlags::IN));
        let mut waits: Vec<_> = interrupts
            .chain(socket)
            .map(|(descriptor, ready)| PollFd::from_borrowed_fd(descriptor, ready))
            .collect();
        let left = self.deadline.saturating_duration_since(Instant::now()).min(limit);
        // A time too long for a Timespec is no limit. After an error (a signal, say) the caller's
        // loop comes back here.
        let _ = poll(&mut waits, Timespec::try_from(left).ok().as_ref());
    }
}

fn refused(why: &str) -> Error {
    Error::new(ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn soon() -> WaitBounds<'static> {
        WaitBounds { deadline: Instant::now() + Duration::from_secs(20), interrupts: &[] }
    }

    fn links<'a>(bounds: WaitBounds<'a>) -> (UnixStream, UnixLink<'a>) {
        let (other, own) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        (other, UnixLink::accepted(own.into(), bounds))
    }

    fn send(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let byte = [IoSlice::new(&[0])];
        rustix::net::sendmsg(stream, &byte, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_descriptor_comes_through_and_stays_in_this_program() {
        let (other, mut own) = links(soon());
        let (mut left, right) = UnixStream::pair().unwrap();
        let mut theirs = UnixLink::accepted(other.into(), soon());
        theirs.send_fd(right.as_fd()).unwrap();
        let passed = own.receive_fd().unwrap();
        let flags = rustix::io::fcntl_getfd(&passed).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        left.write_all(b"x").unwrap();
        assert_eq!(rustix::io::read(&passed, &mut [0; 1]), Ok(1));
    }

    #[test]
    fn none_or_more_than_one_is_refused_and_kept_open_nowhere() {
        for count in [0, 2, 3, 9] {
            let (other, mut own) = links(soon());
            let (left, right) = UnixStream::pair().unwrap();
            send(&other, &vec![right.as_fd(); count]);
            drop(right);
            let error = own.receive_fd().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{count}: {error}");
            // The end of the stream shows that all copies of its other end are closed.
            assert_eq!((&left).read(&mut [0; 1]).unwrap(), 0);
        }
    }

    #[test]
    fn an_end_is_told_from_silence() {
        let (other, mut own) = links(soon());
        drop(other);
        assert_eq!(own.receive_fd().unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let (_silent, mut own) = links(WaitBounds {
            deadline: Instant::now() + Duration::from_millis(30),
            interrupts: &[],
        });
        assert_eq!(own.receive_fd().unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn an_interrupt_ends_a_wait() {
        let interrupt = Interrupt::new().unwrap();
        let interrupts = [&interrupt];
        let bounds = WaitBounds { interrupts: &interrupts, ..soon() };
        let (_silent, mut own) = links(bounds);
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || own.read_exact(&mut [0; 1]).unwrap_err());
            std::thread::sleep(Duration::from_millis(20));
            interrupt.raise();
            assert_eq!(reading.join().unwrap().kind(), ErrorKind::ConnectionAborted);
        });
        assert!(bounds.check().is_err());
    }

    #[test]
    fn a_socket_that_nobody_has_is_said_to_be_out_of_reach() {
        let error = UnixLink::connect("gflow-nobody-has-this", soon()).unwrap_err();
        assert!(error.to_string().contains("network namespace"), "{error}");
    }
}
