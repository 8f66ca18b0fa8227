#!/usr/bin/env python3
"""Tests of the figures: quartiles, paired ratios, disturbed rounds, gates, and the clocks' text."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import disturbance, figures  # noqa: E402  (found by the line above)
from reporting.figures import Quartiles, Rounds  # noqa: E402

STAT = """cpu  9 9 9 9 9 9 9 9 0 0
cpu0 100 1 20 5000 7 3 4 10 50 0
cpu1 200 0 0 5000 0 0 0 0 0 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def rounds(shares, **times):
    found = Rounds()
    for i, share in enumerate(shares):
        found.add({name: column[i] for name, column in times.items()}, share)
    return found


class FiguresTest(unittest.TestCase):
    def test_numbers_keep_three_digits(self):
        found = [figures.number(x) for x in (0, 0.00012, 0.05, 0.123456, 1.0049, 12.34, 123456)]
        self.assertEqual(found, ["0", "0.00012", "0.050", "0.123", "1.005", "12.3", "123,456"])
        self.assertEqual(figures.text(None), figures.NONE)
        self.assertEqual(figures.text(Quartiles(1, 2, 3)), "2.000 [1.000..3.000]")

    def test_nothing_has_no_quartiles(self):
        self.assertIsNone(figures.of([]))
        self.assertEqual(figures.of([1, 2, 3]).median, 2)
        self.assertEqual(figures.scaled(Quartiles(1, 2, 3), 10), Quartiles(10, 20, 30))

    def test_a_percentile_lies_between_two_values(self):
        values = [30, 10, 20, 0]
        found = [figures.percentile(values, share) for share in (0, 0.5, 0.9, 1)]
        self.assertEqual(found, [0, 15, 27, 30])
        self.assertEqual(figures.percentile([7], 0.9), 7)


class RoundsTest(unittest.TestCase):
    def test_a_ratio_is_taken_within_its_round(self):
        # The medians alone would give the ratio 1.
        found = rounds([0, 0, 0], a=[2, 4, 9], b=[1, 4, 3])
        self.assertEqual(found.ratio("a", "b").median, 2)

    def test_disturbed_rounds_are_kept_apart(self):
        found = rounds([0, 0.5, 0.01], a=[1, 100, 3], b=[1, 1, 1])
        self.assertEqual(found.indexes(), [0, 2])
        self.assertEqual(found.seconds("a"), Quartiles(1.5, 2, 2.5))
        self.assertEqual(found.seconds("a", disturbed=True).median, 100)
        self.assertEqual(found.ratio("a", "b", disturbed=True).median, 100)
        self.assertEqual(found.count(), "2 quiet, 1 disturbed")

    def test_a_subject_that_came_late_or_is_missing_counts_where_it_ran(self):
        found = Rounds()
        found.add({"a": 1}, 0)
        found.add({"a": 2, "b": 4}, 0)
        found.add({"b": 6}, 0)
        self.assertEqual(found.times, {"a": [1, 2, None], "b": [None, 4, 6]})
        self.assertEqual(found.ratio("b", "a").median, 2)
        self.assertIsNone(found.ratio("c", "a"))
        self.assertIsNone(found.seconds("c"))


class GateTest(unittest.TestCase):
    def test_is_met_at_its_limit(self):
        for median, met in ((1.05, True), (1.06, False)):
            gate = figures.gate_below("x", 1.05, Quartiles(1, median, 2), quiet_rounds=9)
            self.assertIs(gate.met, met)
        self.assertTrue(figures.gate_above("x", 8, Quartiles(1, 8, 9), 9).met)
        self.assertEqual(figures.gate_above("x", 8, Quartiles(1, 7, 9), 9).verdict(), "MISSED")

    def test_one_number_is_under_its_limit(self):
        found = [figures.gate_under("x", 1, value, "ms").verdict() for value in (0.9, 1, None)]
        self.assertEqual(found, ["met", "MISSED", "not run: not measured"])
        self.assertEqual(figures.gate_under("x", 1, 0.25, "ms").figure, "0.250 ms")

    def test_too_few_quiet_rounds_decide_nothing(self):
        for make in (figures.gate_below, figures.gate_above):
            gate = make("x", 1, Quartiles(1, 1, 1), figures.FEWEST_QUIET_ROUNDS - 1)
            self.assertIsNone(gate.met)
            self.assertIn("too few", gate.verdict())
        gate = figures.gate_below("x", 1, Quartiles(1, 1, 1), 9)
        gate.undecided("a shortened run")
        self.assertEqual(gate.verdict(), "not decided: a shortened run")
        gate = figures.gate_below("x", 1, None, 0)
        self.assertEqual(gate.verdict(), "not decided: no quiet round")
        self.assertEqual(figures.gate_above("x", 1, None, -1).verdict(), "not run: not measured")


class DisturbanceTest(unittest.TestCase):
    def test_busy_time_leaves_out_waits_interrupts_and_other_cores(self):
        self.assertEqual(disturbance.busy_seconds(STAT, [0], tick_s=1), 131)
        self.assertEqual(disturbance.busy_seconds(STAT, [0, 1], tick_s=0.01), 3.31)

    def test_foreign_time_is_busy_time_that_is_not_our_own(self):
        before = disturbance.Reading(at_s=10, busy_s=100, own_s=50)
        after = disturbance.Reading(at_s=11, busy_s=102, own_s=51.5)
        self.assertEqual(disturbance.foreign_share(before, after, cpus=2), 0.25)

    def test_a_foreign_time_within_the_error_of_ticks_is_none(self):
        before = disturbance.Reading(0, 0, 0)
        after = disturbance.Reading(0.01, disturbance.LEAST_FOREIGN_S / 2, 0)
        self.assertEqual(disturbance.foreign_share(before, after, 1), 0)

    def test_the_control_that_was_longest_off_its_cpu_counts(self):
        answers = [
            {"start_ns": 0, "end_ns": 100, "cpu_ns": 99},
            {"start_ns": 50, "end_ns": 150, "cpu_ns": 75},
        ]
        self.assertEqual(disturbance.off_cpu_share(answers), 0.25)
        self.assertEqual(disturbance.off_cpu_share([]), 0)


if __name__ == "__main__":
    unittest.main()
