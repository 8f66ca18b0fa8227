"""What the benchmarks in Python share: event logs, processes, and what is printed."""

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILT = os.path.join(ROOT, "bazel-bin")
# How long anything may take that a benchmark waits for.
PATIENCE_S = 180
POLL_S = 0.002


class BenchmarkError(Exception):
    """The benchmark cannot go on; the text says why."""


# ---- What is printed ------------------------------------------------------------------------


def first_line(*command):
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return answer.stdout.strip().split("\n")[0]
    except OSError:
        return "unknown"


def describe_machine():
    processor = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            processor = re.search(r"^model name\s*: (.*)$", stream.read(), re.MULTILINE).group(1)
    except (OSError, AttributeError):
        pass
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{processor}, {cores} cores (load {load:.2f}), Linux {platform.release()}"


def print_versions(*more):
    commit = first_line("git", "rev-parse", "--short", "HEAD")
    print(f"machine   {describe_machine()}")
    print(f"versions  {', '.join([f'commit {commit}', *more])}", flush=True)


def summary(values, unit):
    median, worst = statistics.median(values), max(values)
    return f"median {median:.3f} {unit}, worst of {len(values)} {worst:.3f} {unit}"


def verdict(value, limit, unit):
    """Whether a figure is under its target, in words."""
    return f"target under {limit:g} {unit}: {'met' if value < limit else 'MISSED'}"


# ---- Waiting, processes -----------------------------------------------------------------------


def wait_for(what, condition, alive=None, patience_s=PATIENCE_S):
    """The first true value of `condition()`. `alive()` says why it can no longer come, or ""."""
    deadline = time.monotonic() + patience_s
    while True:
        why_not = alive() if alive else ""
        value = condition()
        if value:
            return value
        if why_not:
            raise BenchmarkError(f"no {what}: {why_not}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no {what} in {patience_s} s")
        time.sleep(POLL_S)


def ended(process):
    """For wait_for(): what waits for a process' doings waits no longer than it lives."""
    return lambda: "the job has ended" if process.poll() is not None else ""


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
            return [int(x) for x in stream.read().split()]
    except OSError:
        return []


def descendants_of(pid):
    found = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def command_name(pid):
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def cpu_seconds(pid):
    """What all threads of a process have run, to the nanosecond."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as stream:
            total += int(stream.read().split()[0])
    return total / 1e9


def resident_mib(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as stream:
        return int(re.search(r"^VmRSS:\s*(\d+) kB", stream.read(), re.MULTILINE).group(1)) / 1024


def end(process):
    """Ends a launcher: by SIGTERM, which it passes on, and by SIGKILL when that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- Event logs -------------------------------------------------------------------------------


def parse_events(text):
    """The events of a log that may still grow: a line without its end is left for later."""
    return [json.loads(line) for line in text.split("\n")[:-1] if line.strip()]


def read_events(path):
    try:
        with open(path, encoding="utf-8") as stream:
            return parse_events(stream.read())
    except FileNotFoundError:
        return []


# ---- Main -------------------------------------------------------------------------------------


def require_programs(parser, build, *programs):
    for program in programs:
        if not os.access(program, os.X_OK):
            parser.error(f"{program} is missing; run: {build}")


def run_main(name, body):
    """Calls body(folder). Returns its exit code; on an error the folder is kept and named."""
    folder = tempfile.mkdtemp(prefix=f"ddp-{name}.")
    try:
        code = body(folder)
    except BenchmarkError as error:
        sys.exit(f"{name}: {error}\nIts files are kept in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    return code
