"""Measures a sum over hosts of several ranks: the hierarchical backend beside Gloo over all ranks.

    bazel build --config=opt //tools/bench:hierarchical_benchmark_worker
    tools/bench/hierarchical_benchmark        # as root

The hosts are network namespaces (testing/hosts/hosts.py), and tc limits what each sends to --rate.
The backends take turns, sum by sum. The time of a sum is that of its slowest rank. A figure is the
median over the rounds of a ratio inside one round, so a slow moment of the machine hits both. Bytes
are the kernel's counts of the first host's interface: payload, acknowledgements, and a header for
each of the kernel's large packets.

With two hosts no exact sum moves less than one tensor in each direction: every host must learn what
the other one adds. A flat ring of Gloo over 0,1|2,3 moves 2 * 3/4 of a tensor in each direction. So
0.667 of Gloo's bytes is the least, and 0.667 of its time where the link is the limit.

Then a rank is killed in the middle of sums, again and again, and the times until the errors of the
others are measured. --json=FILE writes all figures, round by round and error by error.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import benchmark_tools as tools  # noqa: E402  (found beside this file)

sys.path.insert(0, os.path.join(tools.ROOT, "testing/hosts"))
import hosts  # noqa: E402

PORT = 29400
WORKER = os.path.join(tools.BUILT, "tools/bench/hierarchical_benchmark_worker")


def why_not():
    """Why this process cannot measure, in one line; "" where it can."""
    if shutil.which("tc") is None:
        return "the link is limited by tc (iproute2), which is not installed"
    return hosts.why_not()


class Job:
    """One start of all ranks."""

    def __init__(self, network, options, folder, flags):
        self.processes = []
        names, local_size = options.names, options.ranks_per_host
        size = len(names) * local_size
        for rank in range(size):
            host = network[names[rank // local_size]]
            environment = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank % local_size),
                LOCAL_WORLD_SIZE=str(local_size),
                MASTER_ADDR=network[names[0]].address,
                MASTER_PORT=str(PORT),
                OMP_NUM_THREADS="1",
            )
            output = tempfile.mktemp(prefix=f"rank{rank}.", dir=folder)
            self.processes.append(host.start([options.worker, *flags], output, environment))

    def lines(self, rank):
        """What a rank has printed as JSON so far."""
        lines = self.processes[rank].output().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait(self):
        for rank, process in enumerate(self.processes):
            code = process.wait(600)
            if code not in (0, -signal.SIGKILL):
                raise tools.BenchmarkError(process.quote(f"rank {rank} ended with {code}"))


def quartiles(values):
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"


def slowest(lines_of_ranks):
    """The lines of the first rank, with the time of the slowest rank in each."""
    return [
        dict(same_sum[0], seconds=max(line["seconds"] for line in same_sum))
        for same_sum in zip(*lines_of_ranks)
    ]


def rounds_of(lines, backends):
    """Backend -> the seconds and the bytes of its sums, in lists with one entry per round.

    Without the first sum of each backend, which allocates its buffers.
    """
    found = {}
    for name in backends:
        sums = [line for line in lines if line["backend"] == name][1:]
        found[name] = {key: [x[key] for x in sums] for key in ("seconds", "sent", "received")}
    return found


def ratios(found, base):
    """The ratios of one backend to another inside each round: (of the time, of the bytes)."""
    moved = [[s + r for s, r in zip(x["sent"], x["received"])] for x in (found, base)]
    pairs = (found["seconds"], base["seconds"]), moved
    return [[x / y for x, y in zip(above, below)] for above, below in pairs]


def compare(rounds, payload):
    """Prints the backends beside the first one."""
    for name, found in rounds.items():
        print(
            f"{name:13} {statistics.median(found['seconds']) * 1e3:8.1f} ms   "
            f"over the link, in tensors: sent {statistics.median(found['sent']) / payload:.3f}, "
            f"received {statistics.median(found['received']) / payload:.3f}"
        )
    first, *others = rounds
    for name in others:
        times, moved = ratios(rounds[name], rounds[first])
        print(f"{name} / {first}: time {quartiles(times)}")
        print(f"{name} / {first}: bytes {quartiles(moved)}", flush=True)


def kill_ranks(network, options, folder):
    """Kills one rank after the other, each in a job of its own.

    Prints the times to the errors of the others, and returns them with the number of errors that
    name another rank.
    """
    local_size = options.ranks_per_host
    size = len(options.names) * local_size
    near, far, wrong = [], [], 0
    for number in range(options.kills):
        victim = number % (size - 1) + 1  # rank 0 serves the store
        flags = ["--until_failure", "--backends=hierarchical", f"--elements={options.elements}"]
        job = Job(network, options, folder, flags)
        tools.wait_for("start", lambda: all(job.lines(rank) for rank in range(size)))
        time.sleep(0.1 + 0.13 * number % 0.4)  # anywhere in a sum
        killed_ns = time.monotonic_ns()
        os.kill(job.processes[victim].pid, signal.SIGKILL)
        job.wait()
        for rank in range(size):
            if rank == victim:
                continue
            end = job.lines(rank)[-1]
            on_its_host = rank // local_size == victim // local_size
            (near if on_its_host else far).append((end["failed_ns"] - killed_ns) / 1e6)
            wrong += end["rank"] != victim
    print(f"a rank is killed, {options.kills} times: errors that name another rank: {wrong}")
    print(f"  errors on its host: {tools.summary(near, 'ms')}")
    print(f"  errors on others:   {tools.summary(far, 'ms')}", flush=True)
    return {"kills": options.kills, "near_ms": near, "far_ms": far, "wrong_rank": wrong}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--elements", type=int, default=25 << 18, help="float numbers (25 MiB)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link; empty: no limit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--backends", default="gloo,hierarchical")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--worker", default=WORKER, help="the program of a rank")
    parser.add_argument("--json", default="", help="the file that receives all figures")
    options = parser.parse_args(arguments)
    options.names = [chr(ord("a") + i) for i in range(options.hosts)]
    build = "bazel build --config=opt //tools/bench:hierarchical_benchmark_worker"
    tools.require_programs(parser, build, options.worker)
    return options


def run(options, folder):
    if why_not():
        raise tools.BenchmarkError(why_not())
    tools.print_versions(f"{options.hosts} hosts of {options.ranks_per_host} ranks")
    payload = options.elements * 4
    print(f"link      {options.rate or 'no limit'}; tensor {payload / 2**20:g} MiB")
    found = {"rate": options.rate, "tensor_bytes": payload}
    found["ranks_per_host"] = options.ranks_per_host
    with hosts.Network(options.names) as network:
        for name in options.names:
            if options.rate:
                limit = f"rate {options.rate} burst 256kb latency 100ms"
                network[name].run(f"tc qdisc add dev eth0 root tbf {limit}".split())
        backends = options.backends.split(",")
        flags = [f"--backends={options.backends}", f"--elements={options.elements}"]
        flags.append(f"--rounds={options.rounds + 1}")
        job = Job(network, options, folder, flags)
        job.wait()
        ranks = range(len(options.names) * options.ranks_per_host)
        found["rounds"] = rounds_of(slowest([job.lines(rank) for rank in ranks]), backends)
        compare(found["rounds"], payload)
        if options.kills:
            found["death"] = kill_ranks(network, options, folder)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as stream:
            json.dump(found, stream)


def main(options, folder):
    try:
        return run(options, folder)
    except hosts.HostsError as error:
        raise tools.BenchmarkError(str(error)) from None


if __name__ == "__main__":
    settings = parse_arguments(sys.argv[1:])
    sys.exit(tools.run_main("hierarchical_benchmark", lambda folder: main(settings, folder)))
