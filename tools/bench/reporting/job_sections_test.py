#!/usr/bin/env python3
"""Tests of what follows a kill, on logs as ddprun and the Python program write them."""

import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import job_sections as benchmark  # noqa: E402  (found by the line above)
from reporting import processes  # noqa: E402

SECOND = 1_000_000_000


def event(name, generation, at_s, **fields):
    return {"event": name, "generation": generation, "monotonic_ns": int(at_s * SECOND), **fields}


def started(generation, at_s, pids):
    return event("generation_started", generation, at_s, ranks=[0, 1], pids=pids)


def stepped(generation, at_s, rank, step=1):
    return event("first_step", generation, at_s, rank=rank, step=step)


KILL = benchmark.Kill(generation=1, rank=1, pid=11, monotonic_ns=20 * SECOND)
BEFORE = [started(1, 10, [10, 11]), stepped(1, 11, 0), stepped(1, 11, 1)]
AFTER = [
    event("worker_exited", 1, 20.25, rank=1, pid=11, signal=9),
    event("worker_exited", 1, 20.5, rank=0, pid=10, signal=15),
    event("restart", 2, 20.5, restart=1, max_restarts=5, reason="rank 1 was killed by SIGKILL"),
    started(2, 20.75, [12, 13]),
    stepped(2, 21.5, 1, step=31),
    stepped(2, 21.0, 0, step=31),
]


class RecoveryTest(unittest.TestCase):
    def test_ends_with_the_first_step_of_the_slowest_rank(self):
        recovery = benchmark.recovery_of(BEFORE + AFTER, KILL)
        self.assertEqual(recovery.stepped_s, 1.5)
        self.assertEqual(recovery.started_s, 0.75)
        self.assertEqual(recovery.noticed_s, 0.25)
        self.assertEqual((recovery.generation, recovery.step), (2, 31))

    def test_is_not_over_before_every_rank_has_stepped(self):
        for end in range(len(AFTER)):
            self.assertIsNone(benchmark.recovery_of(BEFORE + AFTER[:end], KILL))

    def test_steps_of_the_killed_generation_do_not_count(self):
        self.assertIsNone(benchmark.recovery_of(BEFORE + [stepped(1, 21, 0)], KILL))

    def test_restarts_have_no_other_cause_than_the_kills(self):
        self.assertEqual(benchmark.restarts_beyond(BEFORE + AFTER, [KILL]), "")
        self.assertIn("0 kills", benchmark.restarts_beyond(AFTER, []))
        other = event("restart", 3, 30, reason="rank 0 exited with code 1")
        self.assertIn("code 1", benchmark.restarts_beyond([*AFTER, other], [KILL, KILL]))

    def test_a_line_that_is_being_written_is_left_for_later(self):
        text = "".join(json.dumps(e) + "\n" for e in BEFORE)
        self.assertEqual(processes.parse_events(text + '{"event": "fir'), BEFORE)
        self.assertEqual(processes.parse_events(""), [])


class FilesTest(unittest.TestCase):
    def test_the_last_checkpoint_is_compared_without_what_differs_between_runs(self):
        with tempfile.TemporaryDirectory() as root:
            for folder in ("step-000000000010.g0001", "step-000000000020.g0003"):
                os.mkdir(os.path.join(root, folder))
                for name in ("model-00001-of-00001.safetensors", "MANIFEST.json"):
                    with open(os.path.join(root, folder, name), "wb") as stream:
                        stream.write(folder.encode())
            name, files = benchmark.final_files(root)
        self.assertEqual(name, "step-000000000020.g0003")
        self.assertEqual(files, {"model-00001-of-00001.safetensors": name.encode()})

    def test_a_folder_without_checkpoints_is_an_error(self):
        with tempfile.TemporaryDirectory() as root:
            self.assertRaises(benchmark.BenchmarkError, benchmark.final_files, root)

    def test_differences_are_told(self):
        self.assertIsNone(benchmark.first_difference({"a": b"x"}, {"a": b"x"}))
        self.assertIn("byte 1", benchmark.first_difference({"a": b"xy"}, {"a": b"xz"}))
        self.assertIn("shorter", benchmark.first_difference({"a": b"xy"}, {"a": b"x"}))
        self.assertIn("files are", benchmark.first_difference({"a": b""}, {"b": b""}))


KILLED_AT = 20 * SECOND


def entries(*lines):
    """Of (what, restart, rank, seconds)."""
    return {(what, restart, rank): (7, int(at * SECOND)) for what, restart, rank, at in lines}


FIRST_SUMS = [("line", 0, 0, 10), ("line", 0, 1, 10), ("sum", 0, 0, 12), ("sum", 0, 1, 12)]
LINES = [("line", 1, 0, 20.25), ("line", 1, 1, 20.5)]


class RestartTest(unittest.TestCase):
    def test_ends_with_the_first_sum_of_the_slowest_rank(self):
        lines = [*FIRST_SUMS, *LINES, ("sum", 1, 0, 22), ("sum", 1, 1, 21)]
        restart = benchmark.restart_of(entries(*lines), KILLED_AT, False)
        self.assertEqual(restart, benchmark.Restart(line_s=0.5, sum_s=2, burnt=0))

    def test_is_not_over_before_every_rank_has_summed(self):
        for more in ([], LINES[:1], LINES, [*LINES, ("sum", 1, 0, 22)]):
            found = benchmark.restart_of(entries(*FIRST_SUMS, *more), KILLED_AT, False)
            self.assertIsNone(found)

    def test_workers_that_fail_by_themselves_burn_restarts(self):
        again = [("line", 2, 0, 25), ("line", 2, 1, 25), ("sum", 2, 0, 27), ("sum", 2, 1, 28)]
        restart = benchmark.restart_of(entries(*FIRST_SUMS, *LINES, *again), KILLED_AT, False)
        self.assertEqual(restart, benchmark.Restart(line_s=0.5, sum_s=8, burnt=1))

    def test_a_job_that_is_over_without_a_sum_was_given_up(self):
        last = [("line", 2, 0, 25)]
        restart = benchmark.restart_of(entries(*FIRST_SUMS, *LINES, *last), KILLED_AT, True)
        self.assertEqual(restart, benchmark.Restart(0.5, float("inf"), 1))

    def test_the_log_is_read_without_a_line_that_is_being_written(self):
        with tempfile.NamedTemporaryFile("w", encoding="ascii") as stream:
            stream.write("line 0 1 42 1000\nsum 0 1 42 20")
            stream.flush()
            self.assertEqual(benchmark.read_log(stream.name), {("line", 0, 1): (42, 1000)})
        self.assertEqual(benchmark.read_log("/nonexistent"), {})


if __name__ == "__main__":
    unittest.main()
