#!/usr/bin/env python3
"""Tests of tools/bench/ddp_step_benchmark.py on what its ranks answer."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ddp_step_benchmark as benchmark  # noqa: E402  (found beside this file)

MILLISECOND = 1_000_000
MODEL = benchmark.Model("tiny", layers=2, width=4, steps=2)


def answer(step_ms, gradient_sum=1.0, faults=0):
    starts = [i * 100 * MILLISECOND for i in range(len(step_ms))]
    return {
        "starts_ns": starts,
        "ends_ns": [start + int(ms * MILLISECOND) for start, ms in zip(starts, step_ms)],
        "minor_faults": faults,
        "gradient_sum": gradient_sum,
    }


class FakeSide:
    """Answers by mode: one list of step times per rank, and the sums of gradients."""

    def __init__(self, name, answers):
        self.name = name
        self.by_mode = answers
        self.asked = []

    def steps(self, mode, count):
        self.asked.append((mode, count))
        return self.by_mode[mode]


class StepTest(unittest.TestCase):
    def test_the_slowest_rank_is_the_step_and_the_first_step_does_not_count(self):
        self.assertEqual(benchmark.step_times_ms([answer([90, 3, 8]), answer([90, 5, 2])]), [5, 8])

    def test_model_sizes_are_those_that_are_published(self):
        sizes = [model.describe() for model in benchmark.MODELS]
        expected = ["1000 parameters, 0.5 MB", "100 parameters, 13.2 MB"]
        self.assertEqual(sizes, expected + ["48 parameters, 100.8 MB"])

    def test_tensors_of_the_other_models_are_counted(self):
        # One block per stage, counted by hand: convolutions and norms, then the head.
        convolutions = 9 * (3 * 2 + 2 * 2 * 2 + 2 * 4 + 2 * 4 * 4 + 4 * 8 + 2 * 8 * 8)
        norms = 2 * (3 * 2 + 3 * 4 + 3 * 8)
        self.assertEqual(benchmark.conv_tensors(1, 2), (29, convolutions + norms + 10 * 9))
        model = benchmark.Model("t", 1, 4, 1, kind="transformer")
        block = 2 * 8 + 4 * 12 + 12 + 4 * 4 + 4 + 4 * 16 + 16 + 16 * 4 + 4
        self.assertEqual(model.tensors(), (17, block + 8 + 1024 * 4 + 1024 * 4 + 1024))

    def test_more_models_are_chosen_by_name(self):
        names = [model.name for model in benchmark.parse_models("conv,small,transformer")]
        self.assertEqual(names, ["conv", "small", "transformer"])


class RoundTest(unittest.TestCase):
    def test_takes_ratios_within_the_round(self):
        plain = [answer([0, 10, 10], 2.0), answer([0, 8, 8], 4.0)]
        view = [answer([99, 12, 12], 3.0, 4), answer([9, 15, 15], 3.0, 5)]
        side = FakeSide("ours", {"plain": plain, "view": view})
        results = {}
        benchmark.run_round(side, ["view"], MODEL, results)
        self.assertEqual(side.asked, [("plain", 3), ("view", 3)])
        self.assertEqual(results["ours", "view"].ratios, [1.5])
        self.assertEqual(results["ours", "view"].faults, [3.0])
        self.assertEqual(results["ours", "plain"].ratios, [1.0])

    def test_a_mode_that_averages_nothing_is_an_error(self):
        plain = [answer([9, 10], 2.0), answer([9, 8], 4.0)]
        side = FakeSide("ours", {"plain": plain, "default": plain, "noop": plain})
        with self.assertRaisesRegex(benchmark.BenchmarkError, "ours default: the gradients of"):
            benchmark.run_round(side, ["default"], MODEL, {})
        benchmark.run_round(side, ["noop"], MODEL, {})  # which says that it does not


class VerdictTest(unittest.TestCase):
    def test_quartiles_that_overlap_are_level(self):
        best = benchmark.quartiles([1.0, 1.2, 1.4, 1.6, 1.8])
        self.assertEqual((best.first, best.median, best.third), (1.2, 1.4, 1.6))
        for values, expected in [
            ([1.1, 1.1, 1.1], "ahead"),
            ([1.0, 1.1, 1.3, 1.4], "level"),
            ([1.7, 1.8, 1.9], "behind"),
        ]:
            found = benchmark.verdict(benchmark.quartiles(values), best)
            self.assertEqual(found, expected, values)


    def test_the_best_mode_is_one_that_synchronizes(self):
        ratios = {
            ("ours", "plain"): benchmark.quartiles([1.0]),
            ("ours", "noop"): benchmark.quartiles([1.1]),
            ("ours", "view"): benchmark.quartiles([1.3]),
            ("ours", "static"): benchmark.quartiles([1.4]),
            ("PyTorch", "plain"): benchmark.quartiles([1.0]),
        }
        self.assertEqual(benchmark.best_mode(ratios, "ours"), ("ours", "view"))
        self.assertIsNone(benchmark.best_mode(ratios, "PyTorch"))


class ArgumentsTest(unittest.TestCase):
    def test_names_what_is_missing(self):
        for arguments in (
            ["--worker=/nonexistent"],
            ["--worker=/bin/true", "--torch-python="],
            ["--worker=/bin/true", "--torch-python=/bin/true"],
            ["--worker=/bin/true", "--models=huge"],
        ):
            with self.assertRaises(SystemExit) as raised, open(os.devnull, "w") as sink:
                stderr, sys.stderr = sys.stderr, sink
                try:
                    benchmark.parse_arguments(arguments)
                finally:
                    sys.stderr = stderr
            self.assertEqual(raised.exception.code, 2, arguments)


if __name__ == "__main__":
    unittest.main()
