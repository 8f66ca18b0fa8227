"""One rank of ddp_step_benchmark.py on PyTorch's side: does training steps of one model on request.

The same as ddp_step_benchmark_worker.cc, which says what the requests are.
"""

import argparse
import gc
import json
import mmap
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Barrier:
    """Meets the other ranks without a library that could be what is measured.

    Gives way while it waits, since threads of a backend share the core.
    """

    STRIDE = 8

    def __init__(self, path, rank, size):
        with open(path, "r+b") as stream:
            memory = mmap.mmap(stream.fileno(), size * self.STRIDE * 8)
        self.counts = memoryview(memory).cast("Q")
        self.rank, self.size, self.round = rank, size, 0

    def wait(self):
        self.round += 1
        self.counts[self.rank * self.STRIDE] = self.round
        for rank in range(self.size):
            while self.counts[rank * self.STRIDE] < self.round:
                os.sched_yield()


class Chain(nn.Module):
    """Linear layers one after the other.

    Weights that keep what comes in, so that no number becomes too large or denormal in any depth.
    """

    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}


class Subject:
    def __init__(self, mode, options):
        self.chain = Chain(options.layers, options.width)
        self.model = self.chain
        if mode != "plain":
            chosen = {}
            for word in mode.split("+"):
                chosen.update(OPTIONS[word])
            self.model = DistributedDataParallel(self.chain, **chosen)


def minor_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def steps(subject, x, count, barrier):
    """Gradients are taken away before the clock starts.

    Every rank takes the time from when all have begun to its own end; the slowest one's is the
    step.
    """
    starts, ends, faults = [], [], 0
    model, parameters = subject.model, list(subject.chain.parameters())
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = None
        barrier.wait()
        faults_before = minor_faults()
        starts.append(time.monotonic_ns())
        model(x).pow(2).mean().backward()
        ends.append(time.monotonic_ns())
        faults += minor_faults() - faults_before
    gradient_sum = sum(p.grad.double().sum().item() for p in parameters)
    return {
        "starts_ns": starts,
        "ends_ns": ends,
        "minor_faults": faults,
        "gradient_sum": gradient_sum,
    }


def main():
    parser = argparse.ArgumentParser(description="one rank of tools/bench/ddp_step_benchmark")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--barrier", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    barrier = Barrier(options.barrier, rank, size)
    count = options.batch * options.width
    x = (torch.arange(count, dtype=torch.float32) * 0.1 + rank).sin()
    x = x.view(options.batch, options.width)
    subjects = {}
    gc.disable()  # its pauses are not what is measured
    print(json.dumps({"version": f"PyTorch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        command, mode, count = line.split()
        assert command == "steps", line
        if mode not in subjects:
            subjects[mode] = Subject(mode, options)
        print(json.dumps(steps(subjects[mode], x, int(count), barrier)), flush=True)


if __name__ == "__main__":
    main()
