use harness_record::Invariant;

harness_language::scalars! {
    /// The name of an always-checked invariant, as in `retry_makes_progress`.
    InvariantText = "invariant", {
        "enum": Invariant::ALL.iter().map(|invariant| invariant.name()).collect::<Vec<_>>()
    };
}
