#!/usr/bin/env python3
"""What docs/deployment.md promises: of the machine, of the container and of the systemd unit."""

import json
import os
import re
import shutil
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

_ROOT = os.path.dirname(os.path.dirname(_HERE))
_BUNDLE = os.path.join(_ROOT, "examples", "minimal", "train.bundle")
_CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_OUR_CODE = ("base", "ddp", "elastic", "launcher", "store")
_SUITES = {"debian:12-slim": "bookworm", "debian:13-slim": "trixie"}
PATIENCE_S = 120

# glibc's functions for system calls that came after Linux 3.2, which glibc itself needs.
_FUNCTIONS = {
    "clone3": "5.3", "close_range": "5.9", "copy_file_range": "4.5", "epoll_pwait2": "5.11",
    "execveat": "3.19", "fsopen": "5.2", "fspick": "5.2", "getrandom": "3.17",
    "memfd_create": "3.17", "mlock2": "4.4", "mount_setattr": "5.12", "move_mount": "5.2",
    "open_tree": "5.2", "pidfd_getfd": "5.6", "pidfd_open": "5.3", "pidfd_send_signal": "5.1",
    "pkey_alloc": "4.9", "preadv2": "4.6", "process_madvise": "5.10", "process_mrelease": "5.15",
    "pwritev2": "4.6", "renameat2": "3.15", "sched_setattr": "3.14", "statx": "4.11",
}  # fmt: skip
# What our code calls by number: since when. None: since 3.2 or before, or never more than tried.
_NUMBERS = {
    "close_range": None,  # else by /proc/self/fd
    "futex": None,
    "futex_waitv": None,  # else by a look now and then
    "getdents64": None,
    "gettid": None,
    "mmap": None,
    "munmap": None,
    "pidfd_open": "5.3",
    "pidfd_send_signal": "5.1",
    "sched_setaffinity": None,
}


def read(path):
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def calls_by_number():
    """The system calls SYS_... that our code makes, as it stands in the checkout."""
    found = set()
    for top in _OUR_CODE:
        for folder, _, names in os.walk(os.path.join(_CHECKOUT, top)):
            sources = [n for n in names if re.search(r"(?<!_test)\.(cc|h)$", n)]
            for name in sources:
                text = read(os.path.join(folder, name))
                found.update(re.findall(r"syscall\(\s*(?:SYS|__NR)_(\w+)", text))
    return found


class NeedsTest(unittest.TestCase):
    page = read(os.path.join(_ROOT, "docs", "deployment.md"))

    def promised(self, what):
        return numbers(re.search(rf"\| {what} ([\d.]+) or newer", self.page).group(1))

    def test_the_oldest_glibc(self):
        if 'VERSION_CODENAME=bookworm' not in read("/etc/os-release"):
            self.skipTest("the page speaks of a bundle that Debian 12 has built")
        needed = {path: elf.glibc(path) for path in elf.files(_BUNDLE)}
        newest = max(needed, key=needed.get)
        self.assertEqual(needed[newest], self.promised("glibc"), newest)

    def test_the_oldest_kernel(self):
        imported = elf.imports(f"{_BUNDLE}/ddprun") | elf.imports(f"{_BUNDLE}/train")
        self.assertIn("getrandom", imported)
        calls = calls_by_number()
        self.assertIn("pidfd_open", calls)
        self.assertEqual(calls - set(_NUMBERS), set(), "since which Linux? See _NUMBERS")
        releases = [_FUNCTIONS[name] for name in imported & set(_FUNCTIONS)]
        releases += [_NUMBERS[name] for name in calls if _NUMBERS[name]]
        self.assertEqual(max(map(numbers, releases)), self.promised("Linux"))

    def test_each_flag_exists(self):
        command = [os.path.join(_BUNDLE, "ddprun"), "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        known = set(re.findall(r"--[a-z][a-z-]*", text))
        files = ["docs/deployment.md", "tools/bundle/Dockerfile", "tools/bundle/train.service"]
        for name in files:
            whole = read(os.path.join(_ROOT, name)).replace("\\\n", " ")
            for flags in re.findall(r"(?m)(?:/run|train) +(--[^\n]*?) *(?: -- |$)", whole):
                given = set(re.findall(r"--[a-z][a-z-]*", flags))
                self.assertEqual(given - known, set(), f"{name}: {flags}")


class UnitTest(unittest.TestCase):
    text = read(os.path.join(_ROOT, "tools", "bundle", "train.service"))

    def test_systemd_takes_the_unit(self):
        self.assertIn("\nExecStart=/opt/train.bundle/run ", self.text)
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "train.service")
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(self.text.replace("/opt/train.bundle", os.path.realpath(_BUNDLE)))
            answer = subprocess.run(
                ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
            )
        said = [line for line in answer.stderr.splitlines() if "train.service" in line]
        self.assertEqual((answer.returncode, said), (0, []))

    def test_each_line_is_a_setting(self):
        lines = self.text.replace("\\\n", "").splitlines()
        settings = [line for line in lines if line and not line.startswith(("#", "["))]
        self.assertGreater(len(settings), 10)
        for line in settings:
            self.assertRegex(line, r"^[A-Z][A-Za-z]+=\S")


