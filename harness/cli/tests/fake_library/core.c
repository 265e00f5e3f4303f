/* The allocator of a library: it requests smaller amounts before it gives up. */
extern int cudaMalloc(void **, unsigned long), cudaFree(void *), cudaMemset(void *, int, unsigned long);

int allocate(void **at, unsigned long size) {
    for (int retry = 0; retry < 4; retry++) {
        if (cudaMalloc(at, size) == 0)
            return 0;
        size -= size / 8;
    }
    return 1;
}

int release(void *at) { return cudaFree(at); }

int fill(void *at, unsigned long size) { return cudaMemset(at, 1, size); }
