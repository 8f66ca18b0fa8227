"""Measures how long a job is away when it loses a host and goes on with the others.

    bazel build --config=opt //launcher:ddprun //examples/digits:train
    tools/bench/node_loss_benchmark        # as root

Three hosts (network namespaces, testing/hosts/hosts.py) train the digits with two ranks each, at
--nnodes=2:3; Redis is on a fourth. Again and again one of the three, left to chance, loses its
power in the middle of training, and comes back when the others have gone on. The time lasts from
the loss to the end of the survivors' first optimizer step, on the slowest rank, restore included:
the step's time is the worker's own stamp, read from the event logs. Ends with an error when a
restart is charged to the job's budget, which is 0.
"""

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import benchmark_tools as tools  # noqa: E402  (found beside this file)

sys.path.insert(0, os.path.join(tools.ROOT, "testing/hosts"))
import hosts  # noqa: E402
from hosts_job import Job  # noqa: E402

NAMES = ["a", "b", "c"]
# Lease in ms, None: the default; and the most seconds that a loss may take.
CASES = [(None, 5.0), (1000, 2.5)]


@dataclass
class Loss:
    host: str
    rank_zero: bool  # whether rank 0 was there
    noticed_s: float  # from the loss until the last survivor knew
    started_s: float  # until the new workers had started everywhere
    stepped_s: float  # until the slowest rank had done a step


def measure(job, network, lost, folder):
    """Takes one host away, waits for the others, and brings it back."""
    survivors = [name for name in NAMES if name != lost]
    rank_zero = job.first_host(NAMES) == lost
    tools.wait_for("checkpoint", lambda: os.listdir(os.path.join(folder, "checkpoints")))
    time.sleep(random.uniform(0.5, 1.5))  # anywhere in a step and between two heartbeats
    lost_at = time.monotonic_ns()
    network[lost].power_off()
    generation = job.await_running(survivors, 2 * len(survivors))

    def last(event):
        nodes = [job.nodes[name] for name in survivors]
        found = [e["monotonic_ns"] for node in nodes for e in node.events(event)]
        return (max(found) - lost_at) / 1e9 if found else float("nan")

    steps = [job.nodes[name].first_steps(generation).values() for name in survivors]
    stepped = max(step["monotonic_ns"] for those in steps for step in those)
    loss = Loss(lost, rank_zero, last("generation_over"), last("generation_started"),
                (stepped - lost_at) / 1e9)  # fmt: skip
    network[lost].boot()
    job.start_node(lost)
    job.await_running(NAMES, 2 * len(NAMES))
    if any(job.nodes[name].last("joined")["restarts"] for name in NAMES):
        raise tools.BenchmarkError(job.quote("a lost host was charged to the budget"))
    return loss


def measure_case(options, lease_ms, folder):
    os.mkdir(folder)
    program = [options.train, "--epochs=1000000", "--checkpoint_every=20"]
    program += [f"--checkpoint_dir={os.path.join(folder, 'checkpoints')}"]
    flags = ["--nnodes=2:3", "--nproc-per-node=2", "--no-python", "--max-restarts=0"]
    flags += ["--rdzv-id=loss"] + ([f"--lease-ms={lease_ms}"] if lease_ms else [])
    flags += ["--quarantine-strikes=0"]  # a host is lost again and again
    chosen = random.Random(options.seed)
    losses = []
    with hosts.Network(["store", *NAMES]) as network:
        job = Job(network, folder, options.ddprun, program, flags)
        job.start_store("store")
        for name in NAMES:
            job.start_node(name)
        job.await_running(NAMES, 2 * len(NAMES))
        for i in range(options.losses):
            losses.append(measure(job, network, chosen.choice(NAMES), folder))
            where = " with rank 0" if losses[-1].rank_zero else ""
            print(
                f"loss {i + 1} of {options.losses}: host {losses[-1].host}{where} "
                f"noticed {losses[-1].noticed_s:.3f} s, workers started "
                f"{losses[-1].started_s:.3f} s, stepped {losses[-1].stepped_s:.3f} s",
                flush=True,
            )
    return losses


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="node_loss_benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--ddprun", default=os.path.join(tools.BUILT, "launcher/ddprun"))
    parser.add_argument("--train", default=os.path.join(tools.BUILT, "examples/digits/train"))
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="chooses the hosts that are lost")
    options = parser.parse_args(argv)
    build = "bazel build --config=opt //launcher:ddprun //examples/digits:train"
    tools.require_programs(parser, build, options.ddprun, options.train)
    if hosts.why_not():
        parser.error(hosts.why_not())
    return options


def run(options, folder):
    version = tools.first_line(options.ddprun, "--version")
    tools.print_versions(version, tools.first_line("redis-server", "--version"))
    missed = False
    for lease_ms, target_s in CASES:
        name = f"--lease-ms={lease_ms}" if lease_ms else "default settings"
        print(f"\n{name}: seconds from the loss of a host", flush=True)
        losses = measure_case(options, lease_ms, os.path.join(folder, f"lease-{lease_ms}"))
        times = [loss.stepped_s for loss in losses]
        missed = missed or max(times) >= target_s
        word = tools.verdict(max(times), target_s, "s")
        print(f"{name}: survivors' first step {tools.summary(times, 's')} ({word})")
    return 1 if missed else 0


def main(options, folder):
    try:
        return run(options, folder)
    except hosts.HostsError as error:
        raise tools.BenchmarkError(str(error)) from None


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(tools.run_main("node_loss_benchmark", lambda folder: main(options, folder)))
