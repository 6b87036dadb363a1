//! The handshake: both ends prove that they hold the group's key before a byte of a job moves.
//!
//! The connecting rank says who it is and sends a nonce; the accepting rank answers with a nonce
//! of its own and a proof over both; the connecting rank answers with its proof. The key never
//! travels. A stranger learns nothing, and what it sends is bounded and timed.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::time::Duration;

/// How long one stranger may take over its handshake before it is dropped.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Pause between attempts to reach a rank that does not listen yet.
pub const RETRY_PAUSE: Duration = Duration::from_millis(20);

pub const KEY_BYTES: usize = 32;
pub type Key = [u8; KEY_BYTES];

/// The last byte is the protocol's version.
const MAGIC: [u8; 8] = *b"gflow\0\0\x03";
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 4 + 4 + 4 + NONCE_BYTES;

/// Who connects, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Caller {
    pub rank: u32,
    /// 0 for the connection that messages go over; others are channels of a ring.
    pub channel: u32,
}

/// Which end a proof is for, so that one end's proof cannot be replayed as the other's.
const CONNECTING: &[u8] = b"connecting";
const ACCEPTING: &[u8] = b"accepting";

/// Proves to `stream` that this is `own`, and makes sure that the other end is rank `peer`.
pub fn connect(stream: &mut (impl Read + Write), key: &Key, own: Caller, peer: u32) -> Result<()> {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..12].copy_from_slice(&own.rank.to_le_bytes());
    hello[12..16].copy_from_slice(&peer.to_le_bytes());
    hello[16..20].copy_from_slice(&own.channel.to_le_bytes());
    hello[20..].copy_from_slice(&nonce()?);
    stream.write_all(&hello)?;

    let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
    stream.read_exact(&mut answer)?;
    let (their_nonce, their_proof) = answer.split_at(NONCE_BYTES);
    verify(key, ACCEPTING, &hello, their_nonce, their_proof)?;
    stream.write_all(&proof(key, CONNECTING, &hello, their_nonce).finalize().into_bytes())
}

/// Returns who connected, once it has proved the key and asked for rank `own`.
pub fn accept(stream: &mut (impl Read + Write), key: &Key, own: u32) -> Result<Caller> {
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    if hello[..8] != MAGIC {
        return Err(refused("it does not speak this version of gflow's protocol"));
    }
    let number_at = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| hello[at + i]));
    let caller = Caller { rank: number_at(8), channel: number_at(16) };
    if number_at(12) != own {
        return Err(refused("it looks for another rank"));
    }
    let own_nonce = nonce()?;
    stream.write_all(&own_nonce)?;
    stream.write_all(&proof(key, ACCEPTING, &hello, &own_nonce).finalize().into_bytes())?;

    let mut their_proof = [0; PROOF_BYTES];
    stream.read_exact(&mut their_proof)?;
    verify(key, CONNECTING, &hello, &own_nonce, &their_proof)?;
    Ok(caller)
}

fn proof(key: &Key, end: &[u8], hello: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(end);
    mac.update(hello);
    mac.update(nonce);
    mac
}

fn verify(key: &Key, end: &[u8], hello: &[u8], nonce: &[u8], claimed: &[u8]) -> Result<()> {
    proof(key, end, hello, nonce)
        .verify_slice(claimed)
        .map_err(|_| refused("it does not hold the group's key"))
}

fn nonce() -> Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
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
                let mut hello = [0; HELLO_BYTES];
                hello[..8].copy_from_slice(&MAGIC);
                stranger.write_all(&hello).unwrap();
            }
            stranger.write_all(&bytes).unwrap();
            stranger.shutdown(std::net::Shutdown::Write).unwrap();
            own.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            prop_assert!(accept(&mut own, &[7; 32], 0).is_err());
        }
    }
}