class Dockerfile:
    """The instructions of a Dockerfile: as far as ours has them."""

    KNOWN = ("ADD", "ENTRYPOINT", "FROM", "RUN", "USER", "WORKDIR")

    def __init__(self, text):
        lines = re.sub(r"\\\n", " ", text).splitlines()
        self.steps = [
            tuple(line.split(None, 1)) for line in lines if line.strip() and line[0] != "#"
        ]
        unknown = [step for step in self.steps if step[0] not in self.KNOWN or len(step) != 2]
        if unknown or self.steps[0][0] != "FROM":
            raise ValueError(f"not a Dockerfile that this test knows: {unknown}")

    def last(self, name):
        return [value for step, value in self.steps if step == name][-1]


class DockerfileTest(unittest.TestCase):
    def test_a_bad_line_is_found(self):
        for text in ("RUN x\n", "FROM x\nRUNN y\n", "FROM x\nUSER\n"):
            with self.assertRaises(ValueError):
                Dockerfile(text)

    def test_its_steps_make_a_container_that_trains(self):
        bare_debian.skip_where_missing()
        file = Dockerfile(read(os.path.join(_ROOT, "tools", "bundle", "Dockerfile")))
        folder = self.enterContext(
            tempfile.TemporaryDirectory(
                dir=os.environ.get("TEST_TMPDIR"), ignore_cleanup_errors=True
            )
        )
        image, output = os.path.join(folder, "image"), os.path.join(folder, "out")
        base = bare_debian.file_system(_SUITES[file.last("FROM")])
        subprocess.run(["cp", "-a", base, image], check=True)
        network = self.enterContext(hosts.Network(["a"]))
        bare_debian.move_in(network["a"], image, {}, writable=True)

        def run(*command):
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            process = network["a"].start(list(command), output, environment, cwd="/")
            self.assertEqual(process.wait(PATIENCE_S), 0, process.output())
            return process.output()

        for name, value in file.steps:
            if name == "ADD":
                tar, place = value.split()
                tar = os.path.join(os.path.dirname(_BUNDLE), tar)
                subprocess.run(["tar", "-xf", tar, "-C", image + place], check=True)
            elif name == "RUN":
                run("sh", "-c", value)
        user, entry = file.last("USER"), json.loads(file.last("ENTRYPOINT"))
        drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"]
        start = ["sh", "-c", 'cd "$0" && exec "$@"', file.last("WORKDIR"), *entry]
        flags = ["--standalone", "--nproc-per-node=2", "--", "checkpoints"]
        first_process = ["unshare", "--pid", "--fork", "--mount-proc"]
        self.assertIn("epoch 4 loss", run(*first_process, *drop, *start, *flags))


if __name__ == "__main__":
    case_report.main()
