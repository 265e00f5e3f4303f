//! [`CostModel`]: the costs of calls and work on the simulated device, each with its source.
//!
//! The costs advance a virtual clock. They give scenarios a plausible order of events and
//! reproducible times. They are not measurements of a GPU, and no report compares them with any.

use std::borrow::Cow;

use crate::device::CostFigure;
use crate::units::{Bytes, Nanos};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sourced<T> {
    pub value: T,
    /// A publication, a measurement with device and date, or `assumed: …` with the reason for
    /// this order of magnitude.
    pub source: Cow<'static, str>,
}

const fn figure<T>(value: T, source: &'static str) -> Sourced<T> {
    Sourced {
        value,
        source: Cow::Borrowed(source),
    }
}

/// The time of a copy of one GiB to or from pinned memory over 16 lanes of PCI Express 3.0.
pub const PCIE_3: Sourced<Nanos> = figure(
    Nanos(89_478_500),
    "https://github.com/ZaidQureshi/bam/issues/54: 12 GB/s into a V100, of 16 GB/s that PCIe 3.0 \
     x16 has",
);
pub const PCIE_4: Sourced<Nanos> = figure(
    Nanos(42_727_500),
    "https://github.com/NVIDIA/nvbandwidth/issues/42: 25.13 GB/s into an A100 SXM (PCIe 4.0 x16)",
);
pub const PCIE_5: Sourced<Nanos> = figure(
    Nanos(20_347_600),
    "https://github.com/NVIDIA/nvbandwidth/issues/24: 52.77 GB/s out of an H100 (PCIe 5.0 x16)",
);

