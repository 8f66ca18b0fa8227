#!/usr/bin/env python3
"""Shows that the tests on the simulated device miss nothing that orders streams.

    tools/mutations.py             # all mutations: a minute or more for each
    tools/mutations.py 3 7         # some
    tools/mutations.py --list

A mutation drops one wait, event, record_stream, abort or shutdown from the library. The script
builds the library without it, runs the test that must fail, and restores the file. Its exit status
is 1 when a test has passed. Files with changes of yours are not touched.
"""

import argparse
import pathlib
import subprocess
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS_FAILED = 3  # Bazel's exit status


class MutationError(Exception):
    """Why a mutation proves nothing."""


@dataclass(frozen=True)
class Mutation:
    drops: str  # what the library loses
    path: str
    old: str  # occurs once in the file
    new: str
    test: str  # the label of the test that must fail
    case: str = "*"  # of its cases


COPY_TEST = "//ddp/transfer:copy_to_device_test"

MUTATIONS = [
    Mutation(
        "the current stream's wait for a copy on a side stream",
        "ddp/transfer/copy_to_device.cc",
        "  copied.block(current);\n",
        "",
        COPY_TEST,
    ),
    Mutation(
        "the event after a copy on a side stream",
        "ddp/transfer/copy_to_device.cc",
        "    copied.record(side);\n",
        "",
        COPY_TEST,
    ),
    Mutation(
        "record_stream of a copy that a side stream owns",
        "ddp/transfer/copy_to_device.cc",
        "  copy.record_stream(current);",
        "",
        COPY_TEST,
    ),
]


def mutated(mutation, text):
    """`text`, the file's, without what the mutation drops."""
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.path} has the text {mutation.old!r} {count} times, not once; "
            "follow the file's change in tools/mutations.py"
        )
    return text.replace(mutation.old, mutation.new)


def is_found(mutation):
    """Whether the test fails without what the mutation drops."""
    path = ROOT / mutation.path
    text = path.read_text()
    changed = ["git", "diff", "--quiet", "HEAD", "--", mutation.path]
    if subprocess.run(changed, cwd=ROOT, check=False).returncode != 0:
        raise MutationError(f"{mutation.path} has changes: commit them first")
    command = [
        "bazel",
        "test",
        mutation.test,
        f"--test_arg=--gtest_filter={mutation.case}",
        "--test_output=errors",
        "--nocache_test_results",
    ]
    try:
        path.write_text(mutated(mutation, text))
        run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if run.returncode not in (0, TESTS_FAILED):
        raise MutationError(f"{mutation.test} does not build:\n{run.stderr[-3000:]}")
    return run.returncode == TESTS_FAILED


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true", help="print the mutations, and end")
    arguments = parser.parse_args()
    numbers = arguments.numbers or range(1, len(MUTATIONS) + 1)
    missed = 0
    for number in numbers:
        if not 1 <= number <= len(MUTATIONS):
            parser.error(f"there is no mutation {number}; the last one is {len(MUTATIONS)}")
        mutation = MUTATIONS[number - 1]
        outcome = ""
        if not arguments.list:
            try:
                outcome = "found: " if is_found(mutation) else "MISSED: "
            except MutationError as error:
                sys.exit(f"mutation {number}: {error}")
        missed += outcome == "MISSED: "
        print(f"{number:2} {outcome}without {mutation.drops} ({mutation.test})", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
