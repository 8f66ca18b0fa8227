"""The rules of this repository that a machine can check, one function each.

A rule takes every file of the tree and returns what is wrong, as "path:line: what; what to do".
tools/tidy_test.py runs them, over bad examples first and over the tree then. To add a rule, write
the function, put it into RULES and give tidy_test.py a bad example of it.

The rules read text, not a syntax tree: they are made for code that clang-format has formatted, and
they err on the side of silence.
"""

# Length: one function for each rule and the tables that rules read. A rule is found by searching
# one file.

import ast
import fnmatch
import os
import re
import subprocess
from dataclasses import dataclass, field

MAX_LINE = 100
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 500
REASON_WITHIN_LINES = 30

CXX_SUFFIXES = (".h", ".cc")
CODE_SUFFIXES = CXX_SUFFIXES + (".py", ".bzl", ".lua", ".sh", ".supp", ".tpl", ".bazel")


@dataclass
class File:
    """One file of the tree: its path from the root, its text and whether it may be executed."""

    path: str
    text: str
    executable: bool = False
    binary: bool = False
    _code: str = field(default=None, repr=False)

    @property
    def lines(self):
        return self.text.split("\n")

    @property
    def name(self):
        return os.path.basename(self.path)

    @property
    def folder(self):
        return os.path.dirname(self.path)

    @property
    def is_header(self):
        return self.path.endswith(".h")

    @property
    def is_cxx(self):
        return self.path.endswith(CXX_SUFFIXES)

    @property
    def is_test(self):
        return self.path.endswith("_test.cc") or self.path.startswith("testing/")

    @property
    def is_build(self):
        return self.name in ("BUILD.bazel", "BUILD")

    @property
    def is_script(self):
        return self.text.startswith("#!") and not self.path.endswith(".py")

    @property
    def is_code(self):
        return self.path.endswith(CODE_SUFFIXES) or self.is_script or self.is_build

    @property
    def code(self):
        """C++ text with comments and literals blanked out, every line and column kept."""
        if self._code is None:
            self._code = blank_comments_and_literals(self.text)
        return self._code


_CXX_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|"""
    r"""(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL,
)


def blank_comments_and_literals(text):
    def blank(match):
        token = match.group(0)
        if token.startswith("//") or token.startswith("/*"):
            return re.sub(r"[^\n]", " ", token)
        return '"' + re.sub(r"[^\n]", " ", token[1:-1]) + '"'

    # The path of an #include is no literal: rules look at it.
    return "".join(
        part if line.startswith("#include") else _CXX_TOKEN.sub(blank, part)
        for line, part in _statements(text)
    )


def _statements(text):
    """Splits off #include lines; the rest stays in whole blocks, so that tokens may span lines."""
    block = []
    for line in text.splitlines(keepends=True):
        if line.startswith("#include"):
            yield "", "".join(block)
            block = []
            yield line, line
        else:
            block.append(line)
    yield "", "".join(block)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def read_tree(root):
    """Every file that git tracks or would track."""
    command = ["git", "-c", "safe.directory=*", "-C", root, "ls-files", "-z", "--cached"]
    listed = subprocess.run(
        command + ["--others", "--exclude-standard"], check=True, capture_output=True
    ).stdout.decode()
    files = []
    for path in sorted(set(filter(None, listed.split("\0")))):
        full = os.path.join(root, path)
        if not os.path.isfile(full) or os.path.islink(full):
            continue
        with open(full, "rb") as stream:
            data = stream.read()
        binary = b"\0" in data
        text = "" if binary else data.decode("utf-8", errors="replace")
        files.append(File(path, text, os.access(full, os.X_OK), binary))
    return files


# ---- Text -----------------------------------------------------------------------------------


# A hash or an address has no place to break.
_UNBREAKABLE = re.compile(r"\b[0-9a-f]{64}\b|https?://\S{60,}")


def line_length(files):
    for f in files:
        if not f.is_code:
            continue
        for number, line in enumerate(f.lines, 1):
            if len(line) > MAX_LINE and not _UNBREAKABLE.search(line):
                yield f"{f.path}:{number}: {len(line)} columns; break the line at {MAX_LINE}"


def white_space(files):
    for f in files:
        if not f.is_code and not f.path.endswith((".md", ".json")):
            continue
        for number, line in enumerate(f.lines, 1):
            if line != line.rstrip():
                yield f"{f.path}:{number}: white space at the end of the line; remove it"
            if "\t" in line:
                yield f"{f.path}:{number}: a tab; write spaces"
        if f.text and not f.text.endswith("\n"):
            yield f"{f.path}:{len(f.lines)}: the last line has no newline; add one"


