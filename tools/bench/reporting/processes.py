"""Programs that the report starts: how they are asked, what they use and what they log."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time

BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(BENCH))
PATIENCE_S = 180  # for an event that a benchmark waits for
PROGRAM_PATIENCE_S = 900  # for a program that runs to its end
POLL_S = 0.002
BARRIER_BYTES = 64  # per rank


class BenchmarkError(Exception):
    """The benchmark cannot go on; the text says why."""


class NotRun(Exception):
    """A section, or a part of one, that cannot run here; the text says why."""


def first_line(*command):
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return answer.stdout.strip().split("\n")[0]
    except OSError:
        return "unknown"


def run_program(command):
    """The output of a program. Raises BenchmarkError when it fails or takes too long."""
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                                timeout=PROGRAM_PATIENCE_S, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{command[0]} took over {PROGRAM_PATIENCE_S} s") from None
    if answer.returncode != 0:
        tail = (answer.stdout + answer.stderr)[-1500:]
        raise BenchmarkError(f"{command[0]} ended with {answer.returncode}:\n{tail}")
    return answer.stdout


def wait_for(what, condition, alive=None, patience_s=PATIENCE_S):
    """The first true value of `condition()`. `alive()` says why it can no longer come, or ""."""
    deadline = time.monotonic() + patience_s
    while True:
        why_not = alive() if alive else ""
        value = condition()
        if value:
            return value
        if why_not:
            raise BenchmarkError(f"no {what}: {why_not}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no {what} in {patience_s} s")
        time.sleep(POLL_S)


def end(process):
    """Ends a launcher: by SIGTERM, which it passes on, and by SIGKILL when that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Logged:
    """A program whose output goes to a file. Ended when the context is left."""

    def __init__(self, command, output, env=None):
        self.name, self.output = command[0], output
        with open(output, "wb") as stream:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream,
                                            stderr=subprocess.STDOUT)  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(self.process)

    def text(self):
        with open(self.output, encoding="utf-8", errors="replace") as stream:
            return stream.read()

    def why_ended(self):
        """For wait_for(): "" while the program runs."""
        if self.process.poll() is None:
            return ""
        code = self.process.returncode
        return f"{self.name} ended with code {code}:\n{self.text()[-3000:]}"

    def finish(self):
        wait_for("end of the job", lambda: self.process.poll() is not None)
        if self.process.returncode != 0:
            raise BenchmarkError(self.why_ended())


@contextlib.contextmanager
def redis_server(folder, port=0):
    """Runs a server on a socket, and on a TCP port unless that is 0. Yields the socket's path."""
    path = os.path.join(folder, "redis.sock")
    command = ["redis-server", "--port", str(port), "--unixsocket", path, "--dir", folder]
    command += ["--save", "", "--protected-mode", "no"]
    with Logged(command, os.path.join(folder, "redis.log")) as server:
        wait_for("Redis server", lambda: os.path.exists(path), server.why_ended)
        yield path


# ---- What a process uses ------------------------------------------------------------------------


def descendants_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
            children = [int(x) for x in stream.read().split()]
    except OSError:
        return []
    return [x for child in children for x in (child, *descendants_of(child))]


def cpu_seconds(pid):
    """What all threads of a process have run, to the nanosecond."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as stream:
            total += int(stream.read().split()[0])
    return total / 1e9


def status_mb(text, name):
    """A line of /proc/PID/status or smaps_rollup in MB."""
    return int(re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE).group(1)) * 1024 / 1e6


def memory_mb(pid, name, file="status"):
    with open(f"/proc/{pid}/{file}", encoding="utf-8") as stream:
        return status_mb(stream.read(), name)


# ---- Event logs ---------------------------------------------------------------------------------


def parse_events(text):
    """The events of a log that may still grow: a line without its end is left for later."""
    return [json.loads(line) for line in text.split("\n")[:-1] if line.strip()]


def read_events(path):
    try:
        with open(path, encoding="utf-8") as stream:
            return parse_events(stream.read())
    except FileNotFoundError:
        return []


# ---- Ranks --------------------------------------------------------------------------------------


def environment(rank, port, ranks, address="127.0.0.1"):
    """Of a rank that finds the others as under torchrun, with an allocator that keeps its memory.

    Page faults in a plain step would hide the costs of the others.
    """
    names = ("DDP_STORE", "DDP_HEALTH_FD", "TORCHELASTIC_ERROR_FILE")
    values = {name: value for name, value in os.environ.items() if name not in names}
    values.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                  LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR=address, MASTER_PORT=str(port),
                  GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
                  MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40))  # fmt: skip
    return values


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def barrier_file(path, ranks):
    """Makes the file by which the ranks of one run meet. Returns its path."""
    with open(path, "wb") as stream:
        stream.write(bytes(BARRIER_BYTES * ranks))
    return path


class Ranks:
    """Processes that answer each line on their stdin with one line of JSON.

    Killed when the context is left.
    """

    patience_s = 120  # for one answer; the first one makes the model

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.processes, self.logs = [], []

    def start(self, label, command, env, **options):
        """Starts the next rank. `label` names its log file."""
        self.logs.append(os.path.join(self.folder, f"log-{label}-{len(self.logs)}"))
        with open(self.logs[-1], "wb") as log:
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, text=True,
                                       stdout=subprocess.PIPE, stderr=log, bufsize=1,
                                       **options)  # fmt: skip
        self.processes.append(process)

    def pids(self):
        return [process.pid for process in self.processes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # a request that the rank never read
                process.stdin.close()
            process.stdout.close()

    def error(self, rank, what):
        with open(self.logs[rank], encoding="utf-8", errors="replace") as stream:
            tail = "".join(stream.readlines()[-20:])
        return BenchmarkError(f"{self.name}: rank {rank} {what}; its log ends with:\n{tail}")

    def answers(self, what, ranks=None):
        """One line of each of `ranks`; default: of every rank."""
        deadline = time.monotonic() + self.patience_s
        answers = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            process = self.processes[rank]
            while not select.select([process.stdout], [], [], 1)[0]:
                if process.poll() is not None:
                    raise self.error(rank, f"ended when asked for {what}")
                if time.monotonic() > deadline:
                    raise self.error(rank, f"took over {self.patience_s} s for {what}")
            line = process.stdout.readline()
            if not line:
                raise self.error(rank, f"ended when asked for {what}")
            answers.append(json.loads(line))
        return answers

    def tell(self, request, ranks=None):
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                self.processes[rank].stdin.write(request + "\n")
            except BrokenPipeError:
                raise self.error(rank, f"ended before {request}") from None

    def ask(self, request):
        """The answers of all ranks to one line."""
        self.tell(request)
        return self.answers(request)
