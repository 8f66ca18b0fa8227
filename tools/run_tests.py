"""Builds and tests the tree, counts the test cases, and shows what failed. See tools/test.

Bazel runs the tests; what it did is read from its build event file, so that nothing is counted that
this run did not ask for. Python's own tests (the tidy test among them) and the consumer workspace
run beside it.
"""

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import build_time  # noqa: E402  (found beside this file)
import fuzz  # noqa: E402
import oracle  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSUMER = "testing/consumer"
# Another Bazel, or one with startup options: BAZEL="bazel --output_base=..." tools/test.
BAZEL = shlex.split(os.environ.get("BAZEL", "bazel"))
# How much of the log of a test that died is shown.
LOG_TAIL_LINES = 100


@dataclass
class Totals:
    """What all steps together have come to."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)  # of (name, output)
    skips: list = field(default_factory=list)  # of (name, reason)

    def fail(self, name, output):
        self.failed += 1
        self.failures.append((name, output.strip("\n")))

    def skip(self, name, reason):
        self.skipped += 1
        self.skips.append((name, reason))


def say(text):
    print(f"\n==== {text}", flush=True)


# ---- What Bazel did -------------------------------------------------------------------------


def read_events(path):
    """The events of a build event file. A cut last line, of a Bazel that was killed, is dropped."""
    events = []
    with open(path, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                events.append(json.loads(line))
            except ValueError:
                break
    return events


# Why Bazel gave up on everything at once: its exit code is then the one failure to report.
_WHOLE_RUN = ("INTERNAL", "USER_INTERRUPTED", "NO_ANALYZE", "NO_BUILD")


def count_bazel(events, totals):
    """Adds up the test cases of one run of Bazel."""
    for event in events:
        identity = event.get("id", {})
        aborted = event.get("aborted")
        if "testResult" in event:
            count_test(identity["testResult"]["label"], event["testResult"], totals)
        elif "testSummary" in event and event["testSummary"].get("overallStatus") in (
            "FAILED_TO_BUILD",
            "NO_STATUS",
        ):
            totals.fail(identity["testSummary"]["label"], "was not run: it could not be built")
        elif aborted and "targetCompleted" in identity:
            label = identity["targetCompleted"]["label"]
            if aborted.get("reason") == "SKIPPED":
                totals.skip(label, "needs a GPU configuration: --config=cuda and a GPU to run on")
            elif aborted.get("reason") not in _WHOLE_RUN:
                totals.fail(label, aborted.get("description") or aborted.get("reason"))
        elif "completed" in event and "targetCompleted" in identity:
            # A test that cannot be built has a testSummary besides; the others have only this.
            completed = event["completed"]
            if not completed.get("success") and not _has_summary(events, identity):
                totals.fail(identity["targetCompleted"]["label"], "could not be built")


def _has_summary(events, identity):
    label = identity["targetCompleted"]["label"]
    return any(e.get("id", {}).get("testSummary", {}).get("label") == label for e in events)


def _read_output(result, name):
    for output in result.get("testActionOutput", []):
        if output.get("name") == name:
            path = urllib.parse.unquote(urllib.parse.urlparse(output.get("uri", "")).path)
            try:
                with open(path, encoding="utf-8", errors="replace") as stream:
                    return stream.read()
            except OSError:
                return ""
    return ""


def count_test(label, result, totals):
    """Counts the cases of one test target from its test.xml."""
    status = result.get("status", "NO_STATUS")
    log = _read_output(result, "test.log")
    failed_before = totals.failed
    try:
        suites = ElementTree.fromstring(_read_output(result, "test.xml"))
    except ElementTree.ParseError:
        suites = ElementTree.Element("none")
    cases = list(suites.iter("testcase"))
    for case in cases:
        count_case(label, case, log, totals)
    if status not in ("PASSED", "FLAKY") and totals.failed == failed_before:
        totals.fail(label, f"{status}, although no case of it failed:\n{tail_of(log)}")
    elif suites.tag == "none" and status in ("PASSED", "FLAKY"):
        totals.passed += 1  # no report at all: the target is the case


def tail_of(log):
    return "\n".join(log.rstrip("\n").split("\n")[-LOG_TAIL_LINES:])


def count_case(label, case, log, totals):
    suite = case.get("classname")
    full = f"{suite}.{case.get('name')}" if suite else case.get("name", "")
    name = f"{label} {full}"
    skipped = case.find("skipped")
    if case.find("failure") is not None or case.find("error") is not None:
        # Of a process that died there is no case: Bazel's own report says how, the log says where.
        totals.fail(name, case_output(log, full) or f"{_message(case)}\n{tail_of(log)}")
    elif skipped is not None:
        totals.skip(name, " ".join((skipped.get("message") or skipped.text or "").split()))
    elif case.get("status") == "notrun":
        totals.skip(name, "disabled")
    else:
        totals.passed += 1


def _message(case):
    parts = [child.get("message") or child.text or "" for child in case]
    return "\n".join(part for part in parts if part)


def case_output(log, name):
    """What one gtest case has printed, from its RUN line to its FAILED line."""
    pattern = r"^\[ RUN      \] {0}$.*?^\[  FAILED  \] {0}\b[^\n]*$".format(re.escape(name))
    match = re.search(pattern, log, re.DOTALL | re.MULTILINE)
    return match.group(0) if match else ""


# ---- What to run ----------------------------------------------------------------------------

_TEST_MACRO = re.compile(
    r"\b(?:TYPED_)?TEST(?:_F|_P)?(?:_P)?\(\s*(\w+),\s*(\w+)\s*\)|^\s*def (test_\w+)", re.MULTILINE
)


def case_names(text):
    """The names of the cases that a source file defines."""
    return {f"{a}.{b}" if b else c for a, b, c in _TEST_MACRO.findall(text)}


def query(expression, *flags):
    command = [*BAZEL, "query", expression, "--noshow_progress", "--keep_going", *flags]
    answer = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    if answer.returncode not in (0, 3):  # 3: some packages could not be loaded
        sys.exit(f"tools/test: bazel query failed:\n{answer.stderr}")
    return answer.stdout


def _label_to_path(label):
    return label[2:].replace(":", "/").lstrip("/") if label.startswith("//") else ""


def source_files():
    """test label -> the files of ours that may define its cases: its own and its direct deps'."""
    rules = ElementTree.fromstring(query("//...", "--output=xml"))
    inputs = {
        rule.get("name"): [x.get("name") for x in rule.findall("rule-input")]
        for rule in rules.iter("rule")
    }
    tests = [r.get("name") for r in rules.iter("rule") if r.get("class", "").endswith("_test")]
    files = {}
    for test in tests:
        labels = set(inputs[test])
        for dependency in inputs[test]:
            labels.update(inputs.get(dependency, []))
        files[test] = [_label_to_path(x) for x in labels if x.endswith((".cc", ".h", ".py"))]
    return files


