#!/usr/bin/env python3
"""Tests the macros of tools/build_defs.bzl, the fetching of wheels, and MODULE.bazel.

Bazel 4 does not read MODULE.bazel, so this test does: Starlark is close enough to Python that
Python runs our files, over stand-ins for what Bazel gives them.
"""

import os
import pathlib
import re
import sys
import tempfile
import types
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tidy  # noqa: E402  (found beside this file)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Bazel's own. A repository that a .bzl file makes up for Bazel 4 needs no module.
BUILT_IN = {"bazel_tools"}


class Anything:
    """Stands in for what a test does not look at, such as attr and repository_rule."""

    def __call__(self, *_args, **_kwargs):
        return self

    def __getattr__(self, _name):
        return self


def run_starlark(path, **given):
    """Runs a file of the tree; `given` are the names that it finds. Returns all its names."""
    names = dict(given)

    for global_name in ("attr", "repository_rule", "rule"):
        names.setdefault(global_name, Anything())

    def load(label, *same, **renamed):
        for name in same:
            renamed[name] = name
        ours = re.fullmatch(r"//(.*):(.*)", label)
        loaded = run_starlark("/".join(ours.groups()), **given) if ours else {}
        for name, original in renamed.items():
            names[name] = loaded.get(original, given.get(original, Anything()))

    names["load"] = load
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        exec(compile(stream.read(), path, "exec"), names)  # noqa: S102  (our own file)
    return names


class Targets:
    """Runs the macros in a package that has certain files, and keeps the targets they make."""

    def __init__(self, package, *files):
        self.made = {}
        native = types.SimpleNamespace(
            glob=lambda patterns, allow_empty: [p for p in patterns if p in files],
            package_name=lambda: package,
        )
        make = {rule: self._maker(rule) for rule in ("cc_library", "cc_test", "cc_binary")}
        self.macros = run_starlark(
            "tools/build_defs.bzl", native=native, Label=str, select=lambda _choices, **_: [],
            fail=self._fail, sh_binary=self._maker("sh_binary"), **make)

    def _maker(self, rule):
        return lambda name, **attributes: self.made.update({name: dict(attributes, rule=rule)})

    @staticmethod
    def _fail(message):
        raise ValueError(message)


class MacroTest(unittest.TestCase):
    def test_a_library_is_made_of_the_files_of_its_name(self):
        targets = Targets("p", "a.h", "a.cc", "b.h")
        for name in ("a", "b", "c"):
            targets.macros["ddp_cc_library"](name=name)
        files = {name: (t["srcs"], t["hdrs"]) for name, t in targets.made.items()}
        self.assertEqual(files, {"a": (["a.cc"], ["a.h"]), "b": ([], ["b.h"]), "c": ([], [])})

    def test_named_files_are_all(self):
        targets = Targets("p", "a.h", "a.cc")
        targets.macros["ddp_cc_library"](name="a", srcs=["b.cc"])
        self.assertEqual(targets.made["a"]["srcs"], ["b.cc"])
        self.assertNotIn("hdrs", targets.made["a"])

    def test_a_program_without_files_is_refused(self):
        targets = Targets("p")
        for macro, attributes in (("ddp_cc_binary", {}), ("ddp_cc_test", {"size": "small"}),
                                  ("ddp_cc_fuzz", {})):
            with self.assertRaisesRegex(ValueError, "//p:a: there is no a.cc; name the srcs"):
                targets.macros[macro](name="a", **attributes)

    def check_test(self, deps, expected, main, package="p", **attributes):
        targets = Targets(package, "a_test.cc")
        targets.macros["ddp_cc_test"](name="a_test", size="small", deps=deps, **attributes)
        test = targets.made["a_test"]
        self.assertEqual(test["srcs"], ["a_test.cc"])
        self.assertEqual(test["tags"], expected)
        self.assertEqual([d for d in test["deps"] if d.startswith("@googletest")], main)

    def test_a_test_gets_its_main_and_its_tags(self):
        gtest, gtest_main = ["@googletest//:gtest"], ["@googletest//:gtest_main"]
        ranks = ["cpu", "multiproc", "redis"]
        self.check_test([":a"], ["cpu"], gtest_main)
        self.check_test([":a"], ["cpu", "local"], gtest_main, tags=["local"])
        self.check_test(["//testing/ranks:rank_test"], ranks, gtest)
        self.check_test([":rank_test"], ranks, gtest, package="testing/ranks")
        self.check_test([":rank_test"], ["cpu"], gtest_main, package="p")
        self.check_test(["//testing/redis:redis_fixture"], ["cpu", "redis"], gtest_main)
        self.check_test([":a"] + gtest, ["cpu"], gtest)
        self.check_test([":a"], ["gpu", "nccl"], gtest_main, tags=["gpu", "nccl"])

    def test_tags_come_from_targets_that_exist(self):
        for label in Targets("p").macros["_TAGS_OF_DEPS"]:
            package, name = label[2:].split(":")
            with open(os.path.join(ROOT, package, "BUILD.bazel"), encoding="utf-8") as stream:
                self.assertIn(f'name = "{name}"', stream.read())


