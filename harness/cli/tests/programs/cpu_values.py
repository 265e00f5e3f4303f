# Decisions by values, which `--values cpu` makes the same as on a GPU.
import json, torch, torch.nn.attention.flex_attention

numbers = torch.arange(10, device="cuda")
found = {"masked": numbers[numbers % 3 == 0].tolist(), "mean": numbers.float().mean().item(), "printed": str(numbers)}
found["unique"] = torch.unique(torch.tensor([3, 1, 3], device="cuda")).tolist()

torch.manual_seed(0)
random = torch.rand(1).item()
model = torch.nn.Linear(4, 1)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[1.0, -1.0, 2.0, 0.0]]))
    model.bias.zero_()
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
found["losses"] = []
while found["losses"][-1:] != [0.0] and len(found["losses"]) < 5:  # Zeros would end it at once.
    optimizer.zero_grad()
    loss = (model(torch.ones(8, 4, device="cuda")) - 1).square().mean()
    loss.backward()
    optimizer.step()
    found["losses"].append(round(loss.item(), 4))
# Random numbers of the GPU do not change those of the CPU.
torch.manual_seed(0)
torch.rand(5, device="cuda")
found["same_random"] = torch.rand(1).item() == random
# Checks of values on the GPU do not raise errors.
found["exponential"] = torch.linalg.matrix_exp(torch.zeros(8, 5, 5, device="cuda")).sum().item()
# Large tensors have values too.
large = torch.ones(1 << 20, device="cuda")
found["large"] = [large.sum().item(), large[:1].item()]
# What no kernel has written is zero.
del large
found["empty"] = torch.empty(1 << 20, device="cuda").sum().item()
# Nested and quantized tensors are not computed.
nested = torch.nested.nested_tensor([torch.ones(3, 4, device="cuda"), torch.ones(5, 4, device="cuda")])
quantized = torch.quantize_per_tensor(torch.ones(4, device="cuda"), 0.1, 0, torch.quint8)
queries = torch.ones(1, 2, 16, 8, device="cuda")
attention = torch.nn.attention.flex_attention.flex_attention(queries, queries, queries)
found["shapes"] = [list(tensor.shape) for tensor in (nested.to_padded_tensor(0.0), quantized.dequantize(), attention)]
# Torch checks arguments by their values.
normal = torch.distributions.Normal(torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"))
found["repeated"] = torch.repeat_interleave(torch.tensor([2, 0, 1], device="cuda")).tolist()
found["sampled"] = bool((normal.sample() != 0).all())
# Sparse tensors, and complex tensors that are conjugated only when they are read.
sparse = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [3.0, 4.0, 5.0], (2, 3), device="cuda", requires_grad=True)
products = sparse @ torch.arange(3.0, device="cuda").unsqueeze(1), sparse.detach().to_dense().to_sparse_csr() @ torch.ones(3, device="cuda")
products[0].sum().backward()
columns = sparse.detach().to_dense().to_sparse_csc()
products = *products, (columns + columns).to_dense()
found["sparse"] = [product.flatten().tolist() for product in (*products, sparse.detach().coalesce().values(), sparse.grad.to_dense())]
waves = torch.fft.rfft(torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"))
found["correlated"] = torch.fft.irfft(waves.conj() * waves).tolist()
# Subclasses of tensors.
marked = torch.arange(4.0, device="cuda").as_subclass(type("Marked", (torch.Tensor,), {}))
found["marked"] = [(marked * 2).sum().item(), marked[marked > 1].tolist(), type(marked * 2).__name__]
# Operations that differ between the CPU and the GPU.
inputs = torch.zeros(2, device="cuda", requires_grad=True)
torch.nn.functional.logsigmoid(inputs).sum().backward()
image, grid = torch.arange(4.0, device="cuda").view(1, 1, 2, 2), torch.zeros(1, 1, 1, 2, device="cuda", requires_grad=True)
sampled = torch.nn.functional.grid_sample(image, grid, align_corners=True)
sampled.sum().backward()
counts = torch.histc(torch.tensor([0, 1, 1, 3], device="cuda"), bins=4, min=0, max=3)
found["different"] = [tensor.flatten().tolist() for tensor in (inputs.grad, sampled, grid.grad, counts)]
# Gradients that the CPU has in single precision only.
found["half"] = []
for normalize in (lambda rows: torch.nn.functional.layer_norm(rows, (4,)), lambda rows: torch.nn.functional.batch_norm(rows.view(4, 2), None, None, training=True)):
    rows = torch.tensor([[0.0, 1.0, 2.0, 5.0], [4.0, 1.0, 0.0, 3.0]], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (normalize(rows) ** 3).sum().backward()
    found["half"].append(rows.grad.tolist())
# Bags, whose backward pass needs more of the forward pass on the GPU, and a view with an offset in its storage.
table = torch.arange(8.0, device="cuda").view(4, 2).requires_grad_()
indices, starts = torch.tensor([1, 2, 2, 3], device="cuda"), torch.tensor([0, 0, 3], device="cuda")
torch.nn.functional.embedding_bag(indices, table, starts, mode="max").sum().backward()
found["bags"] = [table.grad.tolist(), torch.as_strided_copy(table.detach()[1:], (2,), (2,), 1).tolist()]
# Operations that read numbers of the GPU, on which their own allocations depend: how many allocations, of how many bytes.
matrix = torch.eye(40, device="cuda")
entries, twice = matrix.to_sparse(), torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 3]], [1.0, 2.0, 3.0], (40, 40), device="cuda")
embedding = torch.nn.Embedding(50, 4, sparse=True).cuda()
long = torch.arange(4000, device="cuda") // 3
found["read"] = {}
for name, run in {
    "bincount": lambda: torch.bincount(long),
    "mode": lambda: long.view(1, -1).expand(2, -1).mode(-1),
    "rows": lambda: matrix[long % 3].unique(dim=0),
    "to_sparse": lambda: [matrix.to_sparse(), matrix.to_sparse_csr()],
    "sum": lambda: (entries + entries).coalesce(),
    "product": lambda: twice @ matrix,
    "exponential": lambda: torch.linalg.matrix_exp(matrix),
    "isin": lambda: torch.isin(long, long[:200]),
    "softmax": lambda: torch.sparse.softmax(entries, 1),
    "embedding": lambda: embedding(long % 50).sum().backward(),
}.items():
    before, result, after = torch.cuda.memory_stats(), run(), torch.cuda.memory_stats()
    found["read"][name] = [after[key] - before[key] for key in ("allocation.all.allocated", "requested_bytes.all.allocated")]
