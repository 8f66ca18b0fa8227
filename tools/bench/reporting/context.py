"""What all sections share: the options, the cores, the programs, and what this run is made of."""

import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field

from reporting import processes
from reporting.processes import NotRun, first_line

BENCH = "//tools/bench:"
# Option -> the target of the program.
PROGRAMS = {
    "step-worker": BENCH + "step_worker",
    "collective-worker": BENCH + "collective_worker",
    "hierarchical-worker": BENCH + "hierarchical_worker",
    "store-benchmark": BENCH + "store_benchmark",
    "rendezvous-worker": BENCH + "rendezvous_worker",
    "simulate": "//testing/simulator:simulate",
    "damage": "//elastic/checkpoint/save_load:damage_benchmark",
    "ddprun": "//launcher:ddprun",
    "train": "//examples/digits:train",
}


def built(option):
    """Where Bazel puts the program."""
    return os.path.join(processes.ROOT, "bazel-bin", PROGRAMS[option][2:].replace(":", "/"))


def torch_of(python):
    return first_line(python, "-c", "import torch; print(torch.__version__)")


@dataclass
class Context:
    options: object
    folder: str  # for temporary files
    cpus: list = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))

    @property
    def quick(self):
        return self.options.quick

    def rounds(self, full, quick):
        return self.options.rounds or (quick if self.quick else full)

    def cpu_of(self, rank):
        return self.cpus[rank % len(self.cpus)]

    def place(self, name):
        """Makes a folder for temporary files."""
        path = os.path.join(self.folder, name)
        os.mkdir(path)
        return path

    # Each of the following raises NotRun where this machine lacks something.

    def require_cores(self, count):
        if len(self.cpus) < count:
            raise NotRun(f"{count} pinned ranks need {count} cores, here is {len(self.cpus)}")

    def require_redis(self):
        if shutil.which("redis-server") is None:
            raise NotRun("redis-server is not installed")

    def program(self, option):
        """The path of a program."""
        path = getattr(self.options, option.replace("-", "_"))
        if not os.access(path, os.X_OK):
            shown = os.path.relpath(path, processes.ROOT)
            raise NotRun(f"{shown} is missing; run: bazel build --config=opt {PROGRAMS[option]}")
        return path

    def torch_python(self):
        """A Python that has PyTorch."""
        python = self.options.torch_python
        if not python:
            raise NotRun("no --torch-python=PYTHON was given")
        if not torch_of(python):
            raise NotRun(f"{python} has no PyTorch")
        return python


def _line_of(path, expression):
    with open(path, encoding="utf-8") as stream:
        found = re.search(expression, stream.read(), re.MULTILINE)
    return found and found.group(1)


def libtorch_version():
    versions = os.path.join(processes.ROOT, "third_party/versions.bzl")
    return _line_of(versions, r'TORCH_VERSION = "([^"]+)"')


def mpi_version():
    if shutil.which("mpirun") is None:
        return "none"
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    return next((line for line in lines if re.search(r"\d\.\d", line)), "unknown")


def gpu():
    if shutil.which("nvidia-smi") is None:
        return "none: not run on a GPU"
    return f"{first_line('nvidia-smi', '-L')}: not measured, all sections are on the CPU"


def versions(options):
    """name -> text: everything that a reader needs to tell two reports apart."""
    changed = first_line("git", "status", "--porcelain", "--untracked-files=no")
    memory_kb = _line_of("/proc/meminfo", r"^MemTotal:\s*(\d+) kB")
    peer = torch_of(options.torch_python) if options.torch_python else ""
    libtorch = libtorch_version()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": first_line("git", "rev-parse", "--short=12", "HEAD")
        + (", with changes" if changed else ""),
        "CPU": _line_of("/proc/cpuinfo", r"^model name\s*: (.*)$") or platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{int(memory_kb) / 2**20:.1f} GiB",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "kernel": f"Linux {platform.release()}",
        "C library": " ".join(platform.libc_ver()),
        "compiler": first_line(os.environ.get("CC", "gcc"), "--version"),
        "LibTorch": libtorch,
        "Gloo": f"the one in LibTorch {libtorch}",
        "PyTorch (peer)": peer or "not run: no --torch-python with PyTorch",
        "MPI": mpi_version(),
        "GPU": gpu(),
        "Redis": first_line("redis-server", "--version"),
        "Python": platform.python_version(),
        "mode": "quick: shortened, for a test" if options.quick else "full",
    }
