#!/usr/bin/env python3
"""PyTorch's optimizers over the table in optimizers.json: the parameters after 100 steps.

    optimizers.py --out FOLDER    # writes optimizers.safetensors; generate.py does it, too

Adam and AdamW run as fused=True. LAMB and LARS are not in PyTorch: the formulas of their papers
stand here. `NAME/MODEL/I` is parameter I of a model after the last step.
"""

import argparse
import json
import os
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import safetensors_file  # noqa: E402  (found beside this file)

STEPS = 100
# optimizer_test.cc has the same ones.
MODELS = {
    "vectors": [[7], [1], [33]],
    "linear": [[6, 5], [6], [3, 6], [5, 9]],
    "conv": [[4, 3, 3, 3], [4], [2, 4]],
}


class LAMB(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2, with the identity for phi."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0,
                 bias_correction=True):
        super().__init__(params, {})
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.bias_correction = weight_decay, bias_correction
        self.steps = 0
        self.moments = {}

    @torch.no_grad()
    def step(self):
        self.steps += 1
        beta1, beta2 = self.betas
        for p in self.param_groups[0]["params"]:
            m, v = self.moments.get(p, (torch.zeros_like(p), torch.zeros_like(p)))
            m = beta1 * m + (1 - beta1) * p.grad
            v = beta2 * v + (1 - beta2) * p.grad**2
            self.moments[p] = (m, v)
            if self.bias_correction:
                m, v = m / (1 - beta1**self.steps), v / (1 - beta2**self.steps)
            r = m / (v.sqrt() + self.eps) + self.weight_decay * p
            trust = float(p.norm() / r.norm()) if p.norm() > 0 and r.norm() > 0 else 1.0
            p -= self.lr * trust * r


class LARS(torch.optim.Optimizer):
    """You et al., 2017, algorithm 1, with the momentum of PyTorch's SGD."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3,
                 eps=1e-8, nesterov=False):
        super().__init__(params, {})
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.trust_coefficient, self.eps, self.nesterov = trust_coefficient, eps, nesterov
        self.velocity = {}

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            trust = 1.0
            if p.norm() > 0 and p.grad.norm() > 0:
                whole = p.grad.norm() + self.weight_decay * p.norm() + self.eps
                trust = float(self.trust_coefficient * p.norm() / whole)
            g = trust * (p.grad + self.weight_decay * p)
            v = self.momentum * self.velocity[p] + g if p in self.velocity else g
            self.velocity[p] = v
            p -= self.lr * (g + self.momentum * v if self.nesterov else v)


def noise(shape, salt, dtype):
    """Numbers from -0.5 to 0.499, exact in both languages."""
    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count, dtype=torch.int64) * 7919 + salt * 104729) % 1000
    return (numbers.to(torch.float64) / 1000 - 0.5).to(dtype).reshape(shape)


def new_optimizer(case, parameters):
    options = dict(case["options"])
    name = case["optimizer"]
    if name in ("LAMB", "LARS"):
        return {"LAMB": LAMB, "LARS": LARS}[name](parameters, **options)
    if name in ("Adam", "AdamW"):
        options["fused"] = True
    if name == "Adafactor" and "eps1" in options:
        options["eps"] = (options.pop("eps1"), options.pop("eps2"))
    return getattr(torch.optim, name)(parameters, **options)


def run(case, shapes):
    dtype = torch.float32 if case.get("dtype") == "float32" else torch.float64
    if case["optimizer"] == "Muon":
        shapes = [shape for shape in shapes if len(shape) == 2]
    parameters = [
        torch.nn.Parameter(noise(shape, 1000 + i, dtype)) for i, shape in enumerate(shapes)
    ]
    if not parameters:
        return []
    optimizer = new_optimizer(case, parameters)
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            gradient = noise(list(parameter.shape), 10 * step + i, dtype)
            parameter.grad = gradient.add(parameter.detach(), alpha=0.1)
            if case["optimizer"] == "SparseAdam":
                rows = torch.arange(step % 2, parameter.shape[0], 2)
                parameter.grad = torch.sparse_coo_tensor(
                    rows.unsqueeze(0), parameter.grad[rows], parameter.shape, check_invariants=False
                )
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def write(folder):
    torch.set_num_threads(1)
    with open(os.path.join(HERE, "optimizers.json"), encoding="utf-8") as stream:
        cases = json.load(stream)
    tensors = {}
    for case in cases:
        for model, shapes in MODELS.items():
            for i, value in enumerate(run(case, shapes)):
                tensors[f"{case['name']}/{model}/{i}"] = value
    safetensors_file.save(os.path.join(folder, "optimizers.safetensors"), tensors)


def main(argv):
    parser = argparse.ArgumentParser(prog="optimizers.py")
    parser.add_argument("--out", required=True, help="the folder to write to")
    write(parser.parse_args(argv).out)


if __name__ == "__main__":
    main(sys.argv[1:])
