//! Only tests: `cargo test -p harness-schemas --features check`.
