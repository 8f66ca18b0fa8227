#!/usr/bin/env python3
"""Tests the rules of tools/tidy.py on bad and good examples, then holds the whole tree to them.

    tools/tidy_test.py             # every rule
    tools/tidy_test.py -k layers   # one of them
"""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tidy  # noqa: E402  (found beside this file)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

HEADER = """// What it is.
#ifndef DDP_{0}_H_
#define DDP_{0}_H_
{1}
#endif  // DDP_{0}_H_
"""

BUILD = """ddp_cc_library(
    name = "a",
    srcs = ["a.cc"],
    hdrs = ["a.h"],
    deps = [{}],
)
"""

LONG_BODY = "  Step();\n" * 69
TEST_RULE = 'ddp_cc_test(name = "t", srcs = ["t.cc"]{})\n'

# rule -> the bad examples: each a path and a text, or a list of them.
BAD = {
    "line_length": [
        ("a.cc", "int " + "x" * 97 + ";\n"),
        ("tools/setup", "#!/bin/bash\nset -e\n" + "x" * 101 + "\n"),
    ],
    "white_space": [
        ("a.cc", "int x; \n"),
        ("a.h", "\tint x;\n"),
        ("a.md", "# A"),
    ],
    "file_length": [
        ("a.cc", "int x;\n" * 501),
        ("a.h", "// Length: \n" + "int x;\n" * 500),
        ("a.cc", "int x;\n" * 30 + "// Length: one table.\n" + "int x;\n" * 470),
        ("a.py", "// Length: one table.\n" + "x = 1\n" * 500),
    ],
    "markers": [
        ("a.cc", "// FIX" + "ME\n"),
        ("a.cc", "// TO" + "DO: later\n"),
        ("a.cc", "// TO" + "DO(someone): later\n"),
    ],
    "one_title": [
        ("a.md", "# One\n\n# Two\n"),
        ("a.md", "No title.\n"),
        ("a.md", "Text first.\n\n# Title\n"),
    ],
    "links": [
        ("a.md", "# A\n\n[b](b.md)\n"),
        ("d/a.md", "# A\n\n![b](x/b.svg)\n"),
        ("a.md", '# A\n\n<img src="b.svg">\n'),
        ("a.md", "# A\n\n[b](#b)\n"),
        [("a.md", "# A\n\n[b](d/b.md#part-2)\n"), ("d/b.md", "# B\n\n## Part\n")],
    ],
    "banned": [
        ("a.cc", "void F() { usleep(3); }\n"),
        ("a.cc", "void F() { std::this_thread::sleep_for(x); }\n"),
        ("a.cc", "void F() { absl::SleepFor(x); }\n"),
        ("a.cc", "auto t = std::chrono::system_clock::now();\n"),
        ("a.cc", "auto t = absl::Now();\n"),
        ("a.h", "#include <torch/torch.h>\n"),
        ("ddp/a.cc", "auto* r = redisCommand(c, x);\n"),
        ("ddp/a.cc", "#include <hiredis/hiredis.h>\n"),
        ("a.cc", "std::mutex m;\n"),
        ("a.cc", "std::lock_guard<std::mutex> lock(m);\n"),
        ("a.cc", "absl::Mutex m;\n"),
        ("a_test.cc", "void F() { GTEST_SKIP(); }\n"),
        ("a.cc", "void F() { assert(x); }\n"),
        ("a.cc", "int e = getaddrinfo(host, port, &hints, &found);\n"),
        ("a.cc", "int fd = syscall(SYS_pidfd_open, pid, 0);\n"),
        ("a.h", "using namespace std;\n"),
        ("a.cc", "void F() {\n  for (auto& x : *reply->AsArray()) Use(x);\n}\n"),
        ("a.cc", 'void F() { system("ls"); }\n'),
    ],
    "glog_after_torch": [
        ("ddp/a.cc", "#include <ATen/ATen.h>\n#include <glog/logging.h>\n"),
    ],
    "flags_in_main": [("a.cc", 'DEFINE_int32(x, 1, "");\n')],
    "layers": [
        ("store/a.cc", '#include "ddp/b.h"\n'),
        ("base/a_test.cc", '#include "store/redis_store/b.h"\n'),
        ("launcher/a.h", '#include "elastic/worker/b.h"\n'),
        ("elastic/agent/a.cc", '#include "elastic/checkpoint/b.h"\n'),
    ],
    "torch_free": [
        ("launcher/a.cc", "#include <c10/util/Exception.h>\n"),
        ("store/redis/redis_connection.cc", "#include <ATen/ATen.h>\n"),
        ("store/redis_store/redis_key_value_store.cc", "#include <ATen/ATen.h>\n"),
        ("store/redis_store/redis_store_helper.h", "#include <ATen/ATen.h>\n"),
    ],
    "rooms": [
        ("launcher/network/a.cc", ""),
        ("launcher/a.cc", ""),
        ("launcher/job_test.cc", ""),
        ("store/a.h", ""),
        ("a.cc", ""),
        [(f"store/redis/a{i}.txt", "") for i in range(41)],
        [(f"ddp/a{i}.cc", "") for i in range(96)],
    ],
    "room_cycles": [
        [("s/a/x.h", '#include "s/b/y.h"\n'), ("s/b/y_test.cc", '#include "s/a/x.h"\n')],
        [
            ("s/a/x.h", '#include "s/b/y.h"\n'),
            ("s/b/y.h", '#include "s/c/z.h"\n'),
            ("s/c/z.h", '#include "s/a/x.h"\n'),
        ],
        [("s/x.h", '#include "s/b/y.h"\n'), ("s/b/y.h", '#include "s/x.h"\n')],
    ],
    "header_form": [
        ("store/a.h", "// Comment.\nint x;\n"),
        ("store/a.h", HEADER.format("STORE_B", "")),
        ("store/a.h", HEADER.format("STORE_A", "").replace("// What it is.\n", "")),
    ],
    "own_header_first": [
        [("s/a.h", ""), ("s/a.cc", '#include <vector>\n\n#include "s/a.h"\n')],
        [("s/a.h", ""), ("s/a_test.cc", "#include <gtest/gtest.h>\n")],
    ],
    "public_headers": [
        [
            ("ddp/ddp.h", '#include "ddp/a.h"\n'),
            ("ddp/a.h", '#include "ddp/b.h"\n'),
            ("ddp/b.h", ""),
        ],
        [
            ("ddp/ddp.h", '#include "ddp/a.h"\n'),
            ("ddp/a.h", "// See b.h.\n"),
            ("ddp/b.h", ""),
        ],
    ],
    "public_interface": [
        [
            ("tools/install/public_headers.txt", "ddp/a.h\n"),
            ("docs/bazel.md", "# A\n"),
            ("ddp/a.h", ""),
        ],
        [
            ("tools/install/public_headers.txt", "ddp/a.h\n"),
            ("docs/bazel.md", "ddp/a.h"),
            ("ddp/a.h", '#include "ddp/b.h"\n'),
            ("ddp/b.h", '#include "absl/time/time.h"\n'),
        ],
        [
            ("tools/install/public_headers.txt", "ddp/a.h\n"),
            ("docs/bazel.md", "ddp/a.h"),
            ("ddp/a.h", "#include <glog/logging.h>\n"),
        ],
    ],
    "function_length": [
        ("a.cc", "void F() {\n" + LONG_BODY + "}\n"),
        ("a.cc", "namespace n {\nclass C {\n  void F() {\n" + LONG_BODY + "  }\n};\n}\n"),
        ("a.cc", "TEST(A, B) {\n  for (;;) {\n" + LONG_BODY + "  }\n}\n"),
        ("a.cc", "C::C(int x)\n    : x_(x), y_{x} {\n" + LONG_BODY + "}\n"),
    ],
    "scripts": [("tools/x", "#!/usr/bin/env bash\nset -e\n")],
    "build_form": [
        ("s/BUILD.bazel", "ddp_cc_library(\n"),
        ("s/BUILD.bazel", TEST_RULE.format("")),
        ("s/BUILD.bazel", TEST_RULE.format(', size = "huge"')),
        ("s/BUILD.bazel", TEST_RULE.format(', size = "small", tags = ["quick"]')),
        ("s/BUILD.bazel", 'cc_library(name = "a")\n'),
        ("s/BUILD.bazel", 'x(name = "a")\nx(name = "a")\n'),
        ("s/BUILD.bazel", BUILD.format('"//b", ":a"')),
        ("s/BUILD.bazel", BUILD.format('"@glog", "//b"')),
        ("s/BUILD.bazel", BUILD.format('":a", ":a"')),
    ],
    "wide_visibility": [
        ("store/BUILD.bazel", 'package(default_visibility = ["//:__subpackages__"])\n'),
    ],
    "built": [
        [("s/BUILD.bazel", BUILD.format("")), ("s/b.cc", "")],
        [("s/b.h", "")],
        [("s/BUILD.bazel", "# b.lua\n"), ("s/b.lua", "")],
        [("s/BUILD.bazel", 'ddp_cc_library(name = "b", hdrs = ["a.h"])\n'), ("s/b.cc", "")],
    ],
}

