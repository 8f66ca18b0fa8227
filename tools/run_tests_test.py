#!/usr/bin/env python3
"""Tests tools/run_tests.py and tools/torch_units.py on reports as Bazel and gtest write them."""

import os
import sys
import tempfile
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import run_tests  # noqa: E402  (found beside this file)
import torch_units  # noqa: E402

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


class TorchVersionTest(unittest.TestCase):
    def test_another_version_is_built_in_a_folder_of_its_own(self):
        with tempfile.TemporaryDirectory() as folder:
            bazel = os.path.join(folder, "bazel")
            with open(bazel, "w", encoding="utf-8") as stream:
                stream.write('#!/bin/sh\n[ "$*" = "--batch info output_base" ] && echo /base\n')
            os.chmod(bazel, 0o755)
            environment = {"TORCH_PATH": "/a/torch", "DDP_TORCH_VERSION": ""}
            with unittest.mock.patch.dict(os.environ, environment), unittest.mock.patch.object(
                run_tests, "BAZEL", [bazel, "--batch"]
            ):
                run_tests.use_torch("2.15.0")
                wanted = [bazel, "--batch", "--output_base=/base-torch-2.15.0"]
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


class TorchUnitsTest(unittest.TestCase):
    def test_includes_are_followed_through_our_headers(self):
        with tempfile.TemporaryDirectory() as root:
            for name, text in (
                ("a.cc", '#include "b.h"\n'),
                ("b.h", '#include "c.h"\n'),
                ("c.h", '#include "b.h"\n#include <ATen/core/Tensor.h>\n'),
                ("d.cc", "#include <vector>\n// #include <torch/torch.h>\n"),
            ):
                with open(os.path.join(root, name), "w", encoding="utf-8") as stream:
                    stream.write(text)
            self.assertTrue(torch_units.reaches_torch("a.cc", root))
            self.assertFalse(torch_units.reaches_torch("d.cc", root))

    def test_compile_actions_are_pairs_of_target_and_source(self):
        text = (
            "action 'Compiling a/x.cc'\n  Mnemonic: CppCompile\n  Target: //a:x\n\n"
            "action 'Compiling a/x.cc'\n  Mnemonic: CppCompile\n  Target: //a:x\n\n"
            "action 'Compiling external/b/y.cc'\n  Mnemonic: CppCompile\n  Target: @b//:y\n"
        )
        self.assertEqual(torch_units.compile_actions(text), {("//a:x", "a/x.cc")})


if __name__ == "__main__":
    unittest.main()