# Repeated small operations run without Python, which runs each at most twice. The numbers stay those of the CPU.
import collections, harness_cpu_values
in_python, run = collections.Counter(), harness_cpu_values._Values.run
harness_cpu_values._Values.run = lambda values, is_outer, original, kind, *arguments: (in_python.update([kind.name]), run(values, is_outer, original, kind, *arguments))[1]
def train(device):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.LayerNorm(36), torch.nn.Linear(36, 5)
    model, targets = torch.nn.Sequential(*layers).to(device), torch.arange(6).to(device) % 5
    optimizer, images = torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(6, 1, 5, 5).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            logits = torch.cat([model(images), model(images)])
        waves = torch.view_as_complex(torch.stack([logits.float()] * 2, -1)).conj()
        (torch.nn.functional.cross_entropy(logits.float(), targets.repeat(2)[torch.arange(12, device=device)]) + waves.imag.square().mean()).backward()
        optimizer.step()
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
trained = train("cpu"), train("cuda")
found["without_python"] = [abs(trained[0] - trained[1]) < 1e-3 * trained[0], sorted(name for name, count in in_python.items() if count > 8)]
# Between two masks, a tensor comes from the host: the library never runs the mask's operation without its number.
pair, found["masks"] = torch.ones(2, device="cuda"), []
for _ in range(5):
    mask = pair > 0
    torch.tensor(0.0, device="cuda")
    found["masks"].append(pair[mask].numel())
# An operation that PyTorch lacks for sparse tensors ends with PyTorch's own error.
found["errors"] = []
for operation in (torch.cumsum, torch.flip):
    for values in (matrix, matrix, matrix, entries):
        try:
            operation(values, [0] if operation is torch.flip else 0)
        except RuntimeError as error:
            found["errors"].append(type(error).__name__)
# A GPU ends a program that reads beyond a table.
try:
    torch.nn.functional.embedding(torch.tensor([9], device="cuda"), torch.ones(3, 3, device="cuda"))
except IndexError as error:
    found["errors"].append(type(error).__name__)
# The tensors of a padded batch are nested.
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
sequences, is_padding = torch.randn(2, 3, 16), torch.tensor([[False, False, True], [False, True, True]])
with torch.no_grad():
    expected = encoder(sequences, src_key_padding_mask=is_padding)
    encoded = encoder.cuda()(sequences.cuda(), src_key_padding_mask=is_padding.cuda())
found["nested"] = torch.allclose(encoded.cpu(), expected, atol=1e-5)
print(json.dumps(found))