# The same rules must be silent about these.
GOOD = {
    "file_length": [
        ("a.cc", "int x;\n" * 500),
        ("a.cc", "int x;\n" * 29 + "// Length: one table.\n" + "int x;\n" * 471),
        ("a.py", "# Length: one table.\n" + "x = 1\n" * 500),
        ("a.lua", "local x\n" * 501),
    ],
    "line_length": [
        ("a.cc", "x" * 100 + "\n"),
        ("a.md", "# Long\n" + "x" * 300 + "\n"),
        ("a.bzl", '"name": "' + "0123456789abcdef" * 4 + '" ' + "#" * 40 + "\n"),
    ],
    "white_space": [("a.cc", "int x;\n")],
    "markers": [("a.cc", "// TO" + "DO(perf): later\n")],
    "one_title": [("a.md", "# One\n\n```\n# a comment in code\n```\n\n## Part\n")],
    "links": [
        ("a.md", "# A\n\n[b](https://b.org/x) `[c](d)`\n\n    [e](f)\n"),
        [("d/a.md", "# A\n\n[b](../e/b.md#the-part-of-b_c) [e](../e)\n"),
         ("e/b.md", "# B\n\n## The part of `b_c`\n")],
    ],
    "banned": [
        ("a.cc", '// usleep(3), absl::Now()\nconst char* k = "system(x) absl::Now()";\n'),
        ("a.cc", 'const char* k = R"(absl::Now() " )";\nint x = 1\'000;\n'),
        ("store/a.cc", "auto* r = redisCommand(c, x);\n"),
        ("base/mutex.h", "std::mutex mutex_;\n"),
        ("base/host_addresses.cc", "int e = getaddrinfo(host, port, &hints, &found);\n"),
        ("a_test.cc", 'void F() { GTEST_SKIP() << "no GPU"; }\n'),
        ("a.cc", "void F() {\n  for (auto& x : *pointer) Use(x());\n}\n"),
        ("a.cc", "static_assert(x);\n#include <torch/torch.h>\n"),
    ],
    "glog_after_torch": [
        ("ddp/a.cc", '#include <ATen/ATen.h>\n\n#include "ddp/common/logging.h"\n'),
    ],
    "flags_in_main": [("a.cc", 'DEFINE_int32(x, 1, "");\nint main(int argc, char** argv) {}\n')],
    "layers": [
        ("store/a.cc", '#include "base/b.h"\n#include "store/redis_store/c.h"\n'),
        ("testing/a.cc", '#include "ddp/b.h"\n'),
        ("elastic/data/a.cc", '#include "ddp/b.h"\n'),
        ("elastic/agent/a.cc", '#include "elastic/health/b.h"\n'),
    ],
    "torch_free": [
        ("store/redis_store/redis_store.cc", "#include <c10/util/Exception.h>\n"),
        ("ddp/a.cc", "#include <ATen/ATen.h>\n"),
    ],
    "rooms": [
        [("launcher/main.cc", ""), ("launcher/job.h", ""), ("launcher/job.cc", "")],
        [("store/redis/a.cc", ""), ("third_party/x/a.h", ""), ("docs/a.md", "")],
        [(f"store/redis/a{i}.h", "") for i in range(40)],
        [(f"testing/scenarios/agent/a{i}.txt", "") for i in range(90)],
    ],
    "room_cycles": [
        [("s/a/x.h", '#include "s/b/y.h"\n'), ("s/b/y.h", '#include "s/b/z.h"\n')],
        [("s/a/x.h", '#include "t/y.h"\n'), ("t/y.h", '#include "s/a/x.h"\n')],
    ],
    "header_form": [
        ("store/a.h", HEADER.format("STORE_A", "")),
        ("ddp/comm/a.h", HEADER.format("COMM_A", "")),
    ],
    "own_header_first": [
        [("s/a.h", ""), ("s/a.cc", '#include "s/a.h"\n\n#include <vector>\n')],
        [("s/main.cc", "#include <vector>\n")],
    ],
    "public_headers": [
        [
            ("ddp/ddp.h", '#include "ddp/a.h"\n// b.h\n#include "ddp/b.h"\n'),
            ("ddp/a.h", '#include "ddp/b.h"\n#include <c.h>\n'),
            ("ddp/b.h", "// elastic/d.h\n"),
            ("ddp/d.h", '#include "ddp/a.h"\n'),
            ("elastic/d.h", ""),
        ],
    ],
    "public_interface": [
        [
            ("tools/install/public_headers.txt", "ddp/a.h\n"),
            ("docs/bazel.md", "`ddp/a.h`"),
            ("ddp/a.h", '#include <vector>\n#include <torch/types.h>\n#include "ddp/b.h"\n'),
            ("ddp/b.h", '#include "ddp/a.h"\n'),
        ],
    ],
    "function_length": [
        ("a.cc", "void F() {\n" + LONG_BODY[:-10] + "}\n"),
        ("a.cc", "const char* const kTable[] = {\n" + '    F("x"),\n' * 90 + "};\n"),
        ("a.cc", "namespace n {\n" + "void F();\n" * 90 + "}\n"),
        ("a.cc", "struct S {\n" + "  int x = F();\n" * 90 + "};\n"),
        ("a.cc", '#define M(x) \\\n  F({x})\nconst char* k = "{";\n' + "void F() {}\n" * 90),
    ],
    "build_form": [
        ("s/BUILD.bazel", BUILD.format('":b", "//a", "//b:c", "@glog"')),
        ("s/BUILD.bazel", TEST_RULE.format(', size = "small", tags = ["cpu:2"]')),
        ("s/BUILD.bazel", 'exports_files(["x"])\n'),
    ],
    "wide_visibility": [
        ("base/BUILD.bazel", 'package(default_visibility = ["//:__subpackages__"])\n'),
        ("store/BUILD.bazel", 'x(name = "a", visibility = ["//:users_of_store"])\n'),
    ],
    "built": [
        [("s/BUILD.bazel", BUILD.format("")), ("s/a.cc", ""), ("s/a.h", "")],
        [("s/BUILD.bazel", 'ddp_cc_library(name = "a")\n'), ("s/a.cc", ""), ("s/a.h", "")],
        [("s/BUILD.bazel", 'x(srcs = glob(["t/**/*.lua"]))\n'), ("s/t/b.lua", "")],
    ],
}


