//! Programs without Python or without torch.
#![allow(clippy::unwrap_used)]

use super::*;

/// A folder of packages with these names and versions.
fn packages(names: &[&str]) -> (tempfile::TempDir, Program) {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        fs::create_dir(folder.path().join(format!("{name}.dist-info"))).unwrap();
    }
    let program = Program {
        packages: vec![folder.path().to_owned()],
        ..Program::default()
    };
    (folder, program)
}

#[test]
fn names_of_packages_show_the_cuda_release() {
    let of = |names: &[&str]| {
        let (_folder, program) = packages(names);
        program
            .releases_of_packages()
            .into_keys()
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&["jax_cuda13_plugin-0.12.0.1"]), [Cuda::V13]);
    assert_eq!(of(&["nvidia_cublas_cu12-12.9.1.4"]), [Cuda::V12]);
    assert_eq!(of(&["cupy-cuda12x-14.2.0"]), [Cuda::V12]);
    assert_eq!(of(&["nvidia_cuda_runtime-13.5.37"]), [Cuda::V13]);
    assert_eq!(
        of(&["nvidia_nccl_cu12-2.27.3", "nvidia_nccl_cu13-2.32.3"]),
        [Cuda::V12, Cuda::V13]
    );
    // A release without support, another word, and a package without a mark.
    assert_eq!(
        of(&["cupy_cuda11x-13.0.0", "cucumber-12.0", "numpy-2.5.5"]),
        []
    );
}

#[test]
fn installed_libraries_have_their_versions() {
    let (_folder, program) = packages(&[
        "nvidia_cublas_cu12-12.9.1.4",
        "nvidia_cublas-13.1.0.3",
        "nvidia_cudnn_cu12-9.8.0.87",
        "nvidia_cudnn_cu13-9.19.0.56",
    ]);
    let of = |cuda| program.versions_of_libraries(cuda);
    assert_eq!(of(Cuda::V12), "cublas=12.9.1.4,cudnn=9.8.0.87");
    assert_eq!(of(Cuda::V13), "cublas=13.1.0.3,cudnn=9.19.0.56");
    let cudnn = [Cuda::V12, Cuda::V13].map(|cuda| program.cudnn(cuda));
    assert_eq!(cudnn, [Some(90_800), Some(91_900)]);
}

#[test]
fn a_package_in_two_folders_has_the_version_of_the_first() {
    let (first, program) = packages(&["nvidia_cudnn_cu13-9.19.0.56"]);
    let (second, _) = packages(&["nvidia_cudnn_cu13-9.28.1.4", "nvidia_cublas-13.1.0.3"]);
    let program = Program {
        packages: [&first, &second].map(|of| of.path().to_owned()).into(),
        ..program
    };
    assert_eq!(
        program.versions_of_libraries(Cuda::V13),
        "cublas=13.1.0.3,cudnn=9.19.0.56"
    );
}

#[test]
fn cudnn_is_the_installed_one_without_torch() {
    let (_folder, program) = packages(&["nvidia_cudnn_cu13-9.28.1.4"]);
    assert_eq!(program.cudnn(Cuda::V13), Some(92_801));
    assert_eq!(packages(&[]).1.cudnn(Cuda::V13), None);
}

#[test]
fn an_executable_file_has_no_torch_and_shows_its_libraries() {
    let shell = OsString::from("/bin/sh");
    let (program, unusable) = Program::find(&[shell, "-c".into(), "true".into()], None).unwrap();
    assert!(unusable.is_none());
    assert_eq!(program.objects.first(), Some(&PathBuf::from("/bin/sh")));
    assert!(program.libc >= (2, 17), "{:?}", program.libc);
}
