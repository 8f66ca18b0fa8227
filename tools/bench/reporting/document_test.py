#!/usr/bin/env python3
"""Tests of the tables and the plots."""

import os
import sys
import unittest
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import svg  # noqa: E402  (found by the line above)
from reporting.document import Report, Section, Table  # noqa: E402
from reporting.figures import Gate  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text, tag):
    return list(ElementTree.fromstring(text).iter(SVG + tag))


def words(text):
    return [x.text for x in drawn(text, "text")]


class TicksTest(unittest.TestCase):
    def test_a_log_axis_has_powers_of_its_base(self):
        bytes_axis = svg.Axis("bytes", log=True, base=4)
        self.assertEqual(svg.bounds([5, 60], bytes_axis), (4, 64))
        self.assertEqual(svg.ticks(4, 64, bytes_axis), [4, 16, 64])
        time_axis = svg.Axis("us", log=True)
        self.assertEqual(svg.bounds([0, 0.2, 300], time_axis), (0.1, 1000))
        self.assertEqual(svg.ticks(0.1, 10, time_axis), [0.1, 1, 10])

    def test_a_long_log_axis_leaves_out_ticks(self):
        found = svg.ticks(4.0, 4.0**14, svg.Axis("bytes", log=True, base=4))
        self.assertLessEqual(len(found), 10)
        self.assertEqual(found[0], 4)

    def test_a_linear_axis_has_round_numbers(self):
        self.assertEqual(
            svg.ticks(0, 1, svg.Axis("x")), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
        )
        self.assertEqual(svg.bounds([2, 10], svg.Axis("x", from_zero=True))[0], 0)

    def test_names_of_ticks(self):
        self.assertEqual([svg.short(x) for x in (0, 0.5, 20000, 3e6)], ["0", "0.5", "20k", "3M"])
        sizes = [svg.size_text(x) for x in (4, 4096, 64 << 20, 2 << 30)]
        self.assertEqual(sizes, ["4 B", "4 KiB", "64 MiB", "2 GiB"])


class PlotTest(unittest.TestCase):
    def plot(self, points, **y):
        x = svg.Axis("bytes of a rank", log=True, base=4, name=svg.size_text)
        axis = svg.Axis("us per call", **y)
        return svg.render(svg.Plot("A <title>", x, axis, [svg.Line("ours", points)]))

    def test_has_axes_units_and_a_legend(self):
        text = self.plot([(4, 1.0), (1024, 10.0)], log=True)
        for expected in ("A <title>", "bytes of a rank", "us per call", "ours", "4 B", "1 KiB"):
            self.assertIn(expected, words(text))

    def test_larger_values_lie_higher_and_to_the_right(self):
        for y in ({"log": True}, {"from_zero": True}):
            low, high = drawn(self.plot([(4, 1.0), (1024, 10.0)], **y), "circle")
            self.assertLess(float(low.get("cx")), float(high.get("cx")))
            self.assertGreater(float(low.get("cy")), float(high.get("cy")))

    def test_points_without_a_place_on_a_log_axis_are_left_out(self):
        text = self.plot([(4, 1.0), (16, None), (64, 0.0), (256, 2.0, 0.0, 3.0)], log=True)
        self.assertEqual(len(drawn(text, "circle")), 2)

    def test_an_empty_plot_is_still_one(self):
        self.assertEqual(drawn(self.plot([]), "circle"), [])

    def test_points_of_groups_stand_over_their_names_and_missing_ones_are_left_out(self):
        x, y = svg.Axis("model", groups=["small", "large"]), svg.Axis("ratio", from_zero=True)
        lines = [svg.Line("ours", [(-0.2, 1.0, 0.9, 1.1)], joined=False)]
        lines.append(svg.Line("theirs", [(0, 2.0), (1, 4.0)], joined=False))
        text = svg.render(svg.Plot("b", x, y, lines, [(1.0, "limit")]))
        ours, small, large = drawn(text, "circle")
        names = {name.text: float(name.get("x")) for name in drawn(text, "text")}
        for point, name in ((small, "small"), (large, "large")):
            self.assertAlmostEqual(float(point.get("cx")), names[name], places=1)
        self.assertLess(float(ours.get("cx")), names["small"])
        floor = max(float(tick.get("y")) for tick in drawn(text, "text") if tick.text == "0") - 4
        heights = [floor - float(point.get("cy")) for point in (ours, small, large)]
        self.assertAlmostEqual(heights[1] / heights[0], 2, places=1)
        self.assertAlmostEqual(heights[2] / heights[1], 2, places=1)
        self.assertEqual(drawn(text, "polyline"), [])
        self.assertIn("limit", names)


class DocumentTest(unittest.TestCase):
    def test_a_table_has_equal_columns(self):
        table = Table("T", ["a", "b"], [["1", "x|y"], ["long", "z"]], ["A note."])
        lines = table.markdown().splitlines()
        self.assertEqual(lines[0], "**T**")
        self.assertEqual(lines[2], "| a    | b    |")
        self.assertEqual(lines[4], "| 1    | x\\|y |")
        self.assertEqual(lines[-1], "A note.")

    def test_says_what_did_not_run_and_why(self):
        report = Report({"CPU": "x"}, [Section("a", "A", not_run="no GPU")])
        report.sections.append(Section("b", "B", gates=[Gate("g", "at most 1", "2.0", False)]))
        report.sections[-1].gates.append(Gate("h", "at most 1", why="no MPI"))
        text = report.markdown()
        for expected in ("## A\n\nnot run: no GPU", "| CPU | x |", "MISSED", "not run: no MPI"):
            self.assertIn(expected, text)
        verdicts = [gate["verdict"] for gate in report.as_json()["gates"]]
        self.assertEqual(verdicts, ["MISSED", "not run: no MPI"])


if __name__ == "__main__":
    unittest.main()
