"""Measures what data parallelism costs in a training step, ours beside PyTorch's, both on Gloo.

    bazel build --config=opt //tools/bench:ddp_step_benchmark_worker
    tools/bench/ddp_step_benchmark --torch-python=PATH/bin/python

A step is forward and backward, without an optimizer, on two ranks with one thread each, both pinned
to a core of their own. It lasts from when both have begun until the slower one has done. What it
costs is its ratio to the plain step: the same model in the same program without DDP, and again
until the slower rank has done, so a synchronization that takes no time would have the ratio 1. Two
programs per model, one of ours and one of PyTorch's, live through the whole run and take turns:
every round does some steps of each of their modes. A figure is the median over the rounds, with the
first and third quartile; a ratio is taken within its round. Both get the same environment, with an
allocator that keeps its memory: page faults in the plain step would hide the costs.

Of two modes one is ahead when its third quartile is below the other's first.
"""

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import benchmark_tools as tools  # noqa: E402  (found beside this file)
from benchmark_tools import ROOT, BenchmarkError  # noqa: E402

RANKS = 2
BARRIER_BYTES = 64  # per rank
PLAIN = "plain"
OURS, THEIRS = "ours", "PyTorch"
# How long one answer may take; the first one makes the model.
PATIENCE_S = 120
# Sums of gradients that are equal but for the order of additions differ by less than this.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Model:
    name: str
    layers: int  # linear ones; two parameters each
    width: int
    steps: int  # in one round of one mode
    kind: str = "chain"
    batch: int = 32

    def tensors(self):
        """(number of parameters, their elements)."""
        w = self.width
        if self.kind == "chain":
            return 2 * self.layers, self.layers * (w + 1) * w
        if self.kind == "conv":
            return conv_tensors(self.layers, w)
        block = 12 * w * w + 13 * w
        return 12 * self.layers + 5, self.layers * block + 2 * w + VOCABULARY * (2 * w + 1)

    def megabytes(self):
        return self.tensors()[1] * 4 / 1e6

    def describe(self):
        return f"{self.tensors()[0]} parameters, {self.megabytes():.1f} MB"

    def arguments(self):
        return [
            f"--model={self.kind}",
            f"--layers={self.layers}",
            f"--width={self.width}",
            f"--batch={self.batch}",
        ]


VOCABULARY = 1024  # of the transformer
CLASSES = 10  # of the conv net


