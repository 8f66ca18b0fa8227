#!/usr/bin/env python3
"""Runs the report on workers that make their figures up, and reads what it writes."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reporting import collective_section, disturbance, fault_sections, group_sections  # noqa: E402
from reporting import main, models, processes, rendezvous_section  # noqa: E402
from reporting import state_sections, step_sections, store_section  # noqa: E402
from reporting.document import Table  # noqa: E402
from reporting.figures import Rounds  # noqa: E402

FAKE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_worker.py")
STORE = [
    {"operation": "get", "us": {"TCPStore": [51, 50, 60], "RedisStore TCP": [30, 20, 66]}},
    {"operation": "add", "us": {"TCPStore": [2], "RedisStore TCP": [3]}},
]
SIMULATION = """  1200 seeds of 2 hosts or more: 3000 agents, 0.7 hours, 129874 events
   800 seeds of 1000 hosts or more: 2000 agents, 0.0 hours, 387551 events
2.6 hours simulated, 529 generations, 97 restarts charged
faults: 115 worker crash, 6 host lost, 1000 endless losses
messages: 238204 scripts run; lost: 1716 requests
363.7 s on 2 threads
"""
DAMAGE = """600 damages of a checkpoint of 8 files, 102308 bytes: 600 found
  a flipped bit         300 damages,    300 found
  a block of zeros      300 damages,    300 found
