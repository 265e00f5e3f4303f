use harness_gpu_settings::gpus::Gpu;

use super::*;

/// `ptxas -arch=sm_90` of CUDA 13.0 compiled it from the text, and printed 10 registers and 4096
/// bytes of shared memory for the first kernel, 4 registers for the second, and 12 bytes of
/// constants.
const COMPILED: &[u8] = include_bytes!("kernels.cubin");
const TEXT: &str = include_str!("kernels.ptx");

#[test]
fn the_needs_of_kernels_are_those_that_the_compiler_prints() {
    let image = Image::of(COMPILED);
    let first = Kernel {
        registers: 10,
        shared: 4096,
        constant: 12,
        local: 0,
        threads: 256,
    };
    let second = Kernel {
        registers: 4,
        shared: 0,
        threads: 1024,
        ..first
    };
    assert_eq!(
        (
            image.kernel("first"),
            image.kernel("second"),
            image.kernel("third")
        ),
        (Some(first), Some(second), None)
    );
    let parameters = [("first", vec![(0, 8)]), ("second", Vec::new())];
    assert_eq!(
        image.parameters,
        parameters
            .map(|(name, places)| (name.to_owned(), places))
            .into()
    );
    let variables = [("counter", 8), ("scale", 12), ("table", 64)];
    assert_eq!(
        image.variables,
        variables.map(|(name, size)| (name.to_owned(), size)).into()
    );
}

#[test]
fn the_text_declares_the_same_variables() {
    let image = Image::of(TEXT.as_bytes());
    assert_eq!(image.variables, Image::of(COMPILED).variables);
    assert_eq!(image.kernel("any"), Some(Kernel::default()));
}

#[test]
fn damaged_metadata_is_unknown_code() {
    for len in 0..COMPILED.len() {
        let _ = Image::of(&COMPILED[..len]);
    }
    assert_eq!(Image::of(&COMPILED[..200]), Image::default());
}

#[test]
fn active_blocks_are_limited_by_threads_registers_and_shared_memory() {
    let limits = Gpu::named("h100-80").expect("it is known").limits();
    let blocks = |registers: u32, shared: u32, block: u32, dynamic: usize| {
        let kernel = Kernel {
            registers,
            shared,
            ..Kernel::default()
        };
        kernel.active_blocks(&limits, 1024, block, dynamic)
    };
    // Of an H100: 2048 threads, 32 blocks, 65,536 registers, 228 KiB of shared memory.
    assert_eq!(blocks(32, 0, 1024, 0), 2);
    assert_eq!(blocks(32, 0, 32, 0), 32);
    // 255 registers are 8,160 of a warp, in units of 256: 8 warps.
    assert_eq!(blocks(255, 0, 128, 0), 2);
    assert_eq!(
        blocks(255, 0, 512, 0),
        0,
        "a block has more registers than there are"
    );
    assert_eq!(blocks(32, 40 << 10, 128, 10 << 10), 4);
    assert_eq!(blocks(32, 0, 128, 228 << 10), 0);
}
