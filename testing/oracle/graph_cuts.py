"""Where PyTorch's DDPOptimizer cuts graphs: written by generate.py to graph_cuts.json.

Models that DistributedDataParallel wraps go through torch.compile, which traces them and gives the
graphs to DDPOptimizer: the models of the oracle, and random ones. Written are each graph, as
DDPOptimizer got it, and its pieces.
"""

import contextlib
import logging
import os
import random
import re
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

import models

RANDOM_GRAPHS = 24
# First cap and cap, in bytes.
CAPS = ((400, 1048), (1000, 1000), (200, 2000))
CAPS_OF_WIDE = ((1024 * 1024, 3 * 512 * 1024), (361200, 1083600), (1, 361201))
RANDOM_CAPS = ((1, 1), (100, 300), (300, 300), (50, 1000), (400, 500))


@torch._dynamo.allow_in_graph
def mix(*operands):
    """One node of a graph."""
    return sum(operand.sum() for operand in operands)


class RandomGraph(nn.Module):
    """Nodes that read parameters and earlier nodes, some of them twice, and some for nobody."""

    def __init__(self, source):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(source.randrange(60)), requires_grad=source.random() > 0.15)
            for _ in range(source.randint(1, 12))
        )
        self.weights.append(nn.Parameter(torch.ones(10)))  # DDP wants one that needs a gradient
        numbers = range(len(self.weights))
        self.program = [
            (source.choices(range(node), k=source.randrange(3)) if node > 0 else [],
             source.choices(numbers, k=source.randrange(3)))
            for node in range(source.randint(1, 30))
        ]  # fmt: skip
        self.returned = sorted({source.randrange(len(self.program)) for _ in range(2)})
        self.ignored = [f"weights.{n}" for n in numbers[:-1] if source.random() < 0.15]

    def forward(self, x):
        results = []
        for inputs, weights in self.program:
            operands = [results[i] for i in inputs] + [self.weights[i] for i in weights]
            results.append(mix(*operands) if operands else mix(x))
        return [results[i] for i in self.returned]


def parameters_of(graph, ignored):
    """The parameters among the graph's inputs, by their placeholders."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if not isinstance(value, nn.Parameter):
            continue
        name = ".".join(
            re.findall(r"_(?:modules|parameters)\['(\w+)'\]", node._dynamo_source.name)
        )
        found[node] = {
            "bytes": value.untyped_storage().nbytes(),
            "ignored": name in ignored,
            "frozen": not value.requires_grad,
        }
    return found


def node_facts(node, parameters, numbers):
    """What a node reads. DDPOptimizer counts plain arguments only, so there are to be no others."""
    read = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
    named = list(parameters)
    others = set(node.all_input_nodes) - set(read)
    if others & set(named):
        raise ValueError(f"{node} reads a parameter in a list or by a keyword")
    return {
        "parameters": [named.index(arg) for arg in read if arg in parameters],
        "inputs": [numbers[arg] for arg in node.all_input_nodes if arg in numbers],
        "is_output": any(user.op == "output" for user in node.users),
    }


def facts_of(optimizer, module, ignored):
    """The graph of `module`, and the pieces that `optimizer` has made of it."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    numbers = {node: number for number, node in enumerate(nodes)}
    parameters = parameters_of(module.graph, ignored)
    piece_of = {node: i for i, bucket in enumerate(optimizer.buckets) for node in bucket.nodes}
    return {
        "first_cap_bytes": optimizer.first_bucket_cap,
        "cap_bytes": optimizer.bucket_bytes_cap,
        "parameters": list(parameters.values()),
        "nodes": [node_facts(node, parameters, numbers) for node in nodes],
        "piece_of_node": [piece_of[node] for node in nodes],
        "bytes": [bucket.size for bucket in optimizer.buckets],
        "extensions": [
            bucket.opcount_increased_to_capture_external_output for bucket in optimizer.buckets
        ],
    }


@contextlib.contextmanager
def recorded_cuts(ignored):
    """Each call of DDPOptimizer's, as facts."""
    original = DDPOptimizer.compile_fn
    seen = []

    def record(self, module, inputs):
        compiled = original(self, module, inputs)
        seen.append(facts_of(self, module, ignored))
        return compiled

    with mock.patch.object(DDPOptimizer, "compile_fn", record):
        yield seen


def cut(net, caps, run):
    """The facts of the one graph of `net`. `run` calls the model once."""
    first_cap, cap = caps
    ignored = getattr(net, "ignored", [])
    torch._dynamo.reset()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=cap / 2**20)
    with (
        mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", first_cap),
        recorded_cuts(ignored) as seen,
    ):
        run(torch.compile(wrapped, backend="eager"))
    if len(seen) != 1:
        raise ValueError(f"{type(net).__name__}: {len(seen)} graphs")
    return seen[0]


def model_cuts(initial):
    for name, model_class in models.MODELS.items():
        x, y = initial[f"{name}/x"][0][0][0], initial[f"{name}/y"][0][0][0]
        for caps in CAPS_OF_WIDE if name == "wide" else CAPS:
            net = model_class()
            facts = cut(net, caps, lambda model, net=net, x=x, y=y: net.loss(model, x, y, 0, 1))
            yield f"{name}_{caps[0]}_{caps[1]}", facts


def random_cuts():
    for number in range(RANDOM_GRAPHS):
        net = RandomGraph(random.Random(number))
        caps = RANDOM_CAPS[number % len(RANDOM_CAPS)]
        yield f"random_{number}", cut(net, caps, lambda model: model(torch.ones(3)))


def all_cuts(initial, folder):
    """The facts of every case, by name. `folder` is for the store of a group of one rank."""
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store_of_cuts"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return {**dict(model_cuts(initial)), **dict(random_cuts())}
    finally:
        dist.destroy_process_group()
