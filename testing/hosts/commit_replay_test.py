#!/usr/bin/env python3
"""Tests of commit_replay.py on logs as testing/jobs:logging_trainer writes them."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import case_report  # noqa: E402  (found beside this file)
import commit_replay  # noqa: E402


class ReplayTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def log(self, generation, rank, world, text):
        name = f"generation-{generation}-rank-{rank}-of-{world}.txt"
        with open(os.path.join(self.folder, name), "w", encoding="ascii") as stream:
            stream.write(text)

    def test_what_a_restart_undoes_does_not_count(self):
        self.log(1, 0, 2, "1 0 3\n2 0 1\n3 1 0\n")
        self.log(1, 1, 2, "1 0 2\n2 0 0\n3 1 ")  # killed
        self.log(2, 0, 1, "2 0 0 1\n3 1 2 3\n4 1 0 1\n")
        epochs, void = commit_replay.replay(self.folder)
        self.assertEqual(void, 2)
        self.assertEqual(epochs, {0: [3, 2, 0, 1], 1: [2, 3, 0, 1]})
        self.assertEqual(commit_replay.check_once(epochs, 2, 4), "")
        self.assertIn("epochs are [0, 1]", commit_replay.check_once(epochs, 3, 4))
        self.assertIn("1 samples are missing", commit_replay.check_once(epochs, 2, 5))

    def test_samples_that_come_again_are_found(self):
        self.log(1, 0, 1, "1 0 0 1\n2 0 1 2\n")
        epochs, _ = commit_replay.replay(self.folder)
        self.assertIn("1 came again", commit_replay.check_once(epochs, 1, 3))

    def test_a_step_without_one_of_its_ranks_is_an_error(self):
        self.log(1, 0, 2, "1 0 0\n2 0 1\n")
        self.log(1, 1, 2, "1 0 2\n")
        with self.assertRaisesRegex(commit_replay.ReplayError, "step 2 counts"):
            commit_replay.replay(self.folder)

    def test_a_gap_is_an_error(self):
        self.log(1, 0, 1, "1 0 0\n")
        self.log(2, 0, 1, "3 0 1\n")
        with self.assertRaisesRegex(commit_replay.ReplayError, "without a gap"):
            commit_replay.replay(self.folder)


if __name__ == "__main__":
    case_report.main()
