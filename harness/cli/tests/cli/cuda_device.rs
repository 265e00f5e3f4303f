//! Runs the CUDA device's code against the simulated GPU, each test in its own child process.
//!
//! These tests cover the code between the [`Device`] trait and the driver's functions. Only a GPU
//! can test the driver itself. The times are those of the simulated GPU and do not apply to others.

use std::{env, os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Duration};

use harness_allocator::allocator::{Allocator, AllocatorKind, Request};
use harness_allocator::device::{
    CallSite, Device, DeviceError, DevicePtr, EventId, HostMemory, Leaks, MappedDevice,
    MemoryRange, PooledDevice, StreamId, Tag, TestDevice, limited::Limited,
};
use harness_allocator::units::{Bytes, Nanos};
use harness_bench::machine::{Monitor, machine};
use harness_bench::provider::{DeviceProvider, MemoryLimit, SharedDevice};
use harness_bench::torch::Torches;
use harness_cuda::machine::{self};
use harness_cuda::{CudaDevice, nvml::Reading};
use harness_devices::{DeviceChoice, DeviceSource, Resolved};
use harness_gpu_settings::{driver::WrongWrite, settings::Settings};
use harness_staging::{NOTHING_LEFT, Staging, strict};

/// Contains the name of the child's test.
const CHILD: &str = "CUDA_DEVICE_TEST_CHILD";
/// An argument for the child.
const ARGUMENT: &str = "CUDA_DEVICE_TEST_ARGUMENT";

const TAG: Tag = Tag(0x0123_4567_89ab_cdef);
const OTHER: Tag = Tag(0xfedc_ba98_7654_3210);

/// Declares a test whose body runs in a child process with the configured machine. Its contexts
/// must be empty when they are released.
macro_rules! on_the_simulated_gpu {
    ($(fn $name:ident($config:expr) $body:block)*) => {$(
        #[test]
        fn $name() {
            if is_child(stringify!($name)) {
                return $body;
            }
            let staging = Staging::new(&$config).expect("the simulated GPU is set up");
            run_child(stringify!($name), &staging, "");
            assert_nothing_left(&staging);
        }
    )*};
}

/// The staged GPU reports each released context. None may have held memory.
fn assert_nothing_left(staging: &Staging) {
    let left = staging.left().unwrap_or_default();
    let leftovers: Vec<_> = left
        .lines()
        .filter(|line| !line.ends_with(NOTHING_LEFT))
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

fn is_child(test: &str) -> bool {
    env::var(CHILD).is_ok_and(|name| name == test)
}

/// Runs one test again in a child process on the staged machine.
fn run_child(test: &str, staging: &Staging, argument: &str) {
    let mut command = Command::new(env::current_exe().expect("the test program has a path"));
    command
        .args(["--exact", &format!("cuda_device::{test}"), "--nocapture"])
        .env(CHILD, test)
        .env(ARGUMENT, argument);
    staging.apply(&mut command);
    let output = command.output().expect("the test program starts");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && text.contains("1 passed"),
        "the child of {test} ({argument}): {}\n{text}",
        output.status
    );
}

fn device() -> CudaDevice {
    CudaDevice::open(0).expect("the GPU opens")
}

fn refused(opened: Result<CudaDevice, DeviceError>) -> DeviceError {
    opened.err().expect("the device must not open")
}

fn range(start: DevicePtr, offset: u64, len: u64) -> MemoryRange {
    MemoryRange::new(start.offset(Bytes(offset)), Bytes(len))
}

fn free_memory(device: &mut CudaDevice) -> Bytes {
    device.memory().expect("the driver reports memory").free
}

fn used_memory(device: &mut CudaDevice) -> Bytes {
    device.memory().expect("the driver reports memory").used
}

