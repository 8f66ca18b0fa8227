# Trains a small net on points of two spirals: a common program for PyTorch's
# DistributedDataParallel. train.cc is the same program in C++; docs/from-python.md compares them.
#
#   torchrun --nproc-per-node=2 examples/from_python/train.py /tmp/spirals.pt
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def make_points(samples):
    labels = torch.arange(samples) % 2
    radius = torch.rand(samples)
    angle = 3 * radius + 3.1416 * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points, labels


def train(checkpoint, epochs):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    points, labels = make_points(2000)
    dataset = TensorDataset(points, labels)
    sampler = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, batch_size=50 // world, sampler=sampler)

    model = DistributedDataParallel(Net(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    first_epoch = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        with torch.no_grad():
            right = (model.module(points[rank::world]).argmax(1) == labels[rank::world]).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch} accuracy {right.item() / len(points):.3f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, checkpoint)

    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], epochs=10)
