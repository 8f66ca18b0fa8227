"""What a job survives: simulated faults, and damaged checkpoints."""

import re

from reporting.processes import run_program

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
    seeds = 20 if context.quick else 2000
    text = run_program([context.program("simulate"), f"--seeds={seeds}"])
    stories, agents, faults = parse_simulation(text)
    note = "No job broke a requirement: the simulator fails on the first that does."
    title = f"{stories:,} simulated jobs, {agents:,} agents"
    table = section.table(title, ["fault", "times"], [note])
    for name, count in [*faults.items(), (ALL, sum(faults.values()))]:
        table.add(name, f"{count:,}")
    section.data = {"stories": stories, "agents": agents, "faults": faults, "output": text}


def parse_damage(text):
    """Rows of damage_benchmark's output: (kind, damages, found)."""
    rows = [(kind, int(made), int(found)) for kind, made, found in KIND_LINE.findall(text)]
    if not rows:
        raise ValueError("damage_benchmark's output has another form")
    return rows


def run_corruption(context, section):
    """Damaged checkpoints. The program fails when a load takes one of them."""
    damages = 60 if context.quick else 20000
    text = run_program([context.program("damage"), f"--damages={damages}"])
    rows = parse_damage(text)
    rows.append((ALL, sum(row[1] for row in rows), sum(row[2] for row in rows)))
    title = re.search(r"of (a checkpoint of .*):", text)
    note = "Found: the load names the damaged file and takes the older checkpoint."
    table = section.table(f"Damages of {title[1]}", ["damage", "times", "found"], [note])
    for kind, made, found in rows:
        table.add(kind, f"{made:,}", f"{found:,}")
    section.data = {"rows": rows, "output": text}
