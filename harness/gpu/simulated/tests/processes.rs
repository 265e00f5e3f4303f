//! The simulated GPU in real processes: functions of the driver and the runtime, `fork`, and
//! `exec`. Each test runs its program in a child process.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::process::{Command, Output};
use std::{env, os::unix::process::CommandExt as _, ptr};

use harness_allocator::units::Bytes;
use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::settings::{RUN, SETTINGS, Settings, Values};
use harness_gpu_settings::shared_memory::{HOOKED, MemoryInUse, MemoryNotes, MemoryShare, NOTES};
use harness_gpu_settings::{
    calls::Call,
    counters::ProcessCounters,
    gpus::{GPUS, Gpu},
    text::to_variable,
};
// Links the exported functions.
use harness_simulated_gpu as _;
use tempfile::TempDir;

unsafe extern "C" {
    fn cudaGetDeviceCount(count: *mut c_int) -> c_int;
    fn cudaMalloc(address: *mut usize, size: usize) -> c_int;
    fn cudaMallocManaged(address: *mut usize, size: usize, flags: c_uint) -> c_int;
    fn cudaFree(address: usize) -> c_int;
    fn cudaMallocHost(address: *mut usize, size: usize) -> c_int;
    fn cudaFreeHost(address: usize) -> c_int;
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    fn nvmlInit_v2() -> c_int;
    fn nvmlDeviceGetMemoryInfo(device: usize, memory: *mut [u64; 3]) -> c_int;
    fn cudaStreamCreate(stream: *mut usize) -> c_int;
    fn cudaStreamDestroy(stream: usize) -> c_int;
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> c_int;
    fn cudaMemset(address: usize, value: c_int, size: usize) -> c_int;
    fn cudaMemcpy(to: usize, from: usize, size: usize, kind: c_int) -> c_int;
    fn cudaGetSymbolAddress(address: *mut usize, symbol: *const c_void) -> c_int;
    fn cuMemsetD8_v2(address: usize, byte: u8, count: usize) -> c_int;
    fn cuMemsetD32_v2(address: usize, word: c_uint, count: usize) -> c_int;
    fn cuMemcpyHtoD_v2(to: usize, from: usize, size: usize) -> c_int;
    fn cuMemcpyDtoH_v2(to: usize, from: usize, size: usize) -> c_int;
    fn cuMemcpyDtoD_v2(to: usize, from: usize, size: usize) -> c_int;
    fn cuMemcpy(to: usize, from: usize, size: usize) -> c_int;
    fn cuMemcpyPeer(
        to: usize,
        to_context: usize,
        from: usize,
        from_context: usize,
        size: usize,
    ) -> c_int;
    fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int;
    fn nvrtcGetSupportedArchs(list: *mut c_int) -> c_int;
    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: usize) -> c_int;
    fn cuMemHostRegister_v2(address: usize, size: usize, flags: c_uint) -> c_int;
    fn cuMemHostUnregister(address: usize) -> c_int;
    fn cuMemHostGetDevicePointer_v2(device: *mut usize, host: usize, flags: c_uint) -> c_int;
    fn cuCtxPushCurrent_v2(context: usize) -> c_int;
    fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int;
    fn cuCtxGetCurrent(context: *mut usize) -> c_int;
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int;
    fn cuDevicePrimaryCtxReset_v2(device: c_int) -> c_int;
    fn cuCtxCreate_v4(
        context: *mut usize,
        parameters: *const c_void,
        flags: c_uint,
        device: c_int,
    ) -> c_int;
    fn cuCtxDestroy_v2(context: usize) -> c_int;
    fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) -> c_int;
    fn cuCtxDisablePeerAccess(context: usize) -> c_int;
    fn cudaDeviceReset() -> c_int;
    fn cuMemcpy2D_v2(copy: *const [usize; 16]) -> c_int;
    fn cuMemcpy3DAsync_v2(copy: *const [usize; 25], stream: usize) -> c_int;
    fn cudaMemcpy3D(copy: *const [usize; 20]) -> c_int;
    fn cuMemsetD2D16_v2(
        address: usize,
        pitch: usize,
        half: u16,
        width: usize,
        height: usize,
    ) -> c_int;
    fn cuArrayCreate_v2(array: *mut usize, descriptor: *const [usize; 3]) -> c_int;
    fn cuModuleLoadData(module: *mut usize, image: *const u8) -> c_int;
    fn cuModuleUnload(module: usize) -> c_int;
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> c_int;
    fn cuModuleGetGlobal_v2(
        address: *mut usize,
        size: *mut usize,
        module: usize,
        name: *const c_char,
    ) -> c_int;
    fn cuFuncGetAttribute(value: *mut c_int, number: c_int, function: usize) -> c_int;
    fn cuFuncGetParamInfo(
        function: usize,
        index: usize,
        offset: *mut usize,
        size: *mut usize,
    ) -> c_int;
    fn cuFuncSetAttribute(function: usize, number: c_int, value: c_int) -> c_int;
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: usize,
        block: c_int,
        dynamic: usize,
    ) -> c_int;
    fn cuOccupancyMaxPotentialBlockSize(
        grid: *mut c_int,
        block: *mut c_int,
        function: usize,
        size: Option<extern "C" fn(c_int) -> usize>,
        dynamic: usize,
        limit: c_int,
    ) -> c_int;
    fn cudaDeviceSynchronize() -> c_int;
    fn cudaMallocAsync(address: *mut usize, size: usize, stream: usize) -> c_int;
    fn cudaMallocFromPoolAsync(
        address: *mut usize,
        size: usize,
        pool: usize,
        stream: usize,
    ) -> c_int;
    fn cudaFreeAsync(address: usize, stream: usize) -> c_int;
    fn cudaDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) -> c_int;
    fn cudaMemPoolCreate(pool: *mut usize, properties: *const PoolProperties) -> c_int;
    fn cudaMemPoolTrimTo(pool: usize, keep: usize) -> c_int;
    fn cudaMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut u64) -> c_int;
    fn cudaMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const u64) -> c_int;
    fn cuMemPoolExportToShareableHandle(
        descriptor: *mut c_int,
        pool: usize,
        kind: c_int,
        flags: u64,
    ) -> c_int;
    fn cuMemPoolImportFromShareableHandle(
        pool: *mut usize,
        descriptor: usize,
        kind: c_int,
        flags: u64,
    ) -> c_int;
    fn cuMemPoolExportPointer(data: *mut [u8; 64], address: usize) -> c_int;
    fn cuMemPoolImportPointer(address: *mut usize, pool: usize, data: *const [u8; 64]) -> c_int;
    fn cuGetErrorName(number: c_int, text: *mut *const c_char) -> c_int;
    fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: usize) -> c_int;
    fn cuIpcOpenMemHandle_v2(address: *mut usize, handle: IpcHandle, flags: c_uint) -> c_int;
    fn cuIpcCloseMemHandle(address: usize) -> c_int;
    fn cudaSetDevice(device: c_int) -> c_int;
    fn cuStreamGetCtx_v2(stream: usize, context: *mut usize, green: *mut usize) -> c_int;
    fn cudaStreamBeginCapture(stream: usize, mode: c_int) -> c_int;
    fn cudaStreamBeginCaptureToGraph(
        stream: usize,
        graph: usize,
        dependencies: *const c_void,
        edges: *const c_void,
        count: usize,
        mode: c_int,
    ) -> c_int;
    fn cudaStreamEndCapture(stream: usize, graph: *mut usize) -> c_int;
    fn cudaGraphCreate(graph: *mut usize, flags: c_uint) -> c_int;
    fn cudaGraphDestroy(graph: usize) -> c_int;
    fn cuGraphAddNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const c_void,
        count: usize,
        kind: *const c_int,
    ) -> c_int;
    fn cuGraphNodeGetType(node: usize, kind: *mut c_int) -> c_int;
    fn cudaStreamCreateWithFlags(stream: *mut usize, flags: c_uint) -> c_int;
    fn cudaGraphAddMemAllocNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const usize,
        count: usize,
        parameters: *mut AllocationParameters,
    ) -> c_int;
    fn cudaEventCreateWithFlags(event: *mut usize, flags: c_uint) -> c_int;
    fn cudaEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) -> c_int;
    fn cudaGraphAddEventRecordNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const usize,
        count: usize,
        event: usize,
    ) -> c_int;
    fn cudaGraphAddEventWaitNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const usize,
        count: usize,
        event: usize,
    ) -> c_int;
    fn cudaGraphAddMemFreeNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const usize,
        count: usize,
        address: usize,
    ) -> c_int;
    fn cudaGraphAddChildGraphNode(
        node: *mut usize,
        graph: usize,
        dependencies: *const usize,
        count: usize,
        child: usize,
    ) -> c_int;
    fn cuGraphMemAllocNodeGetParams(node: usize, parameters: *mut AllocationParameters) -> c_int;
    fn cuGraphMemFreeNodeGetParams(node: usize, address: *mut usize) -> c_int;
    fn cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) -> c_int;
    fn cudaGraphGetRootNodes(graph: usize, nodes: *mut usize, count: *mut usize) -> c_int;
    fn cudaGraphClone(clone: *mut usize, graph: usize) -> c_int;
    fn cudaGraphInstantiate(executable: *mut usize, graph: usize, flags: u64) -> c_int;
    fn cudaGraphUpload(executable: usize, stream: usize) -> c_int;
    fn cudaGraphLaunch(executable: usize, stream: usize) -> c_int;
    fn cudaGraphExecDestroy(executable: usize) -> c_int;
    fn cudaGraphExecUpdate(executable: usize, graph: usize, result: *mut [usize; 3]) -> c_int;
    fn __cudaRegisterFatBinary(binary: *const usize) -> usize;
    fn __cudaRegisterFunction(
        binary: usize,
        function: usize,
        device_function: *const c_char,
        name: *const c_char,
        threads: c_int,
        places: usize,
        more: usize,
        of_them: usize,
        unused: usize,
        last: usize,
    );
    fn cudaFuncGetAttributes(attributes: *mut [c_int; 36], function: usize) -> c_int;
    fn cudaFuncSetAttribute(function: usize, number: c_int, value: c_int) -> c_int;
    fn cudaDeviceGraphMemTrim(device: c_int) -> c_int;
    fn cudaDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) -> c_int;
}

