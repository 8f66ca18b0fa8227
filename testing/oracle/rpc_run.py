"""PyTorch's RPC, distributed autograd and DistributedOptimizer beside DistributedDataParallel.

Two trainers, 0 and 1, wrap the model `mlp`. A parameter server, rank 2, has a table of rows. A
trainer fetches rows by a remote call, and the backward goes through the server. Used by
generate.py; RunOracleRpc() in scenario_runner.cc is the same program.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import models
import safetensors_file

LEARNING_RATE = 0.1
TRAINERS = [0, 1]
SERVER = "rank2"
# Whether the gradients of the table are sparse, by the name of the run.
RUNS = {"rpc_dense": False, "rpc_sparse": True}

# On the server, by the name of the run.
_tables = {}


class Table(nn.Module):
    def __init__(self, weight, sparse):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.sparse = sparse

    def forward(self, ids):
        return functional.embedding(ids, self.weight, sparse=self.sparse)


def lookup(run, ids):
    return _tables[run](ids)


def values(run):
    return _tables[run].weight.detach()


def weights(run):
    return [rpc.RRef(_tables[run].weight)]


def train(run, initial, rank, group):
    """The losses and, after the last step, all parameters."""
    net = models.Mlp()
    prefix = "mlp/state/"
    net.load_state_dict(
        {k.removeprefix(prefix): v for k, v in initial.items() if k.startswith(prefix)}
    )
    model = DistributedDataParallel(net, process_group=group)
    # The trainers' updates of the table add up, and are not averaged.
    table_optimizer = DistributedOptimizer(
        torch.optim.SGD, rpc.rpc_sync(SERVER, weights, (run,)), lr=LEARNING_RATE / len(TRAINERS)
    )
    net_optimizer = DistributedOptimizer(
        torch.optim.SGD, [rpc.RRef(parameter) for parameter in net.parameters()], lr=LEARNING_RATE
    )
    ids, y = initial["embedding/x"][rank], initial["mlp/y"][rank]
    losses = []
    for step in range(models.STEPS):
        with dist_autograd.context() as context:
            rows = rpc.rpc_sync(SERVER, lookup, (run, ids[step][0]))
            loss = functional.mse_loss(model(rows.mean(1)), y[step][0])
            dist_autograd.backward(context, [loss])
            losses.append(loss.detach())
            dist.barrier(group)  # every row is fetched before the table changes
            for turn in TRAINERS:
                if rank == turn:
                    table_optimizer.step(context)
                dist.barrier(group)
            net_optimizer.step(context)
    return {
        f"{run}/loss/{rank}": torch.stack(losses),
        f"{run}/final/table": rpc.rpc_sync(SERVER, values, (run,)),
        **{f"{run}/final/{key}": value for key, value in net.state_dict().items()},
    }


def run_rank(rank, folder):
    """One of three ranks. A trainer writes its tensors to rpc_RANK in `folder`."""
    torch.set_num_threads(1)
    world_size = len(TRAINERS) + 1
    store = dist.FileStore(os.path.join(folder, "store_of_rpc"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trainers = dist.new_group(TRAINERS)
    initial = safetensors_file.load(os.path.join(folder, "models.safetensors"))
    for run, sparse in RUNS.items():
        _tables[run] = Table(initial["rpc/table"], sparse)
    method = f"file://{os.path.join(folder, 'workers_of_rpc')}"
    rpc.init_rpc(
        f"rank{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=method),
    )
    if rank in TRAINERS:
        tensors = {}
        for run in RUNS:
            tensors |= train(run, initial, rank, trainers)
        safetensors_file.save(os.path.join(folder, f"rpc_{rank}"), tensors)
    rpc.shutdown()


def merge(folder):
    """The tensors of both trainers, which have the same parameters at the end."""
    first, second = [safetensors_file.load(os.path.join(folder, f"rpc_{r}")) for r in TRAINERS]
    for key in first:
        if "/final/" in key and not torch.equal(first[key], second[key]):
            raise ValueError(f"{key} differs between PyTorch's trainers")
    return first | second