def select(wanted):
    """Splits the tests that `wanted` asks for into whole targets and targets with such cases."""
    whole, partial, generated = [], [], []
    for label, paths in sorted(source_files().items()):
        if wanted in label:
            whole.append(label)
            continue
        text = "\n".join(_read_source(path) for path in paths)
        if any(wanted in name for name in case_names(text)):
            partial.append(label)
        elif "INSTANTIATE_TEST_SUITE_P" in text:
            # Cases of these get their names at run time, mostly from words in the source.
            (partial if wanted in text else generated).append(label)
    return whole, partial if whole or partial else generated


def _read_source(path):
    try:
        with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:  # a generated file
        return ""


# ---- Steps ----------------------------------------------------------------------------------


def run_bazel(targets, flags, totals):
    """Runs `bazel test`, its progress visible, and counts what came of it.

    Returns what the tests have measured: the lines of their logs that say so.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "events.json")
        profile = os.path.join(folder, "profile.gz")
        command = [*BAZEL, "test", "--keep_going", "--test_output=summary", f"--profile={profile}"]
        command += [f"--build_event_json_file={path}", *flags, "--", *targets]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        events = read_events(path) if os.path.exists(path) else []
        print(build_time.summary(build_time.compilations(build_time.read_profile(profile))))
    failed_before = totals.failed
    count_bazel(events, totals)
    # 0: passed, 3: some tests failed, 4: nothing to test. Anything else must not pass unseen.
    if code not in (0, 3, 4) and totals.failed == failed_before:
        totals.fail("bazel test", f"exited with code {code}; see its messages above")
    return measurements(events)


def measurements(events):
    logs = [_read_output(e["testResult"], "test.log") for e in events if "testResult" in e]
    return [line for log in logs for line in log.splitlines() if line.startswith("measured: ")]


def run_python_tests(wanted, totals):
    """The tests written in Python: tools/**/*_test.py, the tidy test among them, and CMake's."""
    suite = unittest.TestSuite()
    for folder in ("tools", "tools/bench", "tools/bundle", "tools/python", "testing/cmake"):
        start = os.path.join(ROOT, folder)
        if os.path.isdir(start):
            suite.addTests(_cases(unittest.TestLoader().discover(start, "*_test.py"), wanted))
    output = io.StringIO()
    result = unittest.TextTestRunner(stream=output, verbosity=0).run(suite)
    failures = [(str(test.id()), text) for test, text in result.failures + result.errors]
    failed = {test.id() for test, _ in result.failures + result.errors}
    for name, text in failures:
        totals.fail(f"python {name}", text)
    for test, reason in result.skipped:
        totals.skip(f"python {test.id()}", reason)
    totals.passed += max(0, result.testsRun - len(failed) - len(result.skipped))
    print(f"{result.testsRun} cases, {len(failed)} failed")
    return result.testsRun