"""
# As measure_hosts() returns it: over the link ours moves two thirds of Gloo's bytes.
HOSTS = {
    "rate": "1gbit",
    "tensor_bytes": 100 << 20,
    "ranks_per_host": 2,
    "rounds": {
        "gloo": {"seconds": [1.0, 2.0, 1.0], "sent": [150 << 20] * 3, "received": [150 << 20] * 3},
        "hierarchical": {
            "seconds": [0.5, 1.0, 0.7],
            "sent": [100 << 20] * 3,
            "received": [100 << 20] * 3,
        },
    },
    "death": {"kills": 2, "near_ms": [0.25, 0.5], "far_ms": [3.0, 4.0], "wrong_rank": 0},
}


def report(*arguments):
    """Returns (exit code, text of report.md, report.json, names of the files)."""
    with tempfile.TemporaryDirectory() as folder:
        # MPI's own times have no place in a test.
        absent = mock.patch.object(
            collective_section, "build_mpi", side_effect=processes.NotRun("mpirun is not installed")
        )
        with absent, contextlib.redirect_stdout(io.StringIO()):
            code = main.main([f"--output={folder}", "--quick", "--rounds=3", *arguments])
        with open(os.path.join(folder, "report.md"), encoding="utf-8") as stream:
            text = stream.read()
        with open(os.path.join(folder, "report.json"), encoding="utf-8") as stream:
            return code, text, json.load(stream), sorted(os.listdir(folder))


def two_cores():
    return len(os.sched_getaffinity(0)) >= 2


class ReportTest(unittest.TestCase):
    WORKERS = (f"--step-worker={FAKE}", f"--collective-worker={FAKE}", "--torch-python=")

    def test_measures_and_writes(self):
        code, text, found, files = report("--only=world,collectives,steps", *self.WORKERS)
        self.assertEqual(code, 0, text)
        self.assertNotIn(" met ", text)  # a shortened run decides nothing
        names = [section["name"] for section in found["sections"]]
        self.assertEqual(names, ["steps", "collectives", "world"])
        if not two_cores():
            self.assertIn("not run: 2 pinned ranks need 2 cores", text)
            return
        for file in ("steps.svg", "allreduce-2.svg", "alltoall-4.svg", "world.svg"):
            self.assertIn(file, files)
            self.assertIn(f"({file})", text)
        self.assertIn("PyTorch: not run: no --torch-python=PYTHON was given", text)
        self.assertIn("MPI: not run: mpirun is not installed", text)
        self.assertIn("Gloo, alltoall: not run: this backend has no alltoall", text)
        self.assertIn("1.100 [1.100..1.100]", text)  # step to plain step
        self.assertIn("4.000 [4.000..4.000]", text)  # Gloo to ours
        seconds = found["sections"][1]["data"]["2 ranks"]["allreduce"]["4"]["seconds"]
        self.assertEqual(seconds["shm registered"], [0.002] * 3)

    def test_missing_programs_are_named(self):
        missing = [f"--{option}=/nonexistent" for option in main.PROGRAMS]
        code, text, found, _ = report("--torch-python=", *missing)
        self.assertEqual(code, 0, text)
        self.assertEqual([s["name"] for s in found["sections"]], list(main.SECTIONS))
        for section in found["sections"]:
            self.assertNotEqual(section["not_run"], "", section["name"])
            self.assertFalse(section["not_run"].startswith("failed"), section)

    def test_a_program_that_fails_is_an_error(self):
        wrong = ["--store-benchmark=/bin/false"]
        code, text, _, _ = report("--only=store", "--torch-python=", *wrong)
        self.assertEqual(code, 1)
        self.assertIn("not run: failed: /bin/false ended with 1", text)

    def test_a_section_that_fails_keeps_its_first_figures(self):
        def measure(_, section):
            section.text = "the first figures"
            raise main.BenchmarkError("a rank ended")

        with mock.patch.dict(main.SECTIONS, store=("Store", measure)):
            with contextlib.redirect_stdout(io.StringIO()):
                section = main.run_section("store", mock.Mock(quick=False))
        self.assertEqual(section.text, "the first figures")
        self.assertEqual(section.not_run, "failed: a rank ended")


class GroupSectionsTest(unittest.TestCase):
    DEATH = ("--only=peer_death", f"--hierarchical-worker={FAKE}", "--torch-python=")

    def setUp(self):
        if not two_cores():
            self.skipTest("ranks with a core each need 2 cores")

    def test_kills_ranks_and_reads_the_errors(self):
        code, text, found, _ = report(*self.DEATH)
        self.assertEqual(code, 0, text)
        data = found["sections"][0]["data"]
        every = [data[c.name]["quiet"] + data[c.name]["disturbed"] for c in group_sections.CASES]
        self.assertEqual([len(times) for times in every], [3, 3, 3, 9])
        self.assertGreater(min(sum(every, [])), 0)
        (gate,) = found["gates"]
        self.assertIn("not decided: ", gate["verdict"])

    def test_an_error_that_names_a_survivor_fails_the_section(self):
        with mock.patch.object(group_sections, "measure_death", return_value=([(0.5, 0)], 0)):
            code, text, found, _ = report(*self.DEATH)
        self.assertEqual(code, 1)
        self.assertIn("3 of 3 errors name another rank", text)
        self.assertEqual(found["gates"][0]["verdict"], "not run: not measured")

    def test_ranks_that_end_early_fail_the_section(self):
        code, text, _, _ = report("--only=peer_death", "--hierarchical-worker=/bin/false")
        self.assertEqual(code, 1)
        self.assertIn("peer death: rank 0 ended when asked for its port", text)

    def test_the_larger_percentile_of_two_ranks_decides(self):
        small, large, free, crowded = [case.name for case in group_sections.CASES]
        found = {
            small: group_sections.Deaths([0.1] * 19 + [50], [70]),
            large: group_sections.Deaths([0.4] * 6, []),
            free: group_sections.Deaths([9.0], []),
            crowded: group_sections.Deaths([9.0], []),
        }
        gate = group_sections.peer_death_gate(found)
        self.assertEqual((gate.figure, gate.met), ("p90 0.400 ms", True))
        found[large].quiet = [0.4] * 3 + [1.5] * 3
        self.assertIs(group_sections.peer_death_gate(found).met, False)
        found[large].quiet = [0.4] * 2
        verdict = group_sections.peer_death_gate(found).verdict()
        self.assertEqual(verdict, "not decided: 2 quiet kills of a case are too few")
        found[small].quiet = found[large].quiet = []
        verdict = group_sections.peer_death_gate(found).verdict()
        self.assertEqual(verdict, "not decided: no quiet kill")

    def test_a_process_returns_to_its_cores(self):
        before = os.sched_getaffinity(0)
        with self.assertRaises(KeyError), group_sections.running_on([min(before)]):
            self.assertEqual(os.sched_getaffinity(0), {min(before)})
            raise KeyError
        self.assertEqual(os.sched_getaffinity(0), before)


def a_sum(backend, seconds, sent, received):
    return {"backend": backend, "seconds": seconds, "sent": sent, "received": received}


# Of two ranks; the first round is the one that allocates.
SUMS = [
    [a_sum("gloo", 99, 9, 9), a_sum("ours", 99, 9, 9)]
    + [a_sum("gloo", 4, 15, 15), a_sum("ours", 1, 10, 10)]
    + [a_sum("gloo", 2, 30, 10), a_sum("ours", 2, 10, 10)],
    [a_sum("gloo", 98, 9, 9), a_sum("ours", 98, 9, 9)]
    + [a_sum("gloo", 3, 15, 15), a_sum("ours", 2, 10, 10)]
    + [a_sum("gloo", 8, 30, 10), a_sum("ours", 1, 10, 10)],
]


class SumsTest(unittest.TestCase):
    def rounds(self):
        lines = [group_sections.slowest(same_sum) for same_sum in zip(*SUMS)]
        return group_sections.rounds_of(lines, ["gloo", "ours"])

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
        times, moved = group_sections.ratios(rounds["ours"], rounds["gloo"])
        self.assertEqual(times, [0.5, 0.25])
        self.assertEqual(moved, [20 / 30, 20 / 40])

    def test_bytes_are_shown_in_tensors_and_beside_flat_gloo(self):
        rounds = {"gloo": self.rounds()["gloo"], "hierarchical": self.rounds()["ours"]}
        section = main.Section("hosts", "Hosts")
        found = {**HOSTS, "tensor_bytes": 10, "rounds": rounds}
        group_sections.add_hosts_tables(section, found)
        flat, ours = section.tables[0].rows
        self.assertEqual(flat[3:5], ["2.250", "1.250"])
        self.assertEqual(ours[2], "0.375 [0.312..0.438]")


class HostsTest(unittest.TestCase):
    def report(self, why_not=""):
        measured = mock.patch.object(group_sections, "measure_hosts", return_value=HOSTS)
        hosts = mock.patch.object(group_sections, "why_not", return_value=why_not)
        with measured as measure, hosts:
            worker = f"--hierarchical-worker={FAKE}"
            return *report("--only=hosts", worker, "--torch-python="), measure.call_count

    def test_shows_what_was_measured(self):
        code, text, found, _, _ = self.report()
        self.assertEqual(code, 0, text)
        for expected in ("0.500 [0.500..0.600]", "1.500", "0.667 is the least ratio"):
            self.assertIn(expected, text)
        self.assertEqual(found["sections"][0]["data"], HOSTS)
        self.assertEqual(len(found["gates"]), 3)

    def test_without_root_it_says_so(self):
        code, text, found, _, measured = self.report("hosts need root")
        self.assertEqual((code, measured), (0, 0))
        self.assertIn("not run: hosts need root", text)
        self.assertEqual({gate["verdict"] for gate in found["gates"]}, {"not run: not measured"})

    def test_gates(self):
        moved, times, death = group_sections.hosts_gates(HOSTS)
        self.assertEqual([gate.met for gate in (moved, times, death)], [False, True, True])
        self.assertIn("0.667 is the least", moved.figure)
        self.assertEqual(death.figure, "4.000 ms")  # the latest error of all
        late = {**HOSTS, "death": {**HOSTS["death"], "near_ms": [1000.0]}}
        self.assertIs(group_sections.hosts_gates(late)[2].met, False)


class RendezvousTest(unittest.TestCase):
    class Job:
        """Answers with one figure after the other, as rendezvous_section.Job would."""

        def __init__(self, agents):
            self.agents, self.did = agents, []
            self.joins = iter([(0.436, 0.419), (5, 5), (0.2, 0.1), (0.3, 0.2), (0.4, 0.6)])
            self.known = iter([9, 0.012, 0.014, 0.1])

        def join(self):
            self.did.append("join")
            return next(self.joins)

        def fail(self):
            self.did.append("fail")
            return next(self.known)

        def pings(self, _):
            self.did.append("pings")
            return 4.0

        def percent(self, _):
            self.did.append("beats")
            return 9.2

        def redis(self, *_):
            return "cmdstat_evalsha:calls=10,usec=205,usec_per_call=20.5"

        def settle(self):
            pass

        def scripts(self):
            return "no scripts"

    def test_heartbeats_and_pings_take_turns_and_medians_are_shown(self):
        job = self.Job(1000)
        row, spent, notes = rendezvous_section.measure(job, 2, 10, 3)
        first = ["pings", "join", "beats", "pings", "fail", "join", "beats"]
        self.assertEqual(job.did, first + ["fail", "join"] * 3)
        self.assertEqual(row, ["0.436", "0.014", "0.300", "9.2"])
        self.assertEqual(spent, ["0.419", "0.200", "4.0", "2.300"])
        self.assertTrue(any("joining again, worst: 0.600 s; target under 0.5 s: MISSED" in x
                            for x in notes), notes)  # fmt: skip
        self.assertFalse(any("% of a core" in x for x in notes))  # no target for a small job

    def test_reads_the_cost_of_scripts(self):
        text = "cmdstat_get:calls=1,usec=2\r\ncmdstat_evalsha:calls=10,usec=205,usec_per_call=20.5"
        self.assertEqual(rendezvous_section.ratio_of_scripts(text), (10, 20.5))
        self.assertEqual(rendezvous_section.ratio_of_scripts(""), (0, 0))


class FaultSectionsTest(unittest.TestCase):
    def section(self, measure, output):
        """What `measure` makes of a program's output, and the program's arguments."""
        section = main.Section("name", "title")
        with mock.patch.object(fault_sections, "run_program", return_value=output) as run:
            measure(mock.Mock(quick=False), section)
        return section, run.call_args.args[0]

    def test_counts_simulated_faults(self):
        section, command = self.section(fault_sections.run_faults, SIMULATION)
        self.assertEqual(command[1:], ["--seeds=2000"])
        (table,) = section.tables
        self.assertEqual(table.title, "2,000 simulated jobs, 5,000 agents")
        self.assertEqual(table.rows[1:3], [["host lost", "6"], ["endless losses", "1,000"]])
        self.assertEqual(table.rows[-1], ["all", "1,121"])

    def test_counts_damages(self):
        (table,) = self.section(fault_sections.run_corruption, DAMAGE)[0].tables
        self.assertEqual(table.title, "Damages of a checkpoint of 8 files, 102308 bytes")
        self.assertEqual(table.rows[0], ["a flipped bit", "300", "300"])
        self.assertEqual(table.rows[-1], ["all", "600", "600"])

    def test_another_form_of_output_is_an_error(self):
        for measure in (fault_sections.run_faults, fault_sections.run_corruption):
            with self.assertRaisesRegex(ValueError, "another form"):
                self.section(measure, "all is well\n")


class GatesTest(unittest.TestCase):
    def rounds(self, **times):
        found = Rounds()
        names = {"memcpy": collective_section.MEMCPY, "gloo": collective_section.GLOO}
        names |= {"ours": ("shm", "private"), "registered": ("shm", "registered")}
        for _ in range(5):
            found.add({names[name]: value for name, value in times.items()}, 0)
        return found

    def test_the_worst_size_decides(self):
        mib = 1 << 20
        by_size = {
            4: self.rounds(memcpy=1, gloo=300, ours=2, registered=1),
            mib: self.rounds(memcpy=10, gloo=90, ours=12, registered=10),
            16 * mib: self.rounds(memcpy=10, gloo=80, ours=11, registered=5),
            64 * mib: self.rounds(memcpy=10, gloo=70, ours=12, registered=8),
        }
        gates = collective_section.gates(by_size, 2, "shm")
        self.assertEqual([gate.met for gate in gates], [False, True, True, True, False, True])
        self.assertIn("0.800", gates[0].figure)  # at 64 MiB; 0.5 at 16 MiB
        by_size[4].shares = [1, 1, 1, 0, 0]  # too few quiet rounds of one size
        gates = collective_section.gates(by_size, 2, "shm")
        self.assertEqual([gate.met for gate in gates], [False, True, True, None, False, None])
        by_size[4].shares = [0] * 5
        for ranks in main.parse_arguments(["--ranks=4,16"]).ranks:
            (gate,) = collective_section.gates({4: by_size[4]}, ranks, "shm")
            self.assertTrue(gate.met)
            self.assertIn(f"{ranks} ranks", gate.name)

    def test_without_our_backend_nothing_is_decided(self):
        by_size = {4: self.rounds(memcpy=1, gloo=3)}
        for gate in collective_section.gates(by_size, 2, "shm"):
            self.assertEqual(gate.verdict(), "not run: not measured")

    def test_memory_is_beyond_plain_of_the_same_side(self):
        model = models.MODELS[2]
        plain, size = ("ours", "plain"), model.megabytes()
        for beyond, met in ((1.04, True), (1.2, False)):
            found = {plain: (300, 250), ("ours", "default"): (700, 250 + beyond * size)}
            self.assertIs(step_sections.memory_gate(model, found).met, met)


class PartsTest(unittest.TestCase):
    def test_batches_are_as_long_as_the_clock_needs(self):
        self.assertEqual(collective_section.calls_for(0.001, 0.02), 20)
        self.assertEqual(collective_section.calls_for(5, 0.02), 1)
        self.assertEqual(collective_section.calls_for(1e-9, 0.02), collective_section.MOST_CALLS)

    def test_the_slowest_rank_is_the_call(self):
        answers = [{"start_ns": 0, "end_ns": 100}, {"start_ns": 50, "end_ns": 350}]
        self.assertEqual(disturbance.seconds_of(answers, 3), 1e-7)

    def test_models_with_other_gradients_are_told_apart(self):
        self.assertTrue(step_sections.same_gradients([1.0, 2000.0], [1.0005, 2001.0]))
        self.assertFalse(step_sections.same_gradients([1.0, 2.0], [1.0, 2.5]))

    def test_a_store_is_compared_within_each_round(self):
        table = Table("One operation", ["operation", "store", "us", "to TCPStore"])
        store_section.add_rows(table, STORE)
        self.assertEqual(
            table.rows[:3],
            [
                ["get", "TCPStore", "51.0 [50.5..55.5]", "-"],
                ["get", "RedisStore TCP", "30.0 [25.0..48.0]", "0.588"],
                ["add", "TCPStore", "2.000 [2.000..2.000]", "-"],
            ],
        )
        (note,) = table.notes
        self.assertIn("get, RedisStore TCP: 0.588 of TCPStore's time; target under 0.6", note)

    def test_a_round_of_checkpoints_leaves_nothing(self):
        class Side:
            def ask(self, request):
                os.mkdir(request.split()[1])
                return [{"save_ns": 1e9, "restore_ns": 3e9}, {"save_ns": 2e9, "restore_ns": 1e9}]

        with tempfile.TemporaryDirectory() as folder:
            times = state_sections.checkpoint_round(Side(), folder, state_sections.BLOCK + 5)
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual((times["save"], times["restore"]), (2, 3))

    def test_writes_as_many_bytes_as_the_checkpoint_has(self):
        with tempfile.TemporaryDirectory() as folder:
            for size in (5, state_sections.BLOCK, 2 * state_sections.BLOCK + 1):
                state_sections.write_file(os.path.join(folder, "file"), size)
                self.assertEqual(os.path.getsize(os.path.join(folder, "file")), size)

    def test_reads_memory(self):
        self.assertEqual(
            processes.status_mb("VmPeak:\t1 kB\nVmHWM:\t 1000 kB\n", "VmHWM"), 1.024
        )

    def test_sections_are_chosen_by_name(self):
        self.assertEqual(main.parse_sections("store,steps"), ["store", "steps"])
        for wrong in ("", "storage", "steps,storage"):
            with self.assertRaises(main.argparse.ArgumentTypeError):
                main.parse_sections(wrong)


if __name__ == "__main__":
    unittest.main()
