#!/usr/bin/env python3
"""A trainer on three hosts, of which one loses its power in the middle of an epoch.

The survivors go on from the newest checkpoint, the host comes back, and in the end every sample was
trained exactly once in every epoch. Nobody types anything but what starts ddprun on a host.
"""

import glob
import os
import re
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import case_report  # noqa: E402  (found beside this file)
import commit_replay  # noqa: E402
import hosts  # noqa: E402
from hosts_job import Job, find_program  # noqa: E402

NAMES = ["a", "b", "c"]
SAMPLES = 1437
BATCH = 32
STEPS_OF_EPOCH = -(-SAMPLES // BATCH)
EPOCHS = 40
CHECKPOINT_EVERY = 20
# What the job may take on a machine with other work.
PATIENCE_S = 300


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class LostHostTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self.network = self.enterContext(hosts.Network(["store", *NAMES]))
        self.checkpoints, self.commits = self.path("checkpoints"), self.path("commits")
        os.mkdir(self.commits)
        program = [find_program("testing/jobs:logging_trainer"), f"--epochs={EPOCHS}"]
        program += [f"--checkpoint_every={CHECKPOINT_EVERY}", f"--batch_size={BATCH}"]
        program += [f"--samples={SAMPLES}"]
        program += [f"--checkpoint_dir={self.checkpoints}", f"--commit_log={self.commits}"]
        flags = ["--nnodes=2:3", "--nproc-per-node=2", "--rdzv-id=lost", "--no-python"]
        ddprun = find_program("launcher:ddprun")
        self.job = Job(self.network, self.folder, ddprun, program, flags)

    def path(self, name):
        return os.path.join(self.folder, name)

    def steps_of(self, generation, world):
        """How many steps rank 0 has logged in this generation, and the last one's number."""
        path = os.path.join(self.commits, f"generation-{generation}-rank-0-of-{world}.txt")
        with open(path, encoding="ascii") as stream:
            lines = stream.read().split("\n")[:-1]
        return len(lines), int(lines[-1].split()[0]) if lines else 0

    def await_middle_of_epoch(self, generation, world):
        def in_the_middle():
            count, step = self.steps_of(generation, world)
            between_checkpoints = 5 <= step % CHECKPOINT_EVERY <= 10
            in_epoch = 10 <= step % STEPS_OF_EPOCH <= 30
            return count > STEPS_OF_EPOCH and in_epoch and between_checkpoints

        self.job.wait_until("middle of an epoch", in_the_middle)

    def loss_of(self, epoch):
        """What rank 0 has printed, on whichever host it was then."""
        printed = ""
        for path in glob.glob(os.path.join(self.folder, "*.out")):
            with open(path, encoding="utf-8") as stream:
                printed += stream.read()
        return float(re.search(rf"epoch {epoch} loss ([0-9.]+)", printed).group(1))

    def test_a_host_is_lost_and_comes_back(self):
        self.job.start_store("store")
        for name in NAMES:
            self.job.start_node(name)
        first = self.job.await_running(NAMES, 6)
        self.await_middle_of_epoch(first, 6)
        self.network["c"].power_off()
        second = self.job.await_running(["a", "b"], 4)
        self.await_middle_of_epoch(second, 4)
        self.network["c"].boot()
        self.job.start_node("c")
        self.job.await_running(NAMES, 6)
        for name in NAMES:
            node = self.job.nodes[name]
            self.assertEqual(node.process.wait(PATIENCE_S), 0, self.job.quote(name))
            self.assertEqual(node.last("joined")["restarts"], 0)

        epochs, void = commit_replay.replay(self.commits)
        self.assertEqual(commit_replay.check_once(epochs, EPOCHS, SAMPLES), "")
        print(f"{void} steps were done again, or by a generation that was lost")
        self.assertLess(self.loss_of(EPOCHS - 1), 1e-2)


if __name__ == "__main__":
    case_report.main()
