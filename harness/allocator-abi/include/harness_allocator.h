/* The allocators of the harness as a shared library, libharness_allocator_abi.so: PyTorch's caching allocator (harness_caching_*), TensorFlow's
 * best-fit-with-coalescing allocator (harness_bfc_*) and RMM's pool (harness_rmm_pool_*).
 *
 * *_malloc and *_free are the two functions of torch.cuda.memory.CUDAPluggableAllocator. Memory comes from the CUDA driver, in the primary context of
 * the device, where the CUDA runtime works too. All functions may be called by any thread; the thread's current device stays what it is. A stream is
 * any CUstream or cudaStream_t of that context but the per-thread default stream; null is the default stream.
 *
 * The environment is read once for each device, at the first call:
 *   HARNESS_ALLOCATOR_CONF    settings of harness_caching_*, as in PYTORCH_CUDA_ALLOC_CONF, for example expandable_segments:True
 *   HARNESS_BFC_CONF          allow_growth:True|False, garbage_collection:True|False, memory_limit_mb:N
 *   HARNESS_RMM_POOL_CONF     initial_pool_size_mb:N, maximum_pool_size_mb:N
 *   HARNESS_ALLOCATOR_RECORD  1: what is done is recorded, for *_snapshot; every call then waits for the other threads'
 */
#ifndef HARNESS_ALLOCATOR_H
#define HARNESS_ALLOCATOR_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *harness_stream;

/* Memory for work on the stream, null where there is none. Of a MemPool null becomes torch.OutOfMemoryError; CUDAPluggableAllocator does not look, and
 * the tensor has the address 0. No bytes are null too, without an error. */
void *harness_caching_malloc(ssize_t size, int device, harness_stream stream);
void *harness_bfc_malloc(ssize_t size, int device, harness_stream stream);
void *harness_rmm_pool_malloc(ssize_t size, int device, harness_stream stream);

/* Takes memory back. Work on the stream that it was made for needs no waiting for. Null is passed over. Size and stream are not looked at. */
void harness_caching_free(void *address, ssize_t size, int device, harness_stream stream);
void harness_bfc_free(void *address, ssize_t size, int device, harness_stream stream);
void harness_rmm_pool_free(void *address, ssize_t size, int device, harness_stream stream);

/* Work on another stream uses the memory too, and is waited for before the memory is handed out again. For set_record_stream_fn: without it PyTorch
 * passes Tensor.record_stream over. */
void harness_caching_record_stream(void *address, harness_stream stream);
void harness_bfc_record_stream(void *address, harness_stream stream);
void harness_rmm_pool_record_stream(void *address, harness_stream stream);

/* The stream is about to be destroyed: waits for its work, and what is kept for it goes. 0, or -1 where that failed. */
int harness_caching_release_stream(int device, harness_stream stream);
int harness_bfc_release_stream(int device, harness_stream stream);
int harness_rmm_pool_release_stream(int device, harness_stream stream);

/* Gives the cached memory of all devices back to the driver. For set_reset_fn, which torch.cuda.empty_cache() calls. */
void harness_caching_empty_cache(void);
void harness_bfc_empty_cache(void);
void harness_rmm_pool_empty_cache(void);

/* Limits what is held of the device to a share of its memory, from 0 to 1. For set_memory_fraction_fn. */
void harness_caching_set_memory_fraction(double fraction, int device);
void harness_bfc_set_memory_fraction(double fraction, int device);
void harness_rmm_pool_set_memory_fraction(double fraction, int device);

/* The statistics as JSON, by the names of torch.cuda.memory_stats(): as much of it as there is room for, and a NUL. Returns the length of all of it
 * without the NUL, 0 where it failed. */
size_t harness_caching_stats(int device, char *text, size_t capacity);
size_t harness_bfc_stats(int device, char *text, size_t capacity);
size_t harness_rmm_pool_stats(int device, char *text, size_t capacity);

/* Writes a memory snapshot as torch.cuda.memory._dump_snapshot does, with all that was done, for `harness explain` and PyTorch's viewers. 0, or -1 where
 * that failed; it needs HARNESS_ALLOCATOR_RECORD=1. */
int harness_caching_snapshot(int device, const char *path);
int harness_bfc_snapshot(int device, const char *path);
int harness_rmm_pool_snapshot(int device, const char *path);

/* Why the last call of this thread failed, valid until the next one that does. Empty where none has. */
const char *harness_allocator_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
