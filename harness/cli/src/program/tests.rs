use super::*;

fn renamed(line: &str) -> (String, Vec<String>) {
    let (arguments, hints) = with_new_names(line.split(' ').map(OsString::from));
    (
        arguments
            .join(" ".as_ref())
            .into_string()
            .expect("the line is UTF-8"),
        hints,
    )
}

#[test]
fn old_option_names_become_new_ones_with_one_hint_each() {
    let (line, hints) = renamed("harness shrink job.trace --while conf-differs --conf= --conf a:1");
    assert_eq!(
        line,
        "harness shrink job.trace --preserve conf-differs --alloc-conf= --alloc-conf a:1"
    );
    assert_eq!(
        hints,
        [
            "`--while` is now called `--preserve`",
            "`--conf` is now called `--alloc-conf`"
        ]
    );
    assert_eq!(
        renamed("harness run my.yaml --no-audit").0,
        "harness run my.yaml --skip-checks"
    );
    assert_eq!(
        renamed("harness squeeze --leave=1GiB -- x --leave 2").0,
        "harness squeeze --leave-free=1GiB -- x --leave 2"
    );
}

#[test]
fn other_commands_and_programs_keep_their_options() {
    for line in [
        "harness exec -- train.py --conf x",
        "harness squeeze --leave-free 1GiB -- ./x --conf y",
        "harness check --conf",
    ] {
        assert_eq!(renamed(line), (line.to_owned(), Vec::new()));
    }
}
