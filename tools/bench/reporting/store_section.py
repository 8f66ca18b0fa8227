"""The store: single operations beside LibTorch's TCPStore."""

import re

from reporting import figures
from reporting.figures import Quartiles
from reporting.processes import run_program

STORE_LINE = re.compile(
    r"^(?P<what>.{24}) (?P<who>\S.{17}) +(?P<us>[\d.]+) us +"
    r"\[(?P<first>[\d.]+), (?P<third>[\d.]+)\](?:  ratio (?P<ratio>[\d.]+))?"
)


def parse_store(text):
    """Rows of store_benchmark's output: (what, who, us, first, third, ratio or "")."""
    rows, what = [], ""
    for line in text.splitlines():
        found = STORE_LINE.match(line)
        if found:
            what = found["what"].strip() or what
            numbers = [float(found[x]) for x in ("us", "first", "third")]
            rows.append((what, found["who"].strip(), *numbers, found["ratio"] or ""))
    return rows


def run_store(context, section):
    context.require_redis()
    command = [context.program("store-benchmark")]
    if context.quick:
        command += ["--rounds=3", "--calls=50", "--members=16", "--join_rounds=2"]
    text = run_program(command)
    table = section.table("One operation", ["operation", "store", "us", "to TCPStore"])
    rows = parse_store(text)
    for what, who, median, first, third, ratio in rows:
        table.add(what, who, Quartiles(first, median, third), ratio or figures.NONE)
    section.data = {"rows": rows, "output": text}