/// Starts programs that hold memory. Each writes a file `pid.N` to a folder, and ends after a file
/// `held.N` appears.
fn have_hold(folder: &Path, mut programs: u32, held: Bytes) {
    while programs > 0 {
        for entry in std::fs::read_dir(folder).expect("it is there").flatten() {
            let name = entry.file_name();
            if let Some(pid) = name.to_str().and_then(|name| name.strip_prefix("pid.")) {
                harness_staging::hold_for(pid.parse().expect("a number"), held).expect("it runs");
                std::fs::rename(entry.path(), folder.join(format!("held.{pid}")))
                    .expect("the file can be renamed");
                programs -= 1;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The calls so far.
fn calls() -> Vec<String> {
    harness_staging::calls().expect("calls are listed")
}

/// The number of NVML calls so far.
fn nvml_calls() -> usize {
    calls()
        .into_iter()
        .filter(|call| call.starts_with("nvml"))
        .count()
}

/// A machine whose NVML has only the deprecated functions.
fn without_successors() -> Settings {
    let newer = [
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
    ];
    newer
        .into_iter()
        .fold(strict(), |config, function| config.failing(function, 0, 13))
}

/// The values that NVML returns through deprecated functions or their successors.
fn assert_told(reading: &Reading) {
    let throttled = reading.throttled.as_ref().map(|reasons| {
        reasons
            .iter()
            .map(|reason| reason.words)
            .collect::<Vec<_>>()
    });
    assert_eq!(
        (reading.temperature, throttled),
        (Some(40), Some(vec!["power cap"]))
    );
    assert_eq!(
        (reading.held_by_power, reading.held_by_heat),
        (Some(Nanos(0)), Some(Nanos(0)))
    );
}

/// One call inside a mapping of four pages fails. The mapping must leave nothing, and must succeed
/// when repeated.
fn refused_mapping_is_undone(refused_call: &str, refused_code: u32) {
    let mut device = device();
    let start = device.reserve(Bytes::mib(8)).expect("there are addresses");
    let whole = range(start, 0, 8 << 20);
    let free = free_memory(&mut device);
    let error = device
        .map(whole, Bytes::mib(2))
        .expect_err("a call is refused");
    assert!(
        matches!(error, DeviceError::Driver { call, code, .. }
            if call == refused_call && code == refused_code),
        "{error}"
    );
    assert_eq!(
        (
            device.calls().create,
            device.calls().release,
            free_memory(&mut device)
        ),
        (4, 4, free)
    );
    assert!(matches!(
        device.fill(StreamId::DEFAULT, whole, TAG),
        Err(DeviceError::InvalidAccess { .. })
    ));
    device
        .map(whole, Bytes::mib(2))
        .expect("the second try succeeds");
    device
        .fill(StreamId::DEFAULT, whole, TAG)
        .expect("all of it is mapped");
    device
        .verify(StreamId::DEFAULT, whole, TAG)
        .expect("it is intact");
    device.unmap(whole).expect("it is mapped");
    device.unreserve(start).expect("nothing is mapped");
}

on_the_simulated_gpu! {
    fn a_mapped_file_is_unnamed_and_in_the_requested_folder(strict()) {
        let mut device = device();
        let folder = tempfile::tempdir().expect("a folder");
        let memory =
            |path: &std::path::Path| HostMemory::MappedFile { folder: Some(path.to_owned()) };
        let host = device.host_alloc(Bytes::mib(3), &memory(folder.path())).expect("there is room");
        assert_eq!(folder.path().read_dir().expect("it can be read").count(), 0);
        device.host_free(host).expect("it is held");
        let missing = folder.path().join("missing");
        let refused = device
            .host_alloc(Bytes::mib(3), &memory(&missing))
            .expect_err("there is no folder")
            .to_string();
        assert!(
            refused.starts_with("mmap of 3 MiB failed: a temporary file in ")
                && refused.contains("missing"),
            "{refused}"
        );
    }

    fn an_error_for_pinned_memory_names_the_call(strict().failing("cuMemHostAlloc", 1, 2)) {
        let refused = device()
            .host_alloc(Bytes::mib(1), &HostMemory::Pinned)
            .expect_err("the driver refuses")
            .to_string();
        assert!(refused.starts_with("cuMemHostAlloc of 1 MiB failed: "), "{refused}");
    }

    fn releasing_a_borrowed_stream_waits_for_its_copies_with_host_memory(
        Settings { list_calls: true, ..strict() }
    ) {
        // The lender shares the primary context and outlives the borrower.
        let mut lender = device();
        let lent = lender.create_stream().expect("a stream is created");
        let handle = lender.raw_stream(lent).expect("the stream exists");
        let mut device = device();
        // SAFETY: the stream lives until the end of the test.
        let stream = unsafe { device.borrow_stream(handle) }
            .expect("the stream belongs to the same context");
        let start = device.malloc(Bytes::mib(2)).expect("memory is free");
        let host = device.host_alloc(Bytes::mib(2), &HostMemory::Pageable).expect("memory is free");
        let waits = || calls().iter().filter(|call| *call == "cuStreamSynchronize").count();
        let before = waits();
        device.copy_to_device(stream, host, range(start, 0, 1 << 20)).expect("the copy is queued");
        assert_eq!(waits(), before);
        device.release_stream(stream).expect("the stream is borrowed");
        assert_eq!(waits(), before + 1);
        device.host_free(host).expect("the memory is held");
        device.free(start).expect("the memory is live");
    }

    fn leaked_host_memory_is_freed_with_the_device(Settings { list_calls: true, ..strict() }) {
        let mut device = device();
        for memory in
            [HostMemory::Pinned, HostMemory::Pageable, HostMemory::MappedFile { folder: None }]
        {
            let _ = device.host_alloc(Bytes::mib(1), &memory).expect("there is memory");
        }
        assert_eq!(device.leaks(), Leaks { host: 3, ..Leaks::default() });
        drop(device);
        assert_eq!(calls().iter().filter(|call| *call == "cuMemFreeHost").count(), 1);
    }

    fn an_open_device_describes_itself(Settings { others: Bytes::mib(64), ..strict() }) {
        let mut device = device();
        let info = device.info().clone();
        assert_eq!(
            (info.name.as_str(), info.total, info.granularity),
            ("Simulated GPU", Bytes::gib(2), Bytes::mib(2))
        );
        let facts = info.fingerprint;
        assert_eq!(
            (facts.driver.as_deref(), facts.cuda.as_deref()),
            (Some("simulated"), Some("12.9"))
        );
        assert_eq!(
            (facts.mig, facts.ecc, facts.clocks_mhz),
            (Some(false), Some(true), Some((1980, 2619)))
        );
        assert_eq!(
            (facts.throttle_reasons, facts.other_processes),
            (vec!["power cap".to_owned()], Some(1))
        );
        assert_eq!(facts.uuid_hash.map(|hash| hash.len()), Some(16));
        assert_eq!(device.nvml_problem(), None);
        let memory = device.memory().expect("the driver reports memory");
        assert_eq!((memory.total, memory.free), (Bytes::gib(2), Bytes::mib(2048 - 364)));
        assert_eq!(
            (memory.used, memory.context_overhead),
            (Bytes::mib(364), Bytes::mib(364)),
            "the context and the other process"
        );
        assert_eq!(memory.process, Some(Bytes::mib(300)), "its context");
        assert_eq!(device.own_context(), Ok(Bytes::mib(300)), "without the other process");
    }

    fn without_process_accounting_the_context_is_measured_by_difference(
        Settings { others: Bytes::mib(64), ..strict() }
            .failing("nvmlDeviceGetComputeRunningProcesses_v3", 0, 3)
    ) {
        let mut device = device();
        assert_eq!(device.memory().expect("the driver reports memory").process, None);
        assert_eq!(device.own_context(), Ok(Bytes::mib(300)));
    }

    fn in_a_container_a_pytorch_child_counts_as_our_own(
        Settings { container: true, others: Bytes::mib(64), processes: true, ..strict() }
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let python = folder.path().join("python");
        let script = "#!/bin/sh\ncd \"${0%/*}\" && echo > pid.$$ && while ! [ -e held.$$ ]; do \
             sleep 0.01; done\necho '{\"version\": \"2.11.0\", \"note\": \"\"}'\nread q\n";
        std::fs::write(&python, script).expect("it is written");
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755))
            .expect("the script is executable");
        let opened = device();
        let nvml = machine::nvml_of(opened.info()).expect("there is NVML");
        let others = || {
            nvml.other_processes()
                .expect("NVML tells")
                .into_iter()
                .map(|other| other.used)
                .collect::<Vec<_>>()
        };
        let mut torches = Torches::new(&python.to_string_lossy(), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| have_hold(folder.path(), 2, Bytes::mib(200)));
            torches.with("").expect("it starts");
            torches.with("expandable_segments:True").expect("it starts");
        });
        assert_eq!(others(), [Some(Bytes::mib(64))], "the one that no process has");
        drop(opened);
        let mut opened = device();
        assert_eq!(opened.info().fingerprint.other_processes, Some(1));
        assert_eq!(
            (used_memory(&mut opened), opened.own_context()),
            (Bytes::mib(300 + 64 + 2 * 200), Ok(Bytes::mib(300)))
        );
        drop(torches);
        assert_eq!(used_memory(&mut opened), Bytes::mib(300 + 64), "they are gone");
    }

    fn a_run_on_a_shared_gpu_is_contended(Settings { others: Bytes::mib(64), ..strict() }) {
        let mut device = device();
        let machine = machine(&device, "rustc");
        assert_eq!(
            (machine.device.as_str(), machine.driver.as_deref(), machine.ecc),
            ("Simulated GPU", Some("simulated"), Some(true))
        );
        let mut monitor = Monitor::start(&mut device);
        drop(device);
        monitor.observe();
        let conditions = monitor.finish();
        assert_eq!(conditions.free_at_start, Some(Bytes::mib(2048 - 364)));
        let states: Vec<_> = conditions
            .gpu
            .iter()
            .map(|state| (state.sm_mhz, state.memory_mhz, state.other_processes))
            .collect();
        assert_eq!(states, [(Some(1980), Some(2619), Some(1)); 3], "before, between and after");
        let states: Vec<_> =
            conditions.gpu.iter().map(|state| (state.power_mw, state.temperature)).collect();
        assert_eq!(states, [(Some(250_000), Some(40)); 3]);
        let told = [
            "1 other process held memory of the GPU (other-process, 64 MiB)",
            "clocks were held down: power cap",
        ];
        assert_eq!(conditions.contended[..2], told);
    }

    fn in_a_container_this_process_is_recognized(Settings { container: true, ..strict() }) {
        let mut device = device();
        let memory = device.memory().expect("the driver reports memory");
        assert_eq!(memory.process, Some(Bytes::mib(300)), "its context, by the number that came \
             with it");
        let nvml = machine::nvml_of(device.info()).expect("there is NVML");
        assert_eq!(nvml.other_processes(), Ok(Vec::new()));
    }

    fn a_monitor_without_nvml_still_watches_the_host(Settings { nvml: false, ..strict() }) {
        let conditions = Monitor::start(&mut device()).finish();
        assert_eq!(conditions.gpu, []);
        assert!(
            conditions.contended.iter().all(|why| why.starts_with("the processor was busy")),
            "{:?}",
            conditions.contended
        );
    }

    fn memory_is_charged_in_granules_and_runs_out_exactly(strict()) {
        let mut device = device();
        let room = Bytes::mib(2048 - 300);
        assert_eq!(free_memory(&mut device), room);
        let small = device.malloc(Bytes(1)).expect("it fits");
        let large = device.malloc(Bytes::mib(1001)).expect("it fits");
        assert_eq!(free_memory(&mut device), room - Bytes::mib(2 + 1002));
        assert!(small.0.is_multiple_of(256) && large.0.is_multiple_of(256));
        let left = free_memory(&mut device);
        let requested = left + Bytes(1);
        assert_eq!(
            device.malloc(requested),
            Err(DeviceError::OutOfMemory { requested, free: left })
        );
        assert_eq!(free_memory(&mut device), left, "a refusal changes nothing");
        let last = device.malloc(left).expect("the remaining memory fits exactly");
        assert_eq!(free_memory(&mut device), Bytes::ZERO);
        assert_eq!(device.leaks(), Leaks { allocations: 3, bytes: room, ..Leaks::default() });
        for ptr in [small, large, last] {
            device.free(ptr).expect("it is live");
        }
        assert_eq!(free_memory(&mut device), room);
        assert!(device.leaks().is_empty());
        let calls = device.calls();
        assert_eq!((calls.malloc, calls.malloc_failures, calls.free), (4, 1, 3));
    }

    fn sizes_beyond_any_machine_are_out_of_memory(strict()) {
        let mut device = device();
        for size in [Bytes::gib(1 << 20), Bytes(u64::MAX)] {
            assert!(device.malloc(size).expect_err("it does not fit").is_out_of_memory());
        }
    }

    fn untouched_capacity_takes_no_host_memory(Settings { memory: Bytes::gib(512), ..strict() }) {
        let mut device = device();
        let ptr = device.malloc(Bytes::gib(500)).expect("it fits");
        let end = range(ptr, (500 << 30) - 4096, 4096);
        device.fill(StreamId::DEFAULT, end, TAG).expect("it is queued");
        device.verify(StreamId::DEFAULT, end, TAG).expect("it is intact");
        device.free(ptr).expect("it is live");
    }

    fn nvml_follows_the_charged_memory_exactly(strict()) {
        let mut device = device();
        let overhead = used_memory(&mut device);
        assert_eq!(overhead, Bytes::mib(300));
        let mut charged = Bytes::ZERO;
        for size in [Bytes(1), Bytes::mib(2), Bytes(Bytes::mib(2).0 + 1), Bytes::mib(777)] {
            device.malloc(size).expect("it fits");
            charged += size.checked_round_up(Bytes::mib(2)).expect("it is small");
            let memory = device.memory().expect("the driver reports memory");
            assert_eq!(
                (memory.used, memory.process),
                (overhead + charged, Some(overhead + charged))
            );
        }
        assert_eq!(device.memory().expect("the driver reports memory").context_overhead, overhead);
    }

    fn a_failed_allocation_does_not_call_nvml(Settings { list_calls: true, ..strict() }) {
        let mut device = Limited::new(Box::new(device()), Bytes::gib(1))
            .expect("the device has this much memory");
        assert!(nvml_calls() > 0, "opening and admitting query NVML");
        for kind in AllocatorKind::ALL {
            let mut allocator = kind.build();
            let held = allocator
                .allocate(&mut device, Request::new(Bytes::mib(32)))
                .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            let before = nvml_calls();
            let refused = allocator
                .allocate(&mut device, Request::new(Bytes::gib(2)))
                .expect_err("it does not fit");
            assert!(refused.is_out_of_memory(), "{kind:?}: {refused}");
            assert_eq!(nvml_calls(), before, "{kind:?}");
            allocator.free(&mut device, held).expect("it is live");
            allocator.close(&mut device).expect("nothing is live");
        }
        let before = nvml_calls();
        assert!(device.malloc(Bytes::gib(2)).is_err_and(|error| error.is_out_of_memory()));
        let mapped = device.mapped().expect("the device maps memory");
        let start = mapped.reserve(Bytes::gib(2)).expect("there are addresses");
        assert!(
            mapped
                .map(range(start, 0, 2 << 30), Bytes::mib(2))
                .is_err_and(|error| error.is_out_of_memory())
        );
        mapped.unreserve(start).expect("nothing is mapped");
        assert!(
            device
                .malloc(device.info().total + Bytes(1))
                .is_err_and(|error| error.is_out_of_memory())
        );
        assert_eq!(nvml_calls(), before);
    }

    fn a_provider_queries_nvml_only_after_memory_was_taken(
        Settings { list_calls: true, processes: true, ..strict() }
    ) {
        let source = DeviceSource::new(DeviceChoice::Cuda(0), &machine::probe(), false)
            .expect("the GPU is there");
        let mut provider = SharedDevice::new(source, Box::new(device()), None);
        let need = Bytes::gib(1);
        drop(provider.device(need, MemoryLimit::Enforced).expect("it is free"));
        let before = nvml_calls();
        for limit in [MemoryLimit::Enforced, MemoryLimit::Reported, MemoryLimit::Enforced] {
            let mut reused = provider.device(need, limit).expect("it is free");
            let ptr = reused.malloc(Bytes::mib(512)).expect("it fits");
            reused.free(ptr).expect("it is live");
        }
        assert_eq!(nvml_calls(), before, "nothing has changed");
        drop(provider.device(need + Bytes::mib(2), MemoryLimit::Enforced).expect("it is free"));
        assert!(nvml_calls() > before, "more is wanted");
        // A program that exists everywhere.
        harness_staging::hold_for(1, Bytes::gib(1)).expect("it is staged");
        assert!(matches!(
            provider.device(need, MemoryLimit::Enforced).err(),
            Some(DeviceError::Unavailable { .. })
        ));
        harness_staging::hold_for(1, Bytes::ZERO).expect("it runs still");
        drop(provider.device(need, MemoryLimit::Enforced).expect("the memory is free again"));
    }

    fn a_first_allocation_does_not_call_nvml(Settings { list_calls: true, ..strict() }) {
        let mut device = device();
        let before = nvml_calls();
        for kind in AllocatorKind::ALL {
            let mut allocator = kind.build();
            let held = allocator
                .allocate(&mut device, Request::new(Bytes::mib(32)))
                .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            allocator.free(&mut device, held).expect("it is live");
            allocator.close(&mut device).expect("nothing is live");
        }
        assert_eq!((nvml_calls(), device.free_memory()), (before, Ok(Bytes::mib(2048 - 300))));
    }

    fn the_third_allocation_fails_as_injected_and_the_fourth_succeeds(
        strict().failing("cuMemAlloc_v2", 3, 719)
    ) {
        let mut device = device();
        device.malloc(Bytes::mib(2)).expect("the first");
        device.malloc(Bytes::mib(2)).expect("the second");
        let error = device.malloc(Bytes::mib(2)).expect_err("the third");
        let sentence = error.to_string();
        assert!(
            sentence.starts_with(
                "cuMemAlloc_v2 failed: CUDA_ERROR_LAUNCH_FAILED (719). \
             Earlier work broke the context"
            ),
            "{sentence}"
        );
        device.malloc(Bytes::mib(2)).expect("the fourth");
        assert_eq!(
            (device.leaks().allocations, device.calls().malloc_failures),
            (3, 0),
            "only out of memory counts as an allocation failure"
        );
    }

    fn an_unknown_code_gives_a_readable_error(strict().failing("cuEventQuery", 1, 9999)) {
        let mut device = device();
        let event = device.create_event().expect("an event");
        let sentence = device.event_done(event).expect_err("it is refused").to_string();
        assert!(
            sentence.starts_with("cuEventQuery failed: unknown driver code (9999). "),
            "{sentence}"
        );
    }

    fn a_failed_free_changes_no_account(strict().failing("cuMemFree_v2", 1, 999)) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        assert!(matches!(
            device.free(ptr),
            Err(DeviceError::Driver { call: "cuMemFree_v2", code: 999, .. })
        ));
        assert_eq!(device.leaks().allocations, 1);
        device.free(ptr).expect("the second try succeeds");
    }

    fn a_double_free_is_found_before_the_driver_call(strict()) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        device.set_call_site(CallSite(3));
        device.free(ptr).expect("it is live");
        device.set_call_site(CallSite(5));
        assert_eq!(
            device.free(ptr),
            Err(DeviceError::DoubleFree { ptr, first: CallSite(3), second: CallSite(5) })
        );
        let inside = DevicePtr(ptr.0 + 512);
        assert_eq!(
            device.free(inside),
            Err(DeviceError::InvalidFree { ptr: inside, place: CallSite(5) })
        );
        assert_eq!(
            device.free(DevicePtr::NULL),
            Err(DeviceError::InvalidFree { ptr: DevicePtr::NULL, place: CallSite(5) })
        );
    }

    fn fills_are_verified_at_every_size_and_alignment(strict()) {
        let mut device = device();
        let stream = device.create_stream().expect("a stream");
        let ptr = device.malloc(Bytes::mib(8)).expect("it fits");
        let whole = range(ptr, 0, 8 << 20);
        let lengths = [
            1,
            2,
            3,
            7,
            8,
            9,
            15,
            16,
            17,
            63,
            64,
            255,
            256,
            257,
            4095,
            4096,
            100_003,
            (1 << 20) + 5,
        ];
        for offset in (0..9).chain([255, 256, 4093]) {
            for len in lengths {
                let inner = range(ptr, 8192 + offset, len);
                let after = range(inner.end(), 0, 4096);
                device.fill(stream, whole, OTHER).expect("the whole is filled");
                device.fill(stream, inner, TAG).expect("the inner range is filled");
                device
                    .verify(stream, inner, TAG)
                    .unwrap_or_else(|error| panic!("{offset} {len}: {error}"));
                device
                    .verify(stream, range(ptr, 0, 8192 + offset), OTHER)
                    .unwrap_or_else(|error| panic!("before {offset} {len}: {error}"));
                let shifted = Tag(OTHER.0.rotate_right(((8192 + offset + len) % 8) as u32 * 8));
                device
                    .verify(stream, after, shifted)
                    .unwrap_or_else(|error| panic!("after {offset} {len}: {error}"));
                assert!(
                    matches!(
                        device.verify(stream, inner, OTHER),
                        Err(DeviceError::Corrupted { .. })
                    ),
                    "{offset} {len}"
                );
            }
        }
        device.free(ptr).expect("it is live");
        device.destroy_stream(stream).expect("it is there");
    }

    fn any_wrong_byte_is_found_and_located(strict()) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let filled = range(ptr, 3, 1003);
        for wrong in [0, 4, 5, 6, 13, 500, 996, 997, 1002] {
            device.fill(StreamId::DEFAULT, filled, Tag(0)).expect("it is queued");
            let byte = range(filled.start, wrong, 1);
            device.fill(StreamId::DEFAULT, byte, Tag(0xee)).expect("it is queued");
            let (at, shift) = (byte.start, wrong % 8 * 8);
            let digits = if wrong / 8 == 125 { 6 } else { 16 };
            let found = format!(
                "its word holds 0x{:0digits$x}, and 1 of 1003 bytes differ",
                0xee_u64 << shift
            );
            let error = DeviceError::Corrupted { range: filled, at, expected: 0, found };
            assert_eq!(
                device.verify(StreamId::DEFAULT, filled, Tag(0)),
                Err(error),
                "byte {wrong}"
            );
        }
    }

    fn a_wrong_fill_is_found(
        Settings { wrong_write: Some(WrongWrite { nth: 2, offset: 4096 }), ..strict() }
    ) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let filled = range(ptr, 0, 1 << 20);
        device.fill(StreamId::DEFAULT, filled, TAG).expect("it is queued");
        device.verify(StreamId::DEFAULT, filled, TAG).expect("the first fill is right");
        device.fill(StreamId::DEFAULT, filled, TAG).expect("it is queued");
        let Err(DeviceError::Corrupted { at, found, .. }) =
            device.verify(StreamId::DEFAULT, filled, TAG)
        else {
            panic!("the second fill is wrong");
        };
        assert_eq!(at, ptr.offset(Bytes(4096)));
        assert_eq!(found, "its word holds 0x0123456789abcdee, and 1 of 1048576 bytes differ");
    }

    fn unallocated_memory_is_refused_and_the_device_stays_usable(strict()) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        for bad in [
            range(ptr, 0, (2 << 20) + 1),
            range(ptr, 2 << 20, 8),
            range(DevicePtr(4096), 0, 8),
            range(ptr, 8, u64::MAX - ptr.0 - 8),
        ] {
            assert!(
                matches!(
                    device.fill(StreamId::DEFAULT, bad, TAG),
                    Err(DeviceError::InvalidAccess { .. })
                ),
                "{bad}"
            );
            assert!(
                matches!(
                    device.verify(StreamId::DEFAULT, bad, TAG),
                    Err(DeviceError::InvalidAccess { .. })
                ),
                "{bad}"
            );
        }
        device.set_call_site(CallSite(7));
        device.free(ptr).expect("it is live");
        let error = device
            .fill(StreamId::DEFAULT, range(ptr, 0, 8), TAG)
            .expect_err("it was freed")
            .to_string();
        assert!(error.ends_with("but it was freed at step 7"), "{error}");
        device.synchronize().expect("the context is not broken");
    }

    fn an_event_waits_for_the_streams_earlier_work(strict()) {
        let mut device = device();
        let (stream, idle) =
            (device.create_stream().expect("a stream"), device.create_stream().expect("a stream"));
        let (event, other) = (
            device.create_timed_event().expect("an event"),
            device.create_timed_event().expect("an event"),
        );
        assert_eq!(device.event_done(event), Ok(true), "never recorded");
        let begin = device.now();
        device.busy(stream, Nanos::millis(500)).expect("it is queued");
        device.record_event(event, stream).expect("it is queued");
        device.record_event(other, idle).expect("it is queued");
        assert_eq!(device.event_done(event), Ok(false));
        assert_eq!(device.event_done(other), Ok(true), "the other stream is idle");
        assert_eq!(device.elapsed(other, event), Err(DeviceError::NotReady(event.0)));
        device.synchronize_event(event).expect("the wait succeeds");
        assert_eq!(device.event_done(event), Ok(true));
        assert!(device.now().0 - begin.0 >= Nanos::millis(500).0, "the host waited");
        let calls = device.calls();
        assert_eq!((calls.event_record, calls.event_query, calls.synchronize), (2, 4, 1));
    }

    fn the_elapsed_time_is_the_busy_time(strict()) {
        let mut device = device();
        let stream = device.create_stream().expect("a stream");
        let [start, end, never] = [(); 3].map(|()| device.create_timed_event().expect("an event"));
        // More than a second, so the spin needs two kernels.
        let duration = Nanos::millis(1200);
        device.record_event(start, stream).expect("it is queued");
        device.busy(stream, duration).expect("it is queued");
        device.record_event(end, stream).expect("it is queued");
        device.synchronize_stream(stream).expect("the wait succeeds");
        let elapsed = device.elapsed(start, end).expect("both are done");
        assert!((1199..1600).contains(&(elapsed.0 / 1_000_000)), "{elapsed} for {duration}");
        assert_eq!(device.elapsed(end, start), Ok(Nanos(0)), "a negative time counts as zero");
        assert_eq!(device.elapsed(start, never), Err(DeviceError::NotReady(never.0)));
    }

    fn a_stream_that_waits_for_an_event_reads_the_earlier_write(strict()) {
        let mut device = device();
        let (writer, reader) =
            (device.create_stream().expect("a stream"), device.create_stream().expect("a stream"));
        let event = device.create_event().expect("an event");
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let whole = range(ptr, 0, 2 << 20);
        device.fill(writer, whole, OTHER).expect("it is queued");
        device.synchronize().expect("the wait succeeds");
        device.busy(writer, Nanos::millis(500)).expect("it is queued");
        device.fill(writer, whole, TAG).expect("it is queued");
        device.record_event(event, writer).expect("it is queued");
        device.wait_event(reader, event).expect("it is queued");
        device.destroy_event(event).expect("the queued wait stays valid");
        device.verify(reader, whole, TAG).expect("the reader waited");
    }

    fn a_free_waits_for_work_in_flight(strict()) {
        let mut device = device();
        let stream = device.create_stream().expect("a stream");
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let begin = device.now();
        device.busy(stream, Nanos::millis(100)).expect("it is queued");
        device.fill(stream, range(ptr, 0, 2 << 20), TAG).expect("it is queued");
        device.free(ptr).expect("it is live");
        assert!(device.now().0 - begin.0 >= Nanos::millis(100).0);
        device.synchronize().expect("the fill wrote to live memory");
    }

    fn a_free_is_one_driver_call_without_a_wait(Settings { list_calls: true, ..strict() }) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let before = calls().len();
        device.free(ptr).expect("it is live");
        assert_eq!(calls()[before..], ["cuCtxSetCurrent", "cuMemFree_v2"]);
    }

    fn an_allocators_event_has_no_timing(strict()) {
        let mut device = device();
        let (plain, timed) = (
            device.create_event().expect("an event"),
            device.create_timed_event().expect("an event"),
        );
        for event in [plain, timed] {
            device.record_event(event, StreamId::DEFAULT).expect("it is queued");
            device.synchronize_event(event).expect("the wait succeeds");
        }
        assert!(device.elapsed(timed, timed).is_ok());
        let untimed = DeviceError::UnknownHandle { kind: "timed event", number: plain.0 };
        assert_eq!(device.elapsed(plain, timed), Err(untimed.clone()));
        assert_eq!(device.elapsed(timed, plain), Err(untimed));
    }

    fn a_pool_allocation_reads_only_the_needed_attributes(
        Settings { list_calls: true, ..strict() }
    ) {
        let attributes = || calls().iter().filter(|call| *call == "cuMemPoolGetAttribute").count();
        let asked = |device: &mut dyn TestDevice| {
            let mut allocator = AllocatorKind::AsyncPool.build();
            // The first call creates the pool.
            let mut held =
                vec![allocator.allocate(device, Request::new(Bytes::mib(20))).expect("it fits")];
            let before = attributes();
            held.extend((0..10).map(|_| {
                allocator.allocate(device, Request::new(Bytes::mib(20))).expect("it fits")
            }));
            let asked = attributes() - before;
            held.into_iter()
                .for_each(|allocation| allocator.free(device, allocation).expect("it is live"));
            allocator.close(device).expect("nothing is live");
            asked
        };
        assert_eq!(asked(&mut device()), 10, "one query of reserved memory per call");
        let mut limited =
            Limited::new(Box::new(device()), Bytes::gib(1)).expect("it has that much");
        assert_eq!(
            asked(&mut limited),
            4 * 10,
            "reserved memory is queried for the room, before, \
             after, and by the allocator"
        );
    }

    fn working_verification_passes_its_check(strict()) {
        let mut device = device();
        let calls = device.calls();
        device.check_verification().expect("it works");
        assert_eq!((device.calls(), device.leaks()), (calls, Leaks::default()), "it leaks nothing \
             and counts no call");
    }

    fn a_blind_verify_kernel_is_found_before_a_run(Settings { blind_verify: true, ..strict() }) {
        let error = device().check_verification().expect_err("no wrong byte is found").to_string();
        assert!(
            error.starts_with(
                "verification of GPU memory: a wrong byte at offset 0 of 4.00 \
             KiB was not found"
            ),
            "{error}"
        );
        let source = DeviceSource::new(DeviceChoice::Cuda(0), &machine::probe(), false)
            .expect("the GPU is there");
        assert!(source.open().is_err(), "no run uses this device");
    }

    fn a_wrong_fill_kernel_is_found_before_a_run(
        Settings { wrong_write: Some(WrongWrite { nth: 3, offset: 4000 }), ..strict() }
    ) {
        let error = device().check_verification().expect_err("a byte is wrong").to_string();
        assert!(error.starts_with("verification of GPU memory: a correct range was reported as \
             corrupted ("), "{error}");
    }

    fn newer_functions_of_nvml_are_preferred(Settings { list_calls: true, ..strict() }) {
        let device = device();
        let reading = machine::nvml_of(device.info()).expect("there is NVML").reading();
        assert_told(&reading);
        let old = [
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetViolationStatus",
        ];
        assert_eq!(calls().iter().filter(|call| old.contains(&call.as_str())).count(), 0);
    }

    fn an_nvml_without_newer_functions_uses_deprecated_ones(without_successors()) {
        let device = device();
        assert_told(&machine::nvml_of(device.info()).expect("there is NVML").reading());
    }

    fn unreported_throttling_does_not_count_as_none(
        without_successors().failing("nvmlDeviceGetCurrentClocksThrottleReasons", 0, 26)
    ) {
        let device = device();
        assert_eq!(device.info().fingerprint.throttle_reasons, ["not known"]);
        assert_eq!(
            machine::nvml_of(device.info()).expect("there is NVML").reading().throttled,
            None
        );
    }

    fn nothing_is_learned_from_a_failed_process_query(
        Settings { container: true, ..strict() }
            .failing("nvmlDeviceGetComputeRunningProcesses_v3", 2, 999)
    ) {
        let mut device = device();
        assert_eq!(
            device.memory().expect("the driver reports memory").process,
            None,
            "memory from before the context is unknown"
        );
    }

    fn external_memory_takes_the_requested_or_the_free_memory(strict()) {
        let mut device = device();
        let room = free_memory(&mut device);
        for (asked, held) in [
            (Bytes::mib(300), Bytes::mib(300)),
            (Bytes::mib(1500), Bytes::mib(1500)),
            (Bytes::mib(1026), Bytes::mib(1026)),
            (Bytes::mib(3), Bytes::mib(2)),
            (Bytes(u64::MAX), room),
            (Bytes::mib(700), Bytes::mib(700)),
        ] {
            assert_eq!(device.set_external_memory(asked), Ok(held), "{asked}");
            let memory = device.memory().expect("the driver reports memory");
            assert_eq!((memory.external_memory, memory.free), (held, room - held));
        }
        let left = free_memory(&mut device);
        assert!(device.malloc(left + Bytes(1)).is_err());
        device.malloc(left).expect("the remaining memory fits");
        assert_eq!(device.set_external_memory(Bytes::mib(702)), Ok(Bytes::mib(700)), "nothing is \
             left");
        assert_eq!(device.leaks().allocations, 1, "external memory is not a leak");
        assert_eq!(device.set_external_memory(Bytes::ZERO), Ok(Bytes::ZERO));
        let calls = device.calls();
        assert_eq!((calls.malloc, calls.free), (2, 0), "external memory makes no call");
    }

    fn a_reopened_device_starts_empty(strict()) {
        for _ in 0..3 {
            let mut device = device();
            assert_eq!(used_memory(&mut device), Bytes::mib(300));
            device.malloc(Bytes::mib(100)).expect("it fits");
        }
    }

    fn two_devices_are_used_together(Settings { devices: 2, ..strict() }) {
        let (mut first, mut second) = (device(), CudaDevice::open(1).expect("there are two"));
        assert_ne!(first.info().fingerprint.uuid_hash, second.info().fingerprint.uuid_hash);
        let ptr = first.malloc(Bytes::mib(100)).expect("it fits");
        let other = second.malloc(Bytes::mib(50)).expect("it fits");
        assert_eq!(
            (used_memory(&mut first), used_memory(&mut second)),
            (Bytes::mib(400), Bytes::mib(350))
        );
        assert!(second.free(ptr).is_err());
        first.free(ptr).expect("it is live");
        second.free(other).expect("it is live");
        drop(first);
        second.synchronize().expect("it is still open");
    }

    fn a_device_works_from_any_thread(strict()) {
        let mut device = device();
        let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
        let worker = std::thread::spawn(move || {
            device.fill(StreamId::DEFAULT, range(ptr, 0, 1000), TAG).expect("it is queued");
            device
        });
        let mut device = worker.join().expect("the thread ends well");
        device.verify(StreamId::DEFAULT, range(ptr, 0, 1000), TAG).expect("it is intact");
        std::thread::spawn(move || drop(device)).join().expect("the thread ends well");
    }

    fn unknown_handles_are_named(strict()) {
        let mut device = device();
        let (stream, event) = (StreamId(7), EventId(9));
        let no_stream = DeviceError::UnknownHandle { kind: "stream", number: 7 };
        let no_event = DeviceError::UnknownHandle { kind: "event", number: 9 };
        let live = device.create_event().expect("an event");
        assert_eq!(device.synchronize_stream(stream), Err(no_stream.clone()));
        assert_eq!(device.destroy_stream(stream), Err(no_stream.clone()));
        assert_eq!(device.busy(stream, Nanos(1)), Err(no_stream.clone()));
        assert_eq!(device.record_event(live, stream), Err(no_stream.clone()));
        assert_eq!(device.wait_event(stream, live), Err(no_stream));
        assert_eq!(device.event_done(event), Err(no_event.clone()));
        assert_eq!(device.destroy_event(event), Err(no_event.clone()));
        assert_eq!(device.synchronize_event(event), Err(no_event.clone()));
        assert_eq!(device.elapsed(event, event), Err(no_event.clone()));
        assert_eq!(device.record_event(event, StreamId::DEFAULT), Err(no_event));
        assert!(matches!(
            device.destroy_stream(StreamId::DEFAULT),
            Err(DeviceError::UnknownHandle { number: 0, .. })
        ));
    }

    fn numbers_of_streams_and_events_are_never_reused(strict()) {
        let mut device = device();
        let first = device.create_stream().expect("a stream");
        device.destroy_stream(first).expect("it is there");
        let second = device.create_stream().expect("a stream");
        assert_eq!((first, second), (StreamId(1), StreamId(2)));
        let (event, other) = (
            device.create_timed_event().expect("an event"),
            device.create_timed_event().expect("an event"),
        );
        device.record_event(event, second).expect("it is queued");
        device.destroy_event(event).expect("it is there");
        let again = device.create_timed_event().expect("an event");
        assert!(again > other && other > event);
        let unknown = DeviceError::UnknownHandle { kind: "event", number: event.0 };
        assert_eq!(device.elapsed(event, other), Err(unknown));
    }

    fn a_device_without_virtual_memory_management_reports_it(
        Settings { mapping: false, ..strict() }
    ) {
        let mut device = device();
        assert!(device.mapped().is_none());
        let ptr = device.malloc(Bytes::mib(2)).expect("the rest works");
        device.free(ptr).expect("it is live");
    }

    fn a_device_without_pools_reports_it(Settings { pools: false, ..strict() }) {
        let mut device = device();
        assert!(device.pooled().is_none());
        let refused = AllocatorKind::AsyncPool
            .build()
            .allocate(&mut device, Request::new(Bytes(1)))
            .expect_err("there is no pool");
        assert!(
            refused.to_string().starts_with(
                "the allocator `async_pool`: this device has no \
             stream-ordered memory pools"
            ),
            "{refused}"
        );
    }

    fn a_pool_that_cannot_be_configured_is_destroyed(
        strict().failing("cuMemPoolSetAttribute", 2, 999)
    ) {
        let mut device = device();
        let error = device.create_pool(Bytes::ZERO).expect_err("the second attribute is refused");
        assert!(
            matches!(error, DeviceError::Driver { call: "cuMemPoolSetAttribute", code: 999, .. }),
            "{error}"
        );
        assert!(device.leaks().is_empty());
        let pool = device.create_pool(Bytes::ZERO).expect("the second try succeeds");
        device.destroy_pool(pool).expect("it is empty");
    }

    fn a_failed_free_to_a_pool_changes_no_account(strict().failing("cuMemFreeAsync", 1, 999)) {
        let mut device = device();
        let pool = device.create_pool(Bytes::ZERO).expect("a pool");
        let ptr = device.malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT).expect("it fits");
        assert!(matches!(
            device.free_async(ptr, StreamId::DEFAULT),
            Err(DeviceError::Driver { call: "cuMemFreeAsync", code: 999, .. })
        ));
        assert_eq!(device.leaks().allocations, 1);
        device.free_async(ptr, StreamId::DEFAULT).expect("the second try succeeds");
        assert_eq!(device.leaks().allocations, 0);
    }

    fn completed_frees_finish_despite_a_failing_device(
        strict().failing("cuEventSynchronize", 2, 719)
    ) {
        let mut device = device();
        let side = device.create_stream().expect("a stream");
        let mut allocator = AllocatorKind::Caching.build();
        let allocations: Vec<_> = (0..3)
            .map(|_| {
                allocator.allocate(&mut device, Request::new(Bytes::mib(20))).expect("it fits")
            })
            .collect();
        device.busy(side, Nanos::millis(2000)).expect("it is queued");
        for allocation in allocations {
            allocator.record_stream(&allocation, side).expect("it is live");
            allocator.free(&mut device, allocation).expect("it is live");
        }
        let pending = |allocator: &dyn Allocator| allocator.stats().active.all.current;
        assert_eq!(pending(&*allocator), 3, "all frees wait for the other stream");
        let error = allocator.empty_cache(&mut device).expect_err("the second wait is refused");
        assert!(
            matches!(error, DeviceError::Driver { call: "cuEventSynchronize", code: 719, .. }),
            "{error}"
        );
        assert_eq!(pending(&*allocator), 2, "the first event has completed");
        allocator.empty_cache(&mut device).expect("the next try succeeds");
        assert_eq!((pending(&*allocator), allocator.stats().reserved_bytes.all.current), (0, 0));
        allocator.close(&mut device).expect("nothing is live");
        device.destroy_stream(side).expect("it is there");
        assert!(device.leaks().is_empty(), "{}", device.leaks());
    }

    fn an_allocation_is_freed_if_the_pools_size_is_unreadable(
        strict().failing("cuMemPoolGetAttribute", 1, 719)
    ) {
        let mut device = device();
        let mut allocator = AllocatorKind::AsyncPool.build();
        let error = allocator
            .allocate(&mut device, Request::new(Bytes::mib(20)))
            .expect_err("the pool fails");
        assert!(
            error
                .to_string()
                .starts_with("cuMemPoolGetAttribute failed: CUDA_ERROR_LAUNCH_FAILED (719)"),
            "{error}"
        );
        assert_eq!((device.leaks().allocations, allocator.stats().allocation.all.current), (0, 0));
        let held = allocator
            .allocate(&mut device, Request::new(Bytes::mib(20)))
            .expect("the next try succeeds");
        assert_eq!((device.leaks().allocations, allocator.stats().allocation.all.current), (1, 1));
        allocator.free(&mut device, held).expect("it is live");
        allocator.close(&mut device).expect("nothing is live");
        assert!(device.leaks().is_empty(), "{}", device.leaks());
    }

    fn an_allocation_that_cannot_be_freed_stays_counted(
        strict().failing("cuMemPoolGetAttribute", 1, 719).failing("cuMemFreeAsync", 1, 719)
    ) {
        let mut device = device();
        let mut allocator = AllocatorKind::AsyncPool.build();
        allocator.allocate(&mut device, Request::new(Bytes::mib(20))).expect_err("the pool fails");
        assert_eq!((device.leaks().allocations, allocator.stats().allocation.all.current), (1, 1));
        allocator.close(&mut device).expect("the second free succeeds");
        assert!(device.leaks().is_empty(), "{}", device.leaks());
    }

    fn a_failed_page_releases_the_earlier_pages(strict().failing("cuMemCreate", 3, 999)) {
        let mut device = device();
        let start = device.reserve(Bytes::mib(8)).expect("there are addresses");
        let free = free_memory(&mut device);
        let error = device
            .map(range(start, 0, 8 << 20), Bytes::mib(2))
            .expect_err("the third page is refused");
        assert!(
            matches!(error, DeviceError::Driver { call: "cuMemCreate", code: 999, .. }),
            "{error}"
        );
        assert_eq!(
            (device.calls().create, device.calls().release, free_memory(&mut device)),
            (3, 2, free)
        );
        device.map(range(start, 0, 8 << 20), Bytes::mib(2)).expect("the second try succeeds");
        device.fill(StreamId::DEFAULT, range(start, 0, 8 << 20), TAG).expect("all of it is mapped");
        device.verify(StreamId::DEFAULT, range(start, 0, 8 << 20), TAG).expect("it is intact");
    }

    fn a_mapping_that_fails_midway_is_undone(strict().failing("cuMemMap", 2, 205)) {
        refused_mapping_is_undone("cuMemMap", 205);
    }

    fn a_mapping_without_access_is_undone(strict().failing("cuMemSetAccess", 1, 801)) {
        refused_mapping_is_undone("cuMemSetAccess", 801);
    }

    fn a_partial_unmap_is_accounted_for(strict().failing("cuMemUnmap", 2, 206)) {
        let mut device = device();
        let start = device.reserve(Bytes::mib(6)).expect("there are addresses");
        device.map(range(start, 0, 6 << 20), Bytes::mib(2)).expect("it fits");
        let free = free_memory(&mut device);
        let error = device.unmap(range(start, 0, 6 << 20)).expect_err("the second page is refused");
        assert!(
            matches!(error, DeviceError::Driver { call: "cuMemUnmap", code: 206, .. }),
            "{error}"
        );
        assert_eq!(
            (free_memory(&mut device), device.leaks().bytes),
            (free + Bytes::mib(2), Bytes::mib(4))
        );
        device
            .fill(StreamId::DEFAULT, range(start, 2 << 20, 4 << 20), TAG)
            .expect("the rest is mapped");
        device.synchronize().expect("the context is not broken");
        device.unmap(range(start, 2 << 20, 4 << 20)).expect("the second try succeeds");
        device.unreserve(start).expect("nothing is mapped");
    }

    fn a_multi_instance_slice_is_found_by_its_uuid(Settings { mig: true, ..strict() }) {
        let device = device();
        assert_eq!((device.nvml_problem(), device.info().fingerprint.mig), (None, Some(true)));
    }

    fn without_nvml_the_driver_reports_the_used_memory(Settings { nvml: false, ..strict() }) {
        let mut device = device();
        let why = device.nvml_problem().expect("there is no NVML");
        assert!(why.starts_with("libnvidia-ml.so.1 exists but cannot be loaded: "), "{why}");
        assert_eq!(used_memory(&mut device), Bytes::mib(300));
        device.malloc(Bytes::mib(10)).expect("it fits");
        let memory = device.memory().expect("the driver reports memory");
        assert_eq!(
            (memory.used, memory.context_overhead, memory.process),
            (Bytes::mib(310), Bytes::mib(300), None)
        );
        let unknown = device.own_context().expect_err("the memory of others is unknown");
        assert!(matches!(unknown, DeviceError::Unavailable { .. }), "{unknown}");
        let facts = &device.info().fingerprint;
        assert_eq!(
            (facts.driver.as_deref(), facts.cuda.as_deref(), facts.other_processes),
            (None, Some("12.9"), None)
        );
    }

    fn a_failure_of_nvml_during_a_run_is_an_error(
        strict().failing("nvmlDeviceGetMemoryInfo_v2", 3, 15)
    ) {
        let error = device().memory().expect_err("NVML lost the GPU").to_string();
        assert!(
            error.starts_with("memory used, as NVML reports it: the GPU has fallen off the bus"),
            "{error}"
        );
    }

    fn a_probe_describes_every_device_and_opens_none(
        Settings { devices: 2, others: Bytes::mib(64), ..strict() }
    ) {
        let probe = machine::probe();
        assert_eq!(probe.nvml.as_deref(), Ok("simulated"));
        let driver = probe.driver.as_ref().expect("there is a driver");
        assert_eq!((driver.cuda.as_str(), driver.devices.len()), ("12.9", 2));
        for (ordinal, device) in driver.devices.iter().enumerate() {
            assert_eq!(
                (device.ordinal, device.total, device.compute_capability),
                (ordinal as u32, Bytes::gib(2), (9, 0))
            );
            let nvml = device.nvml().expect("NVML knows it");
            assert_eq!(nvml.free, Bytes::mib(2048 - 64), "no context is made");
            assert_eq!(nvml.others.len(), 1);
            assert_eq!(
                (nvml.others[0].name.as_deref(), nvml.others[0].used),
                (Some("other-process"), Some(Bytes::mib(64)))
            );
        }
        assert_eq!(DeviceChoice::Auto.resolve(&probe), Ok(Resolved::Cuda(0)));
        assert_eq!(DeviceChoice::Cuda(1).resolve(&probe), Ok(Resolved::Cuda(1)));
        assert!(DeviceChoice::Cuda(2).resolve(&probe).is_err());
    }

    fn a_driver_without_a_gpu_differs_from_a_missing_driver(Settings { devices: 0, ..strict() }) {
        let no_gpu = "CUDA device 0: the driver is installed but sees no GPU; see `nvidia-smi -L` \
             and CUDA_VISIBLE_DEVICES";
        assert_eq!(refused(CudaDevice::open(0)).to_string(), no_gpu);
        let probe = machine::probe();
        assert_eq!(
            probe.driver.as_ref().map(|driver| (driver.cuda.as_str(), driver.devices.len())),
            Ok(("12.9", 0))
        );
        let reason = format!("no CUDA device can be opened: {no_gpu}");
        assert_eq!(DeviceChoice::Auto.resolve(&probe), Ok(Resolved::Simulated { reason }));
    }

    fn an_unknown_ordinal_lists_the_devices(Settings { devices: 3, ..strict() }) {
        assert_eq!(refused(CudaDevice::open(3)).to_string(), "CUDA device 3: the driver has 3 \
             devices, cuda:0 to cuda:2");
        assert_eq!(refused(CudaDevice::open(u32::MAX)).to_string(), "CUDA device 4294967295: the \
             driver has 3 devices, cuda:0 to cuda:2");
    }

    fn a_driver_that_fails_to_start_gives_advice(strict().failing("cuInit", 0, 803)) {
        let sentence = refused(CudaDevice::open(0)).to_string();
        assert!(
            sentence.starts_with(
                "cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803). The \
             driver's installation"
            ),
            "{sentence}"
        );
        let Ok(Resolved::Simulated { reason }) = DeviceChoice::Auto.resolve(&machine::probe())
        else {
            panic!("there is no usable GPU")
        };
        assert_eq!(reason, format!("no CUDA device can be opened: {sentence}"));
    }
}

