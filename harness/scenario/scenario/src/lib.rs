//! The scenario language: YAML → wire types → a checked [`Scenario`].
//!
//! [`Scenario::load`] reads a file, [`Scenario::parse`] a text. In the result all names are
//! resolved, all sizes and expectations are parsed, and the order of the steps is valid. A mistake
//! is reported as a [`FileError`] with its position. [`schema()`] is generated from the same types,
//! and the tests generate the language reference from it.

pub mod cases;
mod checker;
pub mod claim;
mod ending;
mod faults;
pub mod markdown;
mod matrix;
mod metric;
pub mod model;
mod needs;
mod plan;
mod policy;
mod scenario;
pub mod steps;
mod text;
mod trace;

pub use cases::{Cases, DeviceKind, Reasons};
pub use checker::{MAX_BUFFERS, MAX_NESTING, MAX_OPERATIONS};
pub use ending::{Ending, Expected};
pub use faults::{AskedFault, FaultOrigin, MAX_FAULTS, NoProcess, PlannedFault};
pub use harness_language::error::{FileError, choices};
pub use harness_language::expression::{
    AmountError, ArithmeticError, Comparison, Dimension, EvaluateError, Evaluation, MAX_TERMS,
    Number, Quantity, Unit, Value,
};
pub use harness_language::fields::{MAX_MEMORY, MIN_MEMORY};
pub use harness_language::located::{Located, Position};
pub use harness_language::yaml::{MAX_FILE, MAX_NODES};
pub use matrix::{MAX_POINTS, ParameterSettings};
pub use metric::{
    Account, Amount, BufferName, BufferRef, DeviceMetric, EventName, Expectation, Expression,
    GrowthSite, MeasureName, Metric, PoolName, ProcessName, ProgramName, RankFigure, Readings,
    ReportKey, StepName, StreamName, VariableName,
};
pub use needs::{Feature, Needs};
pub use plan::{AttemptPlan, PlanPart, Precision, Spilled, SpilledPart};
pub use policy::{
    BatchRule, Chain, MAX_POLICIES, MAX_RETRIES, Policy, PolicyKind, SCALE_LIMIT, ScaleMode,
};
pub use scenario::{
    MAX_INVARIANTS, MAX_PROCESSES, MAX_PROGRAMS, MAX_STREAMS, Process, SCENARIO, Scenario, schema,
};
pub use steps::{Action, EXAMPLE_HEAD, STEP_KEYS, Step, StepKind, example};
pub use text::scalar_kinds;
pub use trace::Trace;
