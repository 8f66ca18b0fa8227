"""Measures what ddprun itself costs: to start a worker, in memory, and while nothing happens.

    bazel build --config=opt //launcher:ddprun
    tools/bench/launcher_benchmark

The start lasts from the fork that makes ddprun to the first moment of the worker, which is `date`:
its own start is included. Without a start of Redis: the server runs already. With: --standalone.
Memory and processor time are those of ddprun's two processes, keeper and agent; the private Redis
server is shown beside them.
"""

import argparse
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import benchmark_tools as tools  # noqa: E402  (found beside this file)

START_TARGET_MS = 30
START_WITH_REDIS_TARGET_MS = 80
MEMORY_TARGET_MIB = 20
IDLE_TARGET_PERCENT = 0.5
WORKERS = 8
IDLE_S = 20


def start_ms(command):
    """From here to the first moment of a worker that prints the time."""
    begun = time.time_ns()
    command = [*command, "--no-python", "date", "+%s%N"]
    answer = subprocess.run(command, cwd=tools.ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise tools.BenchmarkError(f"{' '.join(command)} failed:\n{answer.stderr}")
    return (int(answer.stdout) - begun) / 1e6


def start_redis(folder):
    """A server on a socket. Returns (process, URL)."""
    path = os.path.join(folder, "redis.sock")
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    tools.wait_for("Redis server", lambda: os.path.exists(path))
    return server, f"unix://{path}"


def measure_starts(options, folder):
    """name -> times in ms. The kinds take turns."""
    server, url = start_redis(folder)
    commands = {
        "ddprun, Redis runs already": [options.ddprun, f"--rdzv-endpoint={url}"],
        "ddprun --standalone": [options.ddprun, "--standalone"],
    }
    if options.torch_python:
        torchrun = [options.torch_python, "-m", "torch.distributed.run"]
        commands["torchrun --standalone"] = [*torchrun, "--standalone"]
    times = {name: [] for name in commands}
    try:
        for _ in range(options.starts):
            for name, command in commands.items():
                times[name].append(start_ms(command))
    finally:
        server.kill()
        server.wait()
    return times


def measure_idle(options, folder):
    """(MiB of ddprun, MiB of Redis, share of a core of ddprun in %, the same of Redis)."""
    log = os.path.join(folder, "events.jsonl")
    command = [options.ddprun, "--standalone", f"--nproc-per-node={WORKERS}", "--no-python"]
    command += [f"--event-log-file={log}", "sleep", "1000"]
    job = subprocess.Popen(command, cwd=tools.ROOT, stderr=subprocess.DEVNULL)
    try:
        names = lambda: [e["event"] for e in tools.read_events(log)]  # noqa: E731
        started = lambda: "generation_started" in names()  # noqa: E731
        tools.wait_for("start of the workers", started, tools.ended(job))
        below = tools.descendants_of(job.pid)
        ours = [job.pid] + [p for p in below if tools.command_name(p).startswith("ddp")]
        redis = [p for p in below if tools.command_name(p).startswith("redis-server")]
        time.sleep(1)  # what belongs to the start is over

        def spent(pids):
            return sum(tools.cpu_seconds(p) for p in pids)

        before = time.monotonic(), spent(ours), spent(redis)
        time.sleep(options.idle_seconds)
        after = time.monotonic(), spent(ours), spent(redis)
        share = [100 * (b - a) / (after[0] - before[0]) for a, b in zip(before[1:], after[1:])]
        memory = [sum(tools.resident_mib(p) for p in pids) for pids in (ours, redis)]
        return (*memory, *share)
    finally:
        tools.end(job)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="launcher_benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--ddprun", default=os.path.join(tools.BUILT, "launcher/ddprun"))
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--idle-seconds", type=int, default=IDLE_S)
    parser.add_argument("--torch-python", default="", help="a Python with torch, to start beside")
    options = parser.parse_args(argv)
    tools.require_programs(parser, "bazel build --config=opt //launcher:ddprun", options.ddprun)
    return options


def run(options, folder):
    tools.print_versions(
        tools.first_line(options.ddprun, "--version"), tools.first_line("redis-server", "--version")
    )
    times = measure_starts(options, folder)
    print("\nstart, to the first moment of the worker")
    targets = [START_TARGET_MS, START_WITH_REDIS_TARGET_MS]
    for (name, values), target in zip(times.items(), [*targets, None]):
        word = f" ({tools.verdict(max(values), target, 'ms')})" if target else ""
        print(f"{name:<28} {tools.summary(values, 'ms')}{word}")
    ours, redis, busy, redis_busy = measure_idle(options, folder)
    print(f"\n{WORKERS} workers that do nothing, for {options.idle_seconds} s")
    word = tools.verdict(ours, MEMORY_TARGET_MIB, "MiB")
    print(f"resident memory of ddprun  {ours:.1f} MiB ({word}); its Redis {redis:.1f} MiB")
    word = tools.verdict(busy, IDLE_TARGET_PERCENT, "% of a core")
    redis_share = f"its Redis {redis_busy:.3f} %"
    print(f"processor time of ddprun   {busy:.3f} % of a core ({word}); {redis_share}")
    return 0


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(tools.run_main("launcher_benchmark", lambda folder: run(options, folder)))
