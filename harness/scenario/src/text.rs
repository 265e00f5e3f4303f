//! Scalars that only scenarios have.

harness_language::scalars! {
    /// The name of an always-checked invariant, for example `retry_makes_progress`.
    InvariantText = "invariant", { "enum": harness_record::Invariant::ALL.iter().map(|invariant| invariant.name()).collect::<Vec<_>>() };
}
