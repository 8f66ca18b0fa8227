"""What all sections share: the options, the cores, the programs, and what this run is made of."""

import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field

import benchmark_tools as tools
import ddp_step_benchmark as steps
import recovery_benchmark as recovery

COPY_BYTES = 16 << 20  # of the control beside training steps


class NotRun(Exception):
    """A section, or a part of one, that cannot run here; the text says why."""


def require(program, build):
    if not os.access(program, os.X_OK):
        raise NotRun(f"{os.path.relpath(program, tools.ROOT)} is missing; run: {build}")


@dataclass
class Context:
    options: object
    folder: str  # for temporary files
    cpus: list = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))

    @property
    def quick(self):
        return self.options.quick

    def rounds(self, full, quick):
        if self.options.rounds:
            return self.options.rounds
        return quick if self.quick else full

    def require_cores(self, count):
        if len(self.cpus) < count:
            raise NotRun(f"{count} pinned ranks need {count} cores, here is {len(self.cpus)}")

    def our_sides(self):
        """The step worker's command, after a check that Bazel has built it."""
        require(self.options.step_worker, build_of("//tools/bench:ddp_step_benchmark_worker"))
        return [self.options.step_worker]

    def peer(self):
        """The command of PyTorch's side. Raises NotRun without a Python that has PyTorch."""
        python = self.options.torch_python
        if not python:
            raise NotRun("no --torch-python=PYTHON was given")
        if not torch_of(python):
            raise NotRun(f"{python} has no PyTorch")
        return [python, os.path.join(steps.HERE, "ddp_step_benchmark_torch.py")]

    def collective_worker(self):
        build = build_of("//tools/bench:collective_benchmark_worker")
        require(self.options.collective_worker, build)
        return self.options.collective_worker


def build_of(*targets):
    return f"bazel build --config=opt {' '.join(targets)}"


def torch_of(python):
    return tools.first_line(python, "-c", "import torch; print(torch.__version__)")


class Copiers(steps.Ranks):
    """The control: one process per core that copies memory, for a while, all at the same time."""

    def __init__(self, context, ranks=steps.RANKS):
        super().__init__("control", context.folder)
        worker = context.collective_worker()
        label = f"control-{ranks}"
        barrier = steps.barrier_file(os.path.join(context.folder, f"barrier-{label}"), ranks)
        store = os.path.join(context.folder, f"store-{label}")
        for rank in range(ranks):
            command = [worker, f"--rank={rank}", f"--size={ranks}", f"--barrier={barrier}"]
            command += [f"--cpu={context.cpus[rank % len(context.cpus)]}", "--backends="]
            self.start(label, [*command, f"--store={store}"], dict(os.environ))
        self.answers("the start")

    def copy(self, count=6):
        """Returns (seconds of one copy, the answers)."""
        answers = self.ask(f"time memcpy copy {COPY_BYTES} private {count}")
        return seconds_of(answers, count), answers


def seconds_of(answers, count):
    """The slowest rank's time of one call."""
    return max(answer["end_ns"] - answer["start_ns"] for answer in answers) / 1e9 / count


def _cpu_model():
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        found = re.search(r"^model name\s*: (.*)$", stream.read(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _memory_gib():
    with open("/proc/meminfo", encoding="ascii") as stream:
        return int(re.search(r"^MemTotal:\s*(\d+) kB", stream.read()).group(1)) / 2**20


def mpi_version():
    if shutil.which("mpirun") is None:
        return "none"
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    return next((line for line in lines if re.search(r"\d\.\d", line)), "unknown")


def gpu():
    if shutil.which("nvidia-smi") is None:
        return "none: not run on a GPU"
    return f"{tools.first_line('nvidia-smi', '-L')}: not measured, all sections are on the CPU"


def versions(options):
    """name -> text: everything that a reader needs to tell two reports apart."""
    commit = tools.first_line("git", "rev-parse", "--short=12", "HEAD")
    changed = tools.first_line("git", "status", "--porcelain", "--untracked-files=no")
    python = options.torch_python
    peer = torch_of(python) if python else ""
    libtorch = recovery.torch_version()
    found = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit + (", with changes" if changed else ""),
        "CPU": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{_memory_gib():.1f} GiB",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "kernel": f"Linux {platform.release()}",
        "C library": " ".join(platform.libc_ver()),
        "compiler": tools.first_line(os.environ.get("CC", "gcc"), "--version"),
        "LibTorch": libtorch,
        "Gloo": f"the one in LibTorch {libtorch}",
        "PyTorch (peer)": peer or "not run: no --torch-python with PyTorch",
        "MPI": mpi_version(),
        "GPU": gpu(),
        "Redis": tools.first_line("redis-server", "--version"),
        "Python": platform.python_version(),
        "mode": "quick: shortened, for a test" if options.quick else "full",
    }
    return found
