#!/usr/bin/env python3
"""A bundle on bare Debian 12 and 13: two commands, and nothing else is there."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [_HERE, os.path.join(os.path.dirname(_HERE), "hosts")]
import bare_debian  # noqa: E402  (found beside this file)
import case_report  # noqa: E402
import elf  # noqa: E402
import hosts  # noqa: E402

_MINIMAL = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "examples", "minimal")
_TOOLS_OF_A_BUILD = ["bazel", "g++", "gcc", "cc", "python3", "redis-server", "curl", "wget", "ssh"]
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
EPOCHS = 40
PATIENCE_S = 300


class BundleTest(unittest.TestCase):
    """What a bundle holds."""

    def test_each_file_has_an_owner_and_a_licence(self):
        bundle = os.path.join(_MINIMAL, "train.bundle")
        licences = os.path.join(bundle, "licenses")
        with open(os.path.join(licences, "list"), encoding="utf-8") as stream:
            owners = dict(line.strip().split("  ") for line in stream)
        libraries = [f"lib/{name}" for name in os.listdir(os.path.join(bundle, "lib"))]
        self.assertEqual(sorted(owners), sorted([*libraries, "redis-server"]))
        for owner in [*owners.values(), "nlohmann-json3-dev"]:
            self.assertTrue(os.listdir(os.path.join(licences, owner.split()[0])), owner)
        self.assertIn("GPL-3", os.listdir(os.path.join(licences, "common-licenses")))

    def test_the_other_form_has_nothing_of_torch(self):
        with_torch, without = [
            set(os.listdir(os.path.join(_MINIMAL, form, "lib")))
            for form in ("train.bundle", "train.bundle_without_torch")
        ]
        self.assertLess(without, with_torch)
        wheels = ("libtorch_cpu", "libc10", "libgomp", "libcudart", "libcupti")
        self.assertEqual([n for n in with_torch - without if not n.startswith(wheels)], [])

    def test_no_path_of_the_build_machine_is_searched(self):
        for path in elf.files(os.path.join(_MINIMAL, "train.bundle")):
            for rpath in elf.rpaths(path):
                self.assertIn(rpath, ("RPATH $ORIGIN", "RPATH $ORIGIN/lib"), path)


class BareDebianTest(unittest.TestCase):
    def setUp(self):
        bare_debian.skip_where_missing()
        self.folder = self.enterContext(
            tempfile.TemporaryDirectory(
                dir=os.environ.get("TEST_TMPDIR"), ignore_cleanup_errors=True
            )
        )
        self.network = self.enterContext(hosts.Network(["a", "b"]))
        os.mkdir(self.path("opt"))
        os.mkdir(self.path("srv"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def unpack(self, bundle):
        tar = os.path.join(_MINIMAL, f"{bundle}.tar")
        subprocess.run(["tar", "-xf", tar, "-C", self.path("opt")], check=True)

    def move_in(self, name, suite, more=None):
        folders = {"/opt": self.path("opt"), "/srv": self.path("srv"), **(more or {})}
        bare_debian.move_in(self.network[name], bare_debian.file_system(suite), folders)

    def start(self, name, *command, **environment):
        return self.network[name].start(
            list(command),
            output=self.path(f"{name}.out"),
            environment={**_ENVIRONMENT, **environment},
            cwd="/",
        )

    def run_it(self, name, *command, **environment):
        """Returns the exit code, and what it has printed."""
        before = os.path.getsize(self.path(f"{name}.out")) if self.has_run(name) else 0
        process = self.start(name, *command, **environment)
        return process.wait(PATIENCE_S), process.output()[before:]

    def has_run(self, name):
        return os.path.exists(self.path(f"{name}.out"))

    def kill_a_trainer(self, name):
        def is_trainer(pid):
            try:
                with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
                    return stream.read() == "train\n"
            except OSError:
                return False

        victim = next(pid for pid in self.network[name].processes() if is_trainer(pid))
        os.kill(victim, signal.SIGKILL)

    def test_two_hosts_train_through_a_kill(self):
        self.unpack("train.bundle")
        self.move_in("a", "bookworm")
        self.move_in("b", "trixie")
        for name, version in (("a", "12"), ("b", "13")):
            look = f"cat /etc/debian_version; command -v {' '.join(_TOOLS_OF_A_BUILD)}; ls /mnt"
            _, seen = self.run_it(name, "sh", "-c", look)
            self.assertRegex(seen, rf"^{version}\.\d+\n$")
        flags = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={self.network['a'].address}"]
        program = ["/srv/checkpoints", str(EPOCHS)]
        nodes = [
            self.start(
                *(name, "/opt/train.bundle/run", *flags, f"--node-rank={rank}"),
                *("--max-restarts=3", "--", *program),
            )
            for rank, name in enumerate(("a", "b"))
        ]
        nodes[0].await_output("epoch 5 ")
        self.kill_a_trainer("b")
        for node in nodes:
            self.assertEqual(node.wait(PATIENCE_S), 0, node.output())
        self.assertIn("restart 1 of 3: generation 2: rank ", nodes[0].output())
        epochs = [int(x.split()[1]) for x in nodes[0].output().split("\n") if x[:6] == "epoch "]
        self.assertEqual(sorted(set(epochs)), list(range(EPOCHS)))
        self.assertEqual(epochs.count(0), 1, "it has gone on, and not begun anew")

    def test_the_machines_own_torch(self):
        self.unpack("train.bundle_without_torch")
        # Another machine's LibTorch: what the other form carries, as a stock LibTorch lays it out.
        libraries = os.path.join(_MINIMAL, "train.bundle", "lib")
        os.makedirs(self.path("opt/torch/lib"))
        os.makedirs(self.path("opt/old"))
        os.symlink("../torch/lib", self.path("opt/old/lib"))
        for folder, version in (("torch", self.torch_version()), ("old", "2.3.1+cpu")):
            with open(self.path(f"opt/{folder}/build-version"), "w", encoding="ascii") as stream:
                stream.write(version + "\n")
        self.move_in("b", "trixie", {"/opt/torch/lib": libraries})
        run = ["/opt/train.bundle_without_torch/run", "--standalone", "--nproc-per-node=2"]
        for path, line in (
            ("/opt/old", "TORCH_PATH=/opt/old holds torch 2.3.1; this trainer needs "),
            ("/opt/nowhere", "TORCH_PATH=/opt/nowhere has no lib/libtorch_cpu.so: set TORCH_PATH"),
            ("", "this bundle carries no LibTorch: set TORCH_PATH to the folder of torch "),
        ):
            code, printed = self.run_it("b", *run, TORCH_PATH=path)
            self.assertEqual((code, printed.count("\n")), (2, 1), printed)
            self.assertIn(line, printed)
        code, printed = self.run_it("b", *run, TORCH_PATH="/opt/torch")
        self.assertEqual(code, 0, printed)
        self.assertIn("epoch 4 loss", printed)

    def torch_version(self):
        with open(os.path.join(_MINIMAL, "train.bundle", "licenses", "list")) as stream:
            return next(line.split()[-1] for line in stream if "libtorch_cpu" in line)


if __name__ == "__main__":
    case_report.main()
