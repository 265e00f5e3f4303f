#![allow(clippy::unwrap_used)]

use super::*;
use crate::tests::scripts::program;

fn question() -> Value {
    json!({ "do": "latency", "case": "hit", "size": 2 << 20, "batch": 10, "memory": 1 << 30 })
}

/// A script in place of Python.
fn python(script: &str) -> (tempfile::TempDir, String) {
    let (folder, path) = program("python", script);
    (folder, path.to_string_lossy().into_owned())
}

fn start(script: &str) -> Result<TorchProcess, String> {
    let (_folder, python) = python(script);
    TorchProcess::start(&python, 0, "")
}

const GREETING: &str = r#"echo '{"arm": "torch", "version": "2.11.0", "note": "from Python"}'"#;

#[test]
fn each_question_is_answered_with_samples_a_reason_or_a_failure() {
    let answers = r#"
            read q; echo "{\"samples_ps\": [$(echo "$q" | tr -dc 0-9 | cut -c1-9)]}"
            read q; echo '{"skipped": "not known here"}'
            read q; echo '{"failed": "RuntimeError: no"}'"#;
    let mut torch = start(&format!("{GREETING}{answers}")).unwrap();
    // The first digits of the question: size and batch.
    assert_eq!(
        torch.ask(&question()),
        Ok(Samples {
            samples_ps: vec![209_715_210],
            pass: None
        })
    );
    assert_eq!(
        torch.ask(&question()),
        Err(Fault::Skipped("not known here".to_owned()))
    );
    assert_eq!(
        torch.ask(&question()),
        Err(Fault::Failed("RuntimeError: no".to_owned()))
    );
}

/// A process that continues, for example because its device hangs, keeps its device memory.
#[test]
fn a_process_with_no_answer_or_a_wrong_one_fails_once_and_ends_before_the_next_measurement() {
    let cases = [
        ("", "PyTorch ended without an answer"),
        ("read q; echo hello", "PyTorch answered `hello`"),
        ("read q; exec sleep 1000", "PyTorch gave no answer in 0.1 s"),
        (
            "read q; echo hello; exec sleep 1000",
            "PyTorch answered `hello`",
        ),
    ];
    for (script, expected) in cases {
        let mut torch = start(&format!("{GREETING}\n{script}")).unwrap();
        if expected.contains("0.1 s") {
            torch.process.patience.answer = Duration::from_millis(100);
        }
        let Err(Fault::Failed(failed)) = torch.ask(&question()) else {
            panic!("{script}")
        };
        // If it ended before the question, the pipe is broken.
        assert!(
            failed.starts_with(expected) || failed.contains("Broken pipe"),
            "{failed}"
        );
        assert!(
            torch.process.has_ended(),
            "{script}: it was killed and reaped"
        );
        assert!(matches!(torch.ask(&question()), Err(Fault::Skipped(_))));
    }
}

#[test]
fn a_process_that_ended_is_started_again_for_the_next_question_but_not_for_ever() {
    let (_folder, python) = python(&format!(
        "{GREETING}\nread q; echo '{{\"samples_ps\": [1]}}'; read q"
    ));
    let mut torches = Torches::new(&python, 0);
    for _ in 0..STARTS {
        assert!(torches.with("").unwrap().ask(&question()).is_ok());
        assert!(
            matches!(
                torches.with("").unwrap().ask(&question()),
                Err(Fault::Failed(_))
            ),
            "it read the question and ended"
        );
    }
    assert!(
        matches!(
            torches.with("").unwrap().ask(&question()),
            Err(Fault::Skipped(_))
        ),
        "three are enough"
    );
    assert!(
        torches
            .with("expandable_segments:True")
            .unwrap()
            .ask(&question())
            .is_ok(),
        "other settings have their own limit"
    );
}

#[test]
fn where_pytorch_cannot_be_measured_the_reason_is_told() {
    assert_eq!(
        start(r#"echo '{"unavailable": "this Python has no torch"}'"#).unwrap_err(),
        "this Python has no torch"
    );
    assert_eq!(
        start("exit 1").unwrap_err(),
        "PyTorch ended without an answer"
    );
    let import = "echo 'Traceback (most recent call last):' >&2; echo 'ImportError: \
         libcudart.so.12 is missing' >&2; exit 1";
    assert_eq!(
        start(import).unwrap_err(),
        "PyTorch ended without an answer: ImportError: libcudart.so.12 is missing"
    );
    assert_eq!(Torches::missing("no GPU").with("").unwrap_err(), "no GPU");
    let missing = TorchProcess::start("/no/such/python", 0, "").unwrap_err();
    assert!(
        missing.starts_with("`/no/such/python` cannot be started: "),
        "{missing}"
    );
}
