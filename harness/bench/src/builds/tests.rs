#![allow(clippy::unwrap_used)]

use super::*;
use crate::tests::scripts::program;

fn start(path: &Path) -> Result<Builds, String> {
    Builds::start(path, path, &[], None)
}

fn refused(script: &str) -> String {
    let (folder, path) = program("build", script);
    let error = start(&path).unwrap_err();
    error.replace(folder.path().to_str().unwrap(), "…")
}

fn request() -> Request<'static> {
    Request {
        suite: Path::new("").into(),
        case: "hit, 2 MiB".into(),
        arm: "caching".into(),
        hash: "1".into(),
        batch: None,
    }
}

#[test]
fn a_build_that_cannot_serve_is_refused_with_the_reason() {
    assert_eq!(
        refused("echo '{\"protocol\": 99, \"commit\": null}'; read q"),
        "…/build speaks version 99 of the protocol, this harness version 1"
    );
    let old = refused("echo \"error: unexpected argument '--serve' found\" >&2; exit 2");
    assert_eq!(
        old,
        "…/build: the build ended without an answer: error: unexpected argument '--serve' found"
    );
    let missing =
        Builds::start(Path::new("/no/such"), Path::new("/no/such"), &[], None).unwrap_err();
    assert!(
        missing.starts_with("/no/such: `/no/such` cannot be started: "),
        "{missing}"
    );
}

#[test]
fn a_process_that_dies_fails_its_case_and_is_started_again_for_the_next() {
    let answer = "echo '{\"measured\":{\"readings\":[],\"batch\":4}}'";
    let (folder, path) = program(
        "build",
        &format!(
            "echo '{{\"protocol\": 1, \"commit\": \"abc\"}}'; read q; [ -e $0.once ] || {{ touch \
             $0.once; echo oops >&2; exit 1; }}; {answer}; read q"
        ),
    );
    let mut builds = start(&path).unwrap();
    assert_eq!(builds.accepted_commit(), Some("abc"));
    assert_eq!(
        builds.visit(Side::This, &request()),
        Err(Fault::Failed(
            "the build ended without an answer: oops".to_owned()
        ))
    );
    assert_eq!(
        builds.visit(Side::This, &request()),
        Ok((Vec::new(), Some(4)))
    );
    drop(folder);
}

#[test]
fn each_process_takes_the_next_layout_of_its_program() {
    let script = |answer: &str| {
        format!(
            "echo '{{\"protocol\": 1, \"commit\": null}}'; read q; echo \
             '{{\"measured\":{{\"readings\":[],\"batch\":{answer}}}}}'; read q"
        )
    };
    let (folder, path) = program("build", "exit 1");
    let layouts = folder.path().join("build.layouts");
    std::fs::create_dir(&layouts).unwrap();
    for layout in ["1", "2", "3"] {
        let (_folder, other) = program(layout, &script(layout));
        std::fs::rename(other, layouts.join(layout)).unwrap();
    }
    let (_folder, plain) = program("plain", &script("0"));
    assert!(
        Builds::start(&path, &plain, &[], None).is_err(),
        "only one side has layouts, so none is used"
    );
    let mut builds = start(&path).unwrap();
    let seen: Vec<_> = (0..4)
        .map(|_| {
            let batch = builds.visit(Side::This, &request()).unwrap().1;
            builds.sides[0].restart().unwrap();
            batch
        })
        .collect();
    assert_eq!(seen, [Some(1), Some(2), Some(3), Some(1)]);
}
