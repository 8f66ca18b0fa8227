"""The report: sections with tables, plots and gates, as Markdown, JSON and SVG files."""

import json
import os
from dataclasses import dataclass, field

from reporting import figures, svg


@dataclass
class Table:
    title: str
    columns: list
    rows: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def add(self, *cells):
        """Adds a row. A cell is a text, or figures.Quartiles, or None for one without a figure."""
        self.rows.append([x if isinstance(x, str) else figures.text(x) for x in cells])

    def add_rounds(self, rounds, name, *columns):
        """Adds a row for the quiet rounds and one for the disturbed ones, where there are any.

        `columns`: functions from "disturbed?" to a cell.
        """
        for disturbed, words in rounds.kinds():
            self.add(*name, words, *(column(disturbed) for column in columns))

    def markdown(self):
        cells = [[str(x).replace("|", "\\|") for x in row] for row in [self.columns, *self.rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        shown = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths)) + " |" for row in cells]
        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        lines = [f"**{self.title}**", "", shown[0], rule, *shown[1:], ""]
        return "\n".join(lines + [x + "\n" for x in self.notes])


@dataclass
class Section:
    """`not_run`: why nothing was measured; "" when something was."""

    name: str
    title: str
    not_run: str = ""
    tables: list = field(default_factory=list)
    plots: dict = field(default_factory=dict)  # file name -> svg.Plot
    gates: list = field(default_factory=list)
    data: dict = field(default_factory=dict)  # for the JSON file alone
    text: str = ""  # the output of a program, as it is
    seconds: float = 0.0

    def table(self, title, columns, notes=()):
        """Adds a table, so that a section that fails later keeps it."""
        self.tables.append(Table(title, columns, notes=list(notes)))
        return self.tables[-1]

    def markdown(self):
        parts = [f"## {self.title}", ""]
        if self.not_run:
            parts += [f"not run: {self.not_run}", ""]
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{picture.title}]({file})\n" for file, picture in self.plots.items()]
        if self.text:
            parts += ["```", self.text.rstrip("\n"), "```", ""]
        return "\n".join(parts)


def gates_table(gates):
    table = Table("Gates", ["gate", "target", "figure", "verdict"])
    table.rows = [[g.name, g.limit, g.figure, g.verdict()] for g in gates]
    return table.markdown() if gates else ""


@dataclass
class Report:
    versions: dict
    sections: list = field(default_factory=list)

    def gates(self):
        return [gate for section in self.sections for gate in section.gates]

    def markdown(self):
        parts = ["# Benchmark report", "", "| | |", "|---|---|"]
        parts += [f"| {name} | {str(value)} |" for name, value in self.versions.items()]
        parts += ["", "Figures: median [first quartile..third quartile] of quiet rounds.", ""]
        parts += [gates_table(self.gates())] if self.gates() else []
        parts += [section.markdown() for section in self.sections]
        return "\n".join(parts).rstrip("\n") + "\n"

    def as_json(self):
        gates = [{"name": g.name, "target": g.limit, "figure": g.figure, "verdict": g.verdict()}
                 for g in self.gates()]  # fmt: skip
        sections = []
        for s in self.sections:
            entry = {"name": s.name, "title": s.title, "not_run": s.not_run}
            entry["seconds"] = round(s.seconds, 1)
            entry["tables"] = [vars(table) for table in s.tables]
            sections.append({**entry, "plots": list(s.plots), "data": s.data, "text": s.text})
        return {"versions": self.versions, "gates": gates, "sections": sections}

    def write(self, folder):
        """Writes report.md, report.json and the plots. Replaces the files of an earlier report."""
        os.makedirs(folder, exist_ok=True)
        files = {file: svg.render(x) for s in self.sections for file, x in s.plots.items()}
        files["report.md"] = self.markdown()
        files["report.json"] = json.dumps(self.as_json(), indent=1) + "\n"
        for file, content in files.items():
            path = os.path.join(folder, file)
            with open(path + ".part", "w", encoding="utf-8") as stream:
                stream.write(content)
            os.replace(path + ".part", path)
