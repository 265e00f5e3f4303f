import cupy

MIB = 1 << 20


def step(size):
    try:
        cupy.Array(size).fill()
    except cupy.OutOfMemoryError:
        for _ in range(2):
            cupy.Array(size // 2).fill()


for size in (8 * MIB, 16 * MIB):
    step(size)