/// `cudaMemPoolProps`: pinned memory of the first device.
#[repr(C)]
struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    attributes: usize,
    most: usize,
    rest: [u64; 7],
}

impl PoolProperties {
    const fn new(handle_types: c_int, most: usize) -> Self {
        Self {
            kind: 1,
            handle_types,
            location_kind: 1,
            location: 0,
            attributes: 0,
            most,
            rest: [0; 7],
        }
    }
}

/// `CUipcMemHandle`.
#[repr(C)]
struct IpcHandle([u8; 64]);

/// Names the program that a child process runs.
const PROGRAM: &str = "SIMULATED_GPU_TEST_PROGRAM";
const MIB: usize = 1 << 20;
/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
const ALREADY_REGISTERED: c_int = 712;
/// `CUDA_ERROR_INVALID_HANDLE`.
const INVALID_HANDLE: c_int = 400;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;

/// The folder of a run on two devices of 1 GiB.
struct Run {
    folder: TempDir,
    values: Values,
    /// Calls to fail, as for `--fail`.
    fail: Option<&'static str>,
    gpu: &'static Gpu,
    memory: Bytes,
    devices: u32,
}

impl Run {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        Ledger::create(&folder.path().join("ledger")).unwrap();
        Self {
            folder,
            values: Values::Zeros,
            fail: None,
            gpu: &GPUS[0],
            memory: Bytes::gib(1),
            devices: 2,
        }
    }

    /// The command of a test in a child process.
    fn command(&self, test: &str) -> Command {
        let settings = Settings {
            devices: self.devices,
            values: self.values,
            faults: self
                .fail
                .iter()
                .map(|fault| fault.parse().unwrap())
                .collect(),
            ..Settings::new(self.gpu, self.memory)
        };
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([test, "--exact", "--nocapture", "--test-threads", "1"])
            .env(PROGRAM, test);
        command
            .env(SETTINGS, to_variable(&settings))
            .env(RUN, self.folder.path())
            .env(LEDGER, self.folder.path().join("ledger"));
        command
    }

    fn passes(&self, test: &str) {
        let output = self.command(test).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }

    fn counters(&self) -> Vec<ProcessCounters> {
        ProcessCounters::read_folder(self.folder.path()).unwrap()
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes))
        .concat()
}

fn is_program(test: &str) -> bool {
    env::var(PROGRAM).is_ok_and(|program| program == test)
}

/// Allocates device memory, and returns the code and the address.
fn malloc(size: usize) -> (c_int, usize) {
    let mut address = 0;
    // SAFETY: the address is valid.
    (unsafe { cudaMalloc(&raw mut address, size) }, address)
}

#[test]
fn children_that_are_forked_before_the_context_have_their_own_counters() {
    const TEST: &str = "children_that_are_forked_before_the_context_have_their_own_counters";
    if !is_program(TEST) {
        let run = Run::new();
        run.passes(TEST);
        let mut peaks: Vec<_> = run
            .counters()
            .iter()
            .map(|process| (process.devices[0].peak, process.devices[0].mallocs))
            .collect();
        peaks.retain(|(_, mallocs)| *mallocs > 0);
        peaks.sort_unstable();
        assert_eq!(peaks, [64, 128, 256].map(|size| (Bytes::mib(size), 1)));
        return;
    }
    let mut count = 0;
    // SAFETY: the count is valid, and a forked child only allocates and ends.
    unsafe {
        assert_eq!((cudaGetDeviceCount(&raw mut count), count), (0, 2));
        let children = [64, 128, 256].map(|size| {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(malloc(size * MIB).0);
            }
            child
        });
        for child in children {
            let mut status = -1;
            assert_eq!(
                (libc::waitpid(child, &raw mut status, 0), status),
                (child, 0)
            );
        }
    }
}

#[test]
fn a_program_after_exec_has_the_memory_of_the_program_before_it() {
    const TEST: &str = "a_program_after_exec_has_the_memory_of_the_program_before_it";
    const AGAIN: &str = "SIMULATED_GPU_TEST_AGAIN";
    if !is_program(TEST) {
        let run = Run::new();
        run.passes(TEST);
        let processes = run.counters();
        let [process] = &processes[..] else {
            panic!("one process has counters: {processes:?}")
        };
        assert_eq!(
            (process.devices[0].mallocs, process.devices[0].failed),
            (3, 1),
            "both programs are counted"
        );
        return;
    }
    assert_eq!(malloc(600 * MIB).0, 0);
    if env::var_os(AGAIN).is_none() {
        assert_eq!(malloc(600 * MIB).0, 2, "the device is full");
        panic!(
            "{}",
            Command::new(env::current_exe().unwrap())
                .args(env::args_os().skip(1))
                .env(AGAIN, "1")
                .exec()
        );
    }
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are valid.
    assert_eq!(unsafe { cudaMemGetInfo(&raw mut free, &raw mut total) }, 0);
    assert_eq!((free, total), (424 * MIB, 1024 * MIB));
}

#[test]
fn a_ledger_that_cannot_be_opened_ends_the_program() {
    const TEST: &str = "a_ledger_that_cannot_be_opened_ends_the_program";
    if is_program(TEST) {
        assert_eq!(malloc(MIB).0, 0);
        return;
    }
    let run = Run::new();
    let output = run
        .command(TEST)
        .env(LEDGER, "/nonexistent/ledger")
        .output()
        .unwrap();
    assert!(
        !output.status.success()
            && text(&output).contains("simulated GPU: HARNESS_GPU_LEDGER: No such file"),
        "{}",
        text(&output)
    );
}

#[test]
fn contexts_are_a_stack() {
    const TEST: &str = "contexts_are_a_stack";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut first, mut second, mut popped) = (0, 0, 0);
    let current = || {
        let mut context = 0;
        // SAFETY: the place is valid.
        assert_eq!(unsafe { cuCtxGetCurrent(&raw mut context) }, 0);
        context
    };
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(
            (
                cuDevicePrimaryCtxRetain(&raw mut first, 0),
                cuDevicePrimaryCtxRetain(&raw mut second, 1)
            ),
            (0, 0)
        );
        assert_eq!(
            (
                cuCtxPushCurrent_v2(first),
                cuCtxPushCurrent_v2(second),
                current()
            ),
            (0, 0, second)
        );
        assert_eq!(
            (cuCtxPopCurrent_v2(&raw mut popped), popped, current()),
            (0, second, first)
        );
        assert_eq!(
            (
                cuCtxPushCurrent_v2(second),
                cuCtxPopCurrent_v2(ptr::null_mut()),
                current()
            ),
            (0, 0, first)
        );
    }
}

#[test]
fn the_host_can_access_managed_memory() {
    const TEST: &str = "the_host_can_access_managed_memory";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let mut address = 0;
    // SAFETY: the places and the managed memory are valid.
    unsafe {
        assert_eq!(cudaMallocManaged(&raw mut address, 600 * MIB, 1), 0);
        assert_eq!(
            malloc(600 * MIB).0,
            2,
            "managed memory is charged to the device"
        );
        let numbers: *mut u32 = ptr::with_exposed_provenance_mut(address);
        numbers.write(7);
        assert_eq!(cudaMemset(address + 4, 1, 4), 0);
        assert_eq!(
            (numbers.read(), numbers.add(1).read(), numbers.add(2).read()),
            (7, 0x0101_0101, 0)
        );
        assert_eq!(
            (
                cuMemsetD8_v2(address + 4, 2, 4),
                cuMemsetD32_v2(address + 8, 3, 1)
            ),
            (0, 0)
        );
        assert_eq!(
            (numbers.read(), numbers.add(1).read(), numbers.add(2).read()),
            (7, 0x0202_0202, 3)
        );
        let mut is_managed = 0_u32;
        assert_eq!(
            (
                cuPointerGetAttribute((&raw mut is_managed).cast(), 8, address),
                is_managed
            ),
            (0, 1)
        );
        assert_eq!((cudaFree(address), cudaFree(address)), (0, INVALID_VALUE));
        assert_eq!(malloc(600 * MIB).0, 0);
    }
}

