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
    edits: list  # (file, text that occurs once in it, text in its place)
    test: str  # the label of the test that must fail
    case: str = "*"  # of its cases


COPY = "ddp/transfer/copy_to_device.cc"
COPY_TEST = "//ddp/transfer:copy_to_device_test"
COMMUNICATOR = "ddp/comm/communicator.cc"
WATCH = "ddp/comm/device_watch.cc"
STREAMS = "ddp/reducer/streams_used.h"
STREAMS_TEST = "//ddp/end_to_end:device_streams_test"

MUTATIONS = [
    Mutation(
        "the current stream's wait for a copy on a side stream",
        [(COPY, "  copied.block(current);\n", "")],
        COPY_TEST,
    ),
    Mutation(
        "the event after a copy on a side stream",
        [(COPY, "    copied.record(side);\n", "")],
        COPY_TEST,
    ),
    Mutation(
        "record_stream of a copy that a side stream owns",
        [(COPY, "  copy.record_stream(current);", "")],
        COPY_TEST,
    ),
    Mutation(
        "the current stream's wait for a collective",
        [(COMMUNICATOR, "    if (work) work->synchronize();\n", "")],
        STREAMS_TEST,
        "*EachWaitOrdersItsStream*",
    ),
    Mutation(
        "the second wait for a collective, on another stream",
        [("ddp/process_group/work.cc", " || (state_->pending.on_stream && !state_->error)", "")],
        STREAMS_TEST,
        "*EachWaitOrdersItsStream*",
    ),
    # Each of the two waits for the group's operations, so that one alone is not missed.
    Mutation(
        "the wait for a group's operations at its end, and the shutdown",
        [
            (WATCH, "aborted_ || (ending_ && entries_.empty())", "aborted_ || ending_"),
            (COMMUNICATOR, "    backend_->shutdown();\n", ""),
        ],
        STREAMS_TEST,
        "*TheEndOfAGroupCompletesItsCollectives*",
    ),
    Mutation(
        "the reduction's wait for the streams of its gradients",
        [(STREAMS, "      event.block(current);\n", "")],
        STREAMS_TEST,
        "*GradientsOfTwoStreamsAreInTheSum*",
    ),
    Mutation(
        "the event on the streams of the gradients",
        [(STREAMS, "      event.record(stream);\n", "")],
        STREAMS_TEST,
        "*GradientsOfTwoStreamsAreInTheSum*",
    ),
    Mutation(
        "the host's wait in a barrier",
        [(COMMUNICATOR, "if (pending.on_stream) (void)ToHost(pending.tensor, pending.what);", "")],
        STREAMS_TEST,
        "*ABarrierBlocksTheHost*",
    ),
    Mutation(
        "the abort after a failure",
        [(WATCH, "    backend_->abort();\n", "")],
        STREAMS_TEST,
        "*AKilledPeerEndsAWaitForTheDevice*",
    ),
    Mutation(
        "the event that proves a pass",
        [
            (
                COMMUNICATOR,
                "DeviceProof proof = device_watch_->Mark(device);",
                "DeviceProof proof = nullptr;",
            )
        ],
        STREAMS_TEST,
        "*AStepAfterAnAbortedReductionIsNotKept*",
    ),
    Mutation(
        "the statistics of other ranks in a converted batch norm, on a device without a key",
        [
            (
                "ddp/nn/convert_sync_batchnorm.cc",
                "Key::AutogradPrivateUse1, Key::CPU, Key::CUDA,\n"
                "                          Key::XPU, Key::HPU, Key::MTIA, Key::PrivateUse1",
                "Key::CPU, Key::CUDA, Key::XPU, Key::HPU, Key::MTIA",
            ),
        ],
        "//ddp/end_to_end:simulated_device_test",
        "*SyncBatchNorm*",
    ),
    Mutation(
        "the lock against autograd's threads",
        [("ddp/reducer/reducer.cc", "  if (on_device_) lock_->Enable();\n", "")],
        STREAMS_TEST,
        "*HooksOnTwoThreadsTakeTurns*",
    ),
    Mutation(
        "the wait for the end of a backward that has thrown",
        [
            (
                "ddp/reducer/backward_watch.cc",
                "if (!self_->lock->enabled() || BackwardTask() >= 0) return;",
                "return;",
            ),
        ],
        STREAMS_TEST,
        "*AModelEndsAfterTheBackwardThatHasThrown*",
    ),
    Mutation(
        "the look for an abort after a copy to the host",
        [
            (
                COMMUNICATOR,
                '  if (*proof == DeviceOutcome::kLost) Fail(what, "a peer failed");\n'
                "  FailIfWatched();\n",
                "",
            ),
        ],
        STREAMS_TEST,
        "*TheHostReadsNoAbortedSum*",
    ),
    # Ranks that agree on a save through the store would save a step that an abort has torn.
    Mutation(
        "the agreement on a save through the process group",
        [
            (
                "elastic/training/training.cc",
                "checkpoints.gather = [this](const std::string& mine) { return Gather(mine); };",
                "",
            ),
        ],
        "//elastic/training:training_test",
        "*AStepThatAFailureHasTornOnTheDeviceIsNotSaved*",
    ),
]


def edited(edit):
    """The texts of an edit's file, without and with the edit."""
    path, old, new = edit
    text = (ROOT / path).read_text()
    count = text.count(old)
    if count != 1:
        raise MutationError(
            f"{path} has the text {old!r} {count} times, not once; "
            "follow the file's change in tools/mutations.py"
        )
    return text, text.replace(old, new)


def is_found(mutation):
    """Whether the test fails without what the mutation drops."""
    paths = [path for path, _, _ in mutation.edits]
    changed = ["git", "diff", "--quiet", "HEAD", "--", *paths]
    if subprocess.run(changed, cwd=ROOT, check=False).returncode != 0:
        raise MutationError(f"{' or '.join(paths)} has changes: commit them first")
    command = [
        "bazel",
        "test",
        mutation.test,
        f"--test_arg=--gtest_filter={mutation.case}",
        "--test_output=errors",
        "--nocache_test_results",
    ]
    texts = [edited(edit) for edit in mutation.edits]
    try:
        for path, (_, after) in zip(paths, texts):
            (ROOT / path).write_text(after)
        run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    finally:
        for path, (before, _) in zip(paths, texts):
            (ROOT / path).write_text(before)
    if run.returncode not in (0, TESTS_FAILED):
        raise MutationError(f"{mutation.test} does not build:\n{run.stderr[-3000:]}")
    return run.returncode == TESTS_FAILED


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true", help="check and print the mutations")
    arguments = parser.parse_args()
    numbers = arguments.numbers or range(1, len(MUTATIONS) + 1)
    missed = 0
    for number in numbers:
        if not 1 <= number <= len(MUTATIONS):
            parser.error(f"there is no mutation {number}; the last one is {len(MUTATIONS)}")
        mutation = MUTATIONS[number - 1]
        outcome = ""
        try:
            if arguments.list:
                list(map(edited, mutation.edits))
            else:
                outcome = "found: " if is_found(mutation) else "MISSED: "
        except MutationError as error:
            sys.exit(f"mutation {number}: {error}")
        missed += outcome == "MISSED: "
        print(f"{number:2} {outcome}without {mutation.drops} ({mutation.test})", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
