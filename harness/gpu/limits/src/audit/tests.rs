use std::ptr;

use super::*;

#[test]
fn cuda_libraries_are_recognized_by_their_file_names() {
    let known = [
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "libcudart.so.13",
        "/site/libcudart.8774224f.so.12",
        "libnvidia-ml.so.1",
    ];
    assert!(known.iter().all(|path| is_cuda(path.as_bytes())));
    let others = [
        "",
        "/opt/libcuda.so.1/libc.so.6",
        "libcudnn.so.9",
        "libtorch_cuda.so",
        "libc10_cuda.so",
    ];
    assert!(!others.iter().any(|path| is_cuda(path.as_bytes())));
}

#[test]
fn the_path_of_a_library_is_read_to_its_end() {
    let path = |name: *const c_char| {
        let map = LinkMap { base: 0, name };
        // SAFETY: the name is null or a static string.
        unsafe { map.path() }
    };
    assert_eq!(path(ptr::null()), b"");
    assert_eq!(
        path(c"/usr/lib/libcuda.so.1".as_ptr()),
        b"/usr/lib/libcuda.so.1"
    );
}
