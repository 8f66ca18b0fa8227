#!/usr/bin/env python3
"""Reads the README's numbers out of reports, and compares the README with the last one."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import document, main, readme  # noqa: E402
from reporting.document import Table  # noqa: E402
from reporting.figures import Gate  # noqa: E402
from reporting.readme import Missing, Report  # noqa: E402

VERSIONS = {name: f"the {name}" for name in
            ("date", "commit", "CPU", "cores", "LibTorch", "PyTorch (peer)")}  # fmt: skip
VERSIONS["mode"] = "full"


def report_of(*tables, gates=()):
    section = document.Section("name", "title", tables=list(tables), gates=list(gates))
    return Report(document.Report(VERSIONS, [section]).markdown())


class ReadmeTest(unittest.TestCase):
    def test_the_readme_has_the_numbers_of_the_last_report(self):
        with open(os.path.join(readme.ROOT, readme.README), encoding="utf-8") as stream:
            text = stream.read()
        with open(os.path.join(readme.ROOT, readme.REPORT), encoding="utf-8") as stream:
            expected, _ = readme.filled(text, Report(stream.read()))
        self.assertEqual(text, expected, "run tools/bench/readme_numbers")
        self.assertLessEqual(text.count("\n"), 200)

    def test_every_row_is_of_a_section_of_the_report(self):
        self.assertLessEqual(set(readme.sections()), set(main.SECTIONS))
        self.assertLessEqual(len(readme.ROWS), readme.MOST_ROWS)

    def test_takes_medians_of_two_digits(self):
        columns = ["", "s to the first line", "s to the first all-reduce"]
        rows = [["ddprun", "0.0912 [0.061..0.094]", "2.174 [1.566..2.207]"]]
        rows.append(["torchrun", "0.331 [0.278..0.394]", "1,134 [2.230..2.706]"])
        found = report_of(Table("One Python program", columns, rows))
        _, ours, theirs = readme.ROWS["restart"](found)
        self.assertEqual((ours, theirs), ("0.091 s, 2.2 s", "torchrun: 0.33 s, 1,100 s"))

    def test_takes_steps_from_the_gates(self):
        figure = "1.017 [1.013..1.027] beside 1.157 [1.144..1.220]"
        gates = [Gate(f"step, {model}, beside PyTorch's best mode", "ahead", figure)
                 for model in ("transformer", "conv")]  # fmt: skip
        what, ours, theirs = readme.ROWS["steps"](report_of(gates=gates))
        self.assertEqual((ours, theirs[-10:]), ("1.02, 1.02", "1.16, 1.16"))
        gates[1].figure = "see the disturbed rounds"
        with self.assertRaisesRegex(Missing, "no quiet rounds of conv"):
            readme.ROWS["steps"](report_of(gates=gates))

    def test_a_row_without_figures_is_left_out_and_named(self):
        rows = [["all", "600", "600"]]
        found = report_of(Table("Damages of a checkpoint", ["damage", "times", "found"], rows))
        table, why = readme.block(found)
        self.assertIn("| 600 of 600 |", table)
        self.assertIn("Medians of the date at commit the commit", table)
        self.assertEqual(table.count("--only="), 1)
        self.assertEqual(len(why), len(readme.ROWS) - 1)
        self.assertIn('launch: it has no table that begins with "Start"', why[4])

    def test_a_shortened_report_is_refused(self):
        quick = document.Report({**VERSIONS, "mode": "quick: shortened"}, []).markdown()
        with self.assertRaisesRegex(Missing, "shortened"):
            readme.block(Report(quick))

    def test_a_readme_without_marks_is_refused(self):
        with self.assertRaisesRegex(ValueError, "lacks the line <!-- NUMBERS BEGIN"):
            readme.filled("# Title\n", report_of())
        with self.assertRaisesRegex(ValueError, "lacks the line <!-- NUMBERS END"):
            readme.filled(readme.BEGIN + "\n", report_of())


if __name__ == "__main__":
    unittest.main()
