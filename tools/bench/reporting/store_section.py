"""The store: single operations beside LibTorch's TCPStore."""

from reporting import figures
from reporting.processes import parse_events, run_program

THEIRS = "TCPStore"
# Operation -> the most of TCPStore's time that ours is to take.
TARGETS = {"get": 0.6, "multiGet of 1,024 keys": 0.6}
WAKE, WAKE_TARGET_US = "get, woken by a set", 1000


def add_rows(table, lines):
    """`lines`: those of store_benchmark, each an operation's name and its figures by subject."""
    for line in lines:
        what, rounds = line["operation"], figures.Rounds()
        for i in range(len(line["us"][THEIRS])):
            rounds.add({name: column[i] for name, column in line["us"].items()}, 0)
        for name in rounds.times:
            if name == THEIRS:
                table.add(what, name, rounds.seconds(name), figures.NONE)
                continue
            ratio, name_of_note = rounds.ratio(name, THEIRS).median, f"{what}, {name}"
            table.add(what, name, rounds.seconds(name), f"{ratio:.3f}")
            if what in TARGETS:
                limit, unit = TARGETS[what], "of TCPStore's time"
                table.notes.append(figures.target(name_of_note, ratio, limit, unit))
            if what == WAKE:
                median = rounds.seconds(name).median
                table.notes.append(figures.target(name_of_note, median, WAKE_TARGET_US, "us"))


def run_store(context, section):
    context.require_redis()
    command = [context.program("store-benchmark")]
    if context.quick:
        command += ["--rounds=3", "--calls=50", "--members=16", "--join_rounds=2"]
    *lines, last = parse_events(run_program(command))
    table = section.table("One operation", ["operation", "store", "us", "to TCPStore"])
    add_rows(table, lines)
    table.notes.append(f"The server's commands in 1 s of 8 blocked waits: {last['polls']}.")
    section.data = {"rounds": lines}
