"""One rank of tools/bench/report on PyTorch's side: does training steps of one model on request.

The same as step_worker.cc, which says what the requests are.
"""

import argparse
import gc
import inspect
import json
import math
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


IMAGE_SIZE = 16
CLASSES = 10
VOCABULARY = 1024
HEADS = 4
SEQUENCE = 32


def fill(model):
    """Gives every matrix values that are neither equal nor large, and zeroes every bias."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters(), 1):
            if name.endswith("bias"):
                parameter.zero_()
            if parameter.dim() < 2:
                continue
            count = parameter.numel()
            scale = 1.0 / math.sqrt(count / parameter.size(0))
            values = (torch.arange(count, dtype=torch.double) * 0.7 + index).sin() * scale
            parameter.copy_(values.view(parameter.shape))


class ConvNet(nn.Module):
    """A residual network of three stages with batch normalization."""

    def __init__(self, layers, width):
        super().__init__()
        self.blocks = layers
        self.layers = nn.ModuleList()
        self.add(3, width, 1)
        for stage in range(3):
            channels = width << stage
            if stage > 0:
                self.add(channels // 2, channels, 2)
            for _ in range(2 * layers):
                self.add(channels, channels, 1)
        self.head = nn.Linear(width << 2, CLASSES)
        fill(self)

    def add(self, before, after, stride):
        self.layers.append(nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False))
        self.layers.append(nn.BatchNorm2d(after))

    def forward(self, x):
        layers = iter(self.layers)

        def following(x):
            x = next(layers)(x)
            return next(layers)(x)

        x = following(x).relu()
        for stage in range(3):
            if stage > 0:
                x = following(x).relu()
            for _ in range(self.blocks):
                inner = following(x).relu()
                x = (x + following(inner)).relu()
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A layer of a transformer: normalization before attention and before the linear layers."""

    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        rows, _, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, SEQUENCE, 3, HEADS, width // HEADS)
        parts = parts.permute(2, 0, 3, 1, 4)
        scale = 1.0 / math.sqrt(width / HEADS)
        weights = (parts[0].matmul(parts[1].transpose(2, 3)) * scale).softmax(3)
        mixed = weights.matmul(parts[2]).transpose(1, 2).reshape(rows, SEQUENCE, width)
        y = x + self.out(mixed)
        return y + self.down(nn.functional.gelu(self.up(self.norm2(y))))


class Transformer(nn.Module):
    """Takes tokens, and gives a score for each word of the vocabulary."""

    def __init__(self, layers, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        fill(self)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"chain": Chain, "conv": ConvNet, "transformer": Transformer}


def make_input(options, rank):
    def wave(count):
        return (torch.arange(count, dtype=torch.float32) * 0.1 + rank).sin()

    batch = options.batch
    if options.model == "chain":
        return wave(batch * options.width).view(batch, options.width)
    if options.model == "conv":
        return wave(batch * 3 * IMAGE_SIZE**2).view(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    tokens = torch.arange(batch, dtype=torch.long) * 37 + 101 * rank
    return tokens.remainder(VOCABULARY).view(-1, SEQUENCE)


OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "batched": {"batched_grad_copy": True},
}


def option_of(word):
    """The arguments of DistributedDataParallel for one word of a mode; cap25: buckets of 25 MiB."""
    if word.startswith("cap"):
        return {"bucket_cap_mb": int(word[len("cap") :])}
    return OPTIONS[word]


def has_batched_grad_copy():
    return "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters


class Subject:
    def __init__(self, mode, options):
        self.plain = MODELS[options.model](options.layers, options.width)
        self.model = self.plain
        if mode != "plain":
            chosen = {}
            for word in mode.split("+"):
                chosen.update(option_of(word))
            self.model = DistributedDataParallel(self.plain, **chosen)


def minor_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def steps(subject, x, count, barrier):
    """Gradients are taken away before the clock starts.

    Every rank takes the time from when all have begun to its own end; the slowest one's is the
    step.
    """
    starts, ends, faults = [], [], 0
    model, parameters = subject.model, list(subject.plain.parameters())
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
    parser = argparse.ArgumentParser(description="one rank of tools/bench/report")
    parser.add_argument("--model", choices=MODELS, default="chain")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--barrier", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    barrier = Barrier(options.barrier, rank, size)
    x = make_input(options, rank)
    subjects = {}
    gc.disable()  # its pauses are not what is measured
    hello = {"version": f"PyTorch {torch.__version__}", "batched": has_batched_grad_copy()}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command, mode, count = line.split()
        assert command == "steps", line
        if mode not in subjects:
            subjects[mode] = Subject(mode, options)
        print(json.dumps(steps(subjects[mode], x, int(count), barrier)), flush=True)


if __name__ == "__main__":
    main()
