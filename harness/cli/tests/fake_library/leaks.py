import cupy

kept = []


def step(size):
    try:
        cupy.Array(size).fill()
    except cupy.OutOfMemoryError:
        kept.append(cupy.Array(size // 2))
        for _ in range(2):
            cupy.Array(size // 4).fill()


for mib in (8, 16):
    step(mib << 20)
