#!/usr/bin/env python3
"""Runs the oracle's scenarios through PyTorch's DistributedDataParallel and writes what came out.

    generate.py --out DIRECTORY          # of two and three ranks, everything
    generate.py --out golden --golden    # as committed: gradients of the first step only

Writes models.safetensors (what both sides start from), results_N.safetensors and facts_N.json for N
ranks, rpc.safetensors, graph_cuts.json, schedules.safetensors and optimizers.safetensors: see
README.md. Needs torch 2.15.0 and numpy.
One thread per rank, so that a second run gives the same bytes.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import exchange  # noqa: E402  (found beside this file)
import graph_cuts  # noqa: E402
import models  # noqa: E402
import optimizers  # noqa: E402
import rpc_run  # noqa: E402
import safetensors_file  # noqa: E402
import schedules  # noqa: E402

PYTORCH = "2.15.0"
LEARNING_RATE = 0.1
HOOKS = {
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
    "fp16_compress_wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
}


def scenarios():
    with open(os.path.join(HERE, "scenarios.json"), encoding="utf-8") as stream:
        return json.load(stream)


def stored_scenarios():
    """The table without the runs that are compared with the values of another one."""
    return [scenario for scenario in scenarios() if "like" not in scenario]


def plain_of(scenario):
    """The name of the same run with the plain optimizer."""

    def without_zero(fields):
        return {k: v for k, v in fields.items() if k not in ("name", "zero", "like")}

    same = [
        other["name"]
        for other in scenarios()
        if "zero" not in other and without_zero(other) == without_zero(scenario)
    ]
    return same[0]


@contextlib.contextmanager
def recorded_initial_buckets():
    """What DDP deals before it has seen a gradient; the reducer gets it the other way round."""
    original = dist._compute_bucket_assignment_by_size
    seen = []

    def record(*arguments):
        result = original(*arguments)
        seen.append(list(reversed(result[0])))
        return result

    dist._compute_bucket_assignment_by_size = record
    try:
        yield seen
    finally:
        dist._compute_bucket_assignment_by_size = original


def buckets_of(model, initial, names):
    data = model._get_ddp_logging_data()
    text = data.get("rebuilt_per_bucket_param_indices", "")
    indices = [[int(n) for n in part.split()] for part in text.split(",")] if text else initial
    return [[names[i] for i in bucket] for bucket in indices]


def new_model(scenario, initial):
    net = models.MODELS[scenario["model"]]()
    state = {
        key.split("/state/", 1)[1]: value
        for key, value in initial.items()
        if key.startswith(scenario["model"] + "/state/")
    }
    if state:
        net.load_state_dict(state)
    with recorded_initial_buckets() as buckets:
        model = DistributedDataParallel(net, **scenario.get("options", {}))
    if "hook" in scenario:
        model.register_comm_hook(None, HOOKS[scenario["hook"]])
    model.require_manual_backward_finalization = scenario.get("finalize", False)
    return net, model, buckets[0]


def new_optimizer(scenario, net):
    """SGD, or PyTorch's ZeRO of SGD, which always gives whole parameters to the ranks."""
    options = {"lr": LEARNING_RATE, "momentum": scenario.get("momentum", 0.9)}
    if "zero" not in scenario:
        return torch.optim.SGD(net.parameters(), **options)
    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options)


def run_scenario(scenario, initial, rank, tensors):
    """Adds this rank's tensors, and returns its facts."""
    net, model, first_buckets = new_model(scenario, initial)
    optimizer = new_optimizer(scenario, net)
    x, y = initial[scenario["model"] + "/x"][rank], initial[scenario["model"] + "/y"][rank]
    steps = scenario["batches"][rank] if "batches" in scenario else models.STEPS
    name = scenario["name"]
    losses, undefined, sparse = [], [], set()

    def backward(step, micro):
        loss = net.loss(model, x[step][micro], y[step][micro], rank, step)
        loss.backward()
        if scenario.get("finalize", False) and micro == 0:
            model.finalize_backward()
        return loss.detach()

    def train():
        for step in range(steps):
            optimizer.zero_grad(set_to_none=scenario.get("set_to_none", True))
            if scenario.get("accumulate", False):
                with model.no_sync():
                    losses.append(backward(step, 1))
            losses.append(backward(step, 0))
            undefined.append([k for k, p in net.named_parameters() if p.grad is None])
            for key, parameter in net.named_parameters():
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    sparse.add(key)
                tensors[f"{name}/grad/{step}/{key}"] = parameter.grad.to_dense().clone()
            optimizer.step()

    if "batches" in scenario:
        divide = scenario.get("divide_by_initial_world_size", True)
        joinables = [model, optimizer] if "zero" in scenario else [model]
        with Join(joinables, divide_by_initial_world_size=divide):
            train()
    else:
        train()
    tensors[f"{name}/loss"] = torch.stack(losses)
    for key, value in net.state_dict().items():
        tensors[f"{name}/final/{key}"] = value.clone()
    return {
        "buckets": buckets_of(model, first_buckets, [k for k, _ in net.named_parameters()]),
        "undefined": undefined,
        "sparse": sorted(sparse),
    }


