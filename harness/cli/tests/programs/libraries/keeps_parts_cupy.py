# Adds squares in parts. After an out-of-memory error it frees the memory pool and adds the part again. Its mistake: the list of failed parts keeps an
# array of each, so every error costs memory until the end.
import cupy

total, failed = cupy.zeros(()), []
for part in range(4):
    values = cupy.full(16 << 20, part, cupy.float32)
    try:
        total += cupy.square(values).sum()
    except cupy.cuda.memory.OutOfMemoryError:
        failed.append((part, values))
        cupy.get_default_memory_pool().free_all_blocks()
        total += cupy.dot(values, values)
    del values
print("parts", part + 1, "failed", len(failed))
