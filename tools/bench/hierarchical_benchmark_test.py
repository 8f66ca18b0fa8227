#!/usr/bin/env python3
"""Tests of the figures of tools/bench/hierarchical_benchmark.py."""

import contextlib
import io
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hierarchical_benchmark as benchmark  # noqa: E402  (found beside this file)


def line(backend, seconds, sent, received):
    return {"backend": backend, "seconds": seconds, "sent": sent, "received": received}


# Of two ranks; the first round is the one that allocates.
LINES = [
    [line("gloo", 99, 9, 9), line("ours", 99, 9, 9)]
    + [line("gloo", 4, 15, 15), line("ours", 1, 10, 10)]
    + [line("gloo", 2, 30, 10), line("ours", 2, 10, 10)],
    [line("gloo", 98, 9, 9), line("ours", 98, 9, 9)]
    + [line("gloo", 3, 15, 15), line("ours", 2, 10, 10)]
    + [line("gloo", 8, 30, 10), line("ours", 1, 10, 10)],
]


class FiguresTest(unittest.TestCase):
    def rounds(self):
        return benchmark.rounds_of(benchmark.slowest(LINES), ["gloo", "ours"])

    def test_the_slowest_rank_is_the_sum_and_the_first_round_is_left_out(self):
        self.assertEqual(
            self.rounds(),
            {
                "gloo": {"seconds": [4, 8], "sent": [15, 30], "received": [15, 10]},
                "ours": {"seconds": [2, 2], "sent": [10, 10], "received": [10, 10]},
            },
        )

    def test_a_ratio_is_taken_within_its_round(self):
        rounds = self.rounds()
        times, moved = benchmark.ratios(rounds["ours"], rounds["gloo"])
        self.assertEqual(times, [0.5, 0.25])
        self.assertEqual(moved, [20 / 30, 20 / 40])

    def test_prints_every_backend_beside_the_first(self):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            benchmark.compare(self.rounds(), payload=10)
        self.assertIn("sent 2.250, received 1.250", output.getvalue())
        self.assertIn("ours / gloo: time 0.375", output.getvalue())


if __name__ == "__main__":
    unittest.main()
