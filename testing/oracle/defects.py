#!/usr/bin/env python3
"""Shows what PyTorch's DistributedDataParallel does where docs/parity.md speaks of a defect.

    defects.py            # all of them, a line for each
    defects.py 3 7        # some

ddp/end_to_end/defects_test.cc has the same cases for ours. Number 14 is about LibTorch's sampler
for C++: sampler_test.cc shows it beside ours.
"""

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ranks  # noqa: E402  (found beside this file)


def one_weight():
    """Its gradient is its input."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


def x_of(rank, scale=1.0):
    return torch.full((1, 1), scale * (rank + 1))


def tell(call):
    """What a call comes to, in a line."""
    try:
        call()
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {ranks.first_line(error)[:160]}"


def second_backward(rank):
    net = one_weight()
    model = DistributedDataParallel(net)
    loss = model(x_of(rank)).sum()
    loss.backward(retain_graph=True)
    said = tell(loss.backward)
    twice = net.weight.grad.item()
    net.weight.grad = None
    first, second = model(x_of(rank)), model(x_of(rank, 10.0))
    first.sum().backward()
    said += "; " + tell(second.sum().backward)
    return f"{said}; gradients {twice} and {net.weight.grad.item()}"


def static_graph_no_sync(rank):
    net = one_weight()
    model = DistributedDataParallel(net, static_graph=True)

    def window():
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()

    return "; ".join(f"window {n}: {tell(window)}, {net.weight.grad.item()}" for n in (1, 2, 3))


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)

    def forward(self, x, use):
        x = self.always(x)
        return self.sometimes(x) if use else x


def stale_used_map(rank):
    net = Optional()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    with model.join():
        for step in range(2 if rank == 0 else 1):
            net.zero_grad(set_to_none=True)
            model(torch.ones(1, 2), step == 0).sum().backward()
    gradient = net.sometimes.weight.grad
    return "undefined" if gradient is None else f"defined, largest {gradient.abs().max().item()}"


def static_graph_zero_iterations(rank):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = DistributedDataParallel(net, static_graph=True)
    start = time.monotonic()

    def loop():
        with model.join():
            for _ in range(3 if rank == 0 else 0):
                model(torch.ones(1, 2)).sum().backward()

    return f"{tell(loop)}, after {time.monotonic() - start:.1f} s"


def rank_0_joins_first(rank):
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    model = DistributedDataParallel(net)
    with model.join():
        for _ in range(3 if rank == 1 else 0):
            model(torch.ones(1, 2)).sum().backward()
    return "buckets " + model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "old")


class Pair(nn.Module):
    def __init__(self, swapped):
        super().__init__()
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, nn.Linear(1, 1, bias=False))

    def forward(self, x):
        return self.a(x) + 100 * self.b(x)


def unchecked_models(rank):
    net = Pair(swapped=rank == 1)
    model = DistributedDataParallel(net)
    model(torch.ones(1, 1)).sum().backward()
    said = f"swapped layers: gradients {net.a.weight.grad.item()} and {net.b.weight.grad.item()}"
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen[rank].requires_grad_(False)
    said += "; other layer frozen: " + tell(lambda: DistributedDataParallel(frozen))
    buffered = nn.Linear(1, 1)
    if rank == 1:
        buffered.register_buffer("extra", torch.zeros(0))
    said += "; extra buffer: " + tell(lambda: DistributedDataParallel(buffered))
    said += "; other flags: " + tell(
        lambda: DistributedDataParallel(one_weight(), gradient_as_bucket_view=rank == 1)
    )
    wide = nn.Linear(64, 64).to(torch.float64 if rank == 0 else torch.float32)
    return said + "; other dtype: " + tell(lambda: DistributedDataParallel(wide))


def unused_on_one_rank(rank):
    model = DistributedDataParallel(Optional())
    start = time.monotonic()

    def steps():
        for _ in range(2):
            model(torch.ones(1, 2), rank == 0).sum().backward()

    return f"{tell(steps)}, after {time.monotonic() - start:.1f} s"


class Throws(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("thrown in the backward")


def exception_in_backward(rank):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = DistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()
    hook = net[0].register_forward_hook(lambda module, args, output: Throws.apply(output))
    first = tell(lambda: model(torch.ones(1, 2)).sum().backward())
    hook.remove()
    return f"{first}; next forward: {tell(lambda: model(torch.ones(1, 2)))}"


def result_of(change):
    """A hook whose result is changed at the end."""

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(change(bucket.buffer()))
        return future

    return hook


def hook_results(rank):
    said = []
    for text, change in (("float64", lambda b: b.double()), ("too small", lambda b: b[:1].clone())):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(None, result_of(change))
        said.append(f"{text}: " + tell(lambda: model(torch.ones(1, 4)).sum().backward()))
    return "; ".join(said)


def static_bucket_indices(rank):
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model = DistributedDataParallel(net, static_graph=True, bucket_cap_mb_list=[0.001])
    seen = []

    def hook(state, bucket):
        seen[-1].append(bucket.index())
        return result_of(lambda buffer: buffer)(state, bucket)

    model.register_comm_hook(None, hook)
    for _ in range(3):
        seen.append([])
        model(torch.ones(1, 16)).sum().backward()
    return f"indices by iteration: {seen}"


def double_forward(rank):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    def both():
        loss = model(torch.randn(4, 2)).sum() + model(torch.randn(4, 2)).sum()
        loss.backward()

    return tell(both)


def rounding_of_views(rank):
    said = []
    for view in (False, True):
        net = one_weight()
        model = DistributedDataParallel(net, gradient_as_bucket_view=view)
        for _ in range(2):
            net.zero_grad(set_to_none=False)
            model(torch.full((1, 1), 0.7 * (rank + 1) + 0.35)).sum().backward()
        said.append(net.weight.grad.item().hex())
    return f"copies {said[0]}, views {said[1]}"


class Watched(nn.Module):
    def __init__(self, events):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda _, name=name: events.append("gradient"))

    def forward(self, x):
        return self.layers(x)


def overlap(rank):
    said = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        events = []
        model = DistributedDataParallel(Watched(events), bucket_cap_mb=0.001, **options)

        def hook(state, bucket, events=events):
            events.append("bucket")
            return result_of(lambda buffer: buffer)(state, bucket)

        model.register_comm_hook(None, hook)
        early = []
        for _ in range(3):
            events.clear()
            model(torch.ones(1, 16)).sum().backward()
            last = len(events) - 1 - events[::-1].index("gradient")
            early.append(f"{events[:last].count('bucket')} of {events.count('bucket')}")
        rebuilt = model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)
        name = next(iter(options), "default")
        said.append(f"{name}: buckets before the last gradient {', '.join(early)}"
                    f"; dealt anew: {bool(rebuilt)}")
    return "; ".join(said)


CASES = {
    1: ("second backward", second_backward, {}),
    2: ("static_graph with no_sync", static_graph_no_sync, {}),
    3: ("unused parameter after a rank has joined", stale_used_map, {}),
    4: ("static_graph, a rank joins at once", static_graph_zero_iterations, {"hangs": True}),
    5: ("rank 0 joins first", rank_0_joins_first, {}),
    6: ("models that differ", unchecked_models, {"hangs": True}),
    7: ("parameter unused on one rank", unused_on_one_rank, {"hangs": True}),
    8: ("exception in a backward", exception_in_backward, {}),
    9: ("results of a comm hook", hook_results, {}),
    10: ("bucket indices, static_graph", static_bucket_indices, {}),
    11: ("two forwards of a batch norm", double_forward, {}),
    12: ("rounding with views", rounding_of_views, {"world_size": 3}),
    13: ("overlap in iteration 1", overlap, {}),
}


def main(argv):
    warnings.simplefilter("ignore")
    print(f"PyTorch {torch.__version__}, Gloo")
    for number, (title, body, how) in CASES.items():
        if argv and str(number) not in argv:
            continue
        timeout = ranks.SHORT_TIMEOUT_SECONDS if how.get("hangs") else 60
        texts = ranks.run_ranks(body, how.get("world_size", 2), timeout, kill_after_seconds=40)
        same = len(set(texts)) == 1
        shown = texts[0] if same else " | ".join(f"rank {r}: {t}" for r, t in enumerate(texts))
        print(f"{number:2} {title}: {shown}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
