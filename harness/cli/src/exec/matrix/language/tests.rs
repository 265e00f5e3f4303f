use super::*;

fn planned(text: &str) -> Result<Vec<Planned>, String> {
    let check = |option: &str| (option == "--gpu=h100-8O").then(|| "unknown GPU".to_owned());
    parse(text, Path::new("runs.yaml"), check).map_err(|error| {
        let advice = error.advice().unwrap_or_default().to_owned();
        format!("{error}; {advice}")
    })
}

fn cells(text: &str) -> Vec<String> {
    let rows = planned(text).expect("the matrix is valid");
    rows.iter().map(|row| row.cell.to_string()).collect()
}

#[test]
fn rows_are_all_combinations_and_the_last_axis_changes_fastest() {
    let rows = planned(
        "version: 1\nprograms: { train: 'python train.py -b {batch}', eval: [eval, '{batch}'] }\n\
         gpu: [h200, l40s-48]\nbatch: [8, 16]\nmemory: 24GiB\n",
    )
    .expect("the matrix is valid");
    assert_eq!(rows.len(), 8);
    assert_eq!(
        rows[1].cell.to_string(),
        "train batch=16 gpu=h200 memory=24GiB"
    );
    assert_eq!(rows[1].options, ["--gpu=h200", "--memory=24GiB"]);
    assert_eq!(rows[1].command, ["python", "train.py", "-b", "16"]);
    assert_eq!(rows[6].command, ["eval", "8"]);
    assert_eq!(rows[6].options[0], "--gpu=l40s-48");
}

#[test]
fn the_example_in_errors_is_a_matrix() {
    let lines: Vec<&str> = SHAPE.split('`').skip(1).step_by(2).collect();
    assert_eq!(
        cells(&lines.join("\n")),
        ["train batch=8", "train batch=16"]
    );
}

#[test]
fn values_have_the_text_that_the_file_has() {
    let values = "3.10, 1e-5, 010, 1.50, 12345678901234567890123, 1.0, 1, true, yes, 0x10, -0, .5";
    let text = |values: &str| format!("programs: {{ a: [a, '{{x}}', 2.50] }}\nx: [{values}]\n");
    let rows = planned(&text(values)).expect("the matrix is valid");
    let found: Vec<&str> = rows.iter().map(|row| row.command[1].as_str()).collect();
    assert_eq!(found.join(", "), values);
    assert_eq!(rows[0].command[2], "2.50");
    let quoted = planned(&text("é, \"1.0\", '1.00', 1.000"));
    let quoted = quoted.expect("the matrix is valid");
    let found: Vec<&str> = quoted.iter().map(|row| row.command[1].as_str()).collect();
    assert_eq!(found, ["é", "1.0", "1.00", "1.000"]);
}

#[test]
fn an_alias_has_the_text_of_its_number_or_an_error() {
    let text = |values: &str, more: &str| {
        let programs = "programs: { a: [a, '{x}', '{y}', '{z}'] }";
        format!("{programs}\nx: {values}\ny: *x\nz: [{more}]\n")
    };
    for values in ["&x 3.10", "&x [3.10]", "&x\n- 3.10"] {
        let rows = planned(&text(values, "a")).expect(values);
        assert_eq!(rows[0].command, ["a", "3.10", "3.10", "a"]);
    }
    let error = planned(&text("&x [3.10, '3.1']", "a")).expect_err("the alias has two texts");
    assert!(
        error.contains("3:4: the number `3.1` may have another text elsewhere; write it in quotes"),
        "{error}"
    );
}

/// The example in GitHub's documentation of matrices, with its result.
#[test]
fn include_adds_values_to_rows_whose_own_values_it_keeps_or_else_a_row() {
    let text = "programs: { p: 'p {fruit} {animal} {color} {shape}' }\n\
        fruit: [apple, pear]\nanimal: [cat, dog]\nshape: none\ncolor: none\ninclude:\n\
        - color: green\n- { color: pink, animal: cat }\n- { fruit: apple, shape: circle }\n\
        - { program: p, fruit: banana, animal: none }\n\
        - { program: p, fruit: banana, animal: cat }\n";
    assert_eq!(
        cells(text),
        [
            "p animal=cat color=pink fruit=apple shape=circle",
            "p animal=dog color=green fruit=apple shape=circle",
            "p animal=cat color=pink fruit=pear shape=none",
            "p animal=dog color=green fruit=pear shape=none",
            "p animal=none color=none fruit=banana shape=none",
            "p animal=cat color=none fruit=banana shape=none",
        ]
    );
}

