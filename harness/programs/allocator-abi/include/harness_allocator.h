/* The allocators of the harness as a shared library, libharness_allocator_abi.so: PyTorch's caching allocator (harness_caching_*), TensorFlow's
 * best-fit-with-coalescing allocator (harness_bfc_*) and RMM's pool (harness_rmm_pool_*).
 *
 * *_malloc and *_free are the two functions of torch.cuda.memory.CUDAPluggableAllocator. Memory comes from the CUDA driver, in the primary context of
 * the device, which the CUDA runtime uses too. Any thread may call any function; the thread's current device does not change. A cache hit makes no
 * driver call. A stream is any CUstream or cudaStream_t of that context except the per-thread default stream; null is the default stream.
 *
 * The first call for a device reads the environment:
 *   HARNESS_ALLOCATOR_CONF    settings of harness_caching_*, as in PYTORCH_CUDA_ALLOC_CONF, for example expandable_segments:True
 *   HARNESS_BFC_CONF          allow_growth:True|False, garbage_collection:True|False, memory_limit_mb:N
 *   HARNESS_RMM_POOL_CONF     initial_pool_size_mb:N, maximum_pool_size_mb:N
 *   HARNESS_ALLOCATOR_RECORD  1: records all calls for *_snapshot
 */
#ifndef HARNESS_ALLOCATOR_H
#define HARNESS_ALLOCATOR_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *harness_stream;

/* Allocates memory for work on the stream. Returns null if there is none: a MemPool then raises torch.OutOfMemoryError, but CUDAPluggableAllocator
 * does not check, and the tensor gets the address 0. A request of 0 bytes returns null without an error. */
void *harness_caching_malloc(ssize_t size, int device, harness_stream stream);
void *harness_bfc_malloc(ssize_t size, int device, harness_stream stream);
void *harness_rmm_pool_malloc(ssize_t size, int device, harness_stream stream);

/* Frees memory. Work on the stream of its allocation may still use it. Ignores null, and ignores size and stream. */
void harness_caching_free(void *address, ssize_t size, int device, harness_stream stream);
void harness_bfc_free(void *address, ssize_t size, int device, harness_stream stream);
void harness_rmm_pool_free(void *address, ssize_t size, int device, harness_stream stream);

/* Records that work on another stream uses the memory too. The allocator waits for that work before it reuses the memory. For set_record_stream_fn:
 * without it PyTorch ignores Tensor.record_stream. */
void harness_caching_record_stream(void *address, harness_stream stream);
void harness_bfc_record_stream(void *address, harness_stream stream);
void harness_rmm_pool_record_stream(void *address, harness_stream stream);

/* Call it before you destroy a stream: waits for its work and frees the memory cached for it. Returns 0, or -1 on failure. */
int harness_caching_release_stream(int device, harness_stream stream);
int harness_bfc_release_stream(int device, harness_stream stream);
int harness_rmm_pool_release_stream(int device, harness_stream stream);

/* Returns the cached memory of all devices to the driver. For set_reset_fn, which torch.cuda.empty_cache() calls. */
void harness_caching_empty_cache(void);
void harness_bfc_empty_cache(void);
void harness_rmm_pool_empty_cache(void);

/* Limits the reserved memory to a fraction of the device's memory, from 0 to 1. For set_memory_fraction_fn. */
void harness_caching_set_memory_fraction(double fraction, int device);
void harness_bfc_set_memory_fraction(double fraction, int device);
void harness_rmm_pool_set_memory_fraction(double fraction, int device);

/* Writes the statistics as JSON, with the names of torch.cuda.memory_stats(): as much as fits, with a final NUL. Returns the length of the whole
 * text without the NUL, or 0 on failure. */
size_t harness_caching_stats(int device, char *text, size_t capacity);
size_t harness_bfc_stats(int device, char *text, size_t capacity);
size_t harness_rmm_pool_stats(int device, char *text, size_t capacity);

/* Writes a memory snapshot with its history, as torch.cuda.memory._dump_snapshot does, for `harness explain` and PyTorch's viewers. Returns 0, or -1 on
 * failure. Requires HARNESS_ALLOCATOR_RECORD=1. */
int harness_caching_snapshot(int device, const char *path);
int harness_bfc_snapshot(int device, const char *path);
int harness_rmm_pool_snapshot(int device, const char *path);

/* The reason of the calling thread's last failure, empty if there was none. Valid until its next failure. */
const char *harness_allocator_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
