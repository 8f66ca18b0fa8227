"""The report: sections with tables, plots and gates, as Markdown, JSON and SVG files."""

import json
import os
from dataclasses import dataclass, field

from reporting import svg


@dataclass
class Table:
    title: str
    columns: list
    rows: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def markdown(self):
        lines = [f"**{self.title}**", ""]
        cells = [self.columns, *self.rows]
        cells = [[str(x).replace("|", "\\|") for x in row] for row in cells]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        shown = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths)) + " |" for row in cells]
        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        lines += [shown[0], rule, *shown[1:]]
        return "\n".join(lines + [""] + [x + "\n" for x in self.notes])


@dataclass
class Section:
    """`not_run`: why nothing was measured; "" when something was."""

    name: str
    title: str
    not_run: str = ""
    tables: list = field(default_factory=list)
    plots: dict = field(default_factory=dict)  # file name -> svg.Plot or svg.Bars
    gates: list = field(default_factory=list)
    data: dict = field(default_factory=dict)  # for the JSON file alone
    text: str = ""  # the output of a program, as it is
    seconds: float = 0.0


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
        if self.gates():
            table = Table("Gates", ["gate", "target", "figure", "verdict"])
            table.rows = [[g.name, g.limit, g.figure, g.verdict()] for g in self.gates()]
            parts += [table.markdown()]
        for section in self.sections:
            parts += [f"## {section.title}", ""]
            if section.not_run:
                parts += [f"not run: {section.not_run}", ""]
            parts += [table.markdown() for table in section.tables]
            parts += [f"![{picture.title}]({file})\n" for file, picture in section.plots.items()]
            if section.text:
                parts += ["```", section.text.rstrip("\n"), "```", ""]
        return "\n".join(parts).rstrip("\n") + "\n"

    def as_json(self):
        return {
            "versions": self.versions,
            "gates": [
                {"name": g.name, "target": g.limit, "figure": g.figure, "verdict": g.verdict()}
                for g in self.gates()
            ],
            "sections": [
                {
                    "name": s.name,
                    "title": s.title,
                    "not_run": s.not_run,
                    "seconds": round(s.seconds, 1),
                    "tables": [vars(t) for t in s.tables],
                    "plots": list(s.plots),
                    "data": s.data,
                    "text": s.text,
                }
                for s in self.sections
            ],
        }

    def write(self, folder):
        """Writes report.md, report.json and the plots. Replaces the files of an earlier report."""
        os.makedirs(folder, exist_ok=True)
        for section in self.sections:
            for file, picture in section.plots.items():
                _write(os.path.join(folder, file), svg.render(picture))
        _write(os.path.join(folder, "report.md"), self.markdown())
        _write(os.path.join(folder, "report.json"), json.dumps(self.as_json(), indent=1) + "\n")


def _write(path, content):
    with open(path + ".part", "w", encoding="utf-8") as stream:
        stream.write(content)
    os.replace(path + ".part", path)
