//! Tests of explanations and advice, one module for each subject.

mod causes;
mod history;
mod program_advice;
mod recovered;