#[test]
fn the_address_of_a_symbol_can_be_set_and_copied() {
    const TEST: &str = "the_address_of_a_symbol_can_be_set_and_copied";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut first, mut second, mut again, mut bytes) = (0, 0, 0, [9_u8; 256]);
    let symbols = [0_u8; 2];
    // SAFETY: the places are valid.
    unsafe {
        let symbol = |index: usize| ptr::from_ref(&symbols[index]).cast();
        assert_eq!(cudaGetSymbolAddress(&raw mut first, symbol(0)), 0);
        assert_eq!(cudaGetSymbolAddress(&raw mut second, symbol(1)), 0);
        assert_eq!(cudaGetSymbolAddress(&raw mut again, symbol(0)), 0);
        assert!(first == again && first.abs_diff(second) >= 1 << 20);
        assert_eq!(cudaMemset(first, 1, bytes.len()), 0);
        assert_eq!(
            cudaMemcpy(
                bytes.as_mut_ptr().expose_provenance(),
                first,
                bytes.len(),
                2
            ),
            0
        );
    }
    assert_eq!(bytes, [0; 256], "kernels and memset write no values");
}

#[test]
fn copies_of_the_driver_move_values_between_host_and_devices() {
    const TEST: &str = "copies_of_the_driver_move_values_between_host_and_devices";
    if !is_program(TEST) {
        return Run {
            values: Values::Copies,
            ..Run::new()
        }
        .passes(TEST);
    }
    let ((_, first), (_, second)) = (malloc(MIB), malloc(MIB));
    let (sent, mut received) = ([1_u8, 2, 3, 4], [0_u8; 4]);
    let (from, into) = (
        sent.as_ptr().expose_provenance(),
        received.as_mut_ptr().expose_provenance(),
    );
    // SAFETY: the host's arrays have this size, and the devices' memory is larger.
    let codes = unsafe {
        [
            cuMemcpyHtoD_v2(first, from, 4),
            cuMemcpyDtoD_v2(second, first, 4),
            cuMemcpyPeer(first + 64, 0, second, 0, 4),
            cuMemcpy(second + 64, first + 64, 4),
            cuMemcpyDtoH_v2(into, second + 64, 4),
        ]
    };
    assert_eq!((codes, received), ([0; 5], sent));
}

#[test]
fn nvrtc_lists_the_architectures_that_it_counts() {
    const TEST: &str = "nvrtc_lists_the_architectures_that_it_counts";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut count, mut list) = (0, [0; 32]);
    assert_eq!(
        // SAFETY: the list is longer than the count.
        unsafe {
            (
                nvrtcGetNumSupportedArchs(&raw mut count),
                nvrtcGetSupportedArchs(list.as_mut_ptr()),
            )
        },
        (0, 0)
    );
    let (found, rest) = list.split_at(count as usize);
    assert!(
        found.contains(&90)
            && found.is_sorted()
            && !found.contains(&0)
            && rest.iter().all(|number| *number == 0),
        "{list:?}"
    );
    // SAFETY: a null pointer is refused.
    assert_ne!(unsafe { nvrtcGetSupportedArchs(ptr::null_mut()) }, 0);
}

#[test]
fn pointer_attributes_have_their_own_sizes_and_unknown_ones_are_refused() {
    const TEST: &str = "pointer_attributes_have_their_own_sizes_and_unknown_ones_are_refused";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (_, address) = malloc(4 * MIB);
    let attribute = |number: c_int, address: usize| {
        let mut value = [u64::MAX; 2];
        // SAFETY: the place is larger than every attribute.
        let code = unsafe { cuPointerGetAttribute(value.as_mut_ptr().cast(), number, address) };
        (code, value[0])
    };
    let word = |low: u64| (0, u64::MAX << 32 | low);
    assert_eq!(
        [2, 8, 9, 13].map(|number| attribute(number, address)),
        [word(2), word(0), word(0), word(1)]
    );
    assert_eq!(attribute(3, address + 5), (0, address as u64 + 5));
    assert_eq!(
        [11, 12].map(|number| attribute(number, address + 5)),
        [(0, address as u64), (0, 4 << 20)]
    );
    for unknown in [0, 4, 5, 6, 99] {
        assert_eq!(
            attribute(unknown, address),
            (INVALID_VALUE, u64::MAX),
            "attribute {unknown}"
        );
    }
    assert_eq!(
        attribute(9, 4096),
        (INVALID_VALUE, u64::MAX),
        "memory of the host"
    );
    // Host memory has an address on the device while it is registered.
    let buffer = vec![0_u8; 4096];
    let host = buffer.as_ptr().addr();
    let device_pointer = || {
        let mut device = usize::MAX;
        // SAFETY: the place holds the address.
        (
            unsafe { cuMemHostGetDevicePointer_v2(&raw mut device, host, 0) },
            device,
        )
    };
    assert_eq!(device_pointer(), (INVALID_VALUE, usize::MAX));
    // SAFETY: the buffer lives until the end.
    assert_eq!(unsafe { cuMemHostRegister_v2(host, buffer.len(), 0) }, 0);
    assert_eq!(
        (device_pointer(), attribute(3, host)),
        ((0, host), (0, host as u64))
    );
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemHostUnregister(host) }, 0);
    assert_eq!(device_pointer().0, INVALID_VALUE);
}

/// Free bytes of the current device.
fn free_memory() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are valid.
    assert_eq!(unsafe { cudaMemGetInfo(&raw mut free, &raw mut total) }, 0);
    free
}

/// `CUmemorytype`.
const ON_HOST: usize = 1;
const ON_DEVICE: usize = 2;
const IN_ARRAY: usize = 3;

#[test]
fn rows_and_boxes_are_copied_with_the_distances_of_their_rows() {
    const TEST: &str = "rows_and_boxes_are_copied_with_the_distances_of_their_rows";
    if !is_program(TEST) {
        return Run {
            values: Values::Copies,
            ..Run::new()
        }
        .passes(TEST);
    }
    let (_, device) = malloc(MIB);
    let sent: [u8; 12] = std::array::from_fn(|index| index as u8);
    let mut received = [0_u8; 12];
    let (from, to) = (
        sent.as_ptr().expose_provenance(),
        received.as_mut_ptr().expose_provenance(),
    );
    // CUDA_MEMCPY2D: x, y, kind, host, device, array, pitch; twice; width, height.
    let rows = |from: [usize; 7], to: [usize; 7], width: usize, height: usize| {
        let [a, b, c, d, e, f, g] = from;
        let [h, i, j, k, l, m, n] = to;
        let copy = [a, b, c, d, e, f, g, h, i, j, k, l, m, n, width, height];
        // SAFETY: the structure has this layout, and its ranges are valid.
        unsafe { cuMemcpy2D_v2(&raw const copy) }
    };
    // The last two bytes of three rows of four, to rows of 16 on the device and back.
    let on_host = [2, 0, ON_HOST, from, 0, 0, 4];
    assert_eq!(rows(on_host, [1, 1, ON_DEVICE, 0, device, 0, 16], 2, 3), 0);
    let back = [0, 0, ON_HOST, to, 0, 0, 2];
    assert_eq!(rows([1, 1, ON_DEVICE, 0, device, 0, 16], back, 2, 3), 0);
    assert_eq!(received[..7], [2, 3, 6, 7, 10, 11, 0]);
    // Rows may not overlap, and the kind of memory must be known.
    assert_eq!(
        rows(on_host, [0, 0, ON_DEVICE, 0, device, 0, 1], 2, 3),
        INVALID_VALUE
    );
    assert_eq!(
        rows(on_host, [0, 0, 9, 0, device, 0, 16], 2, 3),
        INVALID_VALUE
    );
    // CUDA_MEMCPY3D: x, y, z, level, kind, host, device, array, reserved, pitch, height; twice;
    // width, height, depth. The second column of two slices of two rows of three.
    let boxes = [
        [1, 0, 0, 0, ON_HOST, from, 0, 0, 0, 3, 2],
        [0, 0, 1, 0, ON_DEVICE, 0, device, 0, 0, 8, 4],
    ]
    .concat();
    let copy: [usize; 25] = [boxes, vec![1, 2, 2]].concat().try_into().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemcpy3DAsync_v2(&raw const copy, 0) }, 0);
    // cudaMemcpy3DParms: array, position, start, pitch, width, height; twice; extent, kind.
    let copy: [usize; 20] = [
        vec![0, 0, 0, 1, device, 8, 8, 4],
        vec![0, 0, 0, 0, to, 1, 1, 2],
        vec![1, 2, 2, 2],
    ]
    .concat()
    .try_into()
    .unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { cudaMemcpy3D(&raw const copy) }, 0);
    assert_eq!(received[..4], [1, 4, 7, 10]);
    // An array of two rows of four elements of a byte: width, height, format and channels.
    let mut array = 0;
    // SAFETY: the places are valid.
    let code = unsafe { cuArrayCreate_v2(&raw mut array, &[4, 2, 1 << 32 | 1]) };
    assert_eq!(code, 0);
    let in_array = [0, 0, IN_ARRAY, 0, 0, array, 0];
    assert_eq!(rows([0, 0, ON_HOST, from, 0, 0, 4], in_array, 4, 2), 0);
    let second = [0, 1, IN_ARRAY, 0, 0, array, 0];
    assert_eq!(rows(second, [0, 0, ON_HOST, to, 0, 0, 0], 4, 1), 0);
    assert_eq!(received[..4], [4, 5, 6, 7]);
    // SAFETY: the memory has these rows.
    assert_eq!(unsafe { cuMemsetD2D16_v2(device, 8, 0x0201, 1, 2) }, 0);
    assert_eq!(rows([0, 0, ON_DEVICE, 0, device, 0, 8], back, 2, 2), 0);
    assert_eq!(received[..4], [1, 2, 1, 2]);
}

