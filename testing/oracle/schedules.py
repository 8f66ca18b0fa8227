#!/usr/bin/env python3
"""PyTorch's learning rate schedulers over the table in schedules.json: rates and momenta.

    schedules.py --out FOLDER    # writes schedules.safetensors; generate.py does it, too

Each run has 200 steps. After steps 67 and 134 the states of optimizer and scheduler go to new ones,
as after a restart. The rates, one row for each step and the one before the first, are `NAME/lr`;
where an optimizer has a momentum or betas, `NAME/momentum` has those.
"""

import argparse
import copy
import json
import os
import sys
import warnings

import torch
from torch.optim import lr_scheduler, swa_utils

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import safetensors_file  # noqa: E402  (found beside this file)

STEPS = 200
RESTARTS = (67, 134)
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1.0),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1.0),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1.0, momentum=0.5),
}
# schedule_test.cc has the same ones.
LAMBDAS = {
    "inverse_root": lambda step: 1.0 / (1.0 + step) ** 0.5,
    "power": lambda step: 0.95**step,
    "slow_power": lambda step: 0.999**step,
}


def metric(step):
    """The metric of a ReduceLROnPlateau at a step: it falls, with noise."""
    return 1.0 / (1.0 + step) + ((step * 7919) % 97) / 970.0


def new_optimizer(case):
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in case["lr"]]
    return OPTIMIZERS[case.get("optimizer", "sgd")](groups)


def new_scheduler(spec, optimizer):
    options = {key: value for key, value in spec.items() if key != "class"}
    module = swa_utils if spec["class"] == "SWALR" else lr_scheduler
    kind = getattr(module, spec["class"])
    if "schedulers" in options:
        parts = [new_scheduler(part, optimizer) for part in options.pop("schedulers")]
        if kind is lr_scheduler.ChainedScheduler:
            return kind(parts, optimizer=optimizer)
        return kind(optimizer, parts, **options)
    if "lambda" in options:
        lambdas = [LAMBDAS[name] for name in options.pop("lambda")]
        options["lr_lambda"] = lambdas
    if "scale_fn" in options:
        options["scale_fn"] = LAMBDAS[options["scale_fn"]]
    for key, value in options.items():
        if isinstance(value, list) and len(value) == 1 and key != "lr_lambda":
            options[key] = value[0]
    return kind(optimizer, **options)


def momenta_of(optimizer):
    return [
        group["betas"][0] if "betas" in group else group["momentum"]
        for group in optimizer.param_groups
    ]


def run(case, tensors):
    optimizer = new_optimizer(case)
    scheduler = new_scheduler(case["scheduler"], optimizer)
    rates, momenta = [], []

    def record():
        rates.append([group["lr"] for group in optimizer.param_groups])
        momenta.append(momenta_of(optimizer))

    record()
    for step in range(1, STEPS + 1):
        if case["scheduler"]["class"] == "ReduceLROnPlateau":
            scheduler.step(metric(step))
        else:
            scheduler.step()
        record()
        if step in RESTARTS:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer = new_optimizer(case)
            scheduler = new_scheduler(case["scheduler"], optimizer)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
    tensors[case["name"] + "/lr"] = torch.tensor(rates, dtype=torch.float64)
    tensors[case["name"] + "/momentum"] = torch.tensor(momenta, dtype=torch.float64)


def write(folder):
    with open(os.path.join(HERE, "schedules.json"), encoding="utf-8") as stream:
        cases = json.load(stream)
    tensors = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order of step() calls
        for case in cases:
            run(case, tensors)
    safetensors_file.save(os.path.join(folder, "schedules.safetensors"), tensors)


def main(argv):
    parser = argparse.ArgumentParser(prog="schedules.py")
    parser.add_argument("--out", required=True, help="the folder to write to")
    write(parser.parse_args(argv).out)


if __name__ == "__main__":
    main(sys.argv[1:])
