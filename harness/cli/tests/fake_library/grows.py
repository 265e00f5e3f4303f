import cupy

for mib in (8, 16):
    for attempt in range(3):
        try:
            cupy.Array((mib << attempt) << 20).fill()
            break
        except cupy.OutOfMemoryError:
            print("retry", attempt)
