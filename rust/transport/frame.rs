//! Frames: how a byte stream is cut into messages.
//!
//! A frame is its length (u32, little-endian, of what follows), one byte of purpose, and the
//! payload. Nothing from the wire is trusted: a length is checked before any byte is kept.

/// The longest payload that gflow sends; a longer frame isn't ours.
pub const MAX_PAYLOAD: usize = 64 * 1024;

const LENGTH_BYTES: usize = 4;
const MESSAGE: u8 = 1;
const LEFT: u8 = 2;
const GAVE_UP: u8 = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    Message(Vec<u8>),
    Goodbye(Goodbye),
}

/// The last frame of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Goodbye {
    /// Whether it broke off, so that what it had begun stays unfinished. A peer that left in order
    /// has done its part of everything it sent a message for.
    pub gave_up: bool,
    pub reason: String,
}

impl Frame {
    /// The bytes of this frame. A payload over the limit is cut off: only a goodbye can be that long.
    pub fn encode(&self) -> Vec<u8> {
        let (purpose, payload) = match self {
            Frame::Message(payload) => (MESSAGE, payload.as_slice()),
            Frame::Goodbye(Goodbye { gave_up: false, reason }) => (LEFT, reason.as_bytes()),
            Frame::Goodbye(Goodbye { gave_up: true, reason }) => (GAVE_UP, reason.as_bytes()),
        };
        let payload = &payload[..payload.len().min(MAX_PAYLOAD)];
        let mut bytes = Vec::with_capacity(LENGTH_BYTES + 1 + payload.len());
        bytes.extend_from_slice(&(payload.len() as u32 + 1).to_le_bytes());
        bytes.push(purpose);
        bytes.extend_from_slice(payload);
        bytes
    }
}

/// Collects bytes as they arrive and returns whole frames.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
}

impl FrameBuffer {
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, `None` if it is incomplete, or why these bytes are no frame.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, String> {
        let Some((purpose, payload)) = self.frame_at(0)? else { return Ok(None) };
        let end = LENGTH_BYTES + 1 + payload.len();
        let frame = match purpose {
            MESSAGE => Frame::Message(payload.to_vec()),
            _ => Frame::Goodbye(goodbye(purpose, payload)),
        };
        self.bytes.drain(..end);
        Ok(Some(frame))
    }

    /// A goodbye that has arrived, even if unread messages are in front of it.
    pub fn waiting_goodbye(&self) -> Option<Goodbye> {
        let mut at = 0;
        while let Ok(Some((purpose, payload))) = self.frame_at(at) {
            if purpose != MESSAGE {
                return Some(goodbye(purpose, payload));
            }
            at += LENGTH_BYTES + 1 + payload.len();
        }
        None
    }

    /// Purpose and payload of the frame that begins at `at`, if it is complete.
    fn frame_at(&self, at: usize) -> Result<Option<(u8, &[u8])>, String> {
        let Some((length, rest)) = self.bytes[at..].split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > MAX_PAYLOAD + 1 {
            return Err(format!("a frame of {length} bytes, allowed are 1 to {}", MAX_PAYLOAD + 1));
        }
        match rest.get(..length) {
            None => Ok(None),
            Some([purpose @ (MESSAGE | LEFT | GAVE_UP), payload @ ..]) => {
                Ok(Some((*purpose, payload)))
            }
            Some(other) => Err(format!("a frame of unknown purpose {}", other[0])),
        }
    }
}

fn goodbye(purpose: u8, reason: &[u8]) -> Goodbye {
    let reason = String::from_utf8_lossy(reason).into_owned();
    Goodbye { gave_up: purpose == GAVE_UP, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let message = proptest::collection::vec(any::<u8>(), 0..200).prop_map(Frame::Message);
        let goodbye = (any::<bool>(), "[a-z ]{0,40}")
            .prop_map(|(gave_up, reason)| Frame::Goodbye(Goodbye { gave_up, reason }));
        proptest::collection::vec(prop_oneof![message, goodbye], 0..12)
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_the_stream_is_cut(
            sent in frames(), cuts in proptest::collection::vec(1usize..64, 1..40)
        ) {
            let stream: Vec<u8> = sent.iter().flat_map(Frame::encode).collect();
            let mut buffer = FrameBuffer::default();
            let mut received = Vec::new();
            let mut rest = stream.as_slice();
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                buffer.push(now);
                rest = later;
                while let Some(frame) = buffer.next_frame().unwrap() {
                    received.push(frame);
                }
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn no_bytes_make_the_decoder_panic_or_loop(
            bytes in proptest::collection::vec(any::<u8>(), 0..4096)
        ) {
            let mut buffer = FrameBuffer::default();
            buffer.push(&bytes);
            let mut frames = 0;
            while let Ok(Some(_)) = buffer.next_frame() {
                frames += 1;
            }
            prop_assert!(frames <= bytes.len() / (LENGTH_BYTES + 1));
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_its_bytes_arrive() {
        let mut buffer = FrameBuffer::default();
        buffer.push(&u32::MAX.to_le_bytes());
        assert!(buffer.next_frame().unwrap_err().contains("allowed are 1 to"));
    }

    #[test]
    fn a_goodbye_behind_an_unread_message_is_seen() {
        let mut buffer = FrameBuffer::default();
        buffer.push(&Frame::Message(vec![1, 2]).encode());
        assert_eq!(buffer.waiting_goodbye(), None);
        let goodbye = Goodbye { gave_up: true, reason: "out of data".into() };
        buffer.push(&Frame::Goodbye(goodbye.clone()).encode());
        assert_eq!(buffer.waiting_goodbye(), Some(goodbye));
        assert_eq!(buffer.next_frame(), Ok(Some(Frame::Message(vec![1, 2]))));
    }
}