#[test]
fn an_unloadable_driver_is_explained_and_the_simulated_device_is_chosen() {
    const NAME: &str = "an_unloadable_driver_is_explained_and_the_simulated_device_is_chosen";
    if !is_child(NAME) {
        return run_child(
            NAME,
            &Staging::with_broken_libraries().expect("the folder is made"),
            "",
        );
    }
    let sentence = refused(CudaDevice::open(0)).to_string();
    assert!(
        sentence
            .starts_with("CUDA driver (libcuda.so.1): the library exists but cannot be loaded: "),
        "{sentence}"
    );
    let probe = machine::probe();
    assert!(
        probe
            .nvml
            .as_ref()
            .is_err_and(|why| why.starts_with("libnvidia-ml.so.1 exists but cannot be loaded: ")),
        "{probe:?}"
    );
    let reason = format!("no CUDA device can be opened: {sentence}");
    assert_eq!(
        DeviceChoice::Auto.resolve(&probe),
        Ok(Resolved::Simulated { reason })
    );
    assert_eq!(
        DeviceChoice::Cuda(0)
            .resolve(&probe)
            .expect_err("there is none")
            .to_string(),
        sentence
    );
}

/// Fails every driver function of `open` in turn. Each time, the error names the function, and
/// nothing is leaked.
#[test]
fn a_failed_call_while_opening_is_named_and_nothing_leaks() {
    const NAME: &str = "a_failed_call_while_opening_is_named_and_nothing_leaks";
    if is_child(NAME) {
        let (call, code) = (env::var(ARGUMENT).expect("the parent told"), 999);
        let error = refused(CudaDevice::open(0));
        assert!(
            matches!(error, DeviceError::Driver { call: refused, code: 999, .. }
                if refused == call),
            "{call} {code}: {error}"
        );
        return;
    }
    let calls = [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceTotalMem_v2",
        "cuDeviceGetAttribute",
        "cuDeviceGetUuid_v2",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity",
        "cuModuleLoadData",
        "cuModuleGetGlobal_v2",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuCtxSynchronize",
        "cuMemGetInfo_v2",
    ];
    for call in calls {
        let staging =
            Staging::new(&strict().failing(call, 1, 999)).expect("the simulated GPU is set up");
        run_child(NAME, &staging, call);
        assert_nothing_left(&staging);
    }
}

