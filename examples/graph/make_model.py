#!/usr/bin/env python3
"""Writes the networks that train.cc trains: two interleaved spirals, two classes.

    python3 examples/graph/make_model.py examples/graph

model.pt is a script, traced.pt is a trace. Needs PyTorch. The repository holds both files, so the
example needs no Python.
"""

import io
import os
import sys
import zipfile

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


class Traced(torch.nn.Module):
    """Convolutions over the two coordinates of a point, a batch norm, and dropout."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv1d(1, 32, 2, padding=1)
        self.norm = torch.nn.BatchNorm1d(32)
        self.second = torch.nn.Conv1d(32, 32, 3, padding=1)
        self.third = torch.nn.Linear(96, 48)
        self.dropout = torch.nn.Dropout(0.05)
        self.last = torch.nn.Linear(48, 2)

    def forward(self, x):
        """Takes points [N, 2] and returns scores [N, 2]."""
        x = torch.relu(self.norm(self.first(x.unsqueeze(1))))
        x = torch.relu(self.second(x))
        x = torch.relu(self.third(x.view(x.size(0), -1)))
        return self.last(self.dropout(x))


def save(module, path):
    """Writes a TorchScript file without the parts that name source files of this machine."""
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as file:
        for entry in archive.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                file.writestr(zipfile.ZipInfo(entry.filename), archive.read(entry))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "."
    torch.manual_seed(1)
    save(torch.jit.script(Net()), os.path.join(folder, "model.pt"))
    torch.manual_seed(1)
    # A trace in the mode of training. Two runs of its dropout differ, so it is not checked.
    traced = torch.jit.trace(Traced().train(), torch.randn(8, 2), check_trace=False)
    save(traced, os.path.join(folder, "traced.pt"))