#[test]
fn a_created_context_holds_its_memory_until_it_is_destroyed() {
    const TEST: &str = "a_created_context_holds_its_memory_until_it_is_destroyed";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut primary, mut created, mut current) = (0, 0, 0);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut primary, 0), 0);
        assert_eq!(cuCtxPushCurrent_v2(primary), 0);
        let before = free_memory();
        assert_eq!(cuCtxCreate_v4(&raw mut created, ptr::null(), 0, 0), 0);
        assert_eq!((cuCtxGetCurrent(&raw mut current), current), (0, created));
        let (code, of_created) = malloc(100 * MIB);
        assert_eq!((code, cuCtxPopCurrent_v2(ptr::null_mut())), (0, 0));
        assert_eq!((cuCtxGetCurrent(&raw mut current), current), (0, primary));
        let (code, of_primary) = malloc(100 * MIB);
        assert_eq!((code, cuCtxPushCurrent_v2(created)), (0, 0));
        assert_eq!(cuCtxDestroy_v2(created), 0);
        assert_eq!((cuCtxGetCurrent(&raw mut current), current), (0, primary));
        assert_eq!(free_memory(), before - 100 * MIB);
        assert_eq!(
            (cudaFree(of_primary), cudaFree(of_created)),
            (0, INVALID_VALUE)
        );
        // CUDA_ERROR_INVALID_CONTEXT.
        assert_eq!(
            (cuCtxDestroy_v2(created), cuCtxDestroy_v2(primary)),
            (201, 201)
        );
        assert_eq!(cuCtxPushCurrent_v2(created), 201);
    }
}

#[test]
fn a_reset_device_has_all_its_memory_and_works_again() {
    const TEST: &str = "a_reset_device_has_all_its_memory_and_works_again";
    if !is_program(TEST) {
        let run = Run::new();
        run.passes(TEST);
        let device = &run.counters()[0].devices[0];
        assert_eq!((device.mallocs, device.frees), (4, 4));
        return;
    }
    let (mut stream, mut managed) = (0, 0);
    let before = free_memory();
    // SAFETY: all places are valid, and the second reset is by number.
    unsafe {
        for reset in [|| cudaDeviceReset(), || cuDevicePrimaryCtxReset_v2(0)] {
            assert_eq!(cudaStreamCreate(&raw mut stream), 0);
            assert_eq!(malloc(600 * MIB).0, 0);
            assert_eq!(cudaMallocManaged(&raw mut managed, 2 * MIB, 1), 0);
            assert_eq!(reset(), 0);
            assert_eq!(free_memory(), before);
            // cudaErrorInvalidResourceHandle.
            assert_eq!(
                (cudaFree(managed), cudaStreamDestroy(stream)),
                (INVALID_VALUE, 400)
            );
        }
    }
}

#[test]
fn access_to_a_peer_is_switched_on_once() {
    const TEST: &str = "access_to_a_peer_is_switched_on_once";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let mut peer = 0;
    // SAFETY: the place is valid.
    unsafe {
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut peer, 1), 0);
        // CUDA_ERROR_PEER_ACCESS_NOT_ENABLED and CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED.
        assert_eq!(cuCtxDisablePeerAccess(peer), 705);
        assert_eq!(cuCtxEnablePeerAccess(peer, 1), INVALID_VALUE);
        assert_eq!(
            [0; 2].map(|flags| cuCtxEnablePeerAccess(peer, flags)),
            [0, 704]
        );
        assert_eq!([(); 2].map(|()| cuCtxDisablePeerAccess(peer)), [0, 705]);
    }
}

#[test]
fn another_process_opens_memory_by_its_handle() {
    const TEST: &str = "another_process_opens_memory_by_its_handle";
    const HANDLE: &str = "SIMULATED_GPU_TEST_HANDLE";
    let with_values = || Run {
        values: Values::Cpu,
        ..Run::new()
    };
    if !is_program(TEST) {
        return with_values().passes(TEST);
    }
    let (mut bytes, mut address) = ([0_u8; 64], 0);
    let mut word = [0_u8; 4];
    let into = word.as_mut_ptr().expose_provenance();
    if let Ok(given) = env::var(HANDLE) {
        bytes = parsed(&given);
        // SAFETY: the places are valid.
        unsafe {
            assert_eq!(
                cuIpcOpenMemHandle_v2(&raw mut address, IpcHandle(bytes), 1),
                0
            );
            assert_eq!((cuMemcpyDtoH_v2(into, address, 4), word), (0, [7; 4]));
            assert_eq!(
                [0; 2].map(|_| cuIpcCloseMemHandle(address)),
                [0, INVALID_VALUE]
            );
        }
        return;
    }
    let (_, memory) = malloc(2 * MIB);
    // SAFETY: the places are valid.
    unsafe {
        assert_eq!(cuMemsetD8_v2(memory, 7, 4), 0);
        assert_eq!(cuIpcGetMemHandle(&raw mut bytes, memory), 0);
    }
    passes_again(HANDLE, &printed(bytes));
}

#[test]
fn page_locked_memory_is_memory_of_a_gpu_that_shares_the_hosts_memory() {
    const TEST: &str = "page_locked_memory_is_memory_of_a_gpu_that_shares_the_hosts_memory";
    const AGAIN: &str = "SIMULATED_GPU_TEST_AGAIN";
    if !is_program(TEST) {
        let run = Run {
            gpu: Gpu::named("gb10-128").unwrap(),
            ..Run::new()
        };
        run.passes(TEST);
        let counters = run.counters();
        let failed = counters
            .iter()
            .find(|process| !process.failed_calls.is_empty());
        assert_eq!(failed.unwrap().failed_calls, [(Call::HostAlloc, [1, 0])]);
        return;
    }
    if env::var_os(AGAIN).is_some() {
        return assert_eq!(free_memory(), 24 * MIB, "other processes see it too");
    }
    let (mut pinned, mut refused, mut is_integrated, mut memory) = (0, 0, 0, [0; 3]);
    let mut registered = vec![0_u8; 100 * MIB];
    let own = registered.as_mut_ptr().expose_provenance();
    assert_eq!(malloc(600 * MIB).0, 0);
    // SAFETY: the places are valid.
    unsafe {
        assert_eq!(cudaMallocHost(&raw mut pinned, 300 * MIB), 0);
        assert_eq!(free_memory(), 124 * MIB);
        assert_eq!(cudaMallocHost(&raw mut refused, 200 * MIB), 2);
        assert_eq!(malloc(200 * MIB).0, 2);
        assert_eq!(cuMemHostRegister_v2(own, registered.len(), 0), 0);
        assert_eq!(free_memory(), 24 * MIB);
        passes_again(AGAIN, "1");
        assert_eq!(cudaFreeHost(pinned), 0);
        assert_eq!(free_memory(), 324 * MIB);
        assert_eq!(cuMemHostUnregister(own), 0);
        assert_eq!(free_memory(), 424 * MIB);
        assert_eq!(cuMemHostUnregister(own), INVALID_VALUE);
        assert_eq!(cudaDeviceGetAttribute(&raw mut is_integrated, 18, 0), 0);
        assert_eq!((is_integrated, nvmlInit_v2()), (1, 0));
        // Not supported.
        assert_eq!(nvmlDeviceGetMemoryInfo(1, &raw mut memory), 3);
        assert_eq!((cudaSetDevice(1), free_memory()), (0, 1024 * MIB));
    }
}

/// What the processes of a run noted of the machine's memory.
fn most_memory(run: &Run) -> Vec<MemoryShare> {
    let notes = std::fs::read_dir(run.folder.path()).unwrap();
    let notes = notes.map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with(NOTES)
    });
    let read = |path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let most = notes.map(read).map(|it: MemoryNotes| it.most);
    most.max_by_key(MemoryInUse::total).unwrap().processes
}

