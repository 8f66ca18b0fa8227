#!/usr/bin/env python3
"""A job on three hosts, two ranks each, its Redis on a fourth: hosts and links are lost and come.

The trainer (summing_trainer.cc) is always in the middle of an all-reduce: all of its ranks but one
wait for the last one. What is asserted is the order and the number of events, never a time.
"""

import os
import signal
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import case_report  # noqa: E402  (found beside this file)
import hosts  # noqa: E402
from hosts_job import Job, find_program  # noqa: E402

NAMES = ["a", "b", "c"]
# Short enough for a quick test, long enough for a busy machine.
LEASE_MS = 1500
# Steps that take longer than several leases (the trainer's --step_ms is 20).
STEPS_OF_LEASES = 300


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class JobTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self.network = self.enterContext(hosts.Network(["store", *NAMES]))

    # ---- What the tests do --------------------------------------------------------------------

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, names, *flags):
        """Starts the job on these hosts and waits until it trains."""
        program = [find_program("testing/hosts:summing_trainer")]
        program += [f"--state={self.path('state')}", f"--until={self.path('until')}"]
        common = ["--nnodes=2:3", "--nproc-per-node=2", "--rdzv-id=job", f"--lease-ms={LEASE_MS}"]
        common += ["--rdzv-conf=last_call_timeout=1", "--no-python"]
        ddprun = find_program("launcher:ddprun")
        self.job = Job(self.network, self.folder, ddprun, program, [*common, *flags])
        self.job.start_store("store")
        for name in names:
            self.job.start_node(name)
        return self.await_running(names)

    def await_running(self, names, after=0):
        return self.job.await_running(names, 2 * len(names), after)

    def finish(self, names):
        """Lets the job come to its end: on these hosts ddprun exits with 0."""
        open(self.path("until"), "w", encoding="ascii").close()
        for name in names:
            self.assertEqual(self.job.nodes[name].process.wait(), 0, self.job.quote(name))
            self.assertEqual(self.job.nodes[name].last("job_finished")["exit_code"], 0)

    def step(self):
        with open(self.path("state"), encoding="ascii") as stream:
            return int(stream.read())

    def await_steps(self, count):
        """The job does so many more steps."""
        target = self.step() + count
        self.job.wait_until(f"step {target}", lambda: self.step() >= target)

    def assert_free(self, names):
        """Nothing was charged to the budget."""
        for name in names:
            self.assertEqual(self.job.nodes[name].last("joined")["restarts"], 0)

    def assert_same_ranks(self, names, before):
        """These nodes' workers are where they were, as far as the job still has their ranks."""
        for name in names:
            self.assertEqual(self.job.nodes[name].last("joined")["group_rank"], before[name])

    def ranks(self, names):
        return {name: self.job.nodes[name].last("joined")["group_rank"] for name in names}

    def order(self, name, *events):
        """What the node has told of these kinds, in order."""
        return [e["event"] for e in self.job.nodes[name].events(*events)]

    def assert_fenced(self, name, old):
        """A node that came back has ended its workers of generation `old`, then joined again."""
        node = self.job.nodes[name]
        events = node.events("joined", "worker_exited")
        kinds = [(e["event"], e["generation"]) for e in events]
        self.assertEqual(kinds.count(("worker_exited", old)), 2, self.job.quote(name))
        again = next(i for i, (k, g) in enumerate(kinds) if k == "joined" and g > old)
        self.assertNotIn(("worker_exited", old), kinds[again:])

    # ---- Stories ------------------------------------------------------------------------------

    def test_killed_node(self):
        first = self.start(NAMES, "--max-restarts=0")
        self.network["c"].kill_all()
        second = self.await_running(["a", "b"])
        self.assertGreater(second, first)
        self.assert_free(["a", "b"])
        for name in ("a", "b"):
            # Its peers' workers were the first to say so, as victims: the cause is the node.
            self.assertIn("node c was lost", self.job.nodes[name].process.output())
        self.finish(["a", "b"])

    def test_killed_host_comes_back(self):
        self.start(NAMES, "--max-restarts=0")
        self.network["c"].power_off()
        self.await_running(["a", "b"])
        before = self.ranks(["a", "b"])
        self.network["c"].boot()
        self.job.start_node("c")
        self.await_running(NAMES)
        self.assert_same_ranks(["a", "b"], before)
        self.assert_free(NAMES)
        self.finish(NAMES)

    def test_cut_link(self):
        first = self.start(NAMES, "--max-restarts=0")
        self.network["c"].cut()
        second = self.await_running(["a", "b"])
        self.job.await_event("c", "store_out_of_reach")
        self.network["c"].restore()
        third = self.await_running(NAMES)
        self.assertLess(first, second)
        self.assertLess(second, third)
        self.assert_fenced("c", first)
        self.assert_free(NAMES)
        self.finish(NAMES)

    def test_stopped_host(self):
        first = self.start(NAMES, "--max-restarts=0")
        self.network["c"].stop()
        second = self.await_running(["a", "b"])
        self.await_steps(STEPS_OF_LEASES)
        self.network["c"].resume()
        third = self.await_running(NAMES)
        self.assertLess(first, second)
        self.assertLess(second, third)
        self.assert_fenced("c", first)
        self.assert_free(NAMES)
        self.finish(NAMES)

    def test_store_outage(self):
        first = self.start(NAMES, "--max-restarts=1")
        self.job.kill_store()
        for name in NAMES:
            self.job.await_event(name, "store_out_of_reach")
        self.await_steps(STEPS_OF_LEASES)
        self.job.restart_store()
        for name in NAMES:
            self.job.await_event(name, "store_back")
        self.await_steps(STEPS_OF_LEASES)
        for name in NAMES:  # it has trained on: same generation, nobody has ended
            self.assertEqual(self.job.nodes[name].trains(), first, self.job.quote(name))
        # The new server knows the job: a failure is charged, and a second one is one too many.
        self.job.nodes["b"].kill_worker(max(self.job.nodes["b"].workers(first)))
        second = self.await_running(NAMES, after=first)
        for name in NAMES:
            self.assertEqual(self.job.nodes[name].last("joined")["restarts"], 1)
        self.job.nodes["c"].kill_worker(max(self.job.nodes["c"].workers(second)))
        for name in NAMES:
            self.assertEqual(self.job.nodes[name].process.wait(), 1, self.job.quote(name))

    def test_added_node(self):
        first = self.start(["a", "b"], "--max-restarts=0")
        before = self.ranks(["a", "b"])
        self.await_steps(STEPS_OF_LEASES)  # from now on the nodes know how fast they are
        self.job.start_node("c")
        self.await_running(NAMES)
        self.assert_same_ranks(["a", "b"], before)
        self.assert_free(NAMES)
        # All stopped after the same step, as they were asked, and the next one follows it.
        stops = {self.job.nodes[name].last("drain")["stop_at_step"] for name in ("a", "b")}
        self.assertEqual(len(stops), 1)
        for name in ("a", "b"):
            node = self.job.nodes[name]
            self.assertEqual([e.get("exit_code") for e in node.exits(first).values()], [0, 0])
        steps = {
            step["step"]
            for name in NAMES
            for step in self.job.nodes[name].first_steps(self.job.nodes[name].generation()).values()
        }
        self.assertEqual(steps, {stops.pop() + 1})
        self.finish(NAMES)

    def test_node_taken_away(self):
        first = self.start(NAMES, "--max-restarts=0")
        self.await_steps(STEPS_OF_LEASES)
        leaver = self.job.nodes["b"]
        leaver.process.signal(signal.SIGTERM)
        self.await_running(["a", "c"])
        leaver.process.wait()
        self.assertEqual([e.get("exit_code") for e in leaver.exits(first).values()], [0, 0])
        stops = {self.job.nodes[name].last("drain")["stop_at_step"] for name in NAMES}
        self.assertEqual(len(stops), 1)
        node = self.job.nodes["a"]
        step = node.first_steps(node.generation()).popitem()[1]["step"]
        self.assertEqual(step, stops.pop() + 1)
        self.assert_free(["a", "c"])
        self.finish(["a", "c"])

    def test_first_node_lost_three_times(self):
        generations = [self.start(NAMES, "--max-restarts=0")]
        for _ in range(3):
            first = self.job.first_host(NAMES)
            others = [name for name in NAMES if name != first]
            self.network[first].power_off()
            generations.append(self.await_running(others))
            self.network[first].boot()
            self.job.start_node(first)
            generations.append(self.await_running(NAMES))
        self.assertEqual(generations, sorted(set(generations)))
        self.assert_free(NAMES)
        self.finish(NAMES)


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class RanksWithoutALauncherTest(unittest.TestCase):
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone, as under mpirun or a scheduler."""

    def run_ranks(self, places, **more):
        """Runs rank r on the host places[r] to its end. Returns what the ranks printed."""
        folder = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        network = self.enterContext(hosts.Network(sorted(set(places))))
        program = [find_program("testing/hosts:summing_trainer")]
        program += [f"--state={folder}/state", f"--until={folder}/until"]
        open(f"{folder}/until", "w", encoding="ascii").close()
        common = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"}
        common |= {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": network[places[0]].address}
        processes = []
        for rank, place in enumerate(places):
            environment = common | {"RANK": str(rank)}
            environment |= {name: value.format(rank=rank) for name, value in more.items()}
            output = os.path.join(folder, f"output-{rank}")
            processes.append(network[place].start(program, output, environment))
        for process in processes:
            self.assertEqual(process.wait(), 0, process.output())
        return "".join(process.output() for process in processes)

    def test_the_ranks_find_their_hosts(self):
        self.assertIn("4 ranks on 2 hosts", self.run_ranks(["a", "a", "b", "b"]))

    def test_ranks_of_hosts_in_turn_use_gloo(self):
        self.assertNotIn(" hosts; sums", self.run_ranks(["a", "b", "a", "b"]))

    def test_all_ranks_on_one_host_share_memory(self):
        self.assertNotIn("uses Gloo", self.run_ranks(["a", "a"]))

    def test_containers_that_are_called_one_host_connect_over_their_networks(self):
        said = self.run_ranks(["a", "b"], LOCAL_WORLD_SIZE="2", LOCAL_RANK="{rank}")
        self.assertIn("this group uses Gloo", said)


if __name__ == "__main__":
    case_report.main()
