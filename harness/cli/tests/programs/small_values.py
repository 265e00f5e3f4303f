# values of small tensors, which are computed although kernels are no-ops
import json, torch

cuda = dict(device="cuda")
a, b = torch.tensor([1.0, 2, 3], **cuda), torch.arange(3, **cuda)  # The first operation begins with the GPU.
found = {"made": [torch.ones((), **cuda).item(), torch.full((2,), 3.0, **cuda).tolist(), b.tolist(), torch.eye(2, **cuda).tolist(), torch.linspace(0, 1, 3, **cuda).tolist()]}
found["computed"] = [(a + b).tolist(), (a * 2).sum().item(), (a > 1).tolist(), a.mean().item(), a.max(0).indices.item(), a.sort(descending=True).values.tolist()]
found["cast"] = [a.to(torch.int64).tolist(), a.half().tolist(), torch.zeros(3, dtype=torch.bfloat16, **cuda).add(1).tolist()]
found["indexed"] = [a[1:].tolist(), a[b > 0].tolist(), a[[2, 0]].tolist(), torch.nonzero(a > 1).tolist(), torch.where(a > 1, a, -a).tolist(), torch.cat([a, a.flip(0)]).tolist()]
found["views"] = [a[None].expand(2, 3).sum(1).tolist(), torch.tensor([[1, 2], [3, 4]], **cuda).T.reshape(-1).tolist(), [value.ceil().item() for value in a / 2], a.tolist()]
found["branches"] = [torch.equal(a, a.clone()), torch.allclose(a, a), bool((a == a).all()), bool(torch.isfinite(a).all()), str(a)]
changed = a.clone()
changed.add_(1).masked_fill_(changed > 3, 0.0)
changed[0] = 7
changed[changed == 0] = 5
found["changed"] = [changed.tolist(), (a @ a).item()]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        found["gradient"] = torch.equal(gradient, torch.tensor(1.0, **cuda))
        return gradient.expand(4)


Sum.apply(torch.zeros(4, requires_grad=True, **cuda)).backward()
for foreach in (False, True):
    parameter = torch.ones(4, requires_grad=True, **cuda)
    optimizer = torch.optim.Adam([parameter], lr=0.5, capturable=True, foreach=foreach)
    (parameter * 3).sum().backward()
    optimizer.step()
    found["foreach" if foreach else "optimizer"] = [round(parameter[0].item(), 3), optimizer.state[parameter]["step"].item()]


def forms(device):
    """Results of operations with each type of argument and result."""
    one, many = torch.ones(1, device=device), torch.arange(4.0, device=device)
    index = torch.tensor([1], device=device)
    functions = torch.nn.functional
    found = [
        torch.clamp(one * 5, 1, max=3), functions.elu(-one, 0.5), one.add(torch.tensor(2.5)), torch.var(many, correction=0), torch.softmax(many, 0, dtype=torch.float64),
        torch.sum(many.view(2, 2), dim=[0], dtype=torch.float64), *torch.topk(many, 2), torch.std_mean(many)[1], torch.norm(many, p=2),
        torch._foreach_norm([one * 3, one * 4])[1], torch._foreach_mul([one], [2.0])[0], torch.addcmul(one, one, one, value=True), torch.lerp(one, one * 3, 0.5),
        torch.threshold(one, 2, 7), torch.searchsorted(many, one, right=True), torch.histc(many, 2, 0, 3), torch.nan_to_num(one / 0, nan=1.0, posinf=2.0),
        torch.index_add(many, 0, index, one, alpha=2), torch.scatter(many, 0, index, 9.0), functions.softplus(one, beta=2.0, threshold=1.0),
    ]
    return [tensor.cpu().tolist() for tensor in found]


found["forms"] = forms("cuda") == forms("cpu")


def counted(device):
    """Counters and fills of each type."""
    types = torch.int64, torch.int32, torch.float64, torch.float32, torch.float16, torch.bool, torch.complex64
    found = [torch.full((3,), -1, device=device, dtype=of).fill_(number) for of in types for number in (3, 2.5, True) if of.is_floating_point or number != 2.5]
    many = torch.zeros(4, 4, dtype=torch.int64, device=device)
    many[:, 1].fill_(7)
    counter = torch.tensor(2**63 - 2, device=device)
    counter.add_(1).add_(torch.tensor(2), alpha=-3).add_(counter, alpha=2)
    ones = torch.ones(1, 1, dtype=torch.int64, device=device).add_(torch.tensor([5], device=device))
    return [tensor.cpu().tolist() for tensor in (*found, many, counter, ones, torch.ones(2, 3, device=device).t().zero_())]