def findings(rule, example):
    files = example if isinstance(example, list) else [example]
    return list(getattr(tidy, rule)([tidy.File(path, text) for path, text in files]))


class RuleTest(unittest.TestCase):
    """Each rule finds what it is for, and only that."""

    def test_every_rule_has_a_bad_example(self):
        untested = {rule.__name__ for rule in tidy.RULES} - set(BAD) - {"binaries"}
        self.assertEqual(untested, set())

    def test_bad_examples_are_found(self):
        for rule, examples in BAD.items():
            for example in examples:
                with self.subTest(rule=rule, example=example):
                    self.assertNotEqual(findings(rule, example), [])

    def test_good_examples_pass(self):
        for rule, examples in GOOD.items():
            for example in examples:
                with self.subTest(rule=rule, example=example):
                    self.assertEqual(findings(rule, example), [])

    def test_binaries_are_data_only(self):
        stray = tidy.File("a.so", "", binary=True)
        data = tidy.File("examples/digits/data/train-images-idx3-ubyte", "", binary=True)
        self.assertEqual(len(list(tidy.binaries([stray, data]))), 1)

    def test_a_finding_names_the_line(self):
        found = findings("banned", ("a.cc", "/* a\n   b */\nint x;\nauto t = absl::Now();\n"))
        self.assertTrue(found[0].startswith("a.cc:4: "), found)

    def test_functions_are_told_by_name_and_extent(self):
        code = "namespace n {\n\nint F(int a) {\n  if (a) {\n  }\n}\n\nA::~A() {}\n\n}  // n\n"
        self.assertEqual(list(tidy.functions(code)), [("F", 3, 6), ("A::~A", 8, 8)])


class TreeTest(unittest.TestCase):
    """The tree keeps every rule."""

    @classmethod
    def setUpClass(cls):
        cls.files = tidy.read_tree(ROOT)


def _add_tree_tests():
    for rule in tidy.RULES:

        def keeps(self, rule=rule):
            found = list(rule(self.files))
            if found:
                self.fail("\n" + "\n".join(found))

        keeps.__doc__ = rule.__name__
        setattr(TreeTest, "test_" + rule.__name__, keeps)


_add_tree_tests()

if __name__ == "__main__":
    unittest.main()
