//! What a collective is, and how the ranks make sure that they all mean the same one.
//!
//! Nothing here moves tensor data yet: the exact exchange runs in the inner Gloo backend once
//! [`agreement`] has shown that every rank made the same call.

pub mod agreement;
pub mod call;