class ModuleTest(unittest.TestCase):
    """MODULE.bazel has what WORKSPACE has."""

    @classmethod
    def setUpClass(cls):
        cls.modules, cls.used = {}, set()
        run_starlark(
            "MODULE.bazel",
            module=lambda name, **_: cls.modules.update({name: None}),
            bazel_dep=lambda name, version: cls.modules.update({name: version}),
            use_extension=lambda file, name: run_starlark(
                file[2:].replace(":", "/"), Label=str, struct=types.SimpleNamespace,
                native=Anything(),
                module_extension=lambda implementation, doc: implementation)[name],
            use_repo=lambda _extension, *names: cls.used.update(names))
        cls.files = [f for f in tidy.read_tree(ROOT) if not f.path.startswith("testing/consumer/")]

    def test_the_extension_makes_the_libraries_of_the_workspace(self):
        declared = []
        deps = run_starlark(
            "third_party/deps.bzl", Label=str, struct=types.SimpleNamespace,
            native=types.SimpleNamespace(),
            maybe=lambda _rule, name, **_: declared.append(name))
        deps["ddp_deps"]()
        for_bazel_4 = {"remote_coverage_tools", "rules_java"}
        self.assertEqual(set(declared) - set(self.modules) - for_bazel_4, self.used)
        self.assertLess(self.modules.keys() - {"ddp", "platforms"}, set(declared))

    def test_every_repository_that_a_file_names_is_there(self):
        known = self.used | set(self.modules) | BUILT_IN
        for f in self.files:
            if f.is_build or f.path.endswith((".bzl", ".tpl")):
                text = re.sub(r'#[^\n]*|""".*?"""', "", f.text, flags=re.DOTALL)
                for name in re.findall(r'"@([a-z_0-9]+)(?=["/])', text):
                    self.assertIn(name, known, f.path)

    def test_rules_that_left_bazel_are_loaded(self):
        for f in self.files:
            if f.path.endswith(".bzl") and f.path != "third_party/bazel_stubs.bzl":
                self.assertNotRegex(f.text, r"native\.(cc|sh|py)_", f.path)
            if not f.is_build and not f.path.endswith(".tpl"):
                continue
            loads = " ".join(re.findall(r"(?m)^load\(.*\)$", f.text))
            for rule in re.findall(r"(?m)^((?:cc|sh|py|java|proto)_\w+)\(", f.text):
                self.assertIn(f'"{rule}"', loads, f.path)


class WheelContext(Anything):
    """What a repository rule is given, with a repository cache that holds some hashes."""

    def __init__(self, *cached):
        self.cached, self.unpacked, self.commands, self.written = set(cached), [], [], {}

    def download_and_extract(self, url, output, sha256, type, allow_fail):
        found = sha256 in self.cached or url == "file:///wheels/x-1-py3-none-any.whl"
        if not found and not allow_fail:
            raise ValueError(url)
        self.unpacked += [(output, sha256, type)] if found else []
        return types.SimpleNamespace(success=found)

    def path(self, _name):
        names = ("requirements.txt", "x-1-py3-none-any.whl")
        files = [WheelFile(name) for name in names]
        return types.SimpleNamespace(readdir=lambda: files)

    def file(self, name, text):
        self.written[name] = text

    def execute(self, command, **_):
        self.commands.append(command[1:4])
        return types.SimpleNamespace(return_code=0)


class WheelFile:
    def __init__(self, basename):
        self.basename = basename

    def __str__(self):
        return "/wheels/" + self.basename


class InstalledTorchTest(unittest.TestCase):
    def test_a_wheel_and_an_archive_tell_their_version(self):
        version = run_starlark(
            "third_party/libtorch/repo.bzl", Label=str, struct=types.SimpleNamespace)[
            "_installed_version"]
        context = types.SimpleNamespace(read=lambda path: path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            torch = pathlib.Path(folder)
            child = lambda name: Child(torch / name)
            self.assertEqual(version(context, types.SimpleNamespace(get_child=child)), "")
            (torch / "build-version").write_text("2.15.0+cpu\n", encoding="utf-8")
            self.assertEqual(version(context, types.SimpleNamespace(get_child=child)), "2.15.0+cpu")
            (torch / "version.py").write_text("__version__ = '2.14.1'\n", encoding="utf-8")
            self.assertEqual(version(context, types.SimpleNamespace(get_child=child)), "2.14.1")


class Child:
    """A path of Bazel's."""

    def __init__(self, path):
        self.exists = path.exists()
        self.read_text = path.read_text


class WheelTest(unittest.TestCase):
    def fetch(self, context):
        wheels = run_starlark(
            "third_party/wheels.bzl", fail=Targets._fail, struct=types.SimpleNamespace)
        wheels["fetch_wheels"](context, {"x==1": "5a" * 32}, "to")
        self.assertEqual(context.unpacked, [("to", "5a" * 32, "zip")])

    def test_the_repository_cache_is_asked_first(self):
        context = WheelContext("5a" * 32)
        self.fetch(context)
        self.assertEqual(context.commands, [])

    def test_pip_downloads_by_hash_what_the_cache_lacks(self):
        context = WheelContext()
        self.fetch(context)
        self.assertEqual(context.commands, [["-m", "pip", "download"]])
        self.assertEqual(list(context.written.values()), ["x==1 --hash=sha256:%s\n" % ("5a" * 32)])


if __name__ == "__main__":
    unittest.main()
