harness_language::scalars! {
    /// The name of an always-checked invariant, as in `retry_makes_progress`.
    InvariantText = "invariant", {
        "enum": harness_record::Invariant::ALL
            .iter()
            .map(|invariant| invariant.name())
            .collect::<Vec<_>>()
    };
}
