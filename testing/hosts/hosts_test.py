#!/usr/bin/env python3
"""Tests of the hosts themselves."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import case_report  # noqa: E402  (found beside this file)
import hosts  # noqa: E402

# Prints what came of connecting to a host's port 9, where nobody listens.
KNOCK = """
import socket, sys
s = socket.socket()
s.settimeout(float(sys.argv[2]))
try:
    s.connect((sys.argv[1], 9))
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("nothing")
"""


def knock(source, target, patience_s):
    return source.run(["python3", "-I", "-c", KNOCK, target, str(patience_s)]).strip()


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class HostsTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.network = self.enterContext(hosts.Network(["a", "b"]))
        self.a, self.b = self.network["a"], self.network["b"]

    def path(self, name):
        return os.path.join(self.folder, name)

    def test_a_host_has_a_name_an_address_and_processes_of_its_own(self):
        self.assertEqual(self.a.run(["hostname"]).strip(), "a")
        self.assertIn(self.b.address, self.b.run(["ip", "-brief", "address"]))
        self.assertIn(self.b.address, self.a.run(["getent", "hosts", "b"]))
        self.assertIn("1 sleep", self.a.run(["ps", "-e", "-o", "pid=,comm="]))
        self.assertNotIn("python3", self.a.run(["ps", "-e", "-o", "comm="]))

    def test_a_cut_link_loses_packets_and_tells_nobody(self):
        self.assertEqual(knock(self.a, "b", 30), "refused")
        self.b.cut()
        self.assertEqual(knock(self.a, "b", 0.5), "nothing")
        self.b.restore()
        self.assertEqual(knock(self.a, "b", 30), "refused")

    def test_power_off_ends_everything_and_the_host_comes_back_the_same(self):
        script = "sleep 1000 & (setsid sleep 1000 &); echo on; wait"
        process = self.b.start(["sh", "-c", script], self.path("out"))
        process.await_output("on")
        inside = self.b.processes()
        self.b.power_off()
        self.assertEqual(process.wait(), -signal.SIGKILL)
        self.assertEqual([p for p in inside if os.path.exists(f"/proc/{p}/ns/pid")], [])
        self.assertEqual(knock(self.a, "b", 0.5), "nothing")
        self.b.boot()
        self.assertEqual(knock(self.a, "b", 30), "refused")
        self.assertEqual(self.b.processes(), [])

    def test_all_processes_stop_and_go_on(self):
        script = "(setsid sh -c 'kill -STOP $$; echo gone on' &); kill -STOP $$; echo on; wait"
        process = self.b.start(["sh", "-c", script], self.path("out"))

        def states():
            return self.b.run(["ps", "-e", "-o", "state=,comm="])

        hosts.wait_until("stop", lambda: states().count("T sh") == 2)
        self.b.resume()
        self.assertEqual(process.wait(), 0)
        hosts.wait_until("the other one", lambda: "gone on" in process.output())

        sleeper = self.b.start(["sleep", "1000"], self.path("sleeper"))
        hosts.wait_until("the sleeper", lambda: "S sleep" in states())
        self.b.stop()
        self.assertIn("T sleep", states())
        self.b.kill_all()
        self.assertEqual(sleeper.wait(), -signal.SIGKILL)
        self.assertTrue(self.b.is_on())

    def test_exit_codes_output_and_pids_pass_through(self):
        process = self.a.start(["sh", "-c", "echo $$; exit 7"], self.path("out"))
        self.assertEqual(process.wait(), 7)
        sleeper = self.a.start(["sh", "-c", "echo $$; exec sleep 1000"], self.path("sleeper"))
        sleeper.await_output("\n")
        self.assertEqual(self.a.outer_pid(int(sleeper.output())), sleeper.pid)
        sleeper.signal(signal.SIGTERM)
        self.assertEqual(sleeper.wait(), -signal.SIGTERM)
        with self.assertRaisesRegex(hosts.HostsError, "no such thing"):
            self.a.run(["sh", "-c", "echo no such thing >&2; exit 1"])

    def test_nothing_is_left_of_a_program_that_was_killed(self):
        script = (
            "import hosts, sys, time\n"
            "with hosts.Network(['x']) as network:\n"
            "  network['x'].start(['sh', '-c', 'setsid sleep 1000'], sys.argv[1])\n"
            "  children = [p for h in [network['x']] for p in h.processes() + [h._init]]\n"
            "  print(*children, flush=True)\n"
            "  time.sleep(1000)\n"
        )
        program = subprocess.Popen(
            [sys.executable, "-c", script, self.path("out")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.path.dirname(os.path.abspath(hosts.__file__)),
        )
        with program:
            pids = [int(x) for x in program.stdout.readline().split()]
            self.assertGreaterEqual(len(pids), 2)
            program.kill()
        gone = lambda: not any(hosts.namespace(p, "pid") for p in pids)  # noqa: E731
        hosts.wait_until("end of the hosts' processes", gone)


class ReasonTest(unittest.TestCase):
    def test_there_is_a_reason_or_there_are_hosts(self):
        if os.geteuid() != 0:
            self.assertIn("need root", hosts.why_not())


if __name__ == "__main__":
    case_report.main()
