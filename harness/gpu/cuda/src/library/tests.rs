use super::*;

#[test]
fn a_missing_library_is_absent() {
    assert_eq!(
        load("libharness-has-no-such-library.so.1").map(drop),
        Err(LoadError::Absent)
    );
}

#[test]
fn an_invalid_library_is_unloadable_with_the_loaders_reason() {
    let path = std::env::current_exe()
        .expect("the test program has a path")
        .with_extension("no-library");
    std::fs::write(&path, "not a library").expect("the folder of the tests is writable");
    let loaded = load(&path.to_string_lossy()).map(drop);
    std::fs::remove_file(&path).expect("the file exists");
    let Err(LoadError::Unloadable(why)) = loaded else {
        panic!("{loaded:?}")
    };
    assert!(why.contains("no-library"), "{why}");
}

#[test]
fn a_library_with_a_missing_dependency_is_unloadable() {
    let text =
        "libnvidia-ptxjitcompiler.so.1: cannot open shared object file: No such file or directory";
    let of_text = |text: &str| LoadError::of_text("libcuda.so.1", text.to_owned());
    assert_eq!(of_text(text), LoadError::Unloadable(text.to_owned()));
    let text = "libcuda.so.1: cannot open shared object file: Permission denied";
    assert_eq!(of_text(text), LoadError::Unloadable(text.to_owned()));
    assert_eq!(
        of_text("libcuda.so.1: cannot open shared object file: No such file or directory"),
        LoadError::Absent
    );
}