fn pageable(shares: &[MemoryShare]) -> Bytes {
    Bytes(shares.iter().map(|share| share.pageable).sum())
}

#[test]
fn memory_that_a_program_page_locks_counts_once() {
    const TEST: &str = "memory_that_a_program_page_locks_counts_once";
    if !is_program(TEST) {
        let run = Run {
            gpu: Gpu::named("gb10-128").unwrap(),
            devices: 1,
            ..Run::new()
        };
        run.passes(TEST);
        let shares = most_memory(&run);
        assert_eq!(shares[0].pinned, Bytes::mib(600).0);
        // 200 of 400 MiB of its own are page-locked.
        assert!(
            (Bytes::mib(200)..Bytes::mib(360)).contains(&pageable(&shares)),
            "{shares:?}"
        );
        return;
    }
    let own = std::hint::black_box(vec![1_u8; 400 * MIB]);
    // SAFETY: the mapping is new and has this size; the ranges are of the program.
    unsafe {
        let shared = libc::mmap(
            ptr::null_mut(),
            400 * MIB,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        let (own, shared) = (own.as_ptr().expose_provenance(), shared.expose_provenance());
        assert_eq!(malloc(MIB).0, 0);
        assert_eq!(cuMemHostRegister_v2(shared, 400 * MIB, 0), 0);
        assert_eq!(cuMemHostRegister_v2(own, 200 * MIB, 0), 0);
        assert_eq!(cuMemHostRegister_v2(own, MIB, 0), ALREADY_REGISTERED);
        assert_eq!(malloc(200 * MIB).0, 0);
        assert_eq!(free_memory(), 222 * MIB);
    }
}

#[test]
fn memory_that_a_forked_child_shares_with_its_parent_counts_once() {
    const TEST: &str = "memory_that_a_forked_child_shares_with_its_parent_counts_once";
    if !is_program(TEST) {
        let run = Run {
            gpu: Gpu::named("gb10-128").unwrap(),
            devices: 1,
            ..Run::new()
        };
        run.passes(TEST);
        let shares = most_memory(&run);
        assert_eq!(shares.len(), 3);
        // 400 MiB of all, and 100 MiB that the parent writes after the forks.
        assert!(
            (Bytes::mib(500)..Bytes::mib(700)).contains(&pageable(&shares)),
            "{shares:?}"
        );
        return;
    }
    let mut own = std::hint::black_box(vec![1_u8; 400 * MIB]);
    let mut pipe = [0; 2];
    let run = std::path::PathBuf::from(env::var_os(RUN).unwrap());
    // SAFETY: the child only waits; the places are valid.
    unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        let children = [(); 2].map(|()| {
            let child = libc::fork();
            if child == 0 {
                libc::close(pipe[1]);
                libc::read(pipe[0], (&raw mut pipe).cast(), 1);
                libc::_exit(0);
            }
            std::fs::write(run.join(format!("{HOOKED}{child}")), "").unwrap();
            child
        });
        assert_eq!(malloc(MIB).0, 0);
        own[..100 * MIB].fill(2);
        assert_eq!(malloc(MIB).0, 0);
        libc::close(pipe[1]);
        for child in children {
            libc::waitpid(child, ptr::null_mut(), 0);
        }
    }
}

#[test]
fn page_locked_memory_of_a_gpu_that_shares_it_may_exceed_that_of_the_host() {
    const TEST: &str = "page_locked_memory_of_a_gpu_that_shares_it_may_exceed_that_of_the_host";
    if !is_program(TEST) {
        let run = Run {
            gpu: Gpu::named("gb10-128").unwrap(),
            memory: Bytes::gib(1 << 14),
            ..Run::new()
        };
        return run.passes(TEST);
    }
    let mut pinned = 0;
    // SAFETY: the place is valid.
    unsafe { assert_eq!(cudaMallocHost(&raw mut pinned, 8 << 40), 0) };
}

/// A fat binary with one image of machine code for the first GPU.
fn fat_binary(image: &[u8]) -> Vec<u8> {
    let (major, minor) = GPUS[0].capability;
    let code = image.len().next_multiple_of(8);
    let mut entry = Vec::new();
    entry.extend(2_u16.to_le_bytes());
    entry.extend(1_u16.to_le_bytes());
    entry.extend(64_u32.to_le_bytes());
    entry.extend((code as u64).to_le_bytes());
    entry.extend([0; 12]);
    entry.extend((10 * major + minor).to_le_bytes());
    entry.resize(64, 0);
    entry.extend(image);
    entry.resize(64 + code, 0);
    let mut binary = Vec::new();
    binary.extend(0xba55_ed50_u32.to_le_bytes());
    binary.extend(1_u16.to_le_bytes());
    binary.extend(16_u16.to_le_bytes());
    binary.extend((entry.len() as u64).to_le_bytes());
    binary.extend(entry);
    binary
}

#[test]
fn a_registered_kernel_has_the_limits_of_a_loaded_one() {
    const TEST: &str = "a_registered_kernel_has_the_limits_of_a_loaded_one";
    /// The magic number and the version of a wrapper of a fat binary.
    const WRAPPER: usize = 0x1_4662_43b1;
    const MAX_DYNAMIC: c_int = 8;
    /// A kernel is known by the address of its function.
    const FUNCTION: usize = 0x1000;
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let image = include_bytes!("../src/image/kernels.cubin");
    let binary = fat_binary(image);
    let wrapper = [WRAPPER, binary.as_ptr().expose_provenance(), 0];
    let (mut module, mut function) = (0, 0);
    // SAFETY: all places and strings are valid, and live until the end of the test.
    unsafe {
        let registered = __cudaRegisterFatBinary(wrapper.as_ptr());
        let name = c"first".as_ptr();
        __cudaRegisterFunction(registered, FUNCTION, name, name, -1, 0, 0, 0, 0, 0);
        assert_eq!(cuModuleLoadData(&raw mut module, image.as_ptr()), 0);
        assert_eq!(cuModuleGetFunction(&raw mut function, module, name), 0);
        let of_runtime = || {
            let mut attributes = [-7; 36];
            assert_eq!(cudaFuncGetAttributes(&raw mut attributes, FUNCTION), 0);
            // Threads of a block, shared memory, registers and the most dynamic shared memory.
            [6, 0, 7, 11].map(|place| attributes[place])
        };
        let of_driver = || {
            [0, 1, 4, MAX_DYNAMIC].map(|number| {
                let mut value = -7;
                assert_eq!(cuFuncGetAttribute(&raw mut value, number, function), 0);
                value
            })
        };
        assert_eq!(of_runtime(), [256, 4096, 10, (48 << 10) - 4096]);
        assert_eq!(of_runtime(), of_driver());
        for (value, code) in [(1 << 20, INVALID_VALUE), (16 << 10, 0)] {
            assert_eq!(cudaFuncSetAttribute(FUNCTION, MAX_DYNAMIC, value), code);
            assert_eq!(cuFuncSetAttribute(function, MAX_DYNAMIC, value), code);
            assert_eq!(of_runtime(), of_driver());
        }
    }
}

#[test]
fn functions_have_the_registers_and_shared_memory_of_their_machine_code() {
    const TEST: &str = "functions_have_the_registers_and_shared_memory_of_their_machine_code";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    #[repr(C, align(8))]
    struct Aligned([u8; include_bytes!("../src/image/kernels.cubin").len()]);
    static IMAGE: Aligned = Aligned(*include_bytes!("../src/image/kernels.cubin"));
    let (mut module, mut function, mut other) = (0, 0, 0);
    let (mut address, mut again, mut size) = (0, 0, 0);
    // SAFETY: all places and strings are valid.
    unsafe {
        assert_eq!(cuModuleLoadData(&raw mut module, IMAGE.0.as_ptr()), 0);
        assert_eq!(
            cuModuleGetFunction(&raw mut function, module, c"first".as_ptr()),
            0
        );
        // CUDA_ERROR_NOT_FOUND.
        assert_eq!(
            cuModuleGetFunction(&raw mut other, module, c"third".as_ptr()),
            500
        );
        let attribute = |number: c_int| {
            let mut value = -7;
            assert_eq!(cuFuncGetAttribute(&raw mut value, number, function), 0);
            value
        };
        // Threads of a block, shared memory, constants, local memory, registers.
        assert_eq!([0, 1, 2, 3, 4].map(attribute), [256, 4096, 12, 0, 10]);
        assert_eq!(attribute(8), (48 << 10) - 4096);
        assert_eq!(cuFuncSetAttribute(function, 8, 1 << 20), INVALID_VALUE);
        assert_eq!(
            (cuFuncSetAttribute(function, 8, 16 << 10), attribute(8)),
            (0, 16 << 10)
        );
        let blocks = |block: c_int, dynamic: usize| {
            let mut blocks = -7;
            let active = cuOccupancyMaxActiveBlocksPerMultiprocessor;
            assert_eq!(active(&raw mut blocks, function, block, dynamic), 0);
            blocks
        };
        // The first GPU has 64 KiB of shared memory and 1024 threads per multiprocessor.
        assert_eq!(
            [blocks(256, 0), blocks(256, 28 << 10), blocks(512, 0)],
            [4, 2, 0]
        );
        let (mut grid, mut block) = (0, 0);
        let potential = cuOccupancyMaxPotentialBlockSize;
        assert_eq!(
            potential(&raw mut grid, &raw mut block, function, None, 0, 0),
            0
        );
        assert_eq!((grid, block), (4 * GPUS[0].multiprocessors as c_int, 256));
        let (mut offset, mut len) = (7, 0);
        let info = cuFuncGetParamInfo;
        assert_eq!(info(function, 0, &raw mut offset, &raw mut len), 0);
        assert_eq!((offset, len), (0, 8));
        assert_eq!(
            info(function, 1, &raw mut offset, &raw mut len),
            INVALID_VALUE
        );
        for place in [&raw mut address, &raw mut again] {
            let found = cuModuleGetGlobal_v2(place, &raw mut size, module, c"table".as_ptr());
            assert_eq!((found, size), (0, 64));
        }
        assert!(address == again && address > 0);
        // CUDA_ERROR_INVALID_HANDLE.
        assert_eq!([0; 2].map(|_| cuModuleUnload(module)), [0, 400]);
    }
}