#[test]
fn a_dropped_device_leaks_nothing() {
    const NAME: &str = "a_dropped_device_leaks_nothing";
    if !is_child(NAME) {
        let staging = Staging::new(&strict()).expect("the simulated GPU is set up");
        run_child(NAME, &staging, "");
        return assert_eq!(
            staging.left().expect("the context was released"),
            format!("device 0 {NOTHING_LEFT}\n")
        );
    }
    let mut device = device();
    let stream = device.create_stream().expect("a stream");
    let event = device.create_event().expect("an event");
    let ptr = device.malloc(Bytes::mib(10)).expect("it fits");
    device
        .set_external_memory(Bytes::mib(100))
        .expect("it fits");
    device
        .busy(stream, Nanos::millis(2000))
        .expect("it is queued");
    device
        .fill(stream, range(ptr, 0, 10 << 20), TAG)
        .expect("it is queued");
    device.record_event(event, stream).expect("it is queued");
    let start = device.reserve(Bytes::mib(40)).expect("there are addresses");
    device
        .map(range(start, 2 << 20, 8 << 20), Bytes::mib(4))
        .expect("it fits");
    device
        .fill(stream, range(start, 2 << 20, 8 << 20), TAG)
        .expect("it is queued");
    let pool = device.create_pool(Bytes(u64::MAX)).expect("a pool");
    device
        .malloc_async(pool, Bytes::mib(3), stream)
        .expect("it fits");
    assert_eq!(
        device.leaks(),
        Leaks {
            allocations: 2,
            reservations: 1,
            pools: 1,
            bytes: Bytes::mib(18 + 32),
            streams: 1,
            events: 1,
            host: 0
        }
    );
}

