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

from reporting import collective_section, fault_sections, group_sections, job_sections
from reporting import rendezvous_section, state_sections, step_sections, store_section
from reporting.context import PROGRAMS, Context, built, versions
from reporting.document import Report, Section, gates_table
from reporting.models import parse_models
from reporting.processes import BenchmarkError, NotRun

# Name -> (title, the function that measures it). In the order of the report.
SECTIONS = {
    "steps": ("Training steps beside PyTorch", step_sections.run_steps),
    "collectives": ("Collectives", collective_section.run_collectives),
    "world": ("Cost against the number of ranks on one host", step_sections.run_world),
    "parameters": ("Cost against the number of parameters", step_sections.run_parameters),
    "memory": ("Memory beyond plain", step_sections.run_memory),
    "zero": ("Sharded optimizer beside the plain one", state_sections.run_zero),
    "store": ("Store beside LibTorch's TCPStore", store_section.run_store),
    "rendezvous": ("Agents of a large job on one Redis", rendezvous_section.run_rendezvous),
    "launch": ("Start of a job, beside torchrun", job_sections.run_launch),
    "restart": ("A rank is killed", job_sections.run_restart),
    "peer_death": ("A rank dies in the middle of a collective", group_sections.run_peer_death),
    "hosts": (
        "Two hosts over a link of 1 Gbit/s, beside Gloo and when a rank dies",
        group_sections.run_hosts,
    ),
    "node_loss": ("A host of three is lost", job_sections.run_node_loss),
    "checkpoint": ("Checkpoint beside the disk", state_sections.run_checkpoint),
    "faults": ("Faults in simulated jobs", fault_sections.run_faults),
    "corruption": ("Damaged checkpoints", fault_sections.run_corruption),
}


def words(text):
    return [word for word in text.split(",") if word]


def parse_sections(text):
    unknown = [name for name in words(text) if name not in SECTIONS]
    if unknown or not words(text):
        known = ", ".join(SECTIONS)
        raise argparse.ArgumentTypeError(f"no section {unknown or text!r}; there are {known}")
    return words(text)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="report", description=__doc__.split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--output", default="benchmark-report", help="the folder of the report")
    add(
        "--only",
        type=parse_sections,
        default=list(SECTIONS),
        help=f"of {','.join(SECTIONS)}; measured in the given order, reported in this one",
    )
    add("--quick", action="store_true", help="shortened: about two minutes in all")
    add("--rounds", type=int, default=0, help="of every measurement, or kills; 0: its own")
    add(
        "--torch-python",
        default=os.environ.get("DDP_TORCH_PYTHON", ""),
        help="a Python that has PyTorch; default: the environment's DDP_TORCH_PYTHON",
    )
    add("--models", type=parse_models, default=[], help="of the sections steps and zero")
    add("--modes", type=words, default=[], help="of ours in steps; noop: a hook without a sum")
    add("--torch-modes", type=words, default=[], help="of PyTorch's in steps")
    add("--backend", default="", help="of the group in the section zero; empty: the default one")
    add(
        "--ranks",
        type=lambda text: [int(word) for word in words(text)],
        default=[2, 4],
        help="of the section collectives, separated by commas; default: 2,4",
    )
    add("--ours", default="shm", help="our backend of the collectives, by name")
    add("--checkpoint-folder", default="", help="on the disk to measure; default: temporary")
    add("--check", action="store_true", help="end with 1 when a gate is missed")
    for option in PROGRAMS:
        add(f"--{option}", default=built(option))
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
    except (BenchmarkError, job_sections.hosts.HostsError, OSError, KeyError, ValueError) as error:
        section.not_run = f"failed: {str(error) or type(error).__name__}"
    section.seconds = time.monotonic() - begun
    if context.quick:
        for gate in section.gates:
            gate.undecided("the run is shortened")
    print(section.markdown(), gates_table(section.gates), sep="\n")
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