fn printed(bytes: [u8; 64]) -> String {
    bytes.map(|byte| byte.to_string()).join(",")
}

fn parsed(text: &str) -> [u8; 64] {
    let bytes: Vec<u8> = text.split(',').map(|byte| byte.parse().unwrap()).collect();
    bytes.try_into().unwrap()
}

/// Runs this program again in a child process, with a variable.
fn passes_again(variable: &str, value: &str) {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(env::args_os().skip(1));
    let output = child.env(variable, value).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// Attributes of a pool.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const USED: c_int = 7;
const USED_HIGH: c_int = 8;

fn in_mib(pool: usize, attribute: c_int) -> u64 {
    let mut value = u64::MAX;
    // SAFETY: the place is valid.
    let code = unsafe { cudaMemPoolGetAttribute(pool, attribute, &raw mut value) };
    assert_eq!(code, 0);
    value >> 20
}

#[test]
fn small_asynchronous_allocations_share_the_memory_of_their_pool() {
    const TEST: &str = "small_asynchronous_allocations_share_the_memory_of_their_pool";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut pool, mut address) = (0, 0);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cudaDeviceGetDefaultMemPool(&raw mut pool, 0), 0);
        let allocated: Vec<usize> = (0..700)
            .map(|_| {
                assert_eq!(cudaMallocAsync(&raw mut address, MIB, 0), 0);
                address
            })
            .collect();
        assert_eq!(
            [USED, RESERVED].map(|number| in_mib(pool, number)),
            [700, 704]
        );
        for address in allocated {
            assert_eq!(cudaFreeAsync(address, 0), 0);
        }
        assert_eq!(cudaFreeAsync(address, 0), INVALID_VALUE);
        assert_eq!(
            [USED, RESERVED].map(|number| in_mib(pool, number)),
            [0, 704]
        );
        // A wait of the host releases what is above the threshold of 0.
        assert_eq!((cudaDeviceSynchronize(), free_memory()), (0, 1024 * MIB));
        assert_eq!(
            [USED_HIGH, RESERVED].map(|number| in_mib(pool, number)),
            [700, 0]
        );
        let most = u64::MAX;
        assert_eq!(
            cudaMemPoolSetAttribute(pool, RELEASE_THRESHOLD, &raw const most),
            0
        );
        assert_eq!(cudaMallocAsync(&raw mut address, 2 * MIB, 0), 0);
        assert_eq!((cudaFree(address), cudaDeviceSynchronize()), (0, 0));
        assert_eq!(in_mib(pool, RESERVED), 32);
        assert_eq!((cudaMemPoolTrimTo(pool, 0), free_memory()), (0, 1024 * MIB));
        // A pool of 4 MiB.
        let properties = PoolProperties::new(0, 4 * MIB);
        assert_eq!(cudaMemPoolCreate(&raw mut pool, &raw const properties), 0);
        let mut allocate = |size: usize| cudaMallocFromPoolAsync(&raw mut address, size, pool, 0);
        assert_eq!([5 * MIB, 3 * MIB, 2 * MIB].map(&mut allocate), [2, 0, 2]);
        assert_eq!(in_mib(pool, RESERVED), 4);
    }
}

#[test]
fn another_process_imports_a_pool_and_its_memory() {
    const TEST: &str = "another_process_imports_a_pool_and_its_memory";
    const HANDLE: &str = "SIMULATED_GPU_TEST_POOL";
    if !is_program(TEST) {
        return Run {
            values: Values::Cpu,
            ..Run::new()
        }
        .passes(TEST);
    }
    let (mut pool, mut address, mut data, mut word) = (0, 0, [0_u8; 64], [0_u8; 4]);
    let into = word.as_mut_ptr().expose_provenance();
    if let Ok(given) = env::var(HANDLE) {
        let (descriptor, bytes) = given.split_once(' ').unwrap();
        data = parsed(bytes);
        // SAFETY: all places are valid.
        unsafe {
            let descriptor = descriptor.parse().unwrap();
            assert_eq!(
                cuMemPoolImportFromShareableHandle(&raw mut pool, descriptor, 1, 0),
                0
            );
            let refused = cudaMallocFromPoolAsync(&raw mut address, MIB, pool, 0);
            assert_eq!(refused, INVALID_VALUE);
            assert_eq!(
                cuMemPoolImportPointer(&raw mut address, pool, &raw const data),
                0
            );
            assert_eq!((cuMemcpyDtoH_v2(into, address, 4), word), (0, [7; 4]));
            assert_eq!(
                [0; 2].map(|_| cudaFreeAsync(address, 0)),
                [0, INVALID_VALUE]
            );
        }
        return;
    }
    let (mut first, mut descriptor) = (0, -1);
    let properties = PoolProperties::new(1, 0);
    // SAFETY: all places are valid, and the child gets the descriptor.
    unsafe {
        assert_eq!(cudaMemPoolCreate(&raw mut pool, &raw const properties), 0);
        for place in [&raw mut first, &raw mut address] {
            assert_eq!(cudaMallocFromPoolAsync(place, 1000, pool, 0), 0);
        }
        assert_eq!((address - first, cuMemsetD8_v2(address, 7, 4)), (1024, 0));
        assert_eq!(
            cuMemPoolExportToShareableHandle(&raw mut descriptor, pool, 1, 0),
            0
        );
        assert_eq!(cuMemPoolExportPointer(&raw mut data, address), 0);
        assert_eq!(libc::fcntl(descriptor, libc::F_SETFD, 0), 0);
    }
    passes_again(HANDLE, &format!("{descriptor} {}", printed(data)));
}

#[test]
fn a_capture_ends_with_its_graph_on_any_device_and_the_next_has_another() {
    const TEST: &str = "a_capture_ends_with_its_graph_on_any_device_and_the_next_has_another";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut stream, mut given, mut got, mut next) = (0, 0, 0, 0);
    // SAFETY: the places are valid, and each graph is destroyed once.
    unsafe {
        assert_eq!(cudaStreamCreate(&raw mut stream), 0);
        assert_eq!(cudaGraphCreate(&raw mut given, 0), 0);
        let none = ptr::null();
        assert_eq!(
            cudaStreamBeginCaptureToGraph(stream, given, none, none, 0, 0),
            0
        );
        assert_eq!(cudaSetDevice(1), 0);
        assert_eq!(
            (cudaStreamEndCapture(stream, &raw mut got), got),
            (0, given)
        );
        assert_eq!(cudaSetDevice(0), 0);
        assert_eq!(cudaStreamBeginCapture(stream, 0), 0);
        assert_eq!(cudaStreamEndCapture(stream, &raw mut next), 0);
        assert_ne!(next, given);
        assert_eq!([given, next].map(|graph| cudaGraphDestroy(graph)), [0, 0]);
    }
}

#[test]
fn a_node_lives_as_long_as_its_graph() {
    const TEST: &str = "a_node_lives_as_long_as_its_graph";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let none = ptr::null();
    let (mut graph, mut node, mut kind) = (0, 0, -1);
    let mut seen = std::collections::BTreeSet::new();
    // SAFETY: the places are valid, and each graph is destroyed once.
    unsafe {
        for _ in 0..64 {
            assert_eq!(cudaGraphCreate(&raw mut graph, 0), 0);
            for of in [0, 5] {
                assert_eq!(
                    cuGraphAddNode(&raw mut node, graph, none, 0, &raw const of),
                    0
                );
                assert_eq!((cuGraphNodeGetType(node, &raw mut kind), kind), (0, of));
                seen.insert(node);
            }
            assert_eq!(cudaGraphDestroy(graph), 0);
        }
    }
    assert!(seen.len() < 128, "nodes are freed with their graph");
}