/// Declares the times of a cost model, each with its row in the table of figures, the unit of size
/// that it is for, and its published value.
macro_rules! cost_model {
    ($($(#[$doc:meta])* $time:ident = $name:literal $unit:literal $published:expr,)*) => {
        /// The costs of host calls and device work. All simulated times follow from them, so they
        /// are the same on every machine.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct CostModel {
            /// The name and version in fingerprints.
            pub name: Cow<'static, str>,
            /// The used device memory before the first allocation.
            pub context_overhead: Sourced<Bytes>,
            $($(#[$doc])* pub $time: Sourced<Nanos>,)*
        }

        impl CostModel {
            /// Figures from publications, collected in November 2026. Figures without a publication
            /// are marked as assumed.
            pub const PUBLISHED: Self = Self {
                name: Cow::Borrowed("published-2026-11 v1"),
                context_overhead: figure(
                    Bytes::mib(555),
                    "https://github.com/ggml-org/llama.cpp/pull/23604: a bare CUDA context takes \
                     555 MiB of an RTX PRO 6000 with 96 GB (107 MiB of an RTX 4060 Ti)",
                ),
                $($time: $published,)*
            };

            /// A model without costs, for comparisons of bytes and calls only.
            pub const FREE_OF_CHARGE: Self = {
                const SOURCE: &str = "by definition: this model charges nothing";
                Self {
                    name: Cow::Borrowed("free-of-charge v1"),
                    context_overhead: figure(Bytes::ZERO, SOURCE),
                    $($time: figure(Nanos::ZERO, SOURCE),)*
                }
            };

            pub fn figures(&self) -> Vec<CostFigure> {
                let row = |name: &str, value: String, source: &str| CostFigure {
                    name: name.to_owned(),
                    value,
                    source: source.to_owned(),
                };
                let context = &self.context_overhead;
                vec![
                    row("context overhead", context.value.to_string(), &context.source),
                    $(row($name, format!("{}{}", self.$time.value, $unit), &self.$time.source),)*
                ]
            }
        }
    };
}

cost_model! {
    malloc = "device allocation" "" figure(Nanos::micros(50),
        "https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_management_overhead.html: \
         cudaMalloc takes about 50 µs from 4 KB to 512 KB (GTX 280)"),
    /// The additional cost of each MiB of a device allocation.
    malloc_per_mib = "device allocation, per size" " per MiB" figure(Nanos::micros(1),
        "https://github.com/kokkos/kokkos/issues/317: cudaMalloc of 100 million integers (381 MiB) \
         takes 432 µs, that is 1.0 µs/MiB above the base"),
    /// The base cost of a device free, without the wait for work in flight.
    free = "device free" "" figure(Nanos::micros(14),
        "https://github.com/Cytnx-dev/Cytnx/pull/850: cudaMalloc, launch and cudaFree of a small \
         buffer take 14.0 µs together (GTX 1660 SUPER / RTX 2080 Ti), \
             taken whole as the upper bound of the free"),
    /// The additional cost of each MiB of a device free.
    free_per_mib = "device free, per size" " per MiB" figure(Nanos::micros(2),
        "https://github.com/intel/llvm/issues/8971: cudaFree of a matrix of 16384 x 16384 floats \
         (1 GiB) takes 2.09 ms in the median, \
             that is 2.0 µs/MiB above the base (RTX 3070)"),
    /// Creating one physical page, mapping it and making it accessible.
    map_page = "mapping a page" "" figure(Nanos::micros(60),
        "assumed: three driver calls (create, map, set access) and the page's own cost, so a \
         little more than one device allocation; \
             no publication has a figure"),
    unmap_page = "unmapping a page" "" figure(Nanos::micros(30),
        "assumed: two driver calls (unmap, release), about half of the mapping; no publication has \
         a figure"),
    /// An allocation, free or trim of the driver's stream-ordered pool that does not change its
    /// size. Growing costs a device allocation more, shrinking a device free.
    pool_call = "call of the driver's pool" "" figure(Nanos::micros(3),
        "assumed: a place in a stream's order as queueing work has, with bookkeeping of the host; \
             https://github.com/kokkos/kokkos/pull/7032 finds allocations that a pool serves one \
             to two orders of magnitude faster than others"),
    submit = "queueing work" "" figure(Nanos::micros(3),
        "https://github.com/facebookincubator/velox/pull/6096: launching a kernel takes about 3 µs \
         (RTX 3080, PCIe 4.0)"),
    stream_create = "making a stream" "" figure(Nanos::micros(5),
        "assumed: https://github.com/cupy/cupy/issues/7110 says \"in the microseconds at most\" \
         but no publication has a figure"),
    event_create = "making an event" "" figure(Nanos(180),
        "https://github.com/harrism/cuda_event_benchmark/pull/7: cudaEventCreate with timing takes \
         180 ns (DGX H100, CUDA 11.8)"),
    event_record = "recording an event" "" figure(Nanos(2_500),
        "https://github.com/NVIDIA/NVTX/issues/3: about 400,000 cudaEventRecord with timing a \
         second (V100, CUDA 10.2)"),
    event_query = "event query" "" figure(Nanos(470),
        "https://github.com/ICLDisco/parsec/pull/576: cudaEventRecord without timing and \
         cudaEventQuery take 0.466 µs together, \
             taken whole as the upper bound of the query"),
    synchronize = "overhead of a host wait" "" figure(Nanos(466),
        "https://github.com/JuliaGPU/CUDA.jl/issues/279: synchronizing an idle device takes 466 ns \
         in the median"),
    /// The time of a fill or verify of one GiB.
    transfer_per_gib = "writing or reading device memory" " per GiB" figure(Nanos(320_520),
        "https://www.nvidia.com/en-us/data-center/h100/: memory bandwidth of the H100 SXM, 3.35 \
         TB/s"),
    /// Allocating one MiB of pinned host memory.
    pinned_alloc_per_mib = "allocating pinned host memory" " per MiB" figure(Nanos::micros(380),
        "https://github.com/rapidsai/dask-cuda/issues/106: alloc_pinned_memory of 32,000,000 bytes \
         takes 11.6 ms"),
    /// Allocating one MiB of pageable host memory and touching it for the first time.
    pageable_alloc_per_mib = "allocating pageable host memory" " per MiB" figure(Nanos::micros(47),
        "https://github.com/rapidsai/dask-cuda/issues/106: touching 32,000,000 bytes for the first \
         time takes 1.43 ms (numpy.ones)"),
    /// A copy of one GiB to or from pinned host memory, limited by the link in one direction.
    pinned_copy_per_gib = "copy to or from pinned host memory" " per GiB" PCIE_5,
    /// A copy of one GiB to or from pageable host memory.
    pageable_copy_per_gib = "copy to or from pageable host memory" " per GiB" figure(
        Nanos(195_226_000),
        "https://github.com/rapidsai/dask-cuda/pull/98: 5 to 6 GB/s without pinned memory, where \
         11 to 12 GB/s are had with it (PCIe 3.0); \
             taken for every link, since the copy to the driver's own pinned buffer is the \
             processor's"),
}

impl CostModel {
    pub fn malloc_time(&self, charged: Bytes) -> Nanos {
        by_size(self.malloc.value, self.malloc_per_mib.value, charged)
    }

    /// The time of a device free of this many charged bytes, without the wait for work in flight.
    pub fn free_time(&self, charged: Bytes) -> Nanos {
        by_size(self.free.value, self.free_per_mib.value, charged)
    }

    pub fn transfer_time(&self, bytes: Bytes) -> Nanos {
        scaled(self.transfer_per_gib.value, bytes, Bytes::gib(1))
    }

    /// The time to allocate this much host memory.
    pub fn host_alloc_time(&self, bytes: Bytes, pinned: bool) -> Nanos {
        let price = if pinned {
            &self.pinned_alloc_per_mib
        } else {
            &self.pageable_alloc_per_mib
        };
        scaled(price.value, bytes, Bytes::mib(1))
    }

    /// The time of a copy of this many bytes between host and device.
    pub fn copy_time(&self, bytes: Bytes, pinned: bool) -> Nanos {
        let price = if pinned {
            &self.pinned_copy_per_gib
        } else {
            &self.pageable_copy_per_gib
        };
        scaled(price.value, bytes, Bytes::gib(1))
    }
}

fn by_size(base: Nanos, per_mib: Nanos, size: Bytes) -> Nanos {
    Nanos(
        base.0
            .saturating_add(scaled(per_mib, size, Bytes::mib(1)).0),
    )
}

/// The cost of `size` at a price per `unit`, rounded down to whole nanoseconds.
fn scaled(price: Nanos, size: Bytes, unit: Bytes) -> Nanos {
    let nanos = u128::from(size.0) * u128::from(price.0) / u128::from(unit.0);
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
