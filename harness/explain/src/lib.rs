//! Why a request ran out of memory, and what would have helped.
//!
//! * [`causes`]: where a device's memory is at one moment of a recording, by cause, and why a request failed. [`state`] goes back to that moment,
//!   [`sites`] tells who allocated, [`pins`] what keeps free memory from going back, [`waits`] and [`growth`] what stalls and what leaks.
//! * [`ranks`]: the snapshots of all ranks together; [`compare`]: two snapshots of one program.
//! * [`advise`]: which settings would have saved a program, by replays under a [`grid`] of them; [`least`]: how much memory would have been enough;
//! * [`program_advice`]: what could be changed in the program itself, tried in the same way;
//! * [`plain`]: a program as a plain trace; [`requests`]: traces and logs of RMM as programs and snapshots;
//! * [`fidelity`]: whether a replay does what the recording has.

pub mod advise;
pub mod attempts;
pub mod causes;
pub mod compare;
pub mod fidelity;
pub mod grid;
pub mod growth;
pub mod least;
pub mod pins;
pub mod plain;
pub mod program_advice;
pub mod ranks;
pub mod requests;
pub mod sites;
pub mod state;
pub mod waits;

mod bytes;
mod explanation;
mod headline;
mod view;

#[cfg(test)]
mod examples;
