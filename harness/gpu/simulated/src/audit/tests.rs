use super::*;

#[test]
fn a_stub_library_replaces_the_library_with_the_same_file_name() {
    let folder = tempfile::tempdir().expect("create a folder");
    for name in [
        "libcuda.so",
        "libcuda.so.1",
        "libcudart.so.13",
        "manifest.json",
    ] {
        fs::write(folder.path().join(name), "").expect("write a file");
    }
    let stubs = Stubs::in_folder(Some(folder.path().as_os_str()));
    let instead_of = |asked: &CStr| {
        stubs
            .instead_of(asked)
            .map(|stub| stub.to_string_lossy().into_owned())
    };
    let stub = |name: &str| Some(folder.path().join(name).to_string_lossy().into_owned());
    assert_eq!(instead_of(c"libcuda.so.1"), stub("libcuda.so.1"));
    assert_eq!(
        instead_of(c"/usr/lib/x86_64-linux-gnu/libcudart.so.13"),
        stub("libcudart.so.13")
    );
    assert_eq!(instead_of(c"libcuda.so"), stub("libcuda.so.1"));
    assert_eq!(instead_of(c"libcudart.so"), stub("libcudart.so.13"));
    for other in [
        c"libcudart.8774224f.so.13",
        c"libcudart.so.12",
        c"manifest.json",
        c"libcuda.so.1/libc.so.6",
        c"",
    ] {
        assert_eq!(instead_of(other), None, "{other:?}");
    }
    assert_eq!(Stubs::in_folder(None).instead_of(c"libcuda.so.1"), None);
}

#[test]
fn the_older_version_of_the_interface_is_used() {
    assert_eq!([1, 2, 3].map(|version| la_version(version)), [1, 2, 2]);
}