#[test]
fn work_on_unmapped_memory_breaks_the_context() {
    const NAME: &str = "work_on_unmapped_memory_breaks_the_context";
    if !is_child(NAME) {
        let staging = Staging::new(&strict()).expect("the simulated GPU is set up");
        run_child(NAME, &staging, "");
        // The memory of a broken context cannot be freed call by call. The driver releases it with
        // the context.
        let left = staging.left().expect("the context was released");
        return assert!(
            left.starts_with(
                "device 0 left: 0 allocations, 1 reservations, 0 pages, 0 pools, 1 streams"
            ),
            "{left}"
        );
    }
    let mut device = device();
    let stream = device.create_stream().expect("a stream");
    let start = device.reserve(Bytes::mib(2)).expect("there are addresses");
    device
        .map(range(start, 0, 2 << 20), Bytes::mib(2))
        .expect("it fits");
    device
        .busy(stream, Nanos::millis(2000))
        .expect("it is queued");
    device
        .fill(stream, range(start, 0, 2 << 20), TAG)
        .expect("it is queued");
    device
        .unmap(range(start, 0, 2 << 20))
        .expect("unmapping does not wait");
    let error = device.synchronize().expect_err("the fill found no memory");
    assert!(
        matches!(error, DeviceError::Driver { code: 700, .. }),
        "{error}"
    );
}

