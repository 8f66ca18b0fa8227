#!/usr/bin/env python3
"""Checkpoints that PyTorch and ours exchange, through tools/python/ddp_checkpoint.py.

    exchange.py make FOLDER                 # Python trains and saves; ours goes on
    exchange.py continue FOLDER KIND OUT    # ours has saved into FOLDER; Python goes on

The model, its data and its steps are those of checkpoint_exchange_test.cc.
"""

import contextlib
import io
import json
import math
import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "tools", "python"))
import ddp_checkpoint  # noqa: E402  (found there)

KINDS = ("SGD", "Adam", "AdamW")
STEPS = 5  # before the exchange, and as many after it
BATCH = 8


class Net(torch.nn.Module):
    """Tied weights, buffers, and tensors of several types."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.fc2 = torch.nn.Linear(8, 8)
        self.again = self.fc2
        self.head = torch.nn.Linear(8, 3)
        for number, parameter in enumerate(self.parameters()):
            values = [0.3 * math.sin(0.7 * i + number) for i in range(parameter.numel())]
            parameter.data = torch.tensor(values).reshape(parameter.shape)

    def forward(self, x):
        x = torch.tanh(self.norm(self.fc1(x)))
        return self.head(torch.tanh(self.again(torch.tanh(self.fc2(x)))))


def values(step, columns, phase):
    """A batch of numbers that both sides can compute."""
    rows = [
        [math.sin(1.3 * step + 0.7 * row + 2.1 * column + phase) for column in range(columns)]
        for row in range(BATCH)
    ]
    return torch.tensor(rows)


def make_optimizer(kind, net):
    """Two groups with different options."""
    head = list(net.head.parameters())
    rest = [p for name, p in net.named_parameters() if not name.startswith("head.")]
    if kind == "SGD":
        groups = [
            {"params": rest, "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
            {"params": head, "lr": 0.05},
        ]
        return torch.optim.SGD(groups, lr=0.1)
    groups = [
        {"params": rest, "lr": 0.01, "amsgrad": True, "weight_decay": 0.02},
        {"params": head, "lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.0},
    ]
    return getattr(torch.optim, kind)(groups, lr=0.01)


def train(net, optimizer, first):
    losses = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(values(step, 4, 0.0)), values(step, 3, 0.5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(out):
    facts = {}
    for kind in KINDS:
        torch.manual_seed(3)
        net = Net()
        optimizer = make_optimizer(kind, net)
        train(net, optimizer, 0)
        folder = os.path.join(out, "exchange", kind)
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            for file in os.listdir(os.path.join(folder, name)):
                os.unlink(os.path.join(folder, name, file))
            os.rmdir(os.path.join(folder, name))
        ddp_checkpoint.save(folder, net, optimizer, step=STEPS, epoch=1, run_id="exchange")
        facts[kind] = {"random": torch.rand(3).tolist(), "losses": train(net, optimizer, STEPS)}
    with open(os.path.join(out, "exchange.json"), "w", encoding="utf-8") as stream:
        json.dump(facts, stream, indent=1)
        stream.write("\n")


def tool(arguments):
    """What the command line of ddp_checkpoint.py prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if ddp_checkpoint.main(arguments) != 0:
            sys.exit(f"ddp_checkpoint.py {arguments} failed")
    return printed.getvalue().strip()


def go_on(folder, kind, out):
    """Through a .pt file, as a user would. Then imports that file again."""
    pt = os.path.join(out, "exported.pt")
    tool(["export", folder, pt])
    saved = torch.load(pt, weights_only=True)
    imported = tool(["import", pt, os.path.join(out, "imported"), "--generation=9"])
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer = make_optimizer(kind, net)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"]["rng.cpu.0"])
    facts = {
        "step": saved["step"],
        "epoch": saved["epoch"],
        "sampler": saved["sampler"],
        "state_hash": ddp_checkpoint.read_manifest(imported)["state_xxh3_128"],
        "random": torch.rand(3).tolist(),
        "losses": train(net, optimizer, STEPS),
    }
    with open(os.path.join(out, "continued.json"), "w", encoding="utf-8") as stream:
        json.dump(facts, stream)


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "make":
        make(arguments[1])
    elif len(arguments) == 4 and arguments[0] == "continue":
        go_on(*arguments[1:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
