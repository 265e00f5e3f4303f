//! cuDNN's own library from the program's environment. It plans convolutions and attention without
//! a device, from a description of one
//! (<https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/utilities/deviceless-ahead-of-time-compilation.html>).
//!
//! Handles stay simulated, so descriptors get the description in place of a handle.

use std::ffi::{CStr, CString, c_int, c_void};
use std::{mem, ptr, sync::OnceLock};

use harness_gpu_settings::settings::{CudnnWorkspace, Settings};

use crate::{device_properties::attribute, world::machine};

pub(super) type Descriptor = *mut c_void;

/// Functions of the library.
pub(super) struct Library {
    create: unsafe extern "C" fn(c_int, *mut Descriptor) -> c_int,
    set: unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *const c_void) -> c_int,
    pub(super) get:
        unsafe extern "C" fn(Descriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int,
    pub(super) finalize: unsafe extern "C" fn(Descriptor) -> c_int,
    pub(super) destroy: unsafe extern "C" fn(Descriptor) -> c_int,
    /// The address of the descriptor of the device.
    device: usize,
}

// Numbers of `cudnnBackendDescriptorType_t`, `cudnnBackendAttributeName_t` and
// `cudnnBackendAttributeType_t` (cudnn_graph.h of cuDNN 9).
const DEVICE: c_int = 38;
const DEVICE_JSON: c_int = 2702;
const HANDLES: [c_int; 2] = [400, 800];
const OBJECTS: c_int = 15;
const CHARACTERS: c_int = 24;
const PLAN_JSON: c_int = 405;

/// Kernels with this knob divide their work among clusters of blocks. Without a GPU, cuDNN plans
/// their partial sums for 18 multiprocessors. Engine and knobs are those of a GPU.
const CLUSTERS: &str = "CUDNN_KNOB_TYPE_TILE_CGA_M";

/// On a GPU, the workspace of such a kernel is at most `LESS` bytes smaller, or `MORE` bytes per
/// multiprocessor larger. These bounds contain 1,738 plans of cuDNN 9.19 that differ on an H100,
/// and the peaks of 28 programs on an H200.
const LESS: u64 = 3 << 19;
const MORE: u64 = 144 << 10;

/// Returns the library of the settings. If it cannot be used, a message says so once per process.
pub(super) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let settings = &machine().settings;
        let CudnnWorkspace::Library(path) = &settings.cudnn_workspace else {
            return None;
        };
        let opened = Library::open(path, &description(settings));
        opened
            .inspect_err(|error| {
                eprintln!("simulated GPU: {path}: {error}; cuDNN workspace sizes are estimates")
            })
            .ok()
    });
    library.as_ref()
}

