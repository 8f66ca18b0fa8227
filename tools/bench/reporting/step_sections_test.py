#!/usr/bin/env python3
"""Tests of the training steps on what the ranks answer."""

import argparse
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import context, figures, main, models, state_sections  # noqa: E402
from reporting import step_sections as steps  # noqa: E402  (found by the line above)

MILLISECOND = 1_000_000
MODEL = models.Model("tiny", layers=2, width=4, steps=2)


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
        self.assertEqual(steps.step_times_ms([answer([90, 3, 8]), answer([90, 5, 2])]), [5, 8])

    def test_model_sizes_are_those_that_are_published(self):
        sizes = [model.describe() for model in models.MODELS]
        expected = ["1000 parameters, 0.5 MB", "100 parameters, 13.2 MB"]
        self.assertEqual(sizes, expected + ["48 parameters, 100.8 MB"])

    def test_tensors_of_the_other_models_are_counted(self):
        # One block per stage, counted by hand: convolutions and norms, then the head.
        convolutions = 9 * (3 * 2 + 2 * 2 * 2 + 2 * 4 + 2 * 4 * 4 + 4 * 8 + 2 * 8 * 8)
        norms = 2 * (3 * 2 + 3 * 4 + 3 * 8)
        self.assertEqual(models.conv_tensors(1, 2), (29, convolutions + norms + 10 * 9))
        model = models.Model("t", 1, 4, 1, kind="transformer")
        block = 2 * 8 + 4 * 12 + 12 + 4 * 4 + 4 + 4 * 16 + 16 + 16 * 4 + 4
        self.assertEqual(model.tensors(), (17, block + 8 + 1024 * 4 + 1024 * 4 + 1024))

    def test_more_models_are_chosen_by_name(self):
        names = [model.name for model in models.parse_models("conv,small,transformer")]
        self.assertEqual(names, ["conv", "small", "transformer"])


class RoundTest(unittest.TestCase):
    def test_takes_ratios_within_the_round(self):
        plain = [answer([0, 10, 10], 2.0), answer([0, 8, 8], 4.0)]
        view = [answer([99, 12, 12], 3.0, 4), answer([9, 15, 15], 3.0, 5)]
        side = FakeSide("ours", {"plain": plain, "view": view})
        found = steps.run_round(side, ["view"], MODEL)
        self.assertEqual(side.asked, [("plain", 3), ("view", 3)])
        rounds = figures.Rounds()
        rounds.add({key: ms for key, (ms, _) in found.items()}, 0)
        for mode, expected in (("view", 1.5), ("plain", 1.0)):
            self.assertEqual(rounds.ratio(("ours", mode), ("ours", "plain")).median, expected)
        self.assertEqual(found["ours", "view"][1], 3.0)

    def test_a_mode_that_averages_nothing_is_an_error(self):
        plain = [answer([9, 10], 2.0), answer([9, 8], 4.0)]
        side = FakeSide("ours", {"plain": plain, "default": plain, "noop": plain})
        with self.assertRaisesRegex(steps.BenchmarkError, "ours default: the gradients of"):
            steps.run_round(side, ["default"], MODEL)
        steps.run_round(side, ["noop"], MODEL)  # which says that it does not

    def test_optimizers_that_train_otherwise_are_an_error(self):
        answers = {"default+adam": [answer([9, 10], 2.0)], "zero": [answer([9, 10], 2.5)]}
        with self.assertRaisesRegex(steps.BenchmarkError, "zero: sums of parameters"):
            steps.run_round(FakeSide("zero", answers), ["zero"], MODEL, "default+adam",
                            state_sections.check_parameters)  # fmt: skip


class VerdictTest(unittest.TestCase):
    def test_quartiles_that_overlap_are_level(self):
        best = figures.of([1.0, 1.2, 1.4, 1.6, 1.8])
        self.assertEqual((best.first, best.median, best.third), (1.2, 1.4, 1.6))
        for values, expected in [
            ([1.1, 1.1, 1.1], "ahead"),
            ([1.0, 1.1, 1.3, 1.4], "level"),
            ([1.7, 1.8, 1.9], "behind"),
        ]:
            found = figures.verdict(figures.of(values), best)
            self.assertEqual(found, expected, values)

    def test_the_best_mode_is_one_that_synchronizes(self):
        ratios = {
            ("ours", "plain"): figures.of([1.0]),
            ("ours", "noop"): figures.of([1.1]),
            ("ours", "view"): figures.of([1.3]),
            ("ours", "static"): figures.of([1.4]),
            ("PyTorch", "plain"): figures.of([1.0]),
        }
        self.assertEqual(steps.best_mode(ratios, "ours"), ("ours", "view"))
        self.assertIsNone(steps.best_mode(ratios, "PyTorch"))


class ArgumentsTest(unittest.TestCase):
    def test_an_unknown_model_is_named(self):
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "no model huge; there are small"):
            models.parse_models("small,huge")

    def test_names_what_is_missing(self):
        for arguments, why in (
            (["--step-worker=/nonexistent"], "step_worker"),
            (["--step-worker=/bin/true", "--torch-python="], "no --torch-python=PYTHON was given"),
            (["--step-worker=/bin/true", "--torch-python=/bin/true"], "/bin/true has no PyTorch"),
        ):
            found = context.Context(main.parse_arguments(arguments), "")
            with self.assertRaisesRegex(steps.NotRun, why):
                found.program("step-worker")
                found.torch_python()


if __name__ == "__main__":
    unittest.main()
