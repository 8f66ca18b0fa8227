"""Measures everything in one run, and writes one table, one JSON file and plots.

    bazel build --config=opt //tools/bench:report_programs //launcher:ddprun //examples/digits:train
    tools/bench/report --torch-python=PATH/bin/python --output=DIR

docs/benchmarks.md explains how to read the report, and docs/benchmarks/methods.md how each gate is
computed. A section whose program is missing says so and why. Each section's figures are written as
soon as it is done. docs/benchmarks/ keeps the report.md and the plots of the last run.
"""

import argparse
import os
import tempfile
import time

import benchmark_tools as tools
from reporting import collective_section, fault_sections, group_sections, job_sections
from reporting import step_sections
from reporting.context import Context, NotRun, versions
from reporting.document import Report, Section

# Name -> (title, the function that measures it). In the order of the report.
SECTIONS = {
    "steps": ("Training steps beside PyTorch", step_sections.run_steps),
    "collectives": ("Collectives", collective_section.run_collectives),
    "world": ("Cost against the number of ranks on one host", step_sections.run_world),
    "parameters": ("Cost against the number of parameters", step_sections.run_parameters),
    "memory": ("Memory beyond plain", step_sections.run_memory),
    "zero": ("Sharded optimizer beside the plain one", job_sections.run_zero),
    "store": ("Store beside LibTorch's TCPStore", job_sections.run_store),
    "rendezvous": ("Agents of a large job on one Redis", job_sections.run_rendezvous),
    "launch": ("Start of a job, beside torchrun", job_sections.run_launch),
    "restart": ("A rank is killed", job_sections.run_restart),
    "peer_death": ("A rank dies in the middle of a collective", group_sections.run_peer_death),
    "hosts": (
        "Two hosts over a link of 1 Gbit/s, beside Gloo and when a rank dies",
        group_sections.run_hosts,
    ),
    "node_loss": ("A host of three is lost", job_sections.run_node_loss),
    "checkpoint": ("Checkpoint beside the disk", job_sections.run_checkpoint),
    "faults": ("Faults in simulated jobs", fault_sections.run_faults),
    "corruption": ("Damaged checkpoints", fault_sections.run_corruption),
}
BENCH = "tools/bench/"
# Option -> the program that Bazel builds, below bazel-bin.
PROGRAMS = {
    "step-worker": BENCH + "ddp_step_benchmark_worker",
    "collective-worker": BENCH + "collective_benchmark_worker",
    "hierarchical-worker": BENCH + "hierarchical_benchmark_worker",
    "store-benchmark": BENCH + "store_benchmark",
    "rendezvous-benchmark": BENCH + "rendezvous_benchmark",
    "simulate": "testing/simulator/simulate",
    "damage": "elastic/checkpoint/save_load/damage_benchmark",
    "ddprun": "launcher/ddprun",
    "train": "examples/digits/train",
}


def parse_sections(text):
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        known = ", ".join(SECTIONS)
        raise argparse.ArgumentTypeError(f"no section {unknown or text!r}; there are {known}")
    return names


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="report", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", default="benchmark-report", help="the folder of the report")
    parser.add_argument(
        "--only",
        type=parse_sections,
        default=list(SECTIONS),
        help=f"of {','.join(SECTIONS)}; measured in the given order, reported in this one",
    )
    parser.add_argument("--quick", action="store_true", help="shortened: about two minutes in all")
    parser.add_argument("--rounds", type=int, default=0, help="of every measurement; 0: its own")
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("DDP_TORCH_PYTHON", ""),
        help="a Python that has PyTorch; default: the environment's DDP_TORCH_PYTHON",
    )
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[2, 4],
        help="of the section collectives, separated by commas; default: 2,4",
    )
    parser.add_argument("--ours", default="shm", help="our backend of the collectives, by name")
    parser.add_argument(
        "--checkpoint-folder", default="", help="on the disk to measure; default: temporary"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 when a gate is missed")
    for option, program in PROGRAMS.items():
        parser.add_argument(f"--{option}", default=os.path.join(tools.BUILT, program))
    return parser.parse_args(argv)


def run_section(name, context):
    """The section's figures, or the reason why there are none, or no more."""
    title, measure = SECTIONS[name]
    section = Section(name, title)
    print(f"\n==== {name}: {title}", flush=True)
    begun = time.monotonic()
    try:
        measure(context, section)
    except NotRun as missing:
        section.not_run = str(missing)
    except (tools.BenchmarkError, OSError, KeyError, ValueError) as error:
        section.not_run = f"failed: {str(error) or type(error).__name__}"
    section.seconds = time.monotonic() - begun
    if context.quick:
        for gate in section.gates:
            gate.undecided("the run is shortened")
    if section.not_run:
        print(f"not run: {section.not_run}")
    print(f"({section.seconds:.0f} s)", flush=True)
    return section


def main(argv):
    options = parse_arguments(argv)
    report = Report(versions(options))
    for name, value in report.versions.items():
        print(f"{name:16}{value}")
    with tempfile.TemporaryDirectory(prefix="ddp-report.") as folder:
        context = Context(options, folder)
        for name in options.only:
            report.sections.append(run_section(name, context))
            report.sections.sort(key=lambda section: list(SECTIONS).index(section.name))
            report.write(options.output)
    print(f"\nThe report is {os.path.join(options.output, 'report.md')}")
    failed = any(s.not_run.startswith("failed: ") for s in report.sections)
    missed = any(gate.met is False for gate in report.gates())
    return 1 if failed or (options.check and missed) else 0
