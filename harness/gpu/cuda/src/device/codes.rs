//! Names of the driver's result codes, with advice. Bindings cannot name codes that they do not
//! know.
//!
//! Source: `CUresult` in the CUDA driver API,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>.

use crate::library::Refusal;
use harness_allocator::device::DeviceError;

impl From<Refusal> for DeviceError {
    fn from(Refusal { call, code }: Refusal) -> Self {
        let (name, advice) = describe(code);
        Self::Driver {
            call,
            code,
            name: name.to_owned(),
            advice,
        }
    }
}

const BUG: &str =
    "The caller or this program made a mistake: report it with the command that reproduces it";
const STICKY: &str = "Earlier work broke the context, which stays unusable: restart the process, \
     and see `dmesg | grep Xid`";
const HARDWARE: &str = "The GPU reports a fault: see `dmesg | grep Xid` and `nvidia-smi -q`, drain \
     the node and reset or replace the GPU";
const INSTALLATION: &str = "The driver's installation is broken: compare `nvidia-smi` and `cat \
     /proc/driver/nvidia/version`, and reboot \
                            after a driver update";
const VISIBILITY: &str = "No GPU is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, and \
     give the container access to the GPU";
const TOO_OLD: &str = "The driver does not support this: install a newer NVIDIA driver";
const MEMORY: &str =
    "Device or host memory is exhausted: see `nvidia-smi` for other processes on the GPU";
const ACCESS: &str = "Another user holds the GPU or forbids its use: see `nvidia-smi -q -d \
     COMPUTE` and the other processes on it";
const MPS: &str = "The MPS server refused the call: see its log, and `echo get_server_list | \
     nvidia-cuda-mps-control`";
const EARLIER: &str =
    "Retry once; if it persists, end other processes on the GPU and see `dmesg | grep Xid`";
const STUB: &str = "The toolkit's stub library was loaded instead of the driver: remove `stubs` \
     from LD_LIBRARY_PATH and install the driver";
const LICENCE: &str =
    "The virtual GPU has no licence: check the licence server with `nvidia-smi -q | grep -i licen`";
const COMPILER: &str = "The driver's libnvidia-ptxjitcompiler.so.1 is missing: install the whole \
     driver, in containers with \
                        NVIDIA_DRIVER_CAPABILITIES=compute,utility";
const SYSTEM: &str = "The operating system refused the driver: check the permissions of \
     /dev/nvidia*, memory limits and cgroups";
const FABRIC: &str = "The fabric manager is not ready: `systemctl status nvidia-fabricmanager`, \
     and `nvidia-smi -q | grep -i fabric`";
const COMPATIBILITY: &str = "The forward-compatibility driver does not support this GPU: remove \
     the `compat` folder from \
                        LD_LIBRARY_PATH";
const NO_REASON: &str = "The driver gives no reason: see `dmesg | grep Xid`; after a driver update \
     or a suspend, reload nvidia_uvm or reboot";

pub(super) fn describe(code: u32) -> (&'static str, &'static str) {
    let unknown = (
        "unknown driver code",
        "This program does not know the code: look it up in `cuda.h` of the installed driver's \
         CUDA version",
    );
    CODES
        .binary_search_by_key(&code, |entry| entry.0)
        .map_or(unknown, |at| (CODES[at].1, CODES[at].2))
}

/// Code, name, advice; sorted by code.
const CODES: &[(u32, &str, &str)] = &[
    (0, "CUDA_SUCCESS", "Nothing is wrong"),
    (1, "CUDA_ERROR_INVALID_VALUE", BUG),
    (2, "CUDA_ERROR_OUT_OF_MEMORY", MEMORY),
    (3, "CUDA_ERROR_NOT_INITIALIZED", BUG),
    (
        4,
        "CUDA_ERROR_DEINITIALIZED",
        "The driver is shutting down: the process is ending while a device is still in use",
    ),
    (5, "CUDA_ERROR_PROFILER_DISABLED", BUG),
    (34, "CUDA_ERROR_STUB_LIBRARY", STUB),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", TOO_OLD),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", ACCESS),
    (100, "CUDA_ERROR_NO_DEVICE", VISIBILITY),
    (101, "CUDA_ERROR_INVALID_DEVICE", VISIBILITY),
    (102, "CUDA_ERROR_DEVICE_NOT_LICENSED", LICENCE),
    (200, "CUDA_ERROR_INVALID_IMAGE", BUG),
    (201, "CUDA_ERROR_INVALID_CONTEXT", BUG),
    (202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT", BUG),
    (205, "CUDA_ERROR_MAP_FAILED", EARLIER),
    (206, "CUDA_ERROR_UNMAP_FAILED", EARLIER),
    (207, "CUDA_ERROR_ARRAY_IS_MAPPED", BUG),
    (208, "CUDA_ERROR_ALREADY_MAPPED", BUG),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU", TOO_OLD),
    (210, "CUDA_ERROR_ALREADY_ACQUIRED", BUG),
    (211, "CUDA_ERROR_NOT_MAPPED", BUG),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", HARDWARE),
    (215, "CUDA_ERROR_UNSUPPORTED_LIMIT", BUG),
    (216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", ACCESS),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", BUG),
    (218, "CUDA_ERROR_INVALID_PTX", TOO_OLD),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", HARDWARE),
    (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", COMPILER),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", TOO_OLD),
    (
        223,
        "CUDA_ERROR_JIT_COMPILATION_DISABLED",
        "CUDA_DISABLE_PTX_JIT is set: unset it, the kernels are translated when the device opens",
    ),
    (224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", BUG),
    (226, "CUDA_ERROR_CONTAINED", STICKY),
    (300, "CUDA_ERROR_INVALID_SOURCE", BUG),
    (301, "CUDA_ERROR_FILE_NOT_FOUND", INSTALLATION),
    (
        302,
        "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND",
        INSTALLATION,
    ),
    (303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", INSTALLATION),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", SYSTEM),
    (400, "CUDA_ERROR_INVALID_HANDLE", BUG),
    (401, "CUDA_ERROR_ILLEGAL_STATE", BUG),
    (500, "CUDA_ERROR_NOT_FOUND", BUG),
    (
        600,
        "CUDA_ERROR_NOT_READY",
        "Work is still running: synchronize first",
    ),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", STICKY),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", BUG),
    (
        702,
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "The display watchdog ended a kernel, and the context stays unusable: use a GPU without a \
         display",
    ),
    (708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", BUG),
    (
        709,
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "Something in this process reset the device while it was in use",
    ),
    (710, "CUDA_ERROR_ASSERT", STICKY),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", STICKY),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", STICKY),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", STICKY),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", STICKY),
    (718, "CUDA_ERROR_INVALID_PC", STICKY),
    (719, "CUDA_ERROR_LAUNCH_FAILED", STICKY),
    (800, "CUDA_ERROR_NOT_PERMITTED", ACCESS),
    (801, "CUDA_ERROR_NOT_SUPPORTED", TOO_OLD),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", FABRIC),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", INSTALLATION),
    (
        804,
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        COMPATIBILITY,
    ),
    (805, "CUDA_ERROR_MPS_CONNECTION_FAILED", MPS),
    (806, "CUDA_ERROR_MPS_RPC_FAILURE", MPS),
    (807, "CUDA_ERROR_MPS_SERVER_NOT_READY", MPS),
    (808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", MPS),
    (809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", MPS),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", MPS),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE", HARDWARE),
    (999, "CUDA_ERROR_UNKNOWN", NO_REASON),
];

#[cfg(test)]
mod tests;
