"""The README's table of numbers, filled from docs/benchmarks/report.md: tools/bench/readme_numbers.

A row names a section of the report and picks cells of its tables. So the README has no number that
the report does not have; readme_test.py compares the two.
"""

import argparse
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
REPORT = "docs/benchmarks/report.md"
README = "README.md"
BEGIN = "<!-- NUMBERS BEGIN: written by tools/bench/readme_numbers from the last report -->"
END = "<!-- NUMBERS END -->"
MOST_ROWS = 8


class Missing(Exception):
    """What the README shows and the report lacks."""


class Report:
    """The tables of a report in Markdown, by title: a list of rows, each a list of cells."""

    def __init__(self, text):
        self.tables = {}
        title = ""
        for line in text.splitlines():
            found = re.fullmatch(r"\*\*(.*)\*\*", line)
            if found or line.startswith("#"):
                title = found[1] if found else ""
            elif line.startswith("|") and not re.fullmatch(r"[|\- ]+", line):
                cells = re.split(r"(?<!\\)\|", line)[1:-1]
                self.tables.setdefault(title, []).append([cell.strip() for cell in cells])

    def version(self, name):
        """A line of the table at the report's head."""
        for row in self.tables.get("", []):
            if row[0] == name:
                return row[1]
        raise Missing(f"its head has no {name}")

    def title(self, begin):
        """The title of the table that begins so; `begin`: a regular expression."""
        for title in self.tables:
            if title and re.match(begin, title):
                return title
        raise Missing(f'it has no table that begins with "{begin}"')

    def cell(self, begin, row, column):
        """A cell of the table whose title begins so; `column`: its heading."""
        heading, *rows = self.tables[self.title(begin)]
        for cells in rows:
            if cells[0] == row and column in heading:
                return cells[heading.index(column)]
        raise Missing(f'its table "{begin}" has no row "{row}" with a column "{column}"')

    def number(self, *cell):
        """Two digits of a cell's median: no README promises a millisecond."""
        value = float(f"{float(self.cell(*cell).split(' [')[0].replace(',', '')):.2g}")
        return f"{value:,.0f}" if value >= 10 else f"{value:g}"

    def step(self, model):
        """(ours, PyTorch's best mode): a step to the plain step of the same side."""
        figure = self.cell("Gates", f"step, {model}, beside PyTorch's best mode", "figure")
        found = re.fullmatch(r"([\d.]+) \[.*\] beside ([\d.]+) \[.*\]", figure)
        if not found:
            raise Missing(f"it has no quiet rounds of {model} beside PyTorch: {figure}")
        return [f"{float(x):.2f}" for x in found.groups()]


def _step(report):
    ours, theirs = map(", ".join, zip(report.step("transformer"), report.step("conv")))
    what = "A training step, in steps of the same program without DDP: transformer, convolutions"
    return what, ours, f"PyTorch DDP in its best mode: {theirs}"


def _restart(report):
    def seconds(launcher):
        columns = ("s to the first line", "s to the first all-reduce")
        return ", ".join(f"{report.number('One Python program', launcher, x)} s" for x in columns)

    what = "A rank of a Python program is killed, until the new ranks' first line, first all-reduce"
    return what, seconds("ddprun"), f"torchrun: {seconds('torchrun')}"


def _recovery(report):
    seconds = report.number("Digits trainer, 2 ranks", "the first step of all ranks", "")
    what = "A rank of a C++ trainer is killed, until the next step of all ranks"
    return what, f"{seconds} s", ""


def _node_loss(report):
    def seconds(row):
        column = "s to the survivors' first step"
        return report.number("Network namespaces, two ranks each", row, column)

    what = "One host of three loses its power, until the next step of the others"
    short = f"{seconds('--lease-ms=1000')} s with `--lease-ms=1000`"
    return what, f"{seconds('default settings')} s; {short}", ""


def _launch(report):
    def ms(launcher):
        column = "ms to the first moment of the worker"
        return f"{report.number('Start', f'{launcher} --standalone', column)} ms"

    what = "From the command to a worker's first moment"
    return what, ms("ddprun"), f"torchrun: {ms('torchrun')}"


def _agents(report):
    columns = ("s until all know of a failure", "s until all have joined again")
    times = ", ".join(f"{report.number('One Redis', '10,000', column)} s" for column in columns)
    return "10,000 nodes on one Redis: all know of a failure, all have joined again", times, ""


def _faults(report):
    title = r"[\d,]+ simulated jobs"
    jobs = re.match(title, report.title(title))[0]
    faults = report.cell(title, "all", "times")
    return f"{faults} faults and newcomers in {jobs}: jobs that break a requirement", "0", ""


def _corruption(report):
    made, found = [report.cell("Damages of a checkpoint", "all", x) for x in ("times", "found")]
    return "Damaged checkpoints that a load finds and passes over", f"{found} of {made}", ""


# Section of the report -> its row.
ROWS = {
    "steps": _step,
    "restart": _restart,
    "restart ": _recovery,
    "node_loss": _node_loss,
    "launch": _launch,
    "rendezvous": _agents,
    "faults": _faults,
    "corruption": _corruption,
}


def sections():
    """The sections that tools/bench/report must have measured."""
    return list(dict.fromkeys(name.strip() for name in ROWS))


def block(report):
    """(what stands between BEGIN and END, why rows are left out).

    Raises Missing for a shortened report, and for one without a head.
    """
    if report.version("mode") != "full":
        raise Missing("it is shortened (--quick)")
    lines, why = ["| What | ddp | Beside it | `--only=` |", "|---|---|---|---|"], []
    for section, row in ROWS.items():
        try:
            lines.append("| " + " | ".join([*row(report), f"`{section.strip()}`"]) + " |")
        except Missing as missing:
            why.append(f"no row of the section {section.strip()}: {missing}")
    version = report.version
    lines += [
        "",
        f"Medians of {version('date')} at commit {version('commit')}: {version('CPU')}, "
        f"{version('cores')} cores, LibTorch {version('LibTorch')},",
        f"PyTorch {version('PyTorch (peer)')}. All on the CPU; PyTorch DDP uses Gloo.",
    ]
    return "\n".join(lines), why


def filled(readme, report):
    """(the README's text with the report's numbers, why rows are left out).

    Raises Missing, and ValueError without marks.
    """
    before, begin, rest = readme.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} lacks the line {END if begin else BEGIN}")
    table, why = block(report)
    return f"{before}{begin}{table}\n{end}{after}", why


def _read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        return stream.read()


def main(argv):
    parser = argparse.ArgumentParser(
        prog="readme_numbers", description=f"Fills the table of {README} from {REPORT}."
    )
    parser.parse_args(argv)
    try:
        text, left_out = filled(_read(README), Report(_read(REPORT)))
    except (Missing, ValueError, OSError) as error:
        print(f"readme_numbers: {REPORT}: {error}", file=sys.stderr)
        return 1
    with open(os.path.join(ROOT, README), "w", encoding="utf-8") as stream:
        stream.write(text)
    for why in left_out:
        print(f"readme_numbers: {REPORT}: {why}", file=sys.stderr)
    if left_out:
        print(f"The README needs tools/bench/report --only={','.join(sections())}", file=sys.stderr)
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
