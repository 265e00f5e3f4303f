# Runs many functions of torch once and prints the groups that end with an error. Only torch itself reads values.
import contextlib, io, json, warnings
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

warnings.simplefilter("ignore")
families = {}


def family(run):
    families[run.__name__] = run


def normal(*shape, dtype=None):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def ones(*shape, dtype=None):
    return torch.ones(*shape, device="cuda", dtype=dtype)


def integers(high, *shape):
    return torch.randint(high, shape, device="cuda")


def train(module, *inputs):
    result = module.cuda()(*inputs)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


@family
def workers():
    # Before other groups: a forked worker has no CUDA, and freeing memory that other streams use needs an event.
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
    for (batch,) in torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True):
        batch.cuda(non_blocking=True)


@family
def decompositions():
    torch.linalg.svd(normal(64, 32))
    torch.linalg.qr(normal(64, 32))
    torch.linalg.eigh(normal(32, 32))
    torch.linalg.cholesky(torch.eye(32, device="cuda"))
    torch.linalg.inv(normal(16, 8, 8))
    torch.linalg.solve(normal(32, 32), normal(32, 4))
    torch.linalg.lstsq(normal(32, 8), normal(32, 4))


@family
def eigenvalues():
    torch.linalg.eig(normal(16, 16))


@family
def fourier():
    torch.fft.rfft2(normal(8, 64, 64))
    torch.fft.irfft(torch.fft.rfft(normal(8, 100)))
    torch.stft(normal(2, 4000), 256, window=torch.hann_window(256, device="cuda"), return_complex=True)


@family
def sparse():
    torch.sparse.mm(torch.sparse_coo_tensor(integers(3, 2, 3), ones(3), (3, 3)), normal(3, 4))
    torch.sparse_csr_tensor(torch.arange(4, device="cuda"), torch.arange(3, device="cuda"), ones(3), (3, 3)) @ normal(3, 4)


@family
def attention():
    for backend, dtype in [
        (SDPBackend.FLASH_ATTENTION, torch.float16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
        (SDPBackend.MATH, torch.float32),
    ]:
        queries = normal(2, 8, 128, 64, dtype=dtype).requires_grad_()
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(queries, queries, queries, is_causal=True).sum().backward()
    train(nn.MultiheadAttention(64, 4, batch_first=True), *[normal(2, 10, 64)] * 3)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).cuda().eval()
    with torch.no_grad():
        encoder(normal(2, 10, 64), src_key_padding_mask=torch.zeros(2, 10, dtype=torch.bool, device="cuda"))


@family
def convolutions():
    train(nn.Conv1d(4, 8, 3, groups=4), normal(2, 4, 20))
    train(nn.Conv2d(8, 8, 3, groups=8, dilation=2), normal(2, 8, 20, 20))
    train(nn.Conv3d(3, 8, 3), normal(2, 3, 8, 8, 8))
    train(nn.ConvTranspose2d(8, 3, 3, stride=2), normal(2, 8, 8, 8))
    train(nn.Conv2d(8, 16, 3).half(), normal(2, 8, 20, 20, dtype=torch.half))
    train(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), normal(2, 8, 20, 20).to(memory_format=torch.channels_last))
    with torch.backends.cudnn.flags(benchmark=True):
        train(nn.Conv2d(8, 16, 3), normal(2, 8, 20, 20))


@family
def recurrent():
    for module in [nn.RNN(16, 32), nn.GRU(16, 32, 2), nn.LSTM(16, 32, bidirectional=True), nn.LSTM(16, 32, proj_size=8)]:
        train(module, normal(5, 2, 16))
    packed = nn.utils.rnn.pack_padded_sequence(normal(4, 10, 16), torch.tensor([10, 8, 5, 2]), batch_first=True)
    output, _ = nn.LSTM(16, 32, batch_first=True).cuda()(packed)
    nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0].sum().backward()


@family
def norms_and_pools():
    for module in [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm(4), nn.RMSNorm(4)]:
        train(module, normal(2, 8, 4, 4))
    F.adaptive_avg_pool2d(F.max_pool2d(normal(2, 3, 8, 8), 2), 3)
    F.interpolate(normal(2, 3, 8, 8), scale_factor=2, mode="bilinear")
    F.grid_sample(normal(2, 3, 8, 8), normal(2, 5, 5, 2), align_corners=False)


@family
def embeddings_and_losses():
    train(nn.EmbeddingBag(100, 16), integers(100, 20), torch.tensor([0, 5, 10], device="cuda"))
    F.cross_entropy(normal(8, 10).requires_grad_(), integers(10, 8)).backward()
    for loss in [F.binary_cross_entropy_with_logits, F.kl_div, F.smooth_l1_loss, F.mse_loss]:
        loss(normal(4), ones(4))
    F.triplet_margin_loss(*[normal(4, 3)] * 3)


@family
def ctc_loss():
    F.ctc_loss(normal(50, 4, 20).log_softmax(2).requires_grad_(), integers(20, 4, 10), torch.full((4,), 50), torch.full((4,), 10)).backward()


