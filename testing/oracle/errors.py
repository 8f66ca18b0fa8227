#!/usr/bin/env python3
"""Collects what PyTorch's DistributedDataParallel says in cases of misuse.

    errors.py --out golden/errors.json

The file keeps what ours say in the same cases ("ours"), which golden_test compares to the letter;
"names" are the parameters that PyTorch names (under TORCH_DISTRIBUTED_DEBUG=INFO), and ours must.
"""

import argparse
import json
import os
import re
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import models  # noqa: E402  (found beside this file)
import ranks  # noqa: E402


def text_of(call):
    try:
        call()
        return "no error"
    except Exception as error:
        return str(error).strip()


def branch_step(model, use_right):
    model.module.zero_grad()
    model(torch.ones(4, 6), False, use_right).sum().backward()


def unused_parameter(rank):
    model = DistributedDataParallel(models.Branches())
    return text_of(lambda: [branch_step(model, True) for _ in range(2)])


def marked_twice(rank):
    model = DistributedDataParallel(models.Checkpointed())
    return text_of(lambda: model(torch.ones(4, 6)).sum().backward())


def static_graph_more(rank):
    model = DistributedDataParallel(models.Branches(), static_graph=True)
    branch_step(model, False)
    return text_of(lambda: branch_step(model, True))


def static_graph_fewer(rank):
    model = DistributedDataParallel(models.Branches(), static_graph=True)
    branch_step(model, True)
    return text_of(lambda: [branch_step(model, False) for _ in range(2)])


def different_shapes(rank):
    return text_of(lambda: DistributedDataParallel(nn.Linear(2, 3 if rank == 1 else 2)))


def different_count(rank):
    return text_of(lambda: DistributedDataParallel(nn.Linear(2, 2, bias=rank == 0)))


def no_trainable_parameter(rank):
    return text_of(lambda: DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False)))


def second_hook(rank):
    model = DistributedDataParallel(nn.Linear(2, 2))

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    return text_of(lambda: model.register_comm_hook(None, hook))


def replaced_view(rank):
    net = models.Mlp()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)

    def replace(gradient):
        if net.fc3.weight.grad is not None:
            net.fc3.weight.grad = net.fc3.weight.grad.clone()

    model(torch.ones(4, 8)).sum().backward()
    net.fc1.weight.register_hook(replace)
    return text_of(lambda: model(torch.ones(4, 8)).sum().backward())


def early_termination(rank):
    model = DistributedDataParallel(nn.Linear(2, 2))

    def loop():
        with model.join(throw_on_early_termination=True):
            for _ in range(2 - rank):
                model(torch.ones(1, 2)).sum().backward()

    return text_of(loop)


def two_devices(rank):
    return text_of(lambda: DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1]))


CASES = [
    unused_parameter,
    marked_twice,
    static_graph_more,
    static_graph_fewer,
    different_shapes,
    different_count,
    no_trainable_parameter,
    second_hook,
    replaced_view,
    early_termination,
    two_devices,
]
NAMES = {name for model in models.MODELS.values() for name, _ in model().named_parameters()}


def names_in(texts):
    words = set(re.findall(r"[\w.]+\w", " ".join(texts)))
    return sorted(words & NAMES)


def main(argv):
    parser = argparse.ArgumentParser(prog="errors.py")
    parser.add_argument("--out", required=True, help="the file to write; 'ours' in it is kept")
    options = parser.parse_args(argv)
    kept = {}
    if os.path.exists(options.out):
        with open(options.out, encoding="utf-8") as stream:
            kept = json.load(stream)
    errors = {}
    for case in CASES:
        texts = ranks.run_ranks(case, 2, ranks.SHORT_TIMEOUT_SECONDS, kill_after_seconds=40)
        print(case.__name__, flush=True)
        ours = kept.get(case.__name__, {}).get("ours", ["", ""])
        errors[case.__name__] = {"pytorch": texts, "names": names_in(texts), "ours": ours}
    with open(options.out, "w", encoding="utf-8") as stream:
        json.dump(errors, stream, indent=1)
        stream.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
