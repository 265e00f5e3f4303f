/* A small caching allocator with the interface of PyTorch's CUDAPluggableAllocator. It rounds requests up to powers of two and keeps freed blocks for
   later requests of the same size on the same stream. Building it needs neither a GPU nor CUDA's headers:

     cc -shared -fPIC -O2 -o scenarios/libraries/bins.so scenarios/libraries/bins.c */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/types.h>

extern int cudaMalloc(void **address, size_t size);
extern int cudaFree(void *address);

struct block {
  void *address, *stream;
  size_t size;
  struct block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *cached;

static size_t rounded(size_t size) {
  size_t power = 512;
  while (power < size) power *= 2;
  return power;
}

/* Removes a block of this size and stream from the cache. */
static void *take(size_t size, void *stream) {
  for (struct block **at = &cached; *at; at = &(*at)->next) {
    struct block *block = *at;
    if (block->size != size || block->stream != stream) continue;
    void *address = block->address;
    *at = block->next;
    free(block);
    return address;
  }
  return NULL;
}

static void give_back_all(void) {
  while (cached) {
    struct block *block = cached;
    cached = block->next;
    cudaFree(block->address);
    free(block);
  }
}

void *bins_malloc(ssize_t size, int device, void *stream) {
  (void)device;
  size_t bytes = rounded((size_t)size);
  pthread_mutex_lock(&lock);
  void *address = take(bytes, stream);
  if (!address && cudaMalloc(&address, bytes) != 0) {
    give_back_all();
    if (cudaMalloc(&address, bytes) != 0) address = NULL;
  }
  pthread_mutex_unlock(&lock);
  return address;
}

void bins_free(void *address, ssize_t size, int device, void *stream) {
  (void)device;
  struct block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  if (block) {
    *block = (struct block){address, stream, rounded((size_t)size), cached};
    cached = block;
  } else {
    cudaFree(address);
  }
  pthread_mutex_unlock(&lock);
}

void bins_empty_cache(void) {
  pthread_mutex_lock(&lock);
  give_back_all();
  pthread_mutex_unlock(&lock);
}
