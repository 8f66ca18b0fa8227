"""The fuzz targets (ddp_cc_fuzz) for tools/test --fuzz: builds them and runs each for a time.

Each target has a folder outside the checkout. Its corpus, the inputs that reach new code, is kept
there for the next run. So are its findings, the inputs that failed: the next run begins with them.
"""

import concurrent.futures
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass

MAX_SECONDS = 24 * 3600
# A target's tag, in the text that Bazel makes of its list of tags.
QUERY = r'attr(tags, "\bfuzz\b", //...)'
# What a target may need besides: reading its corpus, and 10 s for the input at hand.
SLACK_SECONDS = 300
LOG_TAIL_LINES = 60
LIMITS = [
    "-max_len=4096",
    "-timeout=10",
    "-rss_limit_mb=2048",
    # Of one allocation. No input is longer than 4 KiB, and what it claims must not matter.
    "-malloc_limit_mb=64",
]


class FuzzError(Exception):
    """Why nothing was run."""


@dataclass
class Result:
    """What one target has come to."""

    label: str
    executions: int = 0
    reproducer: str = ""  # the file with the input that failed
    output: str = ""  # of a target that failed; empty: no finding

    @property
    def text(self):
        found = "no finding" if not self.output else self.reproducer or "failed without an input"
        return f"{self.label}: {self.executions} inputs, {found}"


def parse_seconds(text):
    """The value of --fuzz."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= MAX_SECONDS:
        raise FuzzError(f"--fuzz={text}: expected whole seconds from 1 to {MAX_SECONDS}")
    return int(text)


def folder_of(label):
    """Where a target's corpus and findings are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "ddp-fuzz", label.lstrip("/").replace("/", "-").replace(":", "-"))


def check_clang():
    """clang, and the library that a fuzz target is linked with."""
    hint = "tools/setup --ci installs it"
    clang = shutil.which("clang")
    if clang is None:
        raise FuzzError(f"--fuzz needs clang: {hint}")
    asked = subprocess.run(
        [clang, "--print-runtime-dir"], capture_output=True, text=True, check=False
    )
    library = f"libclang_rt.fuzzer-{platform.machine()}.a"
    if not os.path.exists(os.path.join(asked.stdout.strip(), library)):
        raise FuzzError(f"--fuzz needs clang's {library} (package libclang-rt-dev): {hint}")


def build(bazel, root, labels):
    """Builds the targets; returns the folder of their programs."""
    command = [*bazel, "build", "--config=fuzz", "--keep_going", "--", *labels]
    if subprocess.run(command, cwd=root, check=False).returncode != 0:
        raise FuzzError("the fuzz targets cannot be built; Bazel's message stands above")
    command = [*bazel, "info", "--config=fuzz", "bazel-bin"]
    asked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise FuzzError(f"bazel info failed: {asked.stderr.strip()}")
    return asked.stdout.strip()


def run_target(label, program, seconds):
    """Runs one target until its time is over or an input fails."""
    folder = folder_of(label)
    corpus, findings = os.path.join(folder, "corpus"), os.path.join(folder, "findings")
    os.makedirs(corpus, exist_ok=True)
    os.makedirs(findings, exist_ok=True)
    command = [program, f"-max_total_time={seconds}", *LIMITS, "-print_final_stats=1"]
    command += [f"-artifact_prefix={findings}/", corpus, findings]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DDP_FUZZ_SEEDS": corpus},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds + SLACK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(label, output=f"did not end {SLACK_SECONDS} s after its time")
    return read_result(label, done.returncode, done.stdout.decode(errors="replace"))


def read_result(label, code, log):
    """What libFuzzer's exit code and log say."""
    executions = re.search(r"^stat::number_of_executed_units:\s*(\d+)", log, re.MULTILINE)
    result = Result(label, executions=int(executions.group(1)) if executions else 0)
    if code == 0 and result.executions > 0:
        return result
    written = re.search(r"Test unit written to (\S+)", log)
    lines = log.rstrip("\n").split("\n")[-LOG_TAIL_LINES:]
    if written:
        result.reproducer = written.group(1)
        lines.append(f"The input is {result.reproducer}. To run it again:")
        lines.append(f"    bazel run --config=fuzz {label} -- {result.reproducer}")
    else:
        lines.append(f"exited with code {code} and named no input")
    result.output = "\n".join(lines)
    return result


def run_all(bazel, root, labels, seconds):
    """Yields the targets' results as they come; as many targets run at once as there are cores."""
    check_clang()
    programs = build(bazel, root, labels)
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        running = []
        for label in labels:
            program = os.path.join(programs, label.lstrip("/").replace(":", "/"))
            running.append(pool.submit(run_target, label, program, seconds))
        for done in concurrent.futures.as_completed(running):
            yield done.result()