@family
def products():
    torch.einsum("bij,bjk->bik", normal(2, 3, 4), normal(2, 4, 5))
    torch.baddbmm(normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5))
    torch.addmv(normal(3), normal(3, 4), normal(4))
    torch.cdist(normal(5, 3), normal(6, 3))
    for dtype in [torch.double, torch.complex64, torch.bfloat16]:
        normal(4, 4).to(dtype) @ normal(4, 4).to(dtype)
    torch._int_mm(*[ones(32, 32, dtype=torch.int8)] * 2)
    eighths, one = ones(32, 32).to(torch.float8_e4m3fn), torch.tensor(1.0, device="cuda")
    torch._scaled_mm(eighths, eighths.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@family
def optimizers():
    names = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD".split()
    for optimizer, options in [(getattr(torch.optim, name), {}) for name in names] + [(torch.optim.AdamW, {"fused": True})]:
        model = nn.Linear(64, 64).cuda()
        stepping = optimizer(model.parameters(), **options)
        model(normal(8, 64)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()


@family
def shapes_by_values():
    numbers = normal(100)
    numbers.nonzero(), numbers[numbers > 0], torch.where(numbers > 0), torch.masked_select(numbers, numbers > 0)
    torch.unique(integers(5, 100)), torch.bincount(integers(5, 10))


@family
def repeats_by_values():
    torch.repeat_interleave(torch.tensor([2, 0, 1], device="cuda"))


@family
def orders_and_indices():
    numbers = normal(10, 1000)
    numbers.sort(), numbers.topk(5), numbers.kthvalue(3), numbers.median(), numbers.mode(), numbers.cumsum(0), numbers.cummax(0), numbers.histc()
    numbers.index_select(0, integers(10, 2)), numbers.gather(1, integers(10, 10, 1)), torch.zeros(5, device="cuda").scatter_add_(0, integers(5, 2), ones(2))
    torch.roll(numbers, 1), torch.flip(numbers, [0]), torch.tril(numbers), torch.linspace(0, 1, 5, device="cuda")


@family
def random_numbers():
    torch.multinomial(ones(10), 3), torch.randperm(100, device="cuda"), torch.bernoulli(ones(4)), torch.poisson(ones(4)), F.dropout(ones(100))
    torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3)), torch.cuda.get_rng_state()


@family
def distributions():
    torch.distributions.Normal(normal(3), ones(3)).sample()
    torch.distributions.Categorical(logits=normal(3, 4)).sample()
    torch.distributions.Gamma(ones(3), ones(3)).sample()


@family
def special_functions():
    # These kernels are compiled at their first call.
    torch.special.zeta(ones(3) * 2, ones(3)), torch.special.bessel_j0(normal(3)), torch.lgamma(normal(3))
    torch.cuda.jiterator._create_jit_fn("template <typename T> T square(T a) { return a * a; }")(normal(4))


@family
def nested_and_quantized():
    torch.nested.nested_tensor([normal(3, 4), normal(5, 4)]).to_padded_tensor(0.0)
    (torch.nested.nested_tensor([normal(3, 4), normal(5, 4)], layout=torch.jagged) * 2).sum()
    torch.quantize_per_tensor(ones(10), 0.1, 0, torch.quint8).dequantize()
    torch.fake_quantize_per_tensor_affine(ones(10), 0.1, 0, 0, 255)


@family
def transforms():
    torch.func.vmap(lambda a: a * 2)(normal(3, 4)), torch.func.grad(lambda a: (a**2).sum())(normal(3)), torch.func.jacrev(lambda a: a**2)(normal(3))
    torch.utils.checkpoint.checkpoint(nn.Linear(8, 8).cuda(), normal(2, 8), use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        train(nn.Linear(8, 8), normal(2, 8))
    for backend in ["eager", "aot_eager"]:
        torch.compile(lambda a: a * 2 + 1, backend=backend)(normal(4))


@family
def graphs():
    still, graph = normal(10), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        still * 2 + 1
    graph.replay()
    torch.cuda.make_graphed_callables(nn.Linear(16, 16).cuda(), (normal(4, 16).requires_grad_(),))(normal(4, 16).requires_grad_()).sum().backward()


@family
def streams_and_pools():
    side, [begin, end] = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin.record()
    # Torch 2.4 has no pools.
    with torch.cuda.stream(side), torch.cuda.use_mem_pool(torch.cuda.MemPool()) if hasattr(torch.cuda, "use_mem_pool") else contextlib.nullcontext():
        normal(1000).record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    begin.elapsed_time(end)


@family
def host():
    torch.randn(1000).pin_memory().to("cuda", non_blocking=True).cpu().tolist()
    torch.from_dlpack(normal(3)), str(normal(3)), bool((normal(3) > 100).any())
    model, file = nn.Linear(4, 4).cuda(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location="cuda"))


@family
def figures():
    with torch.profiler.profile() as profile, torch.cuda.profiler.profile():
        normal(100).square()
    profile.key_averages().table()
    torch.cuda.memory_summary(), torch.cuda.mem_get_info(), torch.cuda.memory_snapshot(), torch.cuda.get_device_properties(0)


failed = []
for name, run in families.items():
    try:
        run()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError):
        failed.append(name)
print(json.dumps({"families": len(families), "failed": failed}))