def conv_tensors(blocks, width):
    layers = [(3, width)]
    for stage in range(3):
        channels = width << stage
        layers += [(channels // 2, channels)] if stage else []
        layers += [(channels, channels)] * (2 * blocks)
    elements = sum(9 * before * after + 2 * after for before, after in layers)
    return 3 * len(layers) + 2, elements + CLASSES * (4 * width + 1)


MODELS = [
    Model("small", 500, 16, 10),
    Model("medium", 50, 256, 10),
    Model("large", 24, 1024, 4),
]
# Models that --models can name besides.
MORE_MODELS = [
    Model("conv", 2, 32, 4, kind="conv", batch=16),
    Model("transformer", 4, 192, 4, kind="transformer", batch=256),
]


@dataclass(frozen=True)
class Quartiles:
    first: float
    median: float
    third: float

    def __str__(self):
        return f"{self.median:7.3f} [{self.first:.3f}..{self.third:.3f}]"


@dataclass
class Series:
    """What one mode of one side did, round by round."""

    step_ms: list = field(default_factory=list)
    ratios: list = field(default_factory=list)  # to the plain step of the same round
    faults: list = field(default_factory=list)  # page faults per step, both ranks


def quartiles(values):
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(first, median, third)


def step_times_ms(answers):
    """The length of each step but the first, given every rank's answer: the slowest rank's."""
    per_rank = [
        [(end - start) / 1e6 for start, end in zip(answer["starts_ns"], answer["ends_ns"])]
        for answer in answers
    ]
    return [max(times) for times in zip(*per_rank)][1:]


def verdict(ours, theirs):
    """Whether `ours` (Quartiles of ratios) is ahead of theirs, level or behind."""
    if ours.third < theirs.first:
        return "ahead"
    if ours.first > theirs.third:
        return "behind"
    return "level"


def check_average(mode, sums, plain_sums):
    """Raises unless the gradients of all ranks are the average of the plain ones."""
    expected = statistics.fmean(plain_sums)
    for rank, found in enumerate(sums):
        if abs(found - expected) > TOLERANCE * max(1.0, *(abs(x) for x in plain_sums)):
            raise BenchmarkError(
                f"mode {mode}: the gradients of rank {rank} have the sum {found}, the average "
                f"of the ranks has {expected}: nothing was averaged"
            )


def environment(rank, port, ranks=RANKS):
    values = dict(os.environ)
    for name in ("DDP_STORE", "DDP_HEALTH_FD", "TORCHELASTIC_ERROR_FILE"):
        values.pop(name, None)
    values.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        MALLOC_MMAP_MAX_="0",
        MALLOC_TRIM_THRESHOLD_=str(1 << 40),
    )
    return values


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def barrier_file(path, ranks):
    """Makes the file by which the ranks of one run meet. Returns its path."""
    with open(path, "wb") as stream:
        stream.write(bytes(BARRIER_BYTES * ranks))
    return path


class Ranks:
    """Processes that answer each line on their stdin with one line of JSON.

    Killed when the context is left.
    """

    patience_s = PATIENCE_S  # for one answer

    def __init__(self, name, folder):
        self.name = name
        self.folder = folder
        self.processes = []
        self.logs = []

    def start(self, label, command, env):
        """Starts the next rank. `label` names its log file."""
        self.logs.append(os.path.join(self.folder, f"log-{label}-{len(self.logs)}"))
        with open(self.logs[-1], "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    bufsize=1,
                )
            )

    def pids(self):
        return [process.pid for process in self.processes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # a request that the rank never read
                process.stdin.close()
            process.stdout.close()

    def error(self, rank, what):
        with open(self.logs[rank], encoding="utf-8", errors="replace") as stream:
            tail = "".join(stream.readlines()[-20:])
        return BenchmarkError(f"{self.name}: rank {rank} {what}; its log ends with:\n{tail}")

    def answers(self, what, ranks=None):
        """One line of each of `ranks`; default: of every rank."""
        deadline = time.monotonic() + self.patience_s
        answers = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            process = self.processes[rank]
            while not select.select([process.stdout], [], [], 1)[0]:
                if process.poll() is not None:
                    raise self.error(rank, f"ended when asked for {what}")
                if time.monotonic() > deadline:
                    raise self.error(rank, f"took over {self.patience_s} s for {what}")
            line = process.stdout.readline()
            if not line:
                raise self.error(rank, f"ended when asked for {what}")
            answers.append(json.loads(line))
        return answers

    def ask(self, request):
        """The answers of all ranks to one line."""
        for rank, process in enumerate(self.processes):
            try:
                process.stdin.write(request + "\n")
            except BrokenPipeError:
                raise self.error(rank, f"ended before {request}") from None
        return self.answers(request)


class Side(Ranks):
    """The ranks of one side for one model, each pinned to a core."""

    def __init__(self, name, command, model, cpus, folder, ranks=RANKS):
        super().__init__(name, folder)
        label = f"{name}-{model.name}-{ranks}"
        barrier = barrier_file(os.path.join(folder, f"barrier-{label}"), ranks)
        port = free_port()
        for rank in range(ranks):
            pinned = ["taskset", "--cpu-list", str(cpus[rank % len(cpus)]), *command]
            pinned += [*model.arguments(), f"--barrier={barrier}"]
            self.start(label, pinned, environment(rank, port, ranks))

    def steps(self, mode, count):
        return self.ask(f"steps {mode} {count}")


def run_round(side, modes, model, results):
    """Every mode once, the plain one first."""
    plain_ms, plain_sums = None, None
    for mode in [PLAIN] + modes:
        # The first step finds the caches full of what another program did.
        answers = side.steps(mode, model.steps + 1)
        step_ms = statistics.median(step_times_ms(answers))
        sums = [answer["gradient_sum"] for answer in answers]
        if mode == PLAIN:
            plain_ms, plain_sums = step_ms, sums
        elif "noop" not in mode:
            check_average(f"{side.name} {mode}", sums, plain_sums)
        series = results.setdefault((side.name, mode), Series())
        series.step_ms.append(step_ms)
        series.ratios.append(step_ms / plain_ms)
        series.faults.append(sum(a["minor_faults"] for a in answers) / (model.steps + 1))


def best_mode(ratios, side):
    """The mode with the lowest median; None where the side has none that synchronizes."""
    modes = [key for key in ratios if key[0] == side and key[1] != PLAIN and "noop" not in key[1]]
    return min(modes, key=lambda key: ratios[key].median, default=None)


def report(model, results):
    print(f"\n{model.name}: {model.describe()}, {model.steps} steps per round")
    print(f"  {'':26}{'step / plain step':30}{'ms':28}page faults per step")
    ratios = {key: quartiles(series.ratios) for key, series in results.items()}
    for key, series in results.items():
        name = f"{key[0]} {key[1]}"
        faults = statistics.median(series.faults)
        print(f"  {name:26}{str(ratios[key]):30}{str(quartiles(series.step_ms)):28}{faults:.0f}")
    best = best_mode(ratios, THEIRS)
    if best is None:
        return
    verdicts = [
        f"{mode} {verdict(ratios[side, mode], ratios[best])}"
        for side, mode in ratios
        if side == OURS and mode != PLAIN and "noop" not in mode
    ]
    print(f"  against PyTorch's best mode here, {best[1]}: {', '.join(verdicts)}")
    mine = best_mode(ratios, OURS)
    print(f"  best against best: {mine[1]} is {verdict(ratios[mine], ratios[best])}", flush=True)


def measure(options, model, cpus, folder):
    sides = [(OURS, [options.worker], options.modes)]
    if options.torch_modes:
        script = os.path.join(HERE, "ddp_step_benchmark_torch.py")
        sides.append((THEIRS, [options.torch_python, script], options.torch_modes))
    results = {}
    started = []
    with contextlib.ExitStack() as stack:
        for name, command, modes in sides:
            side = stack.enter_context(Side(name, command, model, cpus, folder))
            started.append((side, modes))
            version = side.answers("the start")[0]["version"]
            if model is options.models[0]:
                print(f"          {name}: {version}", flush=True)
        for side, modes in started:  # what is slow once: memory, buckets, connections
            for mode in [PLAIN] + modes:
                side.steps(mode, options.warm_up_steps)
        for _ in range(options.rounds):
            for side, modes in started:
                run_round(side, modes, model, results)
    report(model, results)


def parse_models(text):
    names = {model.name: model for model in MODELS + MORE_MODELS}
    unknown = [name for name in text.split(",") if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no model {unknown[0]}; there are {', '.join(names)}")
    return [names[name] for name in text.split(",")]


def parse_modes(text):
    return [mode for mode in text.split(",") if mode]


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="ddp_step_benchmark", description=__doc__.split("\n", maxsplit=1)[0]
    )
    worker = os.path.join(ROOT, "bazel-bin/tools/bench/ddp_step_benchmark_worker")
    parser.add_argument("--worker", default=worker, help="our side, as Bazel built it")
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("DDP_TORCH_PYTHON", ""),
        help="a Python that has PyTorch; default: the environment's DDP_TORCH_PYTHON",
    )
    parser.add_argument(
        "--models",
        type=parse_models,
        default=MODELS,
        help="of small, medium, large (the default), conv, transformer",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm_up_steps", type=int, default=5)
    parser.add_argument(
        "--modes",
        type=parse_modes,
        default=parse_modes("default,view,static,find_unused,view+static"),
        help="of ours; noop among them: a hook that reduces nothing",
    )
    parser.add_argument(
        "--torch_modes",
        type=parse_modes,
        default=parse_modes("default,view,static,find_unused,view+static"),
        help="empty: ours alone",
    )
    options = parser.parse_args(argv)
    if not os.access(options.worker, os.X_OK):
        parser.error(
            f"{options.worker} is missing; run: "
            "bazel build --config=opt //tools/bench:ddp_step_benchmark_worker"
        )
    if options.torch_modes and not options.torch_python:
        parser.error("give --torch-python=PYTHON with PyTorch, or --torch_modes= for ours alone")
    if options.torch_modes and not tools.first_line(
        options.torch_python, "-c", "import torch; print(torch.__version__)"
    ):
        parser.error(f"{options.torch_python} has no PyTorch")
    return options


def main(argv):
    options = parse_arguments(argv)
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < RANKS:
        sys.exit(f"ddp_step_benchmark: {RANKS} ranks need {RANKS} cores, here is {len(cpus)}")
    tools.print_versions()
    with tempfile.TemporaryDirectory(prefix="ddp-step.") as folder:
        try:
            for model in options.models:
                measure(options, model, cpus, folder)
        except BenchmarkError as error:
            sys.exit(f"ddp_step_benchmark: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
