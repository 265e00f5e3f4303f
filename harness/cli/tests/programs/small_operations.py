# Operations on small tensors, each on the CPU and on the GPU: equal, close (other roundings), unknown (the read is counted), or wrong. Prints how many there
# are of each, and those that differ from small_operations.tsv. With `update`, it writes that table.
import collections, ctypes, json, pathlib, sys, warnings, torch

F = torch.nn.functional
warnings.simplefilter("ignore")
TABLE = pathlib.Path(__file__).with_suffix(".tsv")


def result(d, code):
    """The tensors that an expression gives on a device."""
    torch.manual_seed(7)
    x, i = torch.tensor([1.0, 2, 3, 4, 5, 6]).to(d), torch.tensor([3, 1, 1, 0, 5]).to(d)
    m = torch.tensor([[1.0, 2, 4], [3, 0, 1], [2, 2, 2], [5, 1, 3]]).to(d)
    s = torch.tensor([[4.0, 1, 0], [1, 3, 1], [0, 1, 2]]).to(d)

    def grad(function, value):
        value = value.clone().requires_grad_()
        function(value).backward()
        return value.grad

    def step(optimizer, **options):
        parameter = torch.nn.Parameter(x.clone())
        optimizer = optimizer([parameter], **options)

        def loss():
            optimizer.zero_grad()
            loss = (parameter * parameter).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(loss)
        return parameter.detach()

    def statistics():
        norm = torch.nn.BatchNorm1d(3).to(d)
        norm(m)
        return norm.running_mean, norm.running_var, norm.num_batches_tracked

    def gradients_of_convolution():
        convolution = torch.nn.Conv1d(4, 2, 2).to(d)
        for parameter in convolution.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        convolution(m.view(1, 4, 3)).pow(2).sum().backward()
        return convolution.weight.grad, convolution.bias.grad

    def tensors(value):
        if isinstance(value, (tuple, list)):
            return [tensor for element in value for tensor in tensors(element)]
        return [value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)]

    return tensors(eval(code, globals() | locals()))


def is_alike(found, expected, is_same):
    return len(found) == len(expected) and all(a.dtype == b.dtype and a.shape == b.shape and is_same(a, b) for a, b in zip(found, expected))


def is_equal(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())


def is_close(a, b):
    return torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True)


reads = []
note = ctypes.CFUNCTYPE(None)(lambda: reads.append(None))
torch.ones(1, device="cuda")
library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "harness_simulated_gpu" in line))
library.harness_reads_hook(note)
rows, found = [line.split("\t") for line in TABLE.read_text().splitlines()], []
for _, name, code in rows:
    expected = result("cpu", code)
    reads.clear()
    try:
        values = result("cuda", code)
        alike = [is_alike(values, expected, is_same) for is_same in (is_equal, is_close)]
        state = "unknown" if reads else ["wrong", "close", "equal"][sum(alike)]
    except Exception as error:
        state = "unknown" if reads else type(error).__name__
    found.append((state, name, code))
library.harness_reads_hook(None)
if sys.argv[1:] == ["update"]:
    TABLE.write_text("".join("\t".join(row) + "\n" for row in found))
differ = {name: state for (state, name, _), row in zip(found, rows) if state != row[0]}
print(json.dumps({**dict(sorted(collections.Counter(state for state, *_ in found).items())), "differ": differ}))
