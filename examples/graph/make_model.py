#!/usr/bin/env python3
"""Writes model.pt, the network that train.cc trains: two interleaved spirals, two classes.

    python3 examples/graph/make_model.py examples/graph/model.pt

Needs PyTorch. The repository holds the file, so the example needs no Python.
"""

import sys

import torch


class Net(torch.nn.Module):
    """An MLP with a batch norm, dropout, and a buffer that the forward assigns."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.second = torch.nn.Linear(64, 64)
        self.third = torch.nn.Linear(64, 64)
        self.dropout = torch.nn.Dropout(0.05)
        self.last = torch.nn.Linear(64, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        """Takes points [N, 2] and returns scores [N, 2]."""
        if self.training:
            with torch.no_grad():
                self.seen = self.seen + x.size(0)
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x))
        x = torch.relu(self.third(x))
        return self.last(self.dropout(x))


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.jit.script(Net()).save(sys.argv[1] if len(sys.argv) > 1 else "model.pt")