#[test]
fn a_launch_records_the_events_of_the_nodes_of_its_graph() {
    const TEST: &str = "a_launch_records_the_events_of_the_nodes_of_its_graph";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut graph, mut executable, mut start, mut end) = (0, 0, 0, 0);
    let (mut nodes, mut milliseconds) = ([0; 2], -1.0);
    // SAFETY: all places are valid.
    unsafe {
        for event in [&raw mut start, &raw mut end] {
            assert_eq!(cudaEventCreateWithFlags(event, 0), 0);
        }
        assert_eq!(cudaGraphCreate(&raw mut graph, 0), 0);
        let first = (&raw mut nodes).cast::<usize>();
        let last = first.add(1);
        let none = ptr::null();
        assert_eq!(
            [
                cudaGraphAddEventRecordNode(first, graph, none, 0, start),
                cudaGraphAddEventRecordNode(last, graph, first, 1, end),
                cudaGraphAddEventWaitNode(last, graph, first, 1, start),
                cudaGraphAddEventRecordNode(last, graph, none, 0, 0x1234),
                cudaGraphInstantiate(&raw mut executable, graph, 0),
            ],
            [0, 0, 0, INVALID_HANDLE, 0]
        );
        let mut elapsed = || cudaEventElapsedTime(&raw mut milliseconds, start, end);
        assert_eq!(elapsed(), INVALID_HANDLE, "nothing has recorded them");
        assert_eq!(cudaGraphLaunch(executable, 0), 0);
        assert_eq!(elapsed(), 0);
        assert_eq!(cudaGraphExecDestroy(executable), 0);
        assert_eq!(cudaGraphDestroy(graph), 0);
    }
    assert!(milliseconds > 0.0);
}

/// `CUgraphNodeParams` of a conditional node.
#[repr(C)]
struct ConditionalParameters {
    node: [c_int; 4],
    handle: u64,
    kind: c_int,
    size: c_uint,
    bodies: *const usize,
    rest: [u64; 26],
}

#[test]
fn a_conditional_node_has_a_graph_for_each_case_which_takes_nodes() {
    let (mut graph, mut node, mut kind) = (0, 0, -1);
    let none = ptr::null();
    let wanted = |kind, size| ConditionalParameters {
        node: [13, 0, 0, 0],
        handle: 0,
        kind,
        size,
        bodies: ptr::null(),
        rest: [0; 26],
    };
    let (if_, while_, switch) = (0, 1, 2);
    // SAFETY: all places are valid, and the bodies live as long as their graph.
    unsafe {
        assert_eq!(cudaGraphCreate(&raw mut graph, 0), 0);
        let mut add = |kind, size| {
            let mut parameters = wanted(kind, size);
            let place = (&raw mut parameters).cast::<c_int>();
            let code = cuGraphAddNode(&raw mut node, graph, none, 0, place);
            (code, parameters.bodies)
        };
        let refused = [(if_, 0), (if_, 3), (while_, 2), (switch, 0), (3, 1)];
        for (kind, size) in refused {
            assert_eq!(
                add(kind, size),
                (INVALID_VALUE, ptr::null()),
                "{kind} {size}"
            );
        }
        let mut seen = std::collections::BTreeSet::new();
        for (kind, size) in [(if_, 1), (if_, 2), (while_, 1), (switch, 5)] {
            let (code, bodies) = add(kind, size);
            assert_eq!(code, 0, "{kind} {size}");
            seen.extend(std::slice::from_raw_parts(bodies, size as usize));
        }
        assert_eq!(seen.len(), 9, "each body is a graph");
        assert_eq!((cuGraphNodeGetType(node, &raw mut kind), kind), (0, 13));
        for body in seen {
            let empty = 5;
            assert_eq!(
                cuGraphAddNode(&raw mut node, body, none, 0, &raw const empty),
                0
            );
        }
        let mut executable = 0;
        assert_eq!(cudaGraphInstantiate(&raw mut executable, graph, 0), 0);
        assert_eq!(cudaGraphLaunch(executable, 0), 0);
        assert_eq!(cudaGraphExecDestroy(executable), 0);
        assert_eq!(cudaGraphDestroy(graph), 0);
    }
}

/// The graphs of the test programs have memory of the first device.
#[repr(C)]
struct AllocationParameters {
    properties: PoolProperties,
    access: [usize; 2],
    size: usize,
    address: usize,
}

/// The memory of the first device for graphs, in MiB: what is mapped and what is reserved.
fn graph_memory() -> [u64; 2] {
    [0, 2].map(|attribute| {
        let mut value = u64::MAX;
        // SAFETY: the place is valid.
        let code = unsafe { cudaDeviceGetGraphMemAttribute(0, attribute, &raw mut value) };
        assert_eq!(code, 0);
        value >> 20
    })
}

/// Adds an allocation to a graph. Returns the node and the address.
fn allocate_in(graph: usize, size: usize) -> (usize, usize) {
    let mut parameters = AllocationParameters {
        properties: PoolProperties::new(0, 0),
        access: [0; 2],
        size,
        address: 0,
    };
    let (mut node, mut got) = (0, 0);
    // SAFETY: the places are valid.
    unsafe {
        let place = &raw mut parameters;
        let code = cudaGraphAddMemAllocNode(&raw mut node, graph, ptr::null(), 0, place);
        assert_eq!(code, 0);
        let address = parameters.address;
        parameters.address = 0;
        assert_eq!(cuGraphMemAllocNodeGetParams(node, &raw mut parameters), 0);
        assert_eq!((parameters.address, parameters.size), (address, size));
        let refused = cuGraphMemFreeNodeGetParams(node, &raw mut got);
        assert_eq!(refused, INVALID_VALUE, "it allocates");
    }
    (node, parameters.address)
}

/// A graph that allocates, and frees if the program says so; and its instantiation.
fn instantiated(size: usize, frees: bool) -> (usize, usize, usize) {
    let (mut graph, mut executable, mut free, mut freed) = (0, 0, 0, 0);
    // SAFETY: the places are valid.
    unsafe {
        assert_eq!(cudaGraphCreate(&raw mut graph, 0), 0);
        let (node, address) = allocate_in(graph, size);
        if frees {
            let code = cudaGraphAddMemFreeNode(&raw mut free, graph, &raw const node, 1, address);
            assert_eq!(code, 0);
            assert_eq!(cuGraphMemFreeNodeGetParams(free, &raw mut freed), 0);
            assert_eq!(freed, address);
            let (mut nodes, mut count, mut roots) = ([7; 3], 3, 0);
            assert_eq!(
                cudaGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count),
                0
            );
            assert_eq!((nodes, count), ([node, free, 0], 2));
            assert_eq!(
                cudaGraphGetRootNodes(graph, ptr::null_mut(), &raw mut roots),
                0
            );
            assert_eq!(roots, 1);
        }
        assert_eq!(cudaGraphInstantiate(&raw mut executable, graph, 0), 0);
        (graph, executable, address)
    }
}

#[test]
fn graphs_in_one_stream_share_their_memory_which_stays_until_a_trim() {
    const TEST: &str = "graphs_in_one_stream_share_their_memory_which_stays_until_a_trim";
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut stream, mut place) = (0, 0);
    let graphs = [(); 2].map(|()| instantiated(64 * MIB, true));
    let [first, second] = graphs.map(|(_, executable, _)| executable);
    // SAFETY: the places are valid, and each graph is destroyed once.
    unsafe {
        assert_eq!(cudaStreamCreateWithFlags(&raw mut stream, 1), 0);
        assert_eq!((graph_memory(), free_memory()), ([0; 2], 1024 * MIB));
        for executable in [first, first, second] {
            assert_eq!(cudaGraphLaunch(executable, stream), 0);
            assert_eq!((graph_memory(), free_memory()), ([64; 2], 960 * MIB));
        }
        assert_eq!(cudaGraphLaunch(first, 0), 0);
        assert_eq!(graph_memory(), [128; 2], "both may run at once");
        let whole = malloc(960 * MIB);
        assert_eq!(whole.0, 2, "the memory is reserved");
        assert_eq!(cudaDeviceGraphMemTrim(0), 0);
        assert_eq!(graph_memory(), [128; 2], "the host has not waited");
        let refused = [
            cudaGraphInstantiate(&raw mut place, graphs[0].0, 0),
            cudaGraphClone(&raw mut place, graphs[0].0),
            cudaGraphAddChildGraphNode(&raw mut place, graphs[1].0, ptr::null(), 0, graphs[0].0),
        ];
        assert_eq!(refused, [INVALID_VALUE; 3]);
        for (graph, executable, _) in graphs {
            assert_eq!(cudaGraphExecDestroy(executable), 0);
            assert_eq!(cudaGraphDestroy(graph), 0);
        }
        assert_eq!(graph_memory(), [0, 128]);
        assert_eq!(cudaDeviceSynchronize(), 0);
        assert_eq!(cudaDeviceGraphMemTrim(0), 0);
    }
    assert_eq!((graph_memory(), free_memory()), ([0; 2], 1024 * MIB));
}