def _cases(suite, wanted):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _cases(item, wanted)
        elif not wanted or wanted in item.id():
            yield item


class Consumer:
    """The workspace of an outside user: one case. It runs beside other steps, since it compiles."""

    def __init__(self):
        self._output = tempfile.TemporaryFile("w+", errors="replace")
        script = os.path.join(ROOT, CONSUMER, "run")
        self._process = subprocess.Popen(
            [script], cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT
        )

    def finish(self, totals):
        code = self._process.wait()
        self._output.seek(0)
        print(self._output.read(), end="")
        self._output.close()
        if code == 0:
            totals.passed += 1
        else:
            totals.fail(CONSUMER, f"exited with code {code}; its output stands above")


def run_oracle(flags, totals):
    """PyTorch's DDP and ours, both on this machine and now, and what lies between them."""
    try:
        flags = [*flags, "--nocache_test_results", *oracle.test_flags()]
    except oracle.OracleError as error:
        totals.fail("PyTorch's side of the oracle", str(error))
        return
    for line in run_bazel(oracle.TESTS, flags, totals):
        print(line)


def run_fuzz(seconds, wanted, totals):
    """The fuzz targets whose label contains `wanted`, each for some time: one case each."""
    labels = sorted(label for label in query(fuzz.QUERY).split() if wanted in label)
    if not labels:
        raise fuzz.FuzzError(f"no fuzz target's label contains {wanted!r}")
    say(f"{len(labels)} fuzz targets, {seconds} s each")
    for result in fuzz.run_all(BAZEL, ROOT, labels, seconds):
        print(result.text, flush=True)
        if result.output:
            totals.fail(result.label, result.output)
        else:
            totals.passed += 1


# ---- Main -----------------------------------------------------------------------------------


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="tools/test", description="Builds and tests the tree.")
    parser.add_argument(
        "--filter",
        metavar="TEXT",
        default="",
        help="only tests whose label, or whose case's name, contains TEXT",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME",
        help="a configuration of .bazelrc (asan-ubsan, asan, ubsan, tsan, opt, clang, cuda);"
        " Bazel's tests only. tsan leaves out what links LibTorch, which is not instrumented",
    )
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        help="with this version of LibTorch, fetched into an output folder of its own"
        " (third_party/versions.bzl lists the versions)",
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="only the comparison with PyTorch's DDP, both sides run afresh on this machine in"
        " strict bounds. Installs PyTorch in a folder of its own, outside the checkout, unless"
        " DDP_ORACLE_PYTHON names a Python that has it",
    )
    parser.add_argument(
        "--device",
        choices=["sim"],
        help="only tests with ranks, on simulated devices: see docs/hacking.md",
    )
    seeds = "with --device: runs each test N times, each with other latenesses of the device"
    parser.add_argument("--seeds", type=int, metavar="N", help=seeds)
    parser.add_argument(
        "--fuzz",
        nargs="?",
        const="60",
        metavar="SECONDS",
        help="only the fuzz targets, each for a minute or for SECONDS; --filter chooses by label."
        " Needs clang",
    )
    parser.add_argument("flags", nargs="*", help="after --: further flags of bazel test")
    options = parser.parse_args(argv)
    if options.seeds is not None and (options.device is None or options.seeds < 1):
        parser.error("--seeds takes a number from 1, and goes with --device")
    return options


