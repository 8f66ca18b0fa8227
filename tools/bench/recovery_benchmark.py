"""Measures how long a job is away when one of its ranks is killed, and that it comes back the same.

    bazel build //launcher:ddprun //examples/digits:train
    tools/bench/recovery_benchmark
    tools/bench/recovery_benchmark --kills=100

Trains the digits on two ranks twice: once in peace, once with a rank killed by SIGKILL in the
middle of an epoch, ten times over or as often as you like; which rank it is, is left to chance.
A recovery lasts from the kill to the end of the first optimizer step of the new generation on the
slowest rank, restore included: the kill's time is taken here, the step's is the worker's own stamp,
read from the event log of ddprun; both are CLOCK_MONOTONIC. Fails when a restart
was spent on anything but these kills, and when the model or optimizer files of the two runs differ
in a byte, whatever the times are.
"""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import benchmark_tools as tools  # noqa: E402  (found beside this file)
from benchmark_tools import ROOT, BenchmarkError  # noqa: E402

TARGET_S = 1.0


@dataclass
class Kill:
    generation: int  # the one it ended
    rank: int
    pid: int
    monotonic_ns: int


@dataclass
class Recovery:
    kill: Kill
    generation: int  # the new one
    step: int  # the first that it did
    noticed_s: float  # from the kill to the entry of the killed worker's end
    started_s: float  # to the start of the new workers
    stepped_s: float  # to the end of the first step on the slowest rank


def workers_of(events, generation):
    """rank -> pid of a generation, or None when it has not started."""
    for event in events:
        if event["event"] == "generation_started" and event["generation"] == generation:
            return dict(zip(event["ranks"], event["pids"]))
    return None


def latest_generation(events):
    return max((e["generation"] for e in events if e["event"] == "generation_started"), default=0)


def first_steps(events, generation):
    """rank -> event of the first step that it has done in this generation."""
    return {
        e["rank"]: e
        for e in events
        if e["event"] == "first_step" and e["generation"] == generation
    }


def has_stepped(events, generation):
    """Whether every worker of the generation has done a step."""
    workers = workers_of(events, generation)
    return bool(workers) and set(first_steps(events, generation)) == set(workers)


def recovery_of(events, kill):
    """What followed a kill; None while it is not over."""
    generation = latest_generation(events)
    if generation <= kill.generation or not has_stepped(events, generation):
        return None
    steps = first_steps(events, generation).values()
    slowest = max(steps, key=lambda e: e["monotonic_ns"])

    def since_kill(event):
        return (event["monotonic_ns"] - kill.monotonic_ns) / 1e9

    exits = [e for e in events if e["event"] == "worker_exited" and e["pid"] == kill.pid]
    started = ("generation_started", generation)
    starts = [e for e in events if (e["event"], e["generation"]) == started]
    return Recovery(
        kill=kill,
        generation=generation,
        step=slowest["step"],
        noticed_s=since_kill(exits[0]) if exits else float("nan"),
        started_s=since_kill(starts[0]),
        stepped_s=since_kill(slowest),
    )


