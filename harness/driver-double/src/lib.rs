//! Placeholder until the double lands.
