//! The handshake: both ends prove that they hold the group's key before any data moves.
//!
//! The connecting rank introduces itself and sends a nonce; the accepting rank answers with its own
//! nonce and a proof over both; the connecting rank answers with its proof. The key is never sent. A
//! stranger learns nothing, and what it sends is bounded in size and time.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::time::Duration;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// How long a handshake may take before the connection is dropped.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Pause between attempts to reach a rank that does not listen yet.
pub const RETRY_PAUSE: Duration = Duration::from_millis(20);

pub const KEY_BYTES: usize = 32;
pub type Key = [u8; KEY_BYTES];

type Nonce = [u8; 32];
type Proof = [u8; 32];

/// The last byte is the version of the protocol.
const MAGIC: [u8; 8] = *b"gflow\0\0\x03";

/// The connecting rank, and what the connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Caller {
    pub rank: u32,
    /// 0 for the connection that carries messages; others are channels of a ring.
    pub channel: u32,
}

/// The first thing that the connecting rank sends.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Hello {
    magic: [u8; 8],
    rank: U32,
    /// The rank that it wants to reach.
    peer: U32,
    channel: U32,
    nonce: Nonce,
}

/// The reply of the accepting rank.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Answer {
    nonce: Nonce,
    proof: Proof,
}

/// Which end a proof is for, so that one end's proof cannot be replayed as the other's.
const CONNECTING: &[u8] = b"connecting";
const ACCEPTING: &[u8] = b"accepting";

/// Proves to `stream` that this is `own`, and verifies that the other end is rank `peer`.
pub fn connect(stream: &mut (impl Read + Write), key: &Key, own: Caller, peer: u32) -> Result<()> {
    let hello = Hello {
        magic: MAGIC,
        rank: own.rank.into(),
        peer: peer.into(),
        channel: own.channel.into(),
        nonce: nonce()?,
    };
    stream.write_all(hello.as_bytes())?;

    let mut answer = Answer::new_zeroed();
    stream.read_exact(answer.as_mut_bytes())?;
    verify(key, ACCEPTING, &hello, &answer.nonce, &answer.proof)?;
    stream.write_all(&proof(key, CONNECTING, &hello, &answer.nonce).finalize().into_bytes())
}

/// Returns who connected, once it has proved the key and asked for rank `own`.
pub fn accept(stream: &mut (impl Read + Write), key: &Key, own: u32) -> Result<Caller> {
    let mut hello = Hello::new_zeroed();
    stream.read_exact(hello.as_mut_bytes())?;
    if hello.magic != MAGIC {
        return Err(refused("it does not speak this version of gflow's protocol"));
    }
    if hello.peer != own {
        return Err(refused("it looks for another rank"));
    }
    let nonce = nonce()?;
    let proof = proof(key, ACCEPTING, &hello, &nonce).finalize().into_bytes().into();
    stream.write_all(Answer { nonce, proof }.as_bytes())?;

    let mut their_proof: Proof = [0; _];
    stream.read_exact(&mut their_proof)?;
    verify(key, CONNECTING, &hello, &nonce, &their_proof)?;
    Ok(Caller { rank: hello.rank.get(), channel: hello.channel.get() })
}

fn proof(key: &Key, end: &[u8], hello: &Hello, nonce: &Nonce) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(end);
    mac.update(hello.as_bytes());
    mac.update(nonce);
    mac
}

fn verify(key: &Key, end: &[u8], hello: &Hello, nonce: &Nonce, claimed: &Proof) -> Result<()> {
    proof(key, end, hello, nonce)
        .verify_slice(claimed)
        .map_err(|_| refused("it does not hold the group's key"))
}

fn nonce() -> Result<Nonce> {
    let mut bytes = [0; _];
    getrandom::fill(&mut bytes).map_err(Error::other)?;
    Ok(bytes)
}

fn refused(why: &str) -> Error {
    Error::new(ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixStream;

    fn shake(connecting_key: Key, accepting_key: Key, wanted: u32) -> (Result<()>, Result<Caller>) {
        let (mut left, mut right) = UnixStream::pair().unwrap();
        let connecting = std::thread::spawn(move || {
            connect(&mut left, &connecting_key, Caller { rank: 3, channel: 2 }, wanted)
        });
        let accepted = accept(&mut right, &accepting_key, 1);
        drop(right);
        (connecting.join().unwrap(), accepted)
    }

    #[test]
    fn ranks_with_the_same_key_meet() {
        let (connected, accepted) = shake([7; 32], [7; 32], 1);
        connected.unwrap();
        assert_eq!(accepted.unwrap(), Caller { rank: 3, channel: 2 });
    }

    #[test]
    fn a_wrong_key_or_a_wrong_rank_is_refused_on_both_ends() {
        for (key, wanted) in [([8; 32], 1), ([7; 32], 2)] {
            let (connected, accepted) = shake(key, [7; 32], wanted);
            assert!(connected.is_err() && accepted.is_err());
        }
    }

    proptest! {
        #[test]
        fn a_stranger_gets_nowhere_whatever_it_sends(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), ours in any::<bool>()
        ) {
            let (mut stranger, mut own) = UnixStream::pair().unwrap();
            if ours {
                // A hello that is well formed, so that the proof is what fails.
                let hello = Hello { magic: MAGIC, ..Hello::new_zeroed() };
                stranger.write_all(hello.as_bytes()).unwrap();
            }
            stranger.write_all(&bytes).unwrap();
            stranger.shutdown(std::net::Shutdown::Write).unwrap();
            own.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            prop_assert!(accept(&mut own, &[7; 32], 0).is_err());
        }
    }
}
