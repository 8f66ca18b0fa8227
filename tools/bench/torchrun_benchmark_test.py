#!/usr/bin/env python3
"""Tests of tools/bench/torchrun_benchmark.py on logs as its program writes them."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torchrun_benchmark as benchmark  # noqa: E402  (found beside this file)

SECOND = 1_000_000_000
KILLED_AT = 20 * SECOND


def entries(*lines):
    """Of (what, restart, rank, seconds)."""
    return {(what, restart, rank): (7, int(at * SECOND)) for what, restart, rank, at in lines}


BEFORE = [("line", 0, 0, 10), ("line", 0, 1, 10), ("sum", 0, 0, 12), ("sum", 0, 1, 12)]
LINES = [("line", 1, 0, 20.25), ("line", 1, 1, 20.5)]


class RestartTest(unittest.TestCase):
    def test_ends_with_the_first_sum_of_the_slowest_rank(self):
        lines = [*BEFORE, *LINES, ("sum", 1, 0, 22), ("sum", 1, 1, 21)]
        restart = benchmark.restart_of(entries(*lines), KILLED_AT, False)
        self.assertEqual(restart, benchmark.Restart(line_s=0.5, sum_s=2, burnt=0))

    def test_is_not_over_before_every_rank_has_summed(self):
        for more in ([], LINES[:1], LINES, [*LINES, ("sum", 1, 0, 22)]):
            found = benchmark.restart_of(entries(*BEFORE, *more), KILLED_AT, False)
            self.assertIsNone(found)

    def test_workers_that_fail_by_themselves_burn_restarts(self):
        again = [("line", 2, 0, 25), ("line", 2, 1, 25), ("sum", 2, 0, 27), ("sum", 2, 1, 28)]
        restart = benchmark.restart_of(entries(*BEFORE, *LINES, *again), KILLED_AT, False)
        self.assertEqual(restart, benchmark.Restart(line_s=0.5, sum_s=8, burnt=1))

    def test_a_job_that_is_over_without_a_sum_was_given_up(self):
        last = [("line", 2, 0, 25)]
        restart = benchmark.restart_of(entries(*BEFORE, *LINES, *last), KILLED_AT, True)
        self.assertEqual(restart, benchmark.Restart(0.5, float("inf"), 1))

    def test_the_log_is_read_without_a_line_that_is_being_written(self):
        with tempfile.NamedTemporaryFile("w", encoding="ascii") as stream:
            stream.write("line 0 1 42 1000\nsum 0 1 42 20")
            stream.flush()
            self.assertEqual(benchmark.read_log(stream.name), {("line", 0, 1): (42, 1000)})
        self.assertEqual(benchmark.read_log("/nonexistent"), {})


if __name__ == "__main__":
    unittest.main()