#[test]
fn a_graph_with_memory_has_one_place_and_a_failed_capture_keeps_no_addresses() {
    const TEST: &str = "a_graph_with_memory_has_one_place_and_a_failed_capture_keeps_no_addresses";
    const UPDATE_FAILURE: c_int = 910;
    /// `CU_GRAPH_NODE_TYPE_GRAPH` and `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
    const MOVED_CHILD: (usize, usize) = (4, 1);
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut stream, mut capture, mut result) = (0, 0, [7; 3]);
    let [(graph, executable, _), (other, ..)] = [(); 2].map(|()| instantiated(64 * MIB, true));
    let (kind, ownership) = MOVED_CHILD;
    let described = [kind, 0, graph, ownership];
    // SAFETY: the places are valid.
    unsafe {
        assert_eq!(cudaStreamCreateWithFlags(&raw mut stream, 1), 0);
        assert_eq!(cudaStreamBeginCapture(stream, 0), 0);
        assert_eq!(cudaGraphLaunch(executable, stream), INVALID_VALUE);
        assert_eq!(cudaStreamEndCapture(stream, &raw mut capture), 0);
        for (from, expected) in [(graph, (0, [0; 3])), (other, (UPDATE_FAILURE, [6, 0, 0]))] {
            let code = cudaGraphExecUpdate(executable, from, &raw mut result);
            assert_eq!((code, [result[0] & 0xff, result[1], result[2]]), expected);
        }
        let parameters = described.as_ptr().cast();
        let code = cuGraphAddNode(&raw mut capture, other, ptr::null(), 0, parameters);
        assert_eq!(code, 801, "not supported");
        let addresses = [(); 3].map(|()| {
            let mut address = 0;
            assert_eq!(cudaStreamBeginCapture(stream, 0), 0);
            assert_eq!(cudaMallocAsync(&raw mut address, 64 * MIB, stream), 0);
            assert_ne!(cudaDeviceSynchronize(), 0, "unsafe in a capture");
            assert_ne!(cudaStreamEndCapture(stream, &raw mut capture), 0);
            address
        });
        assert_eq!(addresses, [addresses[0]; 3]);
    }
}

#[test]
fn a_captured_allocation_lives_from_a_launch_to_its_free() {
    const TEST: &str = "a_captured_allocation_lives_from_a_launch_to_its_free";
    const RANGE: (c_int, c_int) = (11, 12);
    if !is_program(TEST) {
        return Run::new().passes(TEST);
    }
    let (mut stream, mut graph, mut executable) = (0, 0, 0);
    let (mut temporary, mut kept, mut start, mut size) = (0, 0, 0_usize, 0_usize);
    let (_, other) = malloc(MIB);
    // SAFETY: the places are valid, and each graph is destroyed once.
    unsafe {
        assert_eq!(cudaStreamCreateWithFlags(&raw mut stream, 1), 0);
        assert_eq!(cudaStreamBeginCapture(stream, 0), 0);
        assert_eq!(cudaMallocAsync(&raw mut temporary, 8 * MIB, stream), 0);
        assert_eq!(cudaFreeAsync(temporary, stream), 0);
        assert_eq!(cudaMallocAsync(&raw mut kept, 8 * MIB, stream), 0);
        assert_eq!(kept, temporary, "the address is free again");
        assert_eq!(cudaFreeAsync(other, stream), INVALID_VALUE, "of no graph");
        assert_eq!(cudaStreamEndCapture(stream, &raw mut graph), 0);
        assert_eq!(cudaGraphInstantiate(&raw mut executable, graph, 0), 0);
        assert_eq!(cudaGraphDestroy(graph), 0);
        assert_eq!(cudaFreeAsync(kept, stream), INVALID_VALUE, "not launched");
        assert_eq!(cudaGraphLaunch(executable, stream), 0);
        assert_eq!(cudaGraphLaunch(executable, stream), INVALID_VALUE);
        let (first, second) = RANGE;
        assert_eq!(
            cuPointerGetAttribute((&raw mut start).cast(), first, kept + 5),
            0
        );
        assert_eq!(
            cuPointerGetAttribute((&raw mut size).cast(), second, kept + 5),
            0
        );
        assert_eq!((start, size), (kept, 8 * MIB));
        assert_eq!(cudaFreeAsync(kept, stream), 0);
        assert_eq!(cudaGraphLaunch(executable, stream), 0);
        assert_eq!(cudaGraphExecDestroy(executable), 0);
        assert_eq!(cudaDeviceSynchronize(), 0);
        assert_eq!(cudaDeviceGraphMemTrim(0), 0);
        assert_eq!(graph_memory(), [32; 2], "destruction frees nothing");
        assert_eq!((cudaFree(kept), cudaFree(kept)), (0, INVALID_VALUE));
        assert_eq!((cudaDeviceGraphMemTrim(0), graph_memory()), (0, [0; 2]));
    }
}

#[test]
fn a_launch_or_an_upload_runs_out_of_memory_and_can_be_failed() {
    const TEST: &str = "a_launch_or_an_upload_runs_out_of_memory_and_can_be_failed";
    if !is_program(TEST) {
        let run = Run {
            fail: Some("cudaGraphLaunch:1"),
            ..Run::new()
        };
        run.passes(TEST);
        let process = &run.counters()[0];
        let device = process.devices[0];
        assert_eq!((device.mallocs, device.failed, device.injected), (4, 2, 1));
        assert_eq!(device.peak, Bytes::mib(832));
        assert_eq!(process.graph_requests, 1, "served ones");
        return;
    }
    let [large, small] = [1024, 64].map(|size| instantiated(size * MIB, true).1);
    // SAFETY: the graphs are instantiated.
    unsafe {
        assert_eq!((cudaGraphUpload(small, 0), graph_memory()), (2, [0; 2]));
        assert_eq!((cudaGraphUpload(small, 0), graph_memory()), (0, [64; 2]));
        assert_eq!((cudaGraphLaunch(small, 0), graph_memory()), (0, [64; 2]));
        assert_eq!(malloc(768 * MIB).0, 0);
        // 960 MiB besides the memory of the other graph, which is in the same stream.
        assert_eq!((cudaGraphLaunch(large, 0), graph_memory()), (2, [64; 2]));
    }
}

#[test]
fn a_request_beyond_the_maximum_of_a_pool_is_counted_as_failed() {
    const TEST: &str = "a_request_beyond_the_maximum_of_a_pool_is_counted_as_failed";
    const POOL: c_int = 17;
    if !is_program(TEST) {
        let run = Run::new();
        run.passes(TEST);
        let devices = &run.counters()[0].devices;
        assert_eq!((devices[0].mallocs, devices[0].failed), (3, 2));
        return;
    }
    let properties = PoolProperties::new(0, 4 * MIB);
    let (mut pool, mut address, mut of, mut green) = (0, 0, 1, 1_usize);
    // SAFETY: the places are valid.
    unsafe {
        assert_eq!(cudaMemPoolCreate(&raw mut pool, &raw const properties), 0);
        for (size, code) in [(3 * MIB, 0), (2 * MIB, 2), (usize::MAX, 2)] {
            let mut got = 0;
            assert_eq!(cudaMallocFromPoolAsync(&raw mut got, size, pool, 0), code);
            address = address.max(got);
        }
        assert_eq!(
            (
                cuPointerGetAttribute((&raw mut of).cast(), POOL, address + 8),
                of
            ),
            (0, pool)
        );
        let mut context = 0;
        assert_eq!(cuStreamGetCtx_v2(0, &raw mut context, &raw mut green), 0);
    }
    assert_eq!(green, 0);
}

#[test]
fn a_request_without_a_device_has_the_same_error_by_all_functions() {
    const TEST: &str = "a_request_without_a_device_has_the_same_error_by_all_functions";
    /// `cudaErrorNoDevice`.
    const NO_DEVICE: c_int = 100;
    if !is_program(TEST) {
        let output = Run::new()
            .command(TEST)
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    let mut address = 0;
    // SAFETY: the place is valid.
    let by_stream = unsafe { cudaMallocAsync(&raw mut address, MIB, 0) };
    assert_eq!([malloc(MIB).0, by_stream], [NO_DEVICE; 2]);
}

#[test]
fn errors_have_the_names_of_the_driver() {
    let name = |number: c_int| {
        let mut text = ptr::null();
        // SAFETY: the place is valid, and texts live forever.
        unsafe {
            let code = cuGetErrorName(number, &raw mut text);
            (code, (!text.is_null()).then(|| CStr::from_ptr(text)))
        }
    };
    assert_eq!(name(2), (0, Some(c"CUDA_ERROR_OUT_OF_MEMORY")));
    // The runtime alone has error 9.
    assert_eq!([9, 12345].map(name), [(INVALID_VALUE, None); 2]);
}
