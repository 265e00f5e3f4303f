//! The Kubernetes job that starts benchmarks is valid for Kubernetes.

use serde_json::{Value, json};

use crate::{root, value};

/// The JSON Schema of `batch/v1` `Job` in Kubernetes 1.31, without descriptions and with unknown
/// fields forbidden. The source is
/// <https://github.com/kubernetes/kubernetes/tree/release-1.31/api/openapi-spec>, in the crate
/// k8s-openapi 0.25.
const JOB_SCHEMA: &[u8] = include_bytes!("kubernetes-1.31-job.schema.json.gz");

fn job() -> Value {
    value(&std::fs::read_to_string(root().join("ci/kubernetes/bench.yaml")).unwrap())
}

fn errors(job: &Value) -> Vec<String> {
    let schema: Value = serde_json::from_reader(flate2::read::GzDecoder::new(JOB_SCHEMA)).unwrap();
    crate::errors(&jsonschema::validator_for(&schema).unwrap(), job)
}

#[test]
fn the_job_is_valid() {
    assert_eq!(errors(&job()), Vec::<String>::new());
}

#[test]
fn a_job_with_a_mistake_is_not_valid() {
    let mistaken = |pointer: &str, field: &str, value: Value| {
        let mut job = job();
        job.pointer_mut(pointer).unwrap()[field] = value;
        errors(&job).len()
    };
    assert_eq!(mistaken("/spec", "completionmode", json!("Indexed")), 1);
    assert_eq!(mistaken("/spec", "completions", json!("four")), 1);
    assert_eq!(
        mistaken("/spec/template/spec/containers/0", "gpu", json!(1)),
        1
    );
}