def use_torch(version):
    """Makes every later step fetch this LibTorch and build in an output folder of its own."""
    info = subprocess.run(
        [*BAZEL, "info", "output_base"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if info.returncode != 0:
        sys.exit("tools/test: bazel info output_base failed; its message stands above")
    # The folder in use keeps the other version, so that neither is fetched twice. Bazel takes the
    # link to the other folder's sources for a part of //..., and this folder must leave no such
    # link to the next build.
    BAZEL.append(f"--output_base={info.stdout.strip()}-torch-{version}")
    BAZEL.append(f"--bazelrc={os.path.join(ROOT, 'tools', 'second_output_base.bazelrc')}")
    link = os.path.join(ROOT, "bazel-" + os.path.basename(ROOT))
    if os.path.islink(link):
        os.unlink(link)
    os.environ["BAZEL"] = shlex.join(BAZEL)  # read by testing/consumer/run
    os.environ["DDP_TORCH_VERSION"] = version
    os.environ.pop("TORCH_PATH", None)


def bazel_step(options, totals):
    """Returns whether anything was there to run."""
    flags = [f"--config={name}" for name in options.config] + options.flags
    targets = ["//..."]
    if options.device:
        # TEST_RANDOM_SEED is the number of the run: the seed of the device.
        flags += [f"--test_env=DDP_TEST_DEVICE={options.device}", "--build_tests_only"]
        flags += ["--test_tag_filters=device", f"--runs_per_test={options.seeds or 1}"]
    if "tsan" in options.config:
        # An uninstrumented LibTorch makes ThreadSanitizer report races where there are none.
        targets = query("tests(//...) except rdeps(//..., @libtorch//:all)").split()
    if not options.filter:
        say(f"bazel test {' '.join(flags)}")
        run_bazel(targets, flags, totals)
        return True
    whole, partial = select(options.filter)
    if targets != ["//..."]:
        whole = [label for label in whole if label in targets]
        partial = [label for label in partial if label in targets]
    if whole:
        say(f"bazel test of {len(whole)} targets named *{options.filter}*")
        run_bazel(whole, flags, totals)
    if partial:
        say(f"bazel test of the cases named *{options.filter}* in {len(partial)} targets")
        run_bazel(partial, [*flags, f"--test_filter=*{options.filter}*"], totals)
    return totals.passed + totals.failed + totals.skipped > 0


def report(totals, started):
    for name, reason in dict.fromkeys(totals.skips):
        print(f"SKIPPED {name}: {reason}")
    for name, output in totals.failures:
        print(f"\n---- FAILED {name}\n{output}")
    print(f"\ntools/test took {time.monotonic() - started:.0f} s")
    print(f"{totals.passed} passed, {totals.failed} failed, {totals.skipped} skipped", flush=True)


def fuzz_step(options, totals):
    """--fuzz: nothing else is run."""
    if options.config or options.torch or options.oracle or options.flags:
        raise fuzz.FuzzError("--fuzz stands alone or with --filter")
    run_fuzz(fuzz.parse_seconds(options.fuzz), options.filter, totals)


def main(argv):
    options = parse_arguments(argv)
    started = time.monotonic()
    totals = Totals()
    if options.fuzz is not None:
        try:
            fuzz_step(options, totals)
        except fuzz.FuzzError as error:
            sys.exit(f"tools/test: {error}")
        report(totals, started)
        return 1 if totals.failed else 0
    if options.torch:
        if options.oracle and options.torch != oracle.PYTORCH:
            sys.exit(f"tools/test: --oracle compares with PyTorch {oracle.PYTORCH} only")
        use_torch(options.torch)
    if options.oracle:
        say("PyTorch's DDP and ours, side by side")
        run_oracle([f"--config={name}" for name in options.config] + options.flags, totals)
        report(totals, started)
        return 1 if totals.failed else 0
    found = bazel_step(options, totals)
    if options.device:
        cases = totals.passed + totals.failed
        print(f"{cases} cases on the simulated device: {options.seeds or 1} seeds of each")
    elif not options.config:
        wanted = os.path.isdir(os.path.join(ROOT, CONSUMER)) and options.filter in CONSUMER
        consumer = Consumer() if wanted else None
        say("Python tests: the tidy test, the tools' own and the install tree's")
        found = run_python_tests(options.filter, totals) > 0 or found
        if consumer is not None:
            say(f"{CONSUMER}: a workspace that uses this one from outside")
            consumer.finish(totals)
            found = True
    if not found:
        totals.fail("tools/test", f"no test's label or case name contains {options.filter!r}")
    report(totals, started)
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
