#!/usr/bin/env python3
"""Counts the translation units that compile LibTorch's headers: the build's budget.

    tools/torch_units.py           # the count
    tools/torch_units.py --list    # and which they are

A unit is one (target, source file) pair among the compile actions of the default configuration, as
Bazel itself lists them, from which an #include of LibTorch can be reached through our own headers.
Conditional includes count as if they were taken. A test counts half: it takes LibTorch's headers
precompiled (tools/precompiled/), which halves its time.
"""

import os
import re
import subprocess
import sys

BUDGET = 130
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_TORCH = ("torch/", "ATen/", "c10/", "caffe2/")


def includes(path, root=ROOT):
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as stream:
            return _INCLUDE.findall(stream.read())
    except OSError:  # a system header or a generated one; ours never generate an #include
        return []


def reaches_torch(path, root=ROOT, seen=None):
    """Whether an #include of LibTorch can be reached from `path`. `seen` is shared by the walk."""
    seen = set() if seen is None else seen
    seen.add(path)
    found = includes(path, root)
    if any(name.startswith(_TORCH) for name in found):
        return True
    return any(name not in seen and reaches_torch(name, root, seen) for name in found)


def compile_actions(text):
    """The (target, source) pairs in the text form of `bazel aquery`."""
    pairs = set()
    for action in re.split(r"\n\s*\n", text):
        source = re.search(r"^action 'Compiling (.+)'$", action, re.MULTILINE)
        target = re.search(r"^  Target: (\S+)$", action, re.MULTILINE)
        if source and target and not target.group(1).startswith("@"):
            pairs.add((target.group(1), source.group(1)))
    return pairs


def torch_units(bazel=("bazel",), root=ROOT):
    """The sorted (target, source) pairs, or None when Bazel cannot analyze the tree."""
    query = [*bazel, "aquery", 'mnemonic("CppCompile", //...)', "--include_artifacts=false"]
    query += ["--include_commandline=false", "--noshow_progress", "--ui_event_filters=-info"]
    answer = subprocess.run(query, cwd=root, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return None
    pairs = compile_actions(answer.stdout)
    torch = {source: reaches_torch(source, root) for _, source in pairs}
    return sorted(pair for pair in pairs if torch[pair[1]])


def cost(units):
    """What the budget limits."""
    tests = sum(source.endswith("_test.cc") for _, source in units)
    return len(units) - tests + (tests + 1) // 2


def summary(units):
    return (
        f"translation units with LibTorch: {len(units)}, of the cost of {cost(units)} "
        f"(budget {BUDGET})"
    )


def main():
    units = torch_units()
    if units is None:
        sys.exit("torch_units: bazel aquery failed; does `bazel build --nobuild //...` pass?")
    if "--list" in sys.argv[1:]:
        for target, source in units:
            print(f"{source}  {target}")
    print(summary(units))


if __name__ == "__main__":
    main()
