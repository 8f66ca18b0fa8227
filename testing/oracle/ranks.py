"""Runs a function as the ranks of a Gloo group and brings back what each of them said."""

import datetime
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# What a collective may take in cases that are expected to hang.
SHORT_TIMEOUT_SECONDS = 6


def _run(rank, world_size, folder, timeout_seconds, body):
    torch.set_num_threads(1)
    dist.set_debug_level(dist.DebugLevel.INFO)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    torch.manual_seed(1)
    try:
        said = body(rank)
    except Exception as error:  # what it says is what we came for
        said = f"{type(error).__name__}: {first_line(error)}"
    with open(os.path.join(folder, f"said_{rank}"), "w", encoding="utf-8") as stream:
        json.dump(said, stream)
    # The others are to hear a failure from PyTorch, not from a connection that is closed.
    deadline = time.monotonic() + timeout_seconds + 10
    while time.monotonic() < deadline:
        if all(os.path.exists(os.path.join(folder, f"said_{r}")) for r in range(world_size)):
            break
        time.sleep(0.05)
    os._exit(0)  # a group with an operation in flight must not be destroyed


def first_line(error):
    return str(error).strip().split("\n", maxsplit=1)[0]


def run_ranks(body, world_size=2, timeout_seconds=60, kill_after_seconds=90):
    """body(rank)'s JSON value for each rank, or how the rank ended without one."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_run, args=(rank, world_size, folder, timeout_seconds, body))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + kill_after_seconds
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        ends = [_end_of(process, kill_after_seconds) for process in processes]
        return [_said(folder, rank, ends[rank]) for rank in range(world_size)]


def _end_of(process, seconds):
    if process.is_alive():
        process.kill()
        process.join()
        return f"hung, killed after {seconds} s"
    return f"the process ended with exit code {process.exitcode}"


def _said(folder, rank, end):
    try:
        with open(os.path.join(folder, f"said_{rank}"), encoding="utf-8") as stream:
            return json.load(stream)
    except OSError:
        return end
