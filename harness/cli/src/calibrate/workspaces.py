"""Measures cuDNN's workspaces: python workspaces.py TABLE [DEVICE] prints the table with measured bytes."""
import json, sys
import torch

def workspace(operation):
    """The memory that an operation needs besides its result."""
    operation()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = operation()
    stats = torch.cuda.memory_stats()
    del result
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]

def measured(row):
    shapes, output = json.loads(row["input_shapes"]), json.loads(row["output_shape"])
    stride, padding, dilation = (json.loads(row[name]) for name in ("stride", "padding", "dilation"))
    kind = getattr(torch, row["dtypes"].removeprefix("torch."))
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(len(output), torch.contiguous_format) if row["layout"] == "channels_last" else torch.contiguous_format
    tensors = [torch.empty(shape, device="cuda", dtype=kind).contiguous(memory_format=layout) for shape in (*shapes, output)]
    image, filters, result = tensors
    # No bias, not transposed, no padding of the output.
    common = (stride, padding, dilation, False, [0] * len(stride), image.shape[1] // filters.shape[1])
    if row["operator"] in ("forward", "aten::convolution"):
        return workspace(lambda: torch.ops.aten.convolution(image, filters, None, *common))
    mask = [row["operator"] == "data_gradient", row["operator"] == "filter_gradient", False]
    return workspace(lambda: torch.ops.aten.convolution_backward(result, image, filters, None, *common, mask))

def main(table, device="0"):
    torch.cuda.set_device(int(device))
    lines = [line.split("\t") for line in open(table).read().splitlines() if line and not line.startswith("#")]
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print("\t".join(lines[0]))
    major, minor = torch.cuda.get_device_capability()
    for line in lines[1:]:
        row = dict(zip(lines[0], line))
        row["bytes"], row["capability"] = measured(row), f"{major}.{minor}"
        print("\t".join(str(row[name]) for name in lines[0]), flush=True)

main(*sys.argv[1:])
