"""What the torchrun benchmark runs under both launchers: sums until somebody kills it.

Appends to the file of DDP_BENCHMARK_LOG lines of "what restart rank pid monotonic_ns": `line` when
its first line is reached, `sum` when the first all-reduce is done.
"""

import os
import time


def say(what):
    words = [what, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], os.getpid()]
    line = " ".join(str(x) for x in [*words, time.monotonic_ns()])
    with open(os.environ["DDP_BENCHMARK_LOG"], "a", encoding="ascii") as stream:
        stream.write(line + "\n")


say("line")

import torch  # noqa: E402  (the line above is to be the first)
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
numbers = torch.ones(1000)
dist.all_reduce(numbers)
say("sum")
while True:
    time.sleep(0.01)
    dist.all_reduce(numbers)