def file_length(files):
    """A file above MAX_FILE_LINES gives the reason at its top, as "// Length: REASON"."""
    for f in files:
        count = f.text.count("\n")
        if not f.path.endswith(CXX_SUFFIXES + (".py",)) or count <= MAX_FILE_LINES:
            continue
        mark = "# Length: " if f.path.endswith(".py") else "// Length: "
        reasons = [line[len(mark) :].strip() for line in f.lines[:REASON_WITHIN_LINES]
                   if line.startswith(mark)]
        if not any(reasons):
            yield (
                f"{f.path}:1: {count} lines; split the file along a seam, or give the reason in "
                f'the first {REASON_WITHIN_LINES} lines: "{mark}REASON"'
            )


def markers(files):
    for f in files:
        if not f.is_code or f.path.startswith("tools/tidy"):
            continue
        for number, line in enumerate(f.lines, 1):
            if re.search(r"\b(FIXME|XXX|HACK|DO NOT SUBMIT)\b", line):
                yield f"{f.path}:{number}: a leftover marker; finish it or write a TODO"
            todo = re.search(r"\bTODO\b(\(\w*\))?", line)
            if todo and todo.group(1) not in ("(soon)", "(perf)", "(test)"):
                yield f"{f.path}:{number}: a TODO carries its kind: TODO(soon|perf|test)"


# Data of the examples: the only files that are not text.
BINARY_FILES = ("*-idx1-ubyte", "*-idx3-ubyte", "examples/graph/*.pt",
                "testing/oracle/golden/*.safetensors")


def binaries(files):
    for f in files:
        if f.binary and not any(fnmatch.fnmatch(f.path, p) for p in BINARY_FILES):
            yield f"{f.path}:1: a binary file; the repository holds text"


def one_title(files):
    for f in files:
        if not f.path.endswith(".md"):
            continue
        prose = re.sub(r"^ {0,3}```.*?^ {0,3}```", "", f.text, flags=re.DOTALL | re.MULTILINE)
        titles = len(re.findall(r"^# ", prose, flags=re.MULTILINE))
        if titles != 1 or not f.text.startswith("# "):
            yield f"{f.path}:1: {titles} titles; a document has one, on its first line"