found["counted"] = counted("cuda") == counted("cpu")


def lists(device):
    """Operations on lists with tensors that are not known: they have no part in the results at other indices."""
    large = torch.zeros(100, device=device)
    new = lambda: [torch.ones(3, device=device), large.clone(), torch.full((2,), 2.0, device=device)]
    changed, other, optimized = new(), new(), new()
    torch._foreach_add_(changed, [1.0, 2.0, 3.0])
    torch._foreach_mul_(changed, torch._foreach_add(other, changed, alpha=2))
    torch._foreach_addcmul_(changed, other, changed, [1.0, 2.0, 3.0])
    zeroed, copied = new(), [torch.empty(3, device=device), torch.empty(100, device=device)]
    torch._foreach_zero_(zeroed)
    torch._foreach_copy_(copied, [torch.arange(3), torch.arange(100)])
    parameters = [tensor.requires_grad_() for tensor in optimized]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 2
        optimizer.step()
    norms = torch._foreach_norm(changed)
    return [tensor.cpu().tolist() for tensor in (changed[0], changed[2], zeroed[0], zeroed[2], *copied, norms[0], norms[2], parameters[2].detach())]


found["lists"] = lists("cuda") == lists("cpu")
# Exceptions pass through operations on small tensors.
found["errors"] = 0
for fail in (lambda: a[:1].expand(1 << 33) + a[:1], lambda: torch._foreach_add([a, torch.empty(1 << 33, **cuda)], 1.0), lambda: a.view(2), lambda: a + torch.ones(2, **cuda)):
    try:
        fail()
    except RuntimeError:
        found["errors"] += 1
# The results of large tensors and some random numbers are not known, and a result in memory of an earlier tensor is not that tensor.
for name, make in {"large": lambda: torch.ones(100, **cuda).sum(), "random": lambda: torch.poisson(torch.ones((), **cuda))}.items():
    earlier = torch.full((), 7.0, **cuda)
    del earlier
    found[name] = make().item() == 7
# A kernel copies between layouts, so the known part of a large tensor is not known afterwards.
large = torch.zeros(64, 64, **cuda)
large[0, 2:4] = torch.tensor([1.0, 2.0], **cuda)
large.copy_(torch.full((64, 64), 7.0, **cuda).t().contiguous().t())
found["kept"] = large[0, 2:4].tolist() == [1.0, 2.0]
# Copies of larger tensors are known too.
many = torch.arange(100).cuda()
found["copied"] = [copy.tolist() == list(range(100)) for copy in (many, many.clone())]
# Copies from the CPU too, also into a part of an earlier copy and over parts.
whole = torch.full((2767,), 5, dtype=torch.uint8).cuda()
whole[:223].copy_(torch.full((223,), 7, dtype=torch.uint8))
found["reused"] = [whole.tolist() == [7] * 223 + [5] * 2544]
found["reused"].append(whole.copy_(torch.full((2767,), 9, dtype=torch.uint8)).tolist() == [9] * 2767)
# If a kernel ends such a copy, the earlier values are not known afterwards.
ones = torch.ones(100, 100)
for change in (lambda to: to.t().copy_(ones), lambda to: to[:, ::2].copy_(ones[:, ::2]), lambda to: to.copy_(ones.double().pin_memory(), non_blocking=True)):
    to = torch.full((100, 100), 5.0).to("cuda")
    change(to)
    found["reused"].append(to[0, 0].item() != 5)
allocated = torch.cuda.memory_allocated()
for _ in range(100):
    torch._foreach_mul_([a, changed], torch._foreach_sqrt([a])[0].sum().item())
    torch.equal(a, changed), a[b > 0], changed.add_(a), torch.ones(100, **cuda) * a[0]
found["leaked"] = torch.cuda.memory_allocated() - allocated
print(json.dumps(found))