#[test]
fn an_unordered_read_after_a_write_breaks_the_context() {
    const NAME: &str = "an_unordered_read_after_a_write_breaks_the_context";
    if !is_child(NAME) {
        let staging = Staging::new(&strict()).expect("the simulated GPU is set up");
        run_child(NAME, &staging, "");
        let left = staging.left().expect("the context was released");
        return assert!(
            left.starts_with(
                "device 0 left: 1 allocations, 0 reservations, 0 pages, 0 pools, 2 streams"
            ),
            "{left}"
        );
    }
    let mut device = device();
    let (writer, reader) = (
        device.create_stream().expect("a stream"),
        device.create_stream().expect("a stream"),
    );
    let ptr = device.malloc(Bytes::mib(2)).expect("it fits");
    device
        .fill(writer, range(ptr, 0, 2 << 20), TAG)
        .expect("it is queued");
    let error = device
        .verify(reader, range(ptr, 0, 2 << 20), TAG)
        .expect_err("the reader did not wait");
    assert!(
        matches!(
            error,
            DeviceError::Driver {
                call: "cuLaunchKernel",
                code: 719,
                ..
            }
        ),
        "{error}"
    );
    let error = device
        .synchronize()
        .expect_err("the context is broken for good");
    assert!(
        matches!(error, DeviceError::Driver { code: 719, .. }),
        "{error}"
    );
}