class Job:
    """One run of the digits trainer under ddprun. Killed when it is left early."""

    def __init__(self, options, folder, kills):
        self.checkpoints = os.path.join(folder, "checkpoints")
        self.event_log = os.path.join(folder, "events.jsonl")
        self.output = []  # of (monotonic seconds, line)
        command = [options.ddprun, "--standalone", f"--nproc-per-node={options.ranks}"]
        command += [f"--max-restarts={kills}", f"--event-log-file={self.event_log}"]
        command += [options.train, f"--checkpoint_dir={self.checkpoints}"]
        command += [f"--epochs={options.epochs}", f"--checkpoint_every={options.checkpoint_every}"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        tools.end(self.process)
        self.reader.join(tools.PATIENCE_S)

    def _read(self):
        for line in self.process.stdout:
            self.output.append((time.monotonic(), line))

    def events(self):
        return tools.read_events(self.event_log)

    def epoch_times(self):
        """When each epoch line came."""
        return [at for at, line in list(self.output) if re.match(r"epoch \d+ ", line)]

    def wait_for(self, what, condition):
        """Returns the first true value of `condition()`."""
        try:
            return tools.wait_for(what, condition, tools.ended(self.process))
        except BenchmarkError as error:
            raise BenchmarkError(self.quote(str(error))) from None

    def finish(self):
        try:
            code = self.process.wait(tools.PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(self.quote(f"no end of the job in {tools.PATIENCE_S} s")) from None
        self.reader.join(tools.PATIENCE_S)
        if code != 0:
            raise BenchmarkError(self.quote(f"the job ended with exit code {code}"))

    def quote(self, what):
        tail = "".join(line for _, line in self.output[-40:])
        return f"{what}; its output ends with:\n{tail}"


def kill_in_mid_epoch(job, rank, epoch_s):
    """Kills one rank half an epoch after the generation's first whole epoch."""
    generation = latest_generation(job.events())
    job.wait_for("first step", lambda: has_stepped(job.events(), generation))
    while True:
        seen = len(job.epoch_times())
        job.wait_for("end of an epoch", lambda: len(job.epoch_times()) > seen)
        seen = len(job.epoch_times())
        time.sleep(epoch_s / 2)
        if len(job.epoch_times()) == seen:  # else an epoch was faster than the ones before
            break
    pid = workers_of(job.events(), generation)[rank]
    kill = Kill(generation, rank, pid, time.monotonic_ns())
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise BenchmarkError("the job was done before all kills; raise --epochs") from None
    return kill


def final_files(checkpoints):
    """name -> bytes of the model and optimizer files of the last checkpoint."""
    folders = sorted(x for x in os.listdir(checkpoints) if x.startswith("step-"))
    if not folders:
        raise BenchmarkError(f"no checkpoint in {checkpoints}")
    folder = os.path.join(checkpoints, folders[-1])
    files = {}
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"(model|optimizer)-.*\.safetensors", name):
            with open(os.path.join(folder, name), "rb") as stream:
                files[name] = stream.read()
    if not any(x.startswith("model-") for x in files):
        raise BenchmarkError(f"no model file in {folder}")
    return folders[-1], files


def first_difference(left, right):
    """In words, or None when both hold the same files with the same bytes."""
    if set(left) != set(right):
        return f"the files are {sorted(left)} and {sorted(right)}"
    for name, data in left.items():
        if data != right[name]:
            pairs = zip(data, right[name])
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end of the shorter")
            return f"{name} differs at byte {at}"
    return None


def torch_version():
    with open(os.path.join(ROOT, "third_party/versions.bzl"), encoding="utf-8") as stream:
        return re.search(r'TORCH_VERSION = "([^"]+)"', stream.read()).group(1)


def report(options, recoveries, epoch_s):
    times = [r.stepped_s for r in recoveries]
    redis = tools.first_line("redis-server", "--version")
    tools.print_versions(f"LibTorch {torch_version()}", redis)
    print(f"job       {options.ranks} ranks, an epoch takes {epoch_s:.2f} s in peace")
    print("\nseconds from the kill to  noticed  workers started  first step done on all ranks")
    for r in recoveries:
        print(
            f"rank {r.kill.rank}, step {r.step:<13} {r.noticed_s:8.3f} {r.started_s:16.3f} "
            f"{r.stepped_s:30.3f}"
        )
    print(
        f"\nrecovery of {len(times)}: median {statistics.median(times):.3f} s, worst "
        f"{max(times):.3f} s (target {TARGET_S} s: {'met' if max(times) <= TARGET_S else 'MISSED'})"
    )


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="recovery_benchmark", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--ddprun", default=os.path.join(tools.BUILT, "launcher/ddprun"))
    parser.add_argument("--train", default=os.path.join(tools.BUILT, "examples/digits/train"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="chooses the ranks that are killed")
    parser.add_argument("--epochs", type=int, default=0, help="default: 4 for each kill")
    parser.add_argument("--checkpoint_every", type=int, default=10, help="steps")
    options = parser.parse_args(argv)
    build = "bazel build //launcher:ddprun //examples/digits:train"
    tools.require_programs(parser, build, options.ddprun, options.train)
    options.epochs = options.epochs or max(80, 4 * options.kills)
    return options


def restarts_beyond(events, kills):
    """Why the job's restarts are not one for each kill, in words; "" when they are."""
    restarts = [e for e in events if e["event"] == "restart"]
    causes = {f"rank {kill.rank} was killed by SIGKILL" for kill in kills}
    others = [e["reason"] for e in restarts if e["reason"] not in causes]
    if len(restarts) == len(kills) and not others:
        return ""
    return f"{len(restarts)} restarts after {len(kills)} kills; other causes: {others}"


@dataclass
class Measured:
    recoveries: list
    epoch_s: float  # in peace
    burnt: str  # why a restart had another cause than the kills; "" when none had
    expected: tuple  # (folder, name -> bytes) of the run in peace
    found: tuple  # of the other


def measure(options, folder):
    """Trains once in peace and once with kills."""
    peace, war = os.path.join(folder, "peace"), os.path.join(folder, "war")
    os.mkdir(peace)
    os.mkdir(war)
    print(f"training {options.epochs} epochs in peace", flush=True)
    with Job(options, peace, 0) as job:
        job.finish()
        times = job.epoch_times()
        expected = final_files(job.checkpoints)
    if len(times) < 2:
        raise BenchmarkError(job.quote("fewer than two epoch lines"))
    epoch_s = statistics.median(b - a for a, b in zip(times, times[1:]))

    recoveries = []
    chosen = random.Random(options.seed)
    with Job(options, war, options.kills) as job:
        job.wait_for("start of the workers", lambda: latest_generation(job.events()))
        for i in range(options.kills):
            rank = chosen.randrange(options.ranks)
            kill = kill_in_mid_epoch(job, rank, epoch_s)
            recovery = job.wait_for("recovery", lambda: recovery_of(job.events(), kill))
            print(f"kill {i + 1} of {options.kills}: {recovery.stepped_s:.3f} s", flush=True)
            recoveries.append(recovery)
        job.finish()
        found = final_files(job.checkpoints)
        burnt = restarts_beyond(job.events(), [r.kill for r in recoveries])
    return Measured(recoveries, epoch_s, burnt, expected, found)


def run(options, folder):
    """Returns the exit code."""
    measured = measure(options, folder)
    report(options, measured.recoveries, measured.epoch_s)
    if measured.burnt:
        print(f"the budget was spent on something else: {measured.burnt}")
        return 1
    count = len(measured.recoveries)
    print(f"{count} kills, {count} recoveries, and no restart for anything else")
    expected, found = measured.expected, measured.found
    difference = first_difference(expected[1], found[1])
    names = f"{expected[0]} of the quiet run and {found[0]} of the other"
    if difference:
        print(f"model and optimizer of {names} DIFFER: {difference}")
        return 1
    size = sum(len(data) for data in expected[1].values())
    print(f"model and optimizer of {names}: {len(expected[1])} files, {size} bytes, identical")
    return 0


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(tools.run_main("recovery_benchmark", lambda folder: run(options, folder)))
