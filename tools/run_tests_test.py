#!/usr/bin/env python3
"""Tests run_tests.py, fuzz.py, build_time.py and mutations.py of tools/."""

import gzip
import json
import os
import sys
import tempfile
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import build_time  # noqa: E402  (found beside this file)
import fuzz  # noqa: E402
import mutations  # noqa: E402
import run_tests  # noqa: E402

GTEST_XML = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="4" failures="1" disabled="1" errors="0" name="AllTests">
  <testsuite name="Bad" tests="4" failures="1" disabled="1" errors="0">
    <testcase name="Fails" status="run" result="completed" classname="Bad">
      <failure message="bad.cc:2&#x0A;why" type=""><![CDATA[bad.cc:2
why]]></failure>
    </testcase>
    <testcase name="Passes" status="run" result="completed" classname="Bad" />
    <testcase name="Skips" status="run" result="skipped" classname="Bad">
      <skipped message="bad.cc:4&#x0A;no device" />
    </testcase>
    <testcase name="DISABLED_Off" status="notrun" result="suppressed" classname="Bad" />
  </testsuite>
</testsuites>
"""

GTEST_LOG = """[ RUN      ] Bad.Fails
some output
bad.cc:2: Failure
why
[  FAILED  ] Bad.Fails (0 ms)
[ RUN      ] Bad.Passes
[       OK ] Bad.Passes (0 ms)
"""

# What Bazel writes for a test that leaves no report of its own.
DEAD_XML = """<testsuites><testsuite name="t" tests="1" failures="0" errors="1">
<testcase name="t" status="run"><error message="exited with error code 134"></error></testcase>
</testsuite></testsuites>"""
QUIET_XML = """<testsuites><testsuite name="t" tests="1" failures="0" errors="0">
<testcase name="t" status="run"></testcase></testsuite></testsuites>"""
NO_CASE_XML = '<testsuites tests="0" name="AllTests"></testsuites>'


class DeviceTest(unittest.TestCase):
    def test_each_test_with_ranks_runs_with_each_seed(self):
        options = run_tests.parse_arguments(["--device=sim", "--seeds=3", "--", "--jobs=1"])
        with unittest.mock.patch.object(run_tests, "run_bazel") as run:
            run_tests.bazel_step(options, run_tests.Totals())
        targets, flags, _ = run.call_args[0]
        self.assertEqual(targets, ["//..."])
        for flag in ("DDP_TEST_DEVICE=sim", "tag_filters=device", "runs_per_test=3", "--jobs=1"):
            self.assertIn(flag, " ".join(flags))

    def test_seeds_need_a_device(self):
        for arguments in (["--seeds=3"], ["--device=sim", "--seeds=0"], ["--device=tpu"]):
            with self.assertRaises(SystemExit), unittest.mock.patch("sys.stderr"):
                run_tests.parse_arguments(arguments)


class TorchVersionTest(unittest.TestCase):
    def test_another_version_is_built_in_a_folder_of_its_own(self):
        with tempfile.TemporaryDirectory() as folder:
            bazel = os.path.join(folder, "bazel")
            with open(bazel, "w", encoding="utf-8") as stream:
                stream.write('#!/bin/sh\n[ "$*" = "--batch info output_base" ] && echo /base\n')
            os.chmod(bazel, 0o755)
            link = os.path.join(folder, "bazel-" + os.path.basename(folder))
            os.symlink("/base/execroot/ddp", link)  # as the usual output folder leaves it
            environment = {"TORCH_PATH": "/a/torch", "DDP_TORCH_VERSION": ""}
            with unittest.mock.patch.dict(
                os.environ, environment
            ), unittest.mock.patch.multiple(run_tests, ROOT=folder, BAZEL=[bazel, "--batch"]):
                run_tests.use_torch("2.15.0")
                wanted = [
                    bazel,
                    "--batch",
                    "--output_base=/base-torch-2.15.0",
                    f"--bazelrc={folder}/tools/second_output_base.bazelrc",
                ]
                self.assertFalse(os.path.lexists(link))
                self.assertEqual(run_tests.BAZEL, wanted)
                self.assertEqual(os.environ["BAZEL"].split(), wanted)
                self.assertEqual(os.environ["DDP_TORCH_VERSION"], "2.15.0")
                self.assertNotIn("TORCH_PATH", os.environ)


class CountTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.totals = run_tests.Totals()

    def result(self, status, xml, log=""):
        """A test result event whose files exist."""
        outputs = []
        for name, text in (("test.log", log), ("test.xml", xml)):
            path = os.path.join(self.folder.name, name)
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
            outputs.append({"name": name, "uri": "file://" + path})
        return {
            "id": {"testResult": {"label": "//a:t"}},
            "testResult": {"status": status, "testActionOutput": outputs},
        }

    def count(self, *events):
        run_tests.count_bazel(list(events), self.totals)
        return (self.totals.passed, self.totals.failed, self.totals.skipped)

    def test_cases_of_gtest_are_counted_one_by_one(self):
        self.assertEqual(self.count(self.result("FAILED", GTEST_XML, GTEST_LOG)), (1, 1, 2))
        name, output = self.totals.failures[0]
        self.assertEqual(name, "//a:t Bad.Fails")
        self.assertTrue(output.startswith("[ RUN      ] Bad.Fails\nsome output\n"), output)
        self.assertTrue(output.endswith("[  FAILED  ] Bad.Fails (0 ms)"), output)
        self.assertIn(("//a:t Bad.Skips", "bad.cc:4 no device"), self.totals.skips)

    def test_a_test_that_died_is_one_failure_with_the_end_of_its_log(self):
        self.assertEqual(self.count(self.result("FAILED", DEAD_XML, "last words\n")), (0, 1, 0))
        self.assertIn("exited with error code 134\nlast words", self.totals.failures[0][1])

    def test_a_failure_after_the_last_case_is_not_lost(self):
        passed = GTEST_XML.replace("failure", "ignored")
        self.assertEqual(self.count(self.result("FAILED", passed, "LeakSanitizer")), (2, 1, 2))
        self.assertIn("LeakSanitizer", self.totals.failures[0][1])

    def test_a_timeout_is_a_failure(self):
        self.assertEqual(self.count(self.result("TIMEOUT", "", "slow")), (0, 1, 0))

    def test_a_program_without_cases_is_one(self):
        self.assertEqual(self.count(self.result("PASSED", QUIET_XML)), (1, 0, 0))

    def test_a_filter_that_leaves_no_case_counts_nothing(self):
        self.assertEqual(self.count(self.result("PASSED", NO_CASE_XML)), (0, 0, 0))

    def test_what_cannot_be_built_fails_once(self):
        identity = {"targetCompleted": {"label": "//a:t"}}
        summary = {"id": {"testSummary": {"label": "//a:t"}}}
        summary["testSummary"] = {"overallStatus": "FAILED_TO_BUILD"}
        self.assertEqual(self.count({"id": identity, "completed": {}}, summary), (0, 1, 0))

    def test_a_library_that_cannot_be_built_fails(self):
        identity = {"targetCompleted": {"label": "//a:library"}}
        self.assertEqual(self.count({"id": identity, "completed": {}}), (0, 1, 0))
        self.assertEqual(self.count({"id": identity, "completed": {"success": True}}), (0, 1, 0))

    def test_an_incompatible_target_is_skipped_with_the_reason(self):
        identity = {"targetCompleted": {"label": "//a:gpu_test"}}
        self.assertEqual(self.count({"id": identity, "aborted": {"reason": "SKIPPED"}}), (0, 0, 1))
        self.assertIn("GPU", self.totals.skips[0][1])

    def test_a_cut_event_file_is_read_up_to_the_cut(self):
        path = os.path.join(self.folder.name, "events")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write('{"id": 1}\n{"id": ')
        self.assertEqual(run_tests.read_events(path), [{"id": 1}])


class SelectTest(unittest.TestCase):
    def test_case_names_are_found_in_sources(self):
        text = "TEST(A, B) {}\nTEST_F(C,\n       D) {}\nTYPED_TEST_P(E, F) {}\nTEST_P(G, H) {}\n"
        self.assertEqual(run_tests.case_names(text), {"A.B", "C.D", "E.F", "G.H"})


# The end of libFuzzer's log.
FUZZ_LOG = """#2 INITED cov: 12
Done 1234 runs in 61 second(s)
stat::number_of_executed_units: 1234
stat::average_exec_per_sec:     20
"""
FINDING_LOG = """a.cc:7] Check failed: a == b
artifact_prefix='/f/'; Test unit written to /f/crash-1a
Base64: AA==
stat::number_of_executed_units: 17
"""


class FuzzTest(unittest.TestCase):
    def run_main(self, *arguments):
        """The text with which tools/test ends."""
        with self.assertRaises(SystemExit) as ended:
            run_tests.main(list(arguments))
        return str(ended.exception.code)

    def test_the_time_is_a_minute_or_what_is_said(self):
        self.assertIsNone(run_tests.parse_arguments([]).fuzz)
        self.assertEqual(run_tests.parse_arguments(["--fuzz"]).fuzz, "60")
        self.assertEqual(run_tests.parse_arguments(["--fuzz=600"]).fuzz, "600")
        self.assertEqual(fuzz.parse_seconds("86400"), 86400)

    def test_a_bad_value_is_one_line(self):
        for value in ("0", "-1", "86401", "1.5", "x", "", "9" * 30, "\u0661"):
            line = f"tools/test: --fuzz={value}: expected whole seconds from 1 to 86400"
            self.assertEqual(self.run_main(f"--fuzz={value}"), line)
        self.assertIn("stands alone", self.run_main("--fuzz", "--config=asan"))

    def test_clang_and_its_library_are_asked_for(self):
        with unittest.mock.patch.object(fuzz.shutil, "which", return_value=None):
            with self.assertRaisesRegex(fuzz.FuzzError, "needs clang: tools/setup --ci"):
                fuzz.check_clang()
        with unittest.mock.patch.object(fuzz.shutil, "which", return_value="/bin/true"):
            with self.assertRaisesRegex(fuzz.FuzzError, "libclang-rt-dev.*tools/setup --ci"):
                fuzz.check_clang()

    def test_a_run_without_a_finding_passes(self):
        result = fuzz.read_result("//a:b_fuzz", 0, FUZZ_LOG)
        self.assertEqual(result.text, "//a:b_fuzz: 1234 inputs, no finding")
        self.assertEqual(result.output, "")

    def test_a_finding_names_its_input_and_how_to_run_it(self):
        result = fuzz.read_result("//a:b_fuzz", 77, FINDING_LOG)
        self.assertEqual(result.text, "//a:b_fuzz: 17 inputs, /f/crash-1a")
        self.assertIn("a.cc:7] Check failed", result.output)
        self.assertIn("bazel run --config=fuzz //a:b_fuzz -- /f/crash-1a", result.output)

    def test_a_target_that_runs_nothing_fails(self):
        for code, log in ((0, ""), (1, "cannot start\n")):
            result = fuzz.read_result("//a:b_fuzz", code, log)
            self.assertIn(f"exited with code {code} and named no input", result.output)

    def test_findings_are_counted_as_failures(self):
        results = [fuzz.read_result("//a:b_fuzz", 0, FUZZ_LOG)]
        results.append(fuzz.read_result("//a:c_fuzz", 77, FINDING_LOG))
        totals = run_tests.Totals()
        with unittest.mock.patch.object(
            run_tests, "query", return_value="//a:c_fuzz\n//a:b_fuzz\n//z:d_fuzz\n"
        ), unittest.mock.patch.object(fuzz, "run_all", return_value=results) as run_all:
            run_tests.run_fuzz(60, "//a:", totals)
            self.assertEqual(run_all.call_args.args[2], ["//a:b_fuzz", "//a:c_fuzz"])
            with self.assertRaisesRegex(fuzz.FuzzError, "no fuzz target's label contains 'x'"):
                run_tests.run_fuzz(60, "x", totals)
        self.assertEqual((totals.passed, totals.failed), (1, 1))

    def test_a_target_runs_in_a_folder_of_its_own(self):
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "fuzz")
            with open(program, "w", encoding="utf-8") as stream:
                stream.write('#!/bin/sh\necho seed >"$DDP_FUZZ_SEEDS/seed-0"\n')
                stream.write('echo "$1" stat; echo "stat::number_of_executed_units: 5"\n')
            os.chmod(program, 0o755)
            with unittest.mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
                result = fuzz.run_target("//a/b:c_fuzz", program, 3)
            self.assertEqual((result.executions, result.output), (5, ""))
            self.assertTrue(os.path.exists(f"{folder}/ddp-fuzz/a-b-c_fuzz/corpus/seed-0"))


class BuildTimeTest(unittest.TestCase):
    EVENTS = [
        {"cat": "action processing", "name": "Compiling a/x.cc", "tid": 7, "ts": 10, "dur": 50},
        {"cat": "action processing", "name": "Compiling a/y.cc", "tid": 7, "ts": 60, "dur": 4e6},
        {"cat": "remote output download", "name": "CppCompile", "tid": 7, "ts": 20, "dur": 30},
        {"cat": "local action execution", "name": "CppCompile", "tid": 7, "ts": 70, "dur": 3e6},
        {"cat": "action processing", "name": "Precompiling b.h", "tid": 8, "ts": 0, "dur": 3e6},
        {"cat": "local action execution", "name": "CppPrecompile", "tid": 8, "ts": 5, "dur": 2e6},
        {"cat": "local action execution", "name": "CppLink", "tid": 8, "ts": 4e6, "dur": 9e6},
        {"name": "thread_name", "tid": 8},
    ]

    def test_compilers_that_ran_are_counted_and_named(self):
        found = build_time.compilations(self.EVENTS)
        self.assertEqual(found, [(3.0, "a/y.cc"), (2.0, "b.h")])
        self.assertEqual(
            build_time.summary(found), "compile time: 5 s in 2 files; longest: a/y.cc 3 s, b.h 2 s"
        )
        self.assertEqual(build_time.summary([]), "compile time: nothing was compiled")

    def test_a_profile_that_was_cut_counts_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "profile.gz")
            self.assertEqual(build_time.read_profile(path), [])
            with gzip.open(path, "wt", encoding="utf-8") as stream:
                json.dump({"traceEvents": self.EVENTS}, stream)
            self.assertEqual(build_time.read_profile(path), self.EVENTS)
            with open(path, "r+b") as stream:
                stream.truncate(os.path.getsize(path) - 20)
            self.assertEqual(build_time.read_profile(path), [])


class MutationsTest(unittest.TestCase):
    def test_each_has_its_text_once(self):
        for mutation in mutations.MUTATIONS:
            for edit in mutation.edits:
                before, after = mutations.edited(edit)
                self.assertNotEqual(before, after)


if __name__ == "__main__":
    unittest.main()