_CODE_BLOCK = re.compile(
    r"^ {0,3}```.*?^ {0,3}```|^ {4}[^\n]*$|`[^`\n]*`", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\(([^()\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"")


def _anchors(text):
    """The anchors that GitHub gives to the titles of a page."""
    anchors = []
    for title in re.findall(r"^#+ +(.*?)\s*$", text, flags=re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", x) is not None for x in anchors)
        anchors.append(f"{anchor}-{count}" if count else anchor)
    return anchors + re.findall(r'<a (?:id|name)="([^"]+)"', text)


def links(files):
    """Links of a page to files of this repository, and to titles in them, lead somewhere."""
    by_path = {f.path: f for f in files}
    folders = {""}
    for f in files:
        parts = f.path.split("/")
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
    for f in files:
        if not f.path.endswith(".md"):
            continue
        prose = _CODE_BLOCK.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), f.text)
        for match in _LINK.finditer(prose):
            link = match.group(1) or match.group(2)
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(f.folder, path)) if path else f.path
            place = f"{f.path}:{line_of(prose, match.start())}"
            if target not in by_path and target not in folders and target != ".":
                yield f"{place}: {link}: there is no {target}; mend the link"
            elif anchor and target in by_path and anchor not in _anchors(by_path[target].text):
                yield f"{place}: {link}: {target} has no title of that name; mend the link"


def scripts(files):
    for f in files:
        if not f.is_script:
            continue
        if not f.executable:
            yield f"{f.path}:1: a script that cannot be run; chmod +x it"
        if "sh" in f.lines[0] and not re.search(r"^set -e", f.text, flags=re.MULTILINE):
            yield f"{f.path}:1: goes on after a failed command; set -euo pipefail"


# ---- C++ ------------------------------------------------------------------------------------


@dataclass
class Ban:
    """A pattern that code may not contain, where, and what to write in its place."""

    pattern: str
    instead: str
    applies: object = lambda f: True
    # path -> why it may. A pattern (fnmatch) as path covers a folder.
    allowed: dict = field(default_factory=dict)


BANS = [
    Ban(
        r"\b(usleep|nanosleep|sleep_for|sleep_until|SleepFor|(?<!\w)sleep)\s*\(",
        "wait for an event with a deadline",
    ),
    Ban(
        r"\bsystem_clock\b|\babsl::Now\(|\bgettimeofday\(|\bCLOCK_REALTIME\b|\btime\((nullptr|0)\)",
        "take a Clock (base/clock.h)",
        allowed={
            "testing/simulator/simulate.cc": "how long the seeds took, for people",
            "elastic/agent/worker_group.cc": "the failure report tells people when a worker failed",
            "elastic/agent/event_log.cc": "unix_time of an event, for people",
            "elastic/timers/timer_pipe.cc": "PyTorch's timers end by the host's clock",
            "elastic/timers/timer_pipe_test.cc": "the same",
            "elastic/checkpoint/state_stager.cc": "saved_unix_seconds of a manifest, for people",
            "launcher/checkpoint/checkpoint_command.cc": "the ages of checkpoints, for people",
            "elastic/worker/error_file.cc": "the timestamp is part of torchrun's format",
            "launcher/job.cc": "the same, of a root cause on another node",
            "elastic/worker/fatal_signal.cc": "the same, in a signal handler",
        },
    ),
    Ban(
        r"#include [<\"]torch/torch\.h",
        "include what is used",
        lambda f: f.is_header,
        allowed={"tools/precompiled/modules.h": "it is what tests with modules share"},
    ),
    Ban(r"#include [<\"]torch/extension\.h", "include what is used"),
    Ban(
        r"\bredis(v?Append|Connect|v?Command|Buffer|Get|Set)\w*\s*\(|#include <hiredis/",
        "go through store/redis/redis_connection.h",
        lambda f: not f.path.startswith("store/"),
    ),
    Ban(
        r"\bstd::(recursive_|timed_|shared_)?(mutex|condition_variable(_any)?|lock_guard|"
        r"unique_lock|scoped_lock)\b",
        "use Mutex, MutexLock and CondVar of base/mutex.h",
        allowed={
            "base/mutex.h": "the wrapper itself",
            "ddp/comm/backend/gloo_backend.cc": "LibTorch's Gloo brings its own",
            "elastic/checkpoint/random_generators.cc": "LibTorch's generators bring their own",
        },
    ),
    Ban(r"\babsl::(Mutex|MutexLock|CondVar)\b", "use base/mutex.h: absl's is not instrumented"),
    Ban(r"#include [<\"]absl/(flags|log|synchronization)/", "use gflags, glog and base/mutex.h"),
    Ban(r"\bGTEST_SKIP\(\)(?!\s*<<)", "give the reason: GTEST_SKIP() << ..."),
    Ban(r"(?<!\w)assert\s*\(", "use CHECK: it stays on in release builds"),
    Ban(
        r"\bfor \([^;\n]* : \*[\w.>-]+\(\)\)",
        "name the value first: what a temporary holds is gone before the loop begins",
    ),
    Ban(
        r"\bgetaddrinfo\s*\(",
        "call ResolveHost() of base/host_addresses.h",
        allowed={"base/host_addresses.cc": "the function itself"},
    ),
    Ban(
        r"\bSYS_pidfd_\w+",
        "call OpenPidfd() and SignalPidfd() of base/process/pidfd.h",
        allowed={
            "base/process/pidfd.cc": "the functions themselves",
            "base/process/pidfd_test.cc": "takes the call away",
            "testing/refuse_calls.cc": "takes them away",
        },
    ),
    Ban(r"^\s*using namespace\b", "name what is used", lambda f: f.is_header),
    Ban(r"\b(system|popen|tmpnam|mktemp|strtok|sprintf|gets)\s*\(", "use a safe call"),
]


def banned(files):
    for f in files:
        if not f.is_cxx:
            continue
        for ban in BANS:
            if not ban.applies(f) or any(fnmatch.fnmatch(f.path, p) for p in ban.allowed):
                continue
            for match in re.finditer(ban.pattern, f.code, flags=re.MULTILINE):
                what = " ".join(match.group(0).split())
                yield f"{f.path}:{line_of(f.code, match.start())}: {what}; {ban.instead}"


TORCH_INCLUDE = re.compile(r'^#include [<"](torch|ATen|c10)/', re.MULTILINE)


def glog_after_torch(files):
    for f in files:
        if not f.is_cxx or f.path == "ddp/common/logging.h":
            continue
        if TORCH_INCLUDE.search(f.code) and "#include <glog/logging.h>" in f.code:
            fix = "include ddp/common/logging.h for glog"
            yield f"{f.path}:1: torch and glog both define LOG; {fix}"


def flags_in_main(files):
    for f in files:
        match = re.search(r"^DEFINE_\w+\(", f.code, re.MULTILINE) if f.is_cxx else None
        if match and not re.search(r"\bint main\(", f.code):
            yield (
                f"{f.path}:{line_of(f.code, match.start())}: a gflag outside the file of main(); "
                "take an option struct"
            )


# A layer with public targets -> the layers that may include its headers, besides itself and, for
# tests, testing/. What is not public is guarded by visibility: see the groups in BUILD.bazel.
PUBLIC_LAYERS = {
    "ddp": ["elastic/checkpoint", "elastic/data", "elastic/training", "elastic/worker", "train"],
    "elastic/checkpoint": ["elastic/training", "launcher/checkpoint"],
    "elastic/data": ["elastic/checkpoint", "elastic/training"],
    "elastic/health": ["elastic/agent", "elastic/job", "elastic/worker", "launcher"],
    "elastic/training": [],
    "elastic/worker": ["elastic/checkpoint", "elastic/training"],
    "store/redis_store": ["ddp", "elastic/agent", "elastic/checkpoint", "elastic/data",
                          "elastic/health", "elastic/rendezvous", "elastic/training",
                          "elastic/worker", "launcher", "store"],
    "train": [],
}
FOR_ALL = ("testing", "tools", "examples")
TORCH_FREE = ("base/", "ddp/comm/arena/", "ddp/comm/check/", "ddp/comm/host_group/",
              "ddp/comm/kernels/", "ddp/comm/meeting/", "ddp/comm/reports/", "ddp/graph/cut/",
              "ddp/health/", "launcher/", "store/", "elastic/agent/",
              "elastic/checkpoint/file_system/", "elastic/checkpoint/folder/",
              "elastic/checkpoint/format/", "elastic/checkpoint/inspect/",
              "elastic/checkpoint/retention/", "elastic/checkpoint/save_load/",
              "elastic/error_file/", "elastic/health/", "elastic/job/", "elastic/rendezvous/",
              "elastic/timers/")
# The torch-bound types of otherwise torch-free folders.
TORCH_BOUND = ("ddp/comm/meeting/c10d_group_store.h", "ddp/comm/meeting/c10d_group_store.cc",
               "ddp/comm/meeting/c10d_group_store_test.cc", "store/redis_store/redis_store.h",
               "store/redis_store/redis_store.cc")


def _within(path, folders):
    return path.startswith(tuple(folder + "/" for folder in folders))


def layers(files):
    for f in files:
        if not f.is_cxx or _within(f.path, FOR_ALL):
            continue
        for match in re.finditer(r'^#include "([^"]+)"', f.code, flags=re.MULTILINE):
            path = match.group(1)
            layer = next((x for x in PUBLIC_LAYERS if _within(path, [x])), None)
            if layer and not _within(f.path, [layer] + PUBLIC_LAYERS[layer]):
                yield (
                    f"{f.path}:{line_of(f.code, match.start())}: includes {path}; {layer}/ is for "
                    f"{', '.join(PUBLIC_LAYERS[layer] + list(FOR_ALL))} only"
                )


def torch_free(files):
    for f in files:
        if not f.is_cxx or not f.path.startswith(TORCH_FREE) or f.path in TORCH_BOUND:
            continue
        match = TORCH_INCLUDE.search(f.code)
        if match:
            yield f"{f.path}:{line_of(f.code, match.start())}: {f.folder}/ is free of LibTorch"


# Every folder that holds C++ files -> what belongs there.
ROOMS = {
    "base": "time, events, files, locks, names and text that several other folders need",
    "base/process": "starting, finding and holding a process",
    "base/text": "text for people: tables",
    "ddp": "the public headers of what a trainer links, and their BUILD file",
    "ddp/activation_checkpoint": "segments of a model that run again in the backward",
    "ddp/comm": "the collectives: the communicator, and what it starts and waits for",
    "ddp/comm/arena": "memory of a process that the other processes of its host can map",
    "ddp/comm/backend_factory": "which backend a group gets, and its making",
    "ddp/comm/engine_backend": "the c10d backend of our engines: for one host, and for several",
    "ddp/comm/host_group": "the ranks of a host that share memory: entry, life, waits",
    "ddp/comm/backend": "the c10d backends: how each is made, and what it can do",
    "ddp/comm/check": "finds out which rank is gone, or in another collective",
    "ddp/comm/conformance": "the tests that a communicator passes on every backend",
    "ddp/comm/hierarchical": "collectives over several hosts: shared memory inside, Gloo between",
    "ddp/comm/kernels": "loops over plain memory: sums over ranks, and casts to 16 bits",
    "ddp/comm/meeting": "where ranks meet: the keys of a group's store, and a barrier with values",
    "ddp/comm/reports": "what ranks tell each other through the store: failures, where they are",
    "ddp/comm/shared_memory": "collectives in shared memory: engine, sums in place",
    "ddp/comm_hooks": "the comm hooks that the library brings",
    "ddp/common": "what every room of ddp/ names: errors, ReduceOp, GradBucket, peer waits, glog",
    "ddp/end_to_end": "tests of the wrapper and the collectives as a program uses them",
    "ddp/graph": "TorchScript modules as graphs, and the pieces in which they run",
    "ddp/graph/cut": "where a graph is cut into pieces, without a tensor; the table of pieces",
    "ddp/health": "what is known of a group's failures, and what a call on the group throws",
    "ddp/join": "Join: what its ranks decide, and the events that they announce",
    "ddp/mixed_precision": "parameters in a lower precision in forward and backward",
    "ddp/model": "the tensors of a module by name, and what ranks compare of them",
    "ddp/nn": "layers that take statistics over all ranks, and the conversion of models to them",
    "ddp/optim": "optimizers over all ranks: ZeroRedundancyOptimizer, its shards and their state",
    "ddp/process_group": "ProcessGroup: the ranks, their collectives, a mesh of them",
    "ddp/random": "random numbers that are drawn again",
    "ddp/reducer": "what happens to gradients: the reducer, and what it does for its core",
    "ddp/reducer/arena": "LibTorch's allocator on the arena: gradients in shared memory",
    "ddp/reducer/buckets": "where gradients lie, which of them are reduced together, and how",
    "ddp/reducer/pass": "the decisions of the reducer, without a tensor",
    "ddp/rpc": "calls between workers, distributed autograd contexts, remote optimizers",
    "ddp/rpc/failure": "how an error of LibTorch's engine is read",
    "ddp/statistics": "how a layer finds its ranks, and what becomes of their batch statistics",
    "ddp/transfer": "tensors before and after a collective: arguments, copies, broadcasts",
    "ddp/wrapper": "DistributedDataParallel: one model's forward and backward over all ranks",
    "elastic/agent": "decisions about the workers of one node: the agent's core and its shell",
    "elastic/checkpoint": "Checkpointer: saves and restores the state of a training",
    "elastic/checkpoint/file_system": "files that survive a power cut, and calls that stall",
    "elastic/checkpoint/folder": "the folder of a job's checkpoints: its entries, its owner",
    "elastic/checkpoint/format": "the files of a checkpoint: manifest, safetensors, hashes, IDs",
    "elastic/checkpoint/group": "the ranks that save and restore together",
    "elastic/checkpoint/inspect": "a folder of checkpoints seen from outside of a job",
    "elastic/checkpoint/retention": "the decision which checkpoints of a run stay",
    "elastic/checkpoint/save_load": "one save and one load: the steps that all ranks make",
    "elastic/checkpoint/tensors": "a model and an optimizer as tensors of a checkpoint",
    "elastic/data": "the samples that a rank reads, and the resumable position among them",
    "elastic/error_file": "the format of the file in which a worker says why it failed",
    "elastic/health": "pages that show the progress of each rank; finds hangs and stragglers",
    "elastic/job": "the description of a job, with the default of every setting",
    "elastic/rendezvous": "membership of a job: the core, its scripts, its connection to Redis",
    "elastic/timers": "timers that workers set for themselves, and the pipe that carries them",
    "elastic/training": "the loop of a trainer, made of the worker, the data and the checkpoints",
    "elastic/worker": "a rank's side of the agent: the session, the error file, fatal signals",
    "examples": "how an example finds its data",
    "examples/digits": "a trainer of a convolutional net on handwritten digits",
    "examples/from_python": "a common Python program, and the same in C++",
    "examples/hybrid": "trainers and a parameter server, by remote calls",
    "examples/graph": "a trainer of a TorchScript file, cut at bucket boundaries",
    "examples/minimal": "the shortest trainer",
    "examples/sync_batch_norm": "a trainer whose ranks normalize by their joint batch",
    "examples/zero": "a trainer whose optimizer state is divided among the ranks",
    "launcher": "ddprun's main() and the job that it runs",
    "launcher/checkpoint": "ddprun checkpoint: its arguments, its progress, its exit codes",
    "launcher/end_to_end": "tests of the whole ddprun, and the workers that they start",
    "launcher/flags": "the table of flags, and the options that flags and variables make",
    "launcher/meeting": "the place where nodes meet, and the servers that ddprun starts for it",
    "launcher/output": "lines for people: console, log files, prefixes, the failure report",
    "launcher/process": "workers as processes: start, CPUs, private folder, the keeper",
    "launcher/subcommands": "the words that are no programs, and their flags",
    "launcher/watch": "a running job seen from outside: ddprun status, metrics, job marker",
    "store/redis": "a client of Redis: address, connections, scripts",
    "store/redis/wire": "the protocol of Redis: requests to bytes, bytes to replies and pushes",
    "store/redis_server": "the server that we start, and the rules for its users",
    "store/redis_store": "keys and values on Redis, and c10d::Store on them",
    "store/tcp_store": "a server and a client of the protocol of LibTorch's TCPStore",
    "testing": "fakes, fixtures and helpers that tests of several folders share",
    "testing/accelerator": "a simulated device of LibTorch's, and collectives on it",
    "testing/accelerator/runtime": "two simulated devices, without LibTorch: streams and memory",
    "testing/backend": "ranks as threads of one process, on a c10d backend that a test scripts",
    "testing/consumer": "a workspace of a user, built from outside",
    "testing/file_system": "a file system in memory, and the conformance suite of file systems",
    "testing/jobs": "tests of whole jobs that train and save checkpoints, and their trainer",
    "testing/hosts": "tests that make several hosts of one machine",
    "testing/network": "the test's end of a connection over the loopback address",
    "testing/oracle": "comparisons with PyTorch, run side by side or recorded",
    "testing/ranks": "tests whose ranks are processes",
    "testing/redis": "real Redis servers for a test, and one that follows a script",
    "testing/shared_memory": "processes that die while they share memory, models of its protocols",
    "testing/simulator": "whole jobs under simulated time and network, and the checks of them",
    "testing/simulator/bugs": "bugs that the simulator must find, planted in scripts and cores",
    "testing/simulator/redis": "a Redis in memory that runs our scripts",
    "tools/bench": "benchmarks",
    "tools/precompiled": "the headers that tests take precompiled, and the rule for that",
    "train/averaging": "averages of a model over the steps of a training",
    "train/gradients": "limits and scales of gradients between the backward and the step",
    "train/optim": "optimizers that LibTorch lacks, and what schedulers change of one",
    "train/schedulers": "learning rates over the steps of a training",
}
# Folder -> the only C++ files that it may hold itself. Other files belong into a folder below it.
ROOM_HOLDS = {"launcher": ("main.cc", "job.h", "job.cc")}
MAX_ROOM_FILES = 40


def rooms(files):
    count = {}
    for f in files:
        count[f.folder] = count.get(f.folder, 0) + 1
        if not f.is_cxx or f.path.startswith("third_party/"):
            continue
        if f.folder not in ROOMS:
            yield (
                f"{f.path}:1: {f.folder or 'the root'}/ is no folder for C++ files; choose one of "
                "ROOMS in tools/tidy.py, or list the folder there with what belongs in it"
            )
        elif f.folder in ROOM_HOLDS and f.name not in ROOM_HOLDS[f.folder]:
            yield (
                f"{f.path}:1: {f.folder}/ holds {', '.join(ROOM_HOLDS[f.folder])} only; choose a "
                "folder below it"
            )
    for folder in sorted(set(count) & set(ROOMS)):
        if count[folder] > MAX_ROOM_FILES:
            yield (
                f"{folder}/:1: {count[folder]} files; it may hold {MAX_ROOM_FILES}: split it"
            )


def _way(edges, start, goal):
    """The folders from `start` to `goal` along `edges`, the shortest way; None: there is none."""
    ways = [[start]]
    seen = {start}
    for way in ways:
        if way[-1] == goal:
            return way
        for a, b in edges:
            if a == way[-1] and b not in seen:
                seen.add(b)
                ways.append(way + [b])
    return None


def room_cycles(files):
    """Folders under one top folder include each other's headers in one direction only."""
    edges = {}  # (from, to) -> the first #include
    for f in files:
        if not f.is_cxx:
            continue
        for match in re.finditer(r'^#include "([^"]+)/[^"/]+"', f.code, flags=re.MULTILINE):
            edge = (f.folder, match.group(1))
            within = f.folder.split("/")[0] == match.group(1).split("/")[0]
            if within and edge[0] != edge[1]:
                place = f"{f.path}:{line_of(f.code, match.start())}"
                edges.setdefault(edge, (place, match.group(0)[len('#include "') : -1]))
    for (folder, other), (place, header) in sorted(edges.items()):
        back = _way(edges, other, folder)
        if back is not None:
            cycle = " -> ".join([folder] + back)
            yield f"{place}: includes {header}; a cycle of folders: {cycle}; remove one of them"


def header_form(files):
    for f in files:
        if not f.is_header or f.path.startswith("third_party/"):
            continue
        guard = "DDP_" + re.sub(r"\W", "_", re.sub(r"^ddp/", "", f.path)).upper() + "_"
        guards = (guard, "DDP_" + re.sub(r"\W", "_", f.path).upper() + "_")
        found = re.search(r"^#ifndef (\w+)\n#define (\w+)$", f.text, flags=re.MULTILINE)
        if not found or found.group(1) != found.group(2) or found.group(1) not in guards:
            yield f"{f.path}:1: no include guard {guards[1]}; add it"
        if not re.search(r"^ *// \w", f.text, flags=re.MULTILINE):
            yield f"{f.path}:1: a header without a comment; say what it is and how to use it"


def own_header_first(files):
    headers = {f.path for f in files if f.is_header}
    for f in files:
        if not f.path.endswith(".cc"):
            continue
        stem = re.sub(r"(_test|_benchmark|_fuzz)?\.cc$", "", f.path)
        own = stem + ".h"
        first = re.search(r'^#include [<"]([^>"]+)', f.code, flags=re.MULTILINE)
        if own in headers and (not first or first.group(1) != own):
            yield f"{f.path}:1: includes another header before {own}; include its own first"


def public_headers(files):
    """What ddp/ddp.h includes or exports is public: it names no other header of ddp/."""
    by_path = {f.path: f for f in files if f.is_header}
    if "ddp/ddp.h" not in by_path:
        return
    includes = re.findall(r'^#include "([^"]+)"', by_path["ddp/ddp.h"].text, flags=re.MULTILINE)
    public = {"ddp/ddp.h", *includes}
    for path in sorted(public & set(by_path)):
        public.update(re.findall(r'"([^"]+)"  // IWYU pragma: export$', by_path[path].text, re.M))
    for f in (by_path[path] for path in sorted(public & set(by_path))):
        for match in re.finditer(r"[\w/]+\.h\b", f.text):
            name = match.group(0)
            path = name if "/" in name else "ddp/" + name
            if path.startswith("ddp/") and path in by_path and path not in public:
                yield (
                    f"{f.path}:{line_of(f.text, match.start())}: a public header names {path}, "
                    "which ddp/ddp.h does not include; keep private ones out of it"
                )


PUBLIC_HEADERS = "tools/install/public_headers.txt"
_OF_TORCH_OR_STANDARD = re.compile(r"(torch|ATen|c10)/|[a-z_]+$")


def public_interface(files):
    """The public headers stand in docs/bazel.md, and with all they include need LibTorch only."""
    by_path = {f.path: f for f in files}
    if PUBLIC_HEADERS not in by_path:
        return
    todo = by_path[PUBLIC_HEADERS].text.split()
    for path in todo:
        if path not in by_path["docs/bazel.md"].text:
            yield f"{PUBLIC_HEADERS}:1: {path} is not in docs/bazel.md; add it to the table there"
    for path in todo:  # grows
        f = by_path[path]
        for match in re.finditer(r'^#include ["<]([^">]+)', f.code, flags=re.MULTILINE):
            name = match.group(1)
            if name in by_path:
                todo += [name] if name not in todo else []
            elif not _OF_TORCH_OR_STANDARD.match(name):
                yield (
                    f"{path}:{line_of(f.code, match.start())}: a public header needs {name}; "
                    "only the standard library and LibTorch may stand in the public interface"
                )


_CONTAINER = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")


def _kind_of_block(head):
    """What the braces after `head`, at the level of a namespace or class, enclose."""
    outside = re.sub(r"\(.*\)|<.*>", "", head, flags=re.DOTALL)
    if "=" in re.sub(r"[=!<>]=|operator=", "", outside):
        return "block"  # a table: kNames[] = {
    if _CONTAINER.search(outside):
        return "container"
    return "function" if "(" in head else "block"


def functions(code):
    """Yields (name, first line, last line) of every function body, found by matching braces."""
    stack = []  # of (kind, offset of the head)
    head = 0  # where the statement that leads to the next brace begins
    depth = 0  # of parentheses: braces within them belong to an expression
    for match in re.finditer(r"[{}();]|^#[^\n]*(?:\\\n[^\n]*)*", code, flags=re.MULTILINE):
        token = match.group(0)
        if token.startswith("#"):
            head = match.end() if depth == 0 else head
        elif token == "(":
            depth += 1
        elif token == ")":
            depth = max(0, depth - 1)
        elif token == ";" and depth == 0:
            head = match.end()
        elif token == "{":
            text = code[head : match.start()]
            inside = bool(stack) and stack[-1][0] != "container"
            kind = "block" if inside or depth > 0 else _kind_of_block(text)
            if kind == "function" and not text[-1].isspace():
                kind = "value"  # member_{x}: the function's own brace stands after a space
            stack.append((kind, head, depth))
            depth = 0
            head = match.end()
        elif token == "}" and stack:
            kind, start, depth = stack.pop()
            if kind == "function":
                text = code[start:]
                start += len(text) - len(text.lstrip())
                name = re.search(r"(operator\W+|[\w:~]+)\s*\(", code[start:])
                if name is None:
                    raise ValueError(f"a function without a name: {code[start : start + 80]!r}")
                yield name.group(1), line_of(code, start), line_of(code, match.start())
            head = start if kind == "value" else match.end()


def function_length(files):
    for f in files:
        if not f.is_cxx:
            continue
        for name, first, last in functions(f.code):
            if last - first + 1 > MAX_FUNCTION_LINES:
                yield (
                    f"{f.path}:{first}: {name} has {last - first + 1} lines; a function fits a "
                    f"screen, {MAX_FUNCTION_LINES} lines"
                )


# ---- Bazel ----------------------------------------------------------------------------------

TEST_TAGS = ("cpu", "gpu", "nccl", "redis", "multiproc", "slow", "manual", "exclusive", "local")
TEST_TAGS += ("no-tsan",)  # see docs/hacking.md, Sanitizers
SIZES = ("small", "medium", "large", "enormous")
SORTED_LISTS = ("srcs", "hdrs", "deps", "data", "tags", "textual_hdrs")


def build_calls(f):
    """The calls of a BUILD file as (rule, {attribute: ast node}, line); None: no valid file."""
    try:
        tree = ast.parse(f.text)
    except SyntaxError:
        return None
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            attributes = {k.arg: k.value for k in node.keywords if k.arg}
            calls.append((node.func.id, attributes, node))
    return calls


def _is_rule(rule, attributes):
    return "name" in attributes and rule not in ("workspace", "maybe")


def _strings(node):
    return [x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and
            isinstance(x.value, str)]


def _sort_key(label):
    phase = 1 if label.startswith(":") else 2 if label.startswith("//") else 3
    phase = phase if label.startswith((":", "//", "@")) else 0
    return phase, label.replace(":", ".").split(".")


def build_form(files):
    for f in files:
        if not f.is_build:
            continue
        calls = build_calls(f)
        if calls is None:
            yield f"{f.path}:1: cannot be parsed"
            continue
        names = set()
        for rule, attributes, line in ((r, a, n.lineno) for r, a, n in calls if _is_rule(r, a)):
            name = "".join(_strings(attributes["name"]))
            if name in names:
                yield f"{f.path}:{line}: a second target {name}"
            names.add(name)
            yield from _attribute_findings(f, rule, attributes, line)


def wide_visibility(files):
    """Only base/ and what is no layer may show a target to the whole tree."""
    for f in files:
        if f.is_build and _within(f.path, ("ddp", "elastic", "launcher", "store")):
            for number, line in enumerate(f.lines, 1):
                if '"//:__subpackages__"' in line:
                    yield f"{f.path}:{number}: visible to all; name a group of //:BUILD.bazel"


def _attribute_findings(f, rule, attributes, line):
    if rule in ("cc_library", "cc_test", "cc_binary") and not f.path.startswith("third_party/"):
        yield f"{f.path}:{line}: {rule}; use ddp_{rule}, which adds our options"
    if rule.endswith("_test"):
        size = _strings(attributes["size"]) if "size" in attributes else []
        if not size or size[0] not in SIZES:
            yield f"{f.path}:{line}: a test states its size: {', '.join(SIZES)}"
        for tag in _strings(attributes["tags"]) if "tags" in attributes else []:
            if tag not in TEST_TAGS and not re.fullmatch(r"cpu:\d+", tag):
                yield f'{f.path}:{line}: unknown tag "{tag}"; known: {", ".join(TEST_TAGS)}'
    for attribute in SORTED_LISTS:
        node = attributes.get(attribute)
        if not isinstance(node, ast.List):
            continue
        values = [x.value for x in node.elts if isinstance(x, ast.Constant)]
        if values != sorted(values, key=_sort_key):
            yield f"{f.path}:{node.lineno}: {attribute} is not sorted"
        if len(values) != len(set(values)):
            yield f"{f.path}:{node.lineno}: {attribute} names something twice"


# Found by the tools that read them, not by a target.
UNBUILT = ("testing/cmake/*", "testing/consumer/*", "third_party/*", "tools/*.py",
           "tools/bench/*.py")


def built(files):
    packages = {f.folder: f for f in files if f.is_build}
    named = {}
    for folder, build in packages.items():
        globs, strings = [], set()
        for rule, attributes, node in build_calls(build) or []:
            (globs.extend if rule == "glob" else strings.update)(_strings(node))
            if rule.startswith("ddp_cc_") and not {"srcs", "hdrs"} & set(attributes):
                stem = "".join(_strings(attributes["name"]))
                strings.update((stem + ".cc", stem + ".h"))
        named[folder] = (globs, strings)
    for f in files:
        if not f.path.endswith(CXX_SUFFIXES + (".lua", ".py")):
            continue
        if any(fnmatch.fnmatch(f.path, p) for p in UNBUILT):
            continue
        package = f.folder
        while package not in packages and package:
            package = os.path.dirname(package)
        if package not in packages:
            yield f"{f.path}:1: in no Bazel package; add a BUILD.bazel"
            continue
        globs, strings = named[package]
        relative = os.path.relpath(f.path, package or ".")
        if relative not in strings and ":" + relative not in strings:
            if not any(fnmatch.fnmatch(relative, g.replace("**/", "*")) for g in globs):
                yield f"{f.path}:1: in no target of {packages[package].path}; add it to one"


RULES = [
    line_length,
    white_space,
    file_length,
    markers,
    binaries,
    one_title,
    links,
    scripts,
    banned,
    glog_after_torch,
    flags_in_main,
    layers,
    torch_free,
    rooms,
    room_cycles,
    header_form,
    own_header_first,
    public_headers,
    public_interface,
    function_length,
    build_form,
    wide_visibility,
    built,
]
