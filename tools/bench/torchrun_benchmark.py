"""Measures a restart of one unmodified Python program, under ddprun beside torchrun.

    bazel build --config=opt //launcher:ddprun
    tools/bench/torchrun_benchmark --torch-python=PATH/bin/python

Two ranks sum without end; one is killed by SIGKILL. Measured from the kill until the slowest of the
new workers reaches its first line, before it imports anything, and until it has done its first
all-reduce. The interpreter's start is included, and nobody imports anything beforehand. Each kill
is in a job of its own, and the launchers take turns. A new worker may fail by itself, because it
meets addresses of the attempt before; then the launcher restarts it again, which the time to the
first all-reduce includes, or gives up, or hangs. How often is printed. PATH/bin/python has PyTorch
of the version that is compared, and is the worker's interpreter under both.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import benchmark_tools as tools  # noqa: E402  (found beside this file)

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torchrun_program.py")
RANKS = 2
# The kill costs one.
MAX_RESTARTS = 4
# A job that has not come back by then counts as given up.
HANG_S = 60
# The most that ours may take of torchrun's time to the first line.
TARGET_SHARE = 1 / 3
OURS, THEIRS = "ddprun", "torchrun"


def read_log(path):
    """(what, restart, rank) -> (pid, monotonic_ns)."""
    entries = {}
    try:
        with open(path, encoding="ascii") as stream:
            for line in stream.read().split("\n")[:-1]:
                what, *numbers = line.split()
                restart, rank, pid, at = (int(x) for x in numbers)
                entries[what, restart, rank] = (pid, at)
    except FileNotFoundError:
        pass
    return entries


def slowest(entries, what, restart):
    """When the last rank got there; None while one has not."""
    times = [entries.get((what, restart, rank)) for rank in range(RANKS)]
    return None if None in times else max(at for _, at in times)


@dataclass
class Restart:
    line_s: float  # from the kill to the first line of all new workers
    sum_s: float  # to their first all-reduce; infinite when there was none
    burnt: int  # restarts beyond the one that the kill cost


def restart_of(entries, killed_at, over):
    """What followed the kill; None while it may still come."""
    first = slowest(entries, "line", 1)
    sums = [slowest(entries, "sum", restart) for restart in range(1, MAX_RESTARTS + 1)]
    done = next((i for i, at in enumerate(sums) if at is not None), None)
    if first is None or (done is None and not over):
        return None
    if done is None:
        last = max(restart for _, restart, _ in entries)
        return Restart((first - killed_at) / 1e9, float("inf"), last - 1)
    return Restart((first - killed_at) / 1e9, (sums[done] - killed_at) / 1e9, done)


def measure(command, environment, rank, folder):
    """Kills one rank of one job, and returns what followed."""
    log, output = os.path.join(folder, "log"), os.path.join(folder, "output")
    environment = {**environment, "DDP_BENCHMARK_LOG": log}
    with open(output, "wb") as stream:
        job = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)

    def ended():
        if job.poll() is None:
            return ""
        with open(output, encoding="utf-8", errors="replace") as stream:
            return f"{command[0]} ended with code {job.returncode}:\n{stream.read()[-3000:]}"

    try:
        tools.wait_for("first sum", lambda: slowest(read_log(log), "sum", 0), ended)
        time.sleep(0.2)  # well into the loop
        killed_at = time.monotonic_ns()
        os.kill(read_log(log)["line", 0, rank][0], signal.SIGKILL)

        def restart():
            over = job.poll() is not None or time.monotonic_ns() - killed_at > HANG_S * 1e9
            return restart_of(read_log(log), killed_at, over)

        return tools.wait_for("sum after the kill", restart)
    finally:
        tools.end(job)


def report(restarts):
    """Returns whether the target is met."""
    print("\nseconds from the kill to   the first line on all ranks    the first all-reduce")
    medians = {}
    for name, those in restarts.items():
        kinds = [r.line_s for r in those], [r.sum_s for r in those]
        medians[name] = [statistics.median(x) for x in kinds]
        cells = [f"{statistics.median(x):.3f} (worst {max(x):.3f})" for x in kinds]
        print(f"{name:<24} {cells[0]:>29} {cells[1]:>23}")
    for name, those in restarts.items():
        given_up = sum(r.sum_s == float("inf") for r in those)
        burnt = sum(r.burnt for r in those if r.sum_s != float("inf"))
        print(f"{name}: {burnt} restarts burnt beyond {len(those)} kills, {given_up} jobs given up")
    share, sum_share = (ours / theirs for ours, theirs in zip(medians[OURS], medians[THEIRS]))
    met = share <= TARGET_SHARE and sum_share < 1
    print(
        f"\n{OURS} takes {share:.2f} of {THEIRS}'s time to the first line "
        f"(target {TARGET_SHARE:.2f}) and {sum_share:.2f} to the first all-reduce "
        f"(target below 1): {'met' if met else 'MISSED'}"
    )
    return met


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="torchrun_benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--ddprun", default=os.path.join(tools.BUILT, "launcher/ddprun"))
    parser.add_argument("--torch-python", required=True, help="a Python that has PyTorch")
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args(argv)
    tools.require_programs(parser, "bazel build --config=opt //launcher:ddprun", options.ddprun)
    return options


def run(options, folder):
    version = tools.first_line(options.torch_python, "-c", "import torch; print(torch.__version__)")
    python = tools.first_line(options.torch_python, "--version")
    tools.print_versions(
        tools.first_line(options.ddprun, "--version"), f"torchrun of PyTorch {version}", python
    )
    flags = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={MAX_RESTARTS}", PROGRAM]
    commands = {
        OURS: [options.ddprun, *flags],
        THEIRS: [options.torch_python, "-m", "torch.distributed.run", *flags],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": options.torch_python}
    restarts = {name: [] for name in commands}
    for i in range(options.kills):
        for name, command in commands.items():
            place = os.path.join(folder, f"{name}-{i}")
            os.mkdir(place)
            found = measure(command, environment, i % RANKS, place)
            restarts[name].append(found)
            words = f"{found.line_s:.3f} s, {found.sum_s:.3f} s, {found.burnt} burnt"
            print(f"kill {i + 1} under {name}: {words}", flush=True)
    return 0 if report(restarts) else 1


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(tools.run_main("torchrun_benchmark", lambda folder: run(options, folder)))