def check_zero(rank, tensors):
    """That PyTorch's ZeRO and its plain optimizer give the same bits, except under a join."""
    for scenario in [scenario for scenario in scenarios() if "zero" in scenario]:
        name, plain = scenario["name"], plain_of(scenario)
        ours = [key for key in tensors if key.startswith((f"{name}/final/", f"{name}/loss"))]
        unequal = [
            key.removeprefix(name)
            for key in ours
            if not torch.equal(tensors[key], tensors[plain + key.removeprefix(name)])
        ]
        # Under a join, a rank without inputs updates its shard with its last gradients.
        if bool(unequal) != ("like" in scenario):
            sys.exit(f"rank {rank}: {name} against {plain}: {unequal or 'nothing'} differs")


def run_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store_{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    initial = safetensors_file.load(os.path.join(folder, "models.safetensors"))
    tensors, facts = {}, {}
    for scenario in scenarios():
        facts[scenario["name"]] = run_scenario(scenario, initial, rank, tensors)
    check_zero(rank, tensors)
    safetensors_file.save(os.path.join(folder, f"rank_{world_size}_{rank}"), tensors)
    with open(os.path.join(folder, f"facts_{world_size}_{rank}"), "w", encoding="utf-8") as stream:
        json.dump(facts, stream)
    dist.barrier()
    dist.destroy_process_group()


def recorded_rank(scenario, world_size):
    """The rank whose gradients count: one that has the most batches."""
    batches = scenario.get("batches", [models.STEPS] * world_size)[:world_size]
    return batches.index(max(batches))


def merge(folder, world_size, golden):
    """One file of what all ranks agree on, and of every rank's losses."""
    ranks = [
        safetensors_file.load(os.path.join(folder, f"rank_{world_size}_{rank}"))
        for rank in range(world_size)
    ]
    facts = []
    for rank in range(world_size):
        with open(os.path.join(folder, f"facts_{world_size}_{rank}"), encoding="utf-8") as stream:
            facts.append(json.load(stream))
    tensors, merged_facts = {}, {}
    for scenario in stored_scenarios():
        name, chosen = scenario["name"], recorded_rank(scenario, world_size)
        merged_facts[name] = facts[chosen][name]
        for rank in range(world_size):
            tensors[f"{name}/loss/{rank}"] = ranks[rank][f"{name}/loss"]
        if scenario["model"] in models.BUCKETS_ONLY:
            continue
        kept = [f"{name}/grad/0/" if golden else f"{name}/grad/"]
        if "zero" in scenario or not golden:
            kept.append(f"{name}/final/")
        for key, value in ranks[chosen].items():
            if key.startswith(tuple(kept)):
                tensors[key] = value
    return tensors, merged_facts


def write_facts(path, facts):
    """A line for each fact, so that a difference shows where it is."""
    scenario_texts = []
    for name, values in facts.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        scenario_texts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("{\n" + ",\n".join(scenario_texts) + "\n}\n")


def write_cuts(_, folder, out):
    initial = safetensors_file.load(os.path.join(folder, "models.safetensors"))
    write_facts(os.path.join(out, "graph_cuts.json"), graph_cuts.all_cuts(initial, folder))


def main(argv):
    parser = argparse.ArgumentParser(prog="generate.py")
    parser.add_argument("--out", required=True, help="the folder to write to")
    parser.add_argument("--golden", action="store_true", help="what is committed")
    options = parser.parse_args(argv)
    if torch.__version__.split("+", maxsplit=1)[0] != PYTORCH:
        sys.exit(f"generate.py: the oracle is PyTorch {PYTORCH}, this is {torch.__version__}")
    os.makedirs(options.out, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        initial = models.initial_tensors()
        safetensors_file.save(os.path.join(folder, "models.safetensors"), initial)
        safetensors_file.save(os.path.join(options.out, "models.safetensors"), initial)
        for world_size in (2, 3):
            multiprocessing.spawn(run_rank, (world_size, folder), nprocs=world_size)
            tensors, facts = merge(folder, world_size, options.golden)
            path = os.path.join(options.out, f"results_{world_size}.safetensors")
            safetensors_file.save(path, tensors)
            write_facts(os.path.join(options.out, f"facts_{world_size}.json"), facts)
        multiprocessing.spawn(rpc_run.run_rank, (folder,), nprocs=3)
        safetensors_file.save(os.path.join(options.out, "rpc.safetensors"), rpc_run.merge(folder))
        multiprocessing.spawn(write_cuts, (folder, options.out))
    schedules.write(options.out)
    optimizers.write(options.out)
    exchange.make(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
