# Multiplies matrices, in two halves if memory runs out. Its mistake: JAX raises JaxRuntimeError, which is no MemoryError.
import jax
import jax.numpy as np


def product(a, b):
    try:
        return jax.block_until_ready(a @ b)
    except MemoryError:
        half = a.shape[0] // 2
        return np.concatenate([a[:half] @ b, a[half:] @ b])


a = jax.block_until_ready(np.ones((2048, 2048)))
for _ in range(3):
    a = product(a, a)
print("shape", a.shape)
