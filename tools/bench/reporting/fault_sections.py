"""What the job survives: simulated faults, and damaged checkpoints."""

import re

from reporting.context import build_of, require
from reporting.document import Table
from reporting.job_sections import run_program

ALL = "all"  # the last row of each table here
SEEDS_LINE = re.compile(r"^ *(\d+) seeds of (\d+) hosts or more: (\d+) agents", re.MULTILINE)
KIND_LINE = re.compile(r"^  (\w.*\w) +(\d+) damages, +(\d+) found$", re.MULTILINE)


def parse_simulation(text):
    """(stories, lives of agents, {kind of fault: how often}) of the simulator's summary."""
    sizes = [[int(x) for x in found] for found in SEEDS_LINE.findall(text)]
    line = re.search(r"^faults: (.*)$", text, re.MULTILINE)
    if not sizes or not line:
        raise ValueError("the simulator's summary has another form")
    faults = {}
    for entry in line[1].split(", "):
        count, name = entry.split(" ", 1)
        faults[name] = int(count)
    return sum(s[0] for s in sizes), sum(s[2] for s in sizes), faults


def run_faults(context, section):
    """Jobs under simulated time and network. A job that breaks a requirement is an error."""
    require(context.options.simulate, build_of("//testing/simulator:simulate"))
    text = run_program([context.options.simulate, f"--seeds={20 if context.quick else 2000}"])
    stories, agents, faults = parse_simulation(text)
    table = Table(f"{stories:,} simulated jobs, {agents:,} agents", ["fault", "times"])
    table.rows = [[name, f"{count:,}"] for name, count in faults.items()]
    table.rows.append([ALL, f"{sum(faults.values()):,}"])
    table.notes.append("No job broke a requirement: the simulator fails on the first that does.")
    section.tables = [table]
    section.data = {"stories": stories, "agents": agents, "faults": faults, "output": text}


def parse_damage(text):
    """Rows of damage_benchmark's output: (kind, damages, found)."""
    rows = [(kind, int(made), int(found)) for kind, made, found in KIND_LINE.findall(text)]
    if not rows:
        raise ValueError("damage_benchmark's output has another form")
    return rows


def run_corruption(context, section):
    """Damaged checkpoints. The program fails when a load takes one of them."""
    require(context.options.damage, build_of("//elastic/checkpoint/save_load:damage_benchmark"))
    text = run_program([context.options.damage, f"--damages={60 if context.quick else 20000}"])
    rows = parse_damage(text)
    rows.append((ALL, sum(row[1] for row in rows), sum(row[2] for row in rows)))
    title = re.search(r"of (a checkpoint of .*):", text)
    table = Table(f"Damages of {title[1]}", ["damage", "times", "found"])
    table.rows = [[kind, f"{made:,}", f"{found:,}"] for kind, made, found in rows]
    table.notes.append("Found: the load names the damaged file and takes the older checkpoint.")
    section.tables = [table]
    section.data = {"rows": rows, "output": text}
