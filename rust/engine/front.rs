//! What whoever runs a collective works with: the ways to the other ranks, and the gradients that
//! are on their way. It is locked as a whole, by one at a time.

use crate::collective::fabric::Fabric;
use crate::gradients::Gradients;

pub struct Front {
    pub fabric: Fabric,
    pub gradients: Gradients,
}
