//! Benchmarks are in `benches/`.