/// Runs `harness doctor` on a staged machine. Returns its exit code and its output.
fn doctor(staging: &Staging, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.arg("doctor").args(arguments);
    staging.apply(&mut command);
    let output = command.output().expect("the program runs");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

#[test]
fn doctor_gives_up_on_a_hanging_driver_and_names_the_step() {
    for (function, waits_for) in [
        ("cuInit", "the CUDA driver and NVML to list the GPUs"),
        ("nvmlInit_v2", "the CUDA driver and NVML to list the GPUs"),
        (
            "cuDevicePrimaryCtxRetain",
            "cuda:0 to open and to pass a memory test",
        ),
    ] {
        let staging =
            Staging::new(&strict().hanging(function, 1)).expect("the simulated GPU is set up");
        let (code, text) = doctor(&staging, &["--limit", "2s", "--require-gpu"]);
        assert_eq!(code, Some(3), "{function}: {text}");
        assert!(
            text.contains(&format!("waiting for {waits_for}: the driver hangs; ")),
            "{function}: {text}"
        );
        assert!(
            text.contains("scenarios run only with `--device sim`"),
            "{function}: {text}"
        );
    }
}

#[test]
fn doctor_refuses_a_gpu_whose_verification_finds_nothing() {
    let staging = Staging::new(&Settings {
        blind_verify: true,
        ..strict()
    })
    .expect("the simulated GPU is set up");
    let (code, text) = doctor(&staging, &["--require-gpu"]);
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains(
            "cuda:0 cannot be used: verification of GPU memory: a wrong byte at offset 0"
        ),
        "{text}"
    );
}

#[test]
fn doctor_distinguishes_a_broken_library_from_a_missing_one() {
    let (code, text) = doctor(
        &Staging::with_broken_libraries().expect("the folder is made"),
        &[],
    );
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("CUDA driver (libcuda.so.1): the library exists but cannot be loaded: "),
        "{text}"
    );
    assert!(
        text.contains("NVML: libnvidia-ml.so.1 exists but cannot be loaded: "),
        "{text}"
    );
}