#[test]
fn exclude_removes_each_row_with_all_values_of_an_entry() {
    let text = "programs: { a: 'a {batch}', b: 'b {batch}' }\nbatch: [1, 2]\nmemory: 8GiB\n\
        exclude: [{ program: a, batch: 2 }, { program: b, batch: 1, memory: 8GiB }]\n";
    assert_eq!(
        cells(text),
        ["a batch=1 memory=8GiB", "b batch=2 memory=8GiB"]
    );
}

#[test]
fn doubled_and_other_braces_are_text() {
    let text = "programs: { a: [sh, '{{x}} {x} {} {\"k\": {\"x\": 1}}'] }\nx: [1]\n";
    assert_eq!(
        planned(text).expect("the matrix is valid")[0].command[1],
        "{x} 1 {} {\"k\": {\"x\": 1}}"
    );
}

#[test]
fn each_mistake_has_an_error_with_its_place() {
    let of = |more: &str| format!("programs: {{ a: 'a {{x}}' }}\n{more}\n");
    let million = (0..1001)
        .map(|number| number.to_string())
        .collect::<Vec<_>>()
        .join(", ");
    let cases = [
        (String::new(), "1:1: the file is empty"),
        ("x: [1]".to_owned(), "1:1: the field `programs` is missing"),
        ("programs: {}".to_owned(), "the field `programs` is missing"),
        ("programs: [a]".to_owned(), "1:1: `programs` is not a map"),
        ("programs: { a: }".to_owned(), "`a` has no command"),
        (
            "programs: &all { a: *all }".to_owned(),
            "1:21: the alias is part of its own anchor",
        ),
        ("programs: { a: [] }".to_owned(), "1:16: `a` has no command"),
        (
            "programs: { a: \"a 'b c'\" }".to_owned(),
            "a command with quotes is not split",
        ),
        (of("x: []"), "2:4: `x` has no values"),
        (of("x: { y: 1 }"), "2:4: `x` has no values"),
        (of("x: [1, 2, 1]"), "2:11: the value `1` appears twice"),
        (
            of("x: 1\ngpu: [h200, a100-40, h200-141]"),
            "3:22: `h200` and `h200-141` are one GPU",
        ),
        (of("x: 1\nx: 2"), "the key `x` appears twice"),
        (
            of("y: [1]"),
            "2:1: `y` is neither an option of the runs nor used by a program",
        ),
        (of("x: [1]\ngpus: [h200]"), "did you mean `gpu`?"),
        (of("x: [1]\nalloc-conf: ['']"), "did you mean `alloc_conf`?"),
        (
            of("x: [1]\ngpu: [h200, h100-8O]"),
            "3:13: `h100-8O` is no value of `gpu`; unknown GPU",
        ),
        (
            of("gpu: [h200]"),
            "1:16: the row `a gpu=h200` has no value for {x}",
        ),
        (of("x: [1]\nprogram: a"), "3:1: `program` is no axis"),
        (
            of("x: [1]\nversion: 2"),
            "3:10: this harness reads version 1, not 2",
        ),
        (
            of("x: [1]\nexclude: { x: 1 }"),
            "3:10: `exclude` is not a list of maps",
        ),
        (
            of("x: [1]\nexclude: [{ z: 1 }]"),
            "3:13: the matrix has no axis `z`",
        ),
        (
            of("x: [1]\nexclude: [{ x: 2 }]"),
            "3:11: this excludes no row",
        ),
        (
            of("x: [1]\nexclude: [{ x: [1] }]"),
            "3:16: `x` is not one value",
        ),
        (
            of("x: [1]\nexclude: [{ x: 1 }]"),
            "1:1: the matrix has no rows",
        ),
        (
            of("x: [1]\ninclude: [{ program: b }]"),
            "3:22: unknown program `b`",
        ),
        (
            of("x: [1]\ninclude: [{ x: 2 }]"),
            "3:11: this fits no row, and has no program",
        ),
        (
            of("x: [1]\nmemory: 1GiB\ninclude: [{ program: a, x: 2 }, { program: a, x: 2 }]"),
            "are the same run",
        ),
        (
            "programs: { a: a, b: 'b {x}' }\nx: [1, 2]".to_owned(),
            "1:16: `a x=1` and `a x=2` are the same run",
        ),
        (
            format!("programs: {{ a: 'a {{x}} {{y}}' }}\nx: [{million}]\ny: [{million}]"),
            "1:1: the matrix has 1002001 rows, and the limit is 1000000",
        ),
    ];
    for (text, expected) in cases {
        let error = planned(&text).expect_err(&text);
        assert!(error.contains(expected), "{text}\n{error}");
    }
}
