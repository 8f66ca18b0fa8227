#!/usr/bin/env python3
"""Tests of the packer's decisions, and of the script that starts a bundle."""

import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import pack  # noqa: E402  (found beside this file)

LDD = """\tlinux-vdso.so.1 (0x00007ffd)
\tlibglog.so.1 => /lib/x86_64-linux-gnu/libglog.so.1 (0x00007f01)
\tlibcap.so.2 => /lib/x86_64-linux-gnu/libcap.so.2 (0x00007f02)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f03)
\tlibmvec.so.1 => /lib/x86_64-linux-gnu/libmvec.so.1 (0x00007f04)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f05)
"""


class PackTest(unittest.TestCase):
    NEEDS = {
        "train": ["libtorch_cpu.so", "libglog.so.1", "libc.so.6"],
        "/t/libtorch_cpu.so": ["libcublas.so.13", "libm.so.6"],
        "/d/libglog.so.1": ["libgflags.so.2"],
        "/d/libgflags.so.2": ["libglog.so.1", "ld-linux-x86-64.so.2"],
    }
    HERE = {
        "libtorch_cpu.so": "/t/libtorch_cpu.so",
        "libglog.so.1": "/d/libglog.so.1",
        "libgflags.so.2": "/d/libgflags.so.2",
        "libc.so.6": "/d/libc.so.6",
    }

    def closure(self, *whole):
        return pack.closure("train", self.HERE, self.NEEDS.__getitem__, whole.__contains__)

    def test_what_ldd_finds(self):
        found = pack.parse_ldd(LDD)
        self.assertEqual(found["libglog.so.1"], "/lib/x86_64-linux-gnu/libglog.so.1")
        self.assertEqual(pack.parse_ldd("\tlibx.so.1 => not found\n"), {})

    def test_a_missing_library_is_named(self):
        with self.assertRaisesRegex(pack.PackError, "^train needs libcublas.so.13, which this"):
            self.closure()

    def test_what_comes_whole_brings_its_own_and_the_c_library_is_the_machines(self):
        found = self.closure("libtorch_cpu.so")
        self.assertEqual(sorted(found), ["libgflags.so.2", "libglog.so.1", "libtorch_cpu.so"])

    def test_torch_versions(self):
        wheel = "from typing import Optional\n\n__version__ = '2.15.0+cu132'\ncuda = '13.2'\n"
        self.assertEqual(pack.parse_torch_version(wheel), "2.15.0")
        self.assertEqual(pack.parse_torch_version("2.14.1+cpu\n"), "2.14.1")
        with self.assertRaises(pack.PackError):
            pack.parse_torch_version("debug = False\n")

    def test_owners_of_files(self):
        text = (
            "diversion by dash from: /bin/sh\n"
            "libc6:amd64, libc6:i386: /usr/share/doc/libc6\n"
            "redis-tools: /usr/bin/redis-check-rdb\n"
        )
        self.assertEqual(
            pack.parse_owners(text),
            {"/usr/share/doc/libc6": "libc6", "/usr/bin/redis-check-rdb": "redis-tools"},
        )

    def test_an_installed_file_has_its_package_by_either_path(self):
        path = os.path.realpath("/usr/bin/dpkg-query")
        self.assertEqual(pack.debian_owners([path, "/nowhere"]), {path: "dpkg"})

    def test_runfiles_lie_where_the_trainer_looks_for_them(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        os.mkdir(os.path.join(folder, "images"))
        for name in ("list", "images/one"):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as stream:
                stream.write(name)
        bundle = pack.Bundle(os.path.join(folder, "bundle"))
        listed = [f"my/{name}\t{folder}/{name}\n" for name in ("list", "images")]
        bundle.add_data("train", "".join(listed))
        for name in ("list", "images/one"):
            with open(bundle.place("train.runfiles", "my", name), encoding="utf-8") as stream:
                self.assertEqual(stream.read(), name)
        self.assertFalse(os.access(bundle.place("train.runfiles", "my", "list"), os.X_OK))

    def test_a_program_among_the_runfiles_runs(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        program = os.path.join(folder, "loader")
        with open(program, "w", encoding="utf-8") as stream:
            stream.write("#!/bin/sh\necho read\n")
        os.chmod(program, 0o555)
        bundle = pack.Bundle(os.path.join(folder, "bundle"))
        bundle.add_data("train", f"my/loader\t{program}\n")
        copy = bundle.place("train.runfiles", "my", "loader")
        self.assertEqual(subprocess.run([copy], capture_output=True, check=True).stdout, b"read\n")

    def test_what_comes_with_torch(self):
        self.assertTrue(pack.is_of_torch("/site/torch/lib/libc10.so", "/site/torch"))
        self.assertTrue(pack.is_of_torch("/site/nvidia/cu13/lib/libcudart.so", "/site/torch"))
        self.assertFalse(pack.is_of_torch("/site/torchvision/libx.so", "/site/torch"))


class RunScriptTest(unittest.TestCase):
    """run.sh over a ddprun that prints its arguments, one a line."""

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        template = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.sh")
        options = pack.parse_arguments(
            ["--output=x", "--tar=x", "--trainer=train", "--ddprun=x"]
            + [f"--run={template}", "--arguments", "--mode=a b"]
        )
        self.write("run", pack.run_script(options, "2.15.0"))
        self.write("ddprun", "#!/bin/sh\nprintf '%s\\n' \"$@\" \"$LD_LIBRARY_PATH\"\n")

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(path, 0o755)
        return path

    def run_it(self, *flags, program="run", **environment):
        answer = subprocess.run(
            [os.path.join(self.folder, program), *flags],
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return answer.returncode, answer.stdout.splitlines(), answer.stderr

    def test_the_trainer_stands_where_the_first_dashes_stood(self):
        self.write("lib/libtorch_cpu.so", "")
        trainer = [os.path.join(self.folder, "train"), "--mode=a b"]
        _, printed, _ = self.run_it("--nnodes=2", "--", "one two", "--", "")
        self.assertEqual(printed, ["--nnodes=2", *trainer, "one two", "--", "", ""])
        _, printed, _ = self.run_it("--nnodes=2")
        self.assertEqual(printed, ["--nnodes=2", *trainer, ""])

    def test_it_may_be_called_by_a_link(self):
        self.write("lib/libtorch_cpu.so", "")
        os.symlink("run", os.path.join(self.folder, "link"))
        self.assertEqual(self.run_it(program="link")[1][0], os.path.join(self.folder, "train"))

    def test_the_machines_torch_is_found_by_torch_path(self):
        for name, text in (
            ("version.py", "x = 1\n__version__ = '2.15.0+cpu'\n"),
            ("build-version", "2.15.0+cu132\n"),
        ):
            with self.subTest(name):
                self.write(f"{name}.torch/lib/libtorch_cpu.so", "")
                self.write(f"{name}.torch/{name}", text)
                torch = os.path.join(self.folder, f"{name}.torch")
                code, printed, errors = self.run_it(TORCH_PATH=torch, LD_LIBRARY_PATH="/x")
                self.assertEqual((code, errors), (0, ""))
                self.assertEqual(printed[-1], f"{torch}/lib:/x")

    def test_no_torch_or_another_one_is_one_line(self):
        self.write("empty/x", "")
        self.write("old/lib/libtorch_cpu.so", "")
        self.write("old/version.py", "__version__ = '2.14.1+cpu'\n")
        self.write("unknown/lib/libtorch_cpu.so", "")
        wanted = "set TORCH_PATH to the folder of torch 2.15.0 that holds lib/libtorch_cpu.so"
        for path, line in (
            (None, f"this bundle carries no LibTorch: {wanted}"),
            ("empty", f"TORCH_PATH=EMPTY has no lib/libtorch_cpu.so: {wanted}"),
            ("old", "TORCH_PATH=OLD holds torch 2.14.1; this trainer needs 2.15.0,"),
            ("unknown", "TORCH_PATH=UNKNOWN holds torch of no known version; this trainer needs"),
        ):
            with self.subTest(path):
                torch = os.path.join(self.folder, path) if path else ""
                code, printed, errors = self.run_it(TORCH_PATH=torch)
                self.assertEqual((code, printed, errors.count("\n")), (2, [], 1))
                self.assertIn(f"/run: {line.replace((path or '').upper() or '-', torch)}", errors)


if __name__ == "__main__":
    unittest.main()
