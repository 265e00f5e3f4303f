use harness_allocator::units::Bytes;
use harness_gpu_settings::{driver::Kernels, gpus::GPUS};

use super::*;

const MODULE: &str = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .global .align 8 \
     .b64 harness_findings[4];\n\
                          .visible .entry harness_busy(.param .u64 nanos)";

fn gpu() -> (DeviceMemory, Execution) {
    let settings = Settings {
        kernels: Kernels::Execute,
        ..Settings::new(&GPUS[0], Bytes::mib(64))
    };
    (
        DeviceMemory::new(0, &settings),
        Execution::new(0, &settings),
    )
}

const fn fill(address: u64) -> Work {
    Work::Fill {
        address,
        len: 8,
        value: 7,
        first: 0,
    }
}

fn word(execution: &Execution, address: u64) -> u64 {
    let mut bytes = [0; 8];
    execution.bytes.read(address, &mut bytes);
    u64::from_le_bytes(bytes)
}

#[test]
fn work_runs_after_the_earlier_work_of_its_stream() {
    let (mut memory, mut execution) = gpu();
    let start = memory.allocate(Bytes::mib(2)).expect("allocate");
    execution
        .submit(&mut memory, StreamId::DEFAULT, Work::Busy(Nanos(10)))
        .expect("queue the work");
    execution
        .submit(&mut memory, StreamId::DEFAULT, fill(start))
        .expect("queue the work");
    assert_eq!(execution.settle(&mut memory, Nanos(9)), Ok(()));
    assert_eq!((word(&execution, start), execution.queued()), (0, 1));
    assert_eq!(execution.settle(&mut memory, Nanos(10)), Ok(()));
    assert_eq!((word(&execution, start), execution.queued()), (7, 0));
}

#[test]
fn work_on_freed_memory_breaks_the_context_for_good() {
    let (mut memory, mut execution) = gpu();
    let start = memory.allocate(Bytes::mib(2)).expect("allocate");
    execution
        .submit(&mut memory, StreamId::DEFAULT, Work::Busy(Nanos(10)))
        .expect("queue the work");
    execution
        .submit(&mut memory, StreamId::DEFAULT, fill(start))
        .expect("queue the work");
    memory.free(start).expect("free");
    assert_eq!(execution.settle(&mut memory, Nanos(9)), Ok(()));
    assert_eq!(
        execution.settle(&mut memory, Nanos(10)),
        Err(Code::IllegalAddress)
    );
    assert_eq!(
        execution.settle(&mut memory, Nanos(11)),
        Err(Code::IllegalAddress)
    );
}

#[test]
fn mapped_memory_is_accessible_only_after_access_is_allowed() {
    for allowed in [false, true] {
        let (mut memory, mut execution) = gpu();
        let (start, page) = (
            memory.reserve(Bytes::mib(2)).expect("reserve"),
            memory.create(Bytes::mib(2)).expect("allocate"),
        );
        memory.map(start, Bytes::mib(2), page).expect("map");
        if allowed {
            memory.allow(start, Bytes::mib(2)).expect("allow access");
        }
        execution
            .submit(&mut memory, StreamId::DEFAULT, fill(start))
            .expect("queue the work");
        assert_eq!(execution.settle(&mut memory, Nanos::ZERO).is_ok(), allowed);
    }
}

#[test]
fn a_kernel_is_found_by_its_name_and_its_declared_parameters() {
    let (_, mut execution) = gpu();
    assert_eq!(execution.load("no PTX"), Err(Code::InvalidPtx));
    let module = execution.load(MODULE).expect("load PTX");
    let busy = execution
        .function(module, "harness_busy")
        .expect("find the kernel");
    assert_eq!(execution.kernel(busy), Ok(Kernel::Busy));
    assert_eq!(
        execution.function(module, "harness_fill_words"),
        Err(Code::NotFound),
        "the text does not contain it"
    );
    let other = execution
        .load(&MODULE.replace(
            "(.param .u64 nanos)",
            "(.param .u64 nanos, .param .u64 more)",
        ))
        .expect("load PTX");
    assert_eq!(
        execution.function(other, "harness_busy"),
        Err(Code::NotFound),
        "the parameters differ"
    );
    let (start, size) = execution
        .variable(module, FINDINGS)
        .expect("find the variable");
    assert!(
        size == 32 && execution.is_variable(start, 32) && !execution.is_variable(start + 8, 32)
    );
    execution.unload(module).expect("unload");
    assert!(execution.kernel(busy).is_err() && !execution.is_variable(start, 32));
}