impl Library {
    fn open(path: &str, description: &str) -> Result<Self, String> {
        let path = CString::new(path).map_err(|error| error.to_string())?;
        // SAFETY: the path is a string. The library stays loaded.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        if opened.is_null() {
            // SAFETY: `dlopen` failed, so there is a text.
            return Err(unsafe { CStr::from_ptr(libc::dlerror()) }
                .to_string_lossy()
                .into_owned());
        }
        // SAFETY: the functions have these types since cuDNN 8 (cudnn_graph.h).
        let mut library = unsafe {
            Self {
                create: function(opened, c"cudnnBackendCreateDescriptor")?,
                set: function(opened, c"cudnnBackendSetAttribute")?,
                get: function(opened, c"cudnnBackendGetAttribute")?,
                finalize: function(opened, c"cudnnBackendFinalize")?,
                destroy: function(opened, c"cudnnBackendDestroyDescriptor")?,
                device: 0,
            }
        };
        let mut device = ptr::null_mut();
        // SAFETY: the library writes the new descriptor, and reads as many characters as the text
        // has.
        let statuses = unsafe {
            let created = (library.create)(DEVICE, &raw mut device);
            if created != 0 {
                return Err("it cannot plan without a device; cuDNN 9.8 and later can".to_owned());
            }
            [
                (library.set)(
                    device,
                    DEVICE_JSON,
                    CHARACTERS,
                    description.len() as i64,
                    description.as_ptr().cast(),
                ),
                (library.finalize)(device),
            ]
        };
        library.device = device.expose_provenance();
        if statuses == [0, 0] {
            Ok(library)
        } else {
            Err(format!(
                "it rejects the description of the GPU: {statuses:?}"
            ))
        }
    }

    /// Creates a descriptor. Engines, heuristics and plans are for the device.
    pub(super) fn create(&self, kind: c_int, place: *mut Descriptor) -> c_int {
        let attribute = match kind {
            2 => 1307,
            4 => 204,
            5 => 407,
            _ => 0,
        };
        let device: Descriptor = ptr::with_exposed_provenance_mut(self.device);
        // SAFETY: the place is the program's, and both descriptors are the library's.
        unsafe {
            match (self.create)(kind, place) {
                0 if attribute != 0 => {
                    (self.set)(*place, attribute, OBJECTS, 1, (&raw const device).cast())
                }
                status => status,
            }
        }
    }

    /// Notes by how much the workspace of a plan may differ on a GPU.
    ///
    /// # Safety
    /// The plan is the library's.
    pub(super) unsafe fn note_estimate(&self, plan: Descriptor, bytes: u64) {
        let mut text = vec![0_u8; 1 << 16];
        let mut len = 0;
        // SAFETY: the library writes at most as many characters as the text has.
        let status = unsafe {
            (self.get)(
                plan,
                PLAN_JSON,
                CHARACTERS,
                text.len() as i64,
                &raw mut len,
                text.as_mut_ptr().cast(),
            )
        };
        text.truncate(usize::try_from(len).unwrap_or(0));
        if status == 0 && String::from_utf8_lossy(&text).contains(CLUSTERS) {
            let machine = machine();
            let multiprocessors = attribute(&machine.settings, 16, 0);
            machine
                .counters
                .note_workspace(bytes.min(LESS), u64::from(multiprocessors) * MORE);
        }
    }

    /// # Safety
    /// The descriptor is the library's, and there are `count` elements.
    pub(super) unsafe fn set(
        &self,
        descriptor: Descriptor,
        number: c_int,
        kind: c_int,
        count: i64,
        elements: *const c_void,
    ) -> c_int {
        if HANDLES.contains(&number) {
            0
        } else {
            // SAFETY: as the caller promises.
            unsafe { (self.set)(descriptor, number, kind, count, elements) }
        }
    }
}

/// Finds a function of a loaded library.
///
/// # Safety
/// `T` is the type of the function.
unsafe fn function<T>(library: *mut c_void, name: &CStr) -> Result<T, String> {
    // SAFETY: the library is loaded, and the name is a string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return Err(format!("it has no {}", name.to_string_lossy()));
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { mem::transmute_copy(&address) })
}

/// The properties of the GPU as JSON.
fn description(settings: &Settings) -> String {
    let numbers = [
        ("regsPerBlock", 12),
        ("multiProcessorCount", 16),
        ("warpSize", 10),
        ("maxSharedMemoryPerBlock", 8),
        ("maxSharedMemoryPerBlockOptin", 97),
        ("reservedSharedMemoryPerBlock", 111),
        ("maxRegistersPerSM", 82),
        ("maxCtasPerSM", 106),
        ("maxThreadsPerBlock", 1),
        ("maxThreadsPerSM", 39),
        ("pciDeviceId", 34),
        ("isTccDriver", 35),
        ("supportCoopLaunch", 95),
        ("smClockRateKHz", 13),
        ("memClockRateKHz", 36),
        ("memoryBusWidth", 37),
        ("l2CacheSize", 38),
    ];
    let of = |number: i32| attribute(settings, number, 0);
    let numbers: String = numbers
        .iter()
        .map(|(name, number)| format!(r#""{name}":{},"#, of(*number)))
        .collect();
    format!(
        concat!(
            r#"{{{}"maxGridSize":{:?},"maxBlockSize":{:?},"deviceVer":{},"driverVer":{},"#,
            r#""totalGlobalMem":{},"deviceName":"{}","cudaDeviceId":0,"#,
            r#""oversizedSharedMemoryPerBlock":0}}"#,
        ),
        numbers,
        [5, 6, 7].map(of),
        [2, 3, 4].map(of),
        100 * of(75) + 10 * of(76),
        settings.cuda.driver_version(),
        settings.memory.0,
        settings.device_name(),
    )
}
