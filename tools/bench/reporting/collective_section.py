"""Collectives on raw backends from 4 B to 256 MiB, beside Gloo, MPI and a memcpy of all ranks."""

import contextlib
import os
import shutil
import subprocess

from reporting import figures, processes, svg
from reporting.disturbance import CollectiveWorkers, Watch, seconds_of
from reporting.figures import Rounds
from reporting.processes import BenchmarkError, NotRun

MPI_SOURCE = os.path.join(processes.BENCH, "collective_worker_mpi.c")
COLLECTIVES = ["allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"]
SIZES = [4**power for power in range(1, 15)]  # 4 B to 256 MiB
# Of a rank of two, and of all ranks where there are more: buffers of more would not fit a small
# machine.
MOST_BYTES = 256 << 20
CHECKED_BYTES = 4 << 20  # larger results are not compared
MEMCPY = ("memcpy", "private")
GLOO = ("gloo", "private")
MPI = ("mpi", "private")
BATCH_S = {True: 0.003, False: 0.02}  # quick?; of one subject in one round
MOST_CALLS = 20_000
# A control of less time shows no disturbance. Then a longer one follows.
LEAST_CONTROL_S = 0.002
LONG_CONTROL = (1 << 20, 60)  # bytes and calls
MIB = 1 << 20


def calls_for(seconds, batch_s):
    """How many calls of `seconds` fill a batch."""
    return max(1, min(MOST_CALLS, round(batch_s / max(seconds, 1e-9))))


def name_of(subject):
    backend, memory = subject
    words = {"memcpy": "memcpy", "gloo": "Gloo", "mpi": "MPI"}
    name = words.get(backend, f"ours ({backend})")
    return f"{name}, registered" if memory == "registered" else name


class MpiProcess:
    """mpirun, as the process of a rank is used: one pipe to it and one from it."""

    def __init__(self, mpirun, requests, answers):
        self.mpirun = mpirun
        self.pid = mpirun.pid
        self.stdin = requests
        self.stdout = answers

    def poll(self):
        return self.mpirun.poll()

    def kill(self):
        self.mpirun.terminate()  # mpirun ends its ranks; it cannot when it is killed

    def wait(self):
        try:
            self.mpirun.wait(10)
        except subprocess.TimeoutExpired:
            self.mpirun.kill()
            self.mpirun.wait()


class MpiWorkers(processes.Ranks):
    """The same on MPI. Its ranks read pipes, since mpirun has one stdin for all."""

    def __init__(self, context, ranks, program):
        super().__init__("MPI", context.folder)
        prefix = os.path.join(context.folder, f"mpi-{ranks}")
        barrier = processes.barrier_file(f"{prefix}.barrier", ranks)
        for rank in range(ranks):
            os.mkfifo(f"{prefix}.requests.{rank}")
            os.mkfifo(f"{prefix}.answers.{rank}")
        cpus = ",".join(str(context.cpu_of(rank)) for rank in range(ranks))
        self.logs = [f"{prefix}.log"] * ranks
        command = ["mpirun", "-n", str(ranks), program, prefix, barrier, cpus]
        # Open MPI refuses root and more ranks than cores without these. MPICH ignores them.
        env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        env.update(OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")
        with open(self.logs[0], "wb") as log:
            mpirun = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                      stderr=log)  # fmt: skip
        try:
            for rank in range(ranks):
                # Opened for both, so that a rank that never comes does not block this process.
                pipes = [
                    os.open(f"{prefix}.{x}.{rank}", os.O_RDWR) for x in ("requests", "answers")
                ]
                requests = os.fdopen(pipes[0], "w", buffering=1, encoding="ascii")
                answers = os.fdopen(pipes[1], "r", encoding="ascii")
                self.processes.append(MpiProcess(mpirun, requests, answers))
        except OSError:
            mpirun.kill()
            raise

    def pids(self):
        return processes.descendants_of(self.processes[0].pid)


def build_mpi(folder):
    """Compiles the MPI side. Returns its path."""
    for program in ("mpirun", "mpicc"):
        if shutil.which(program) is None:
            raise NotRun(f"{program} is not installed")
    program = os.path.join(folder, "collective_worker_mpi")
    command = ["mpicc", "-O2", "-o", program, MPI_SOURCE]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise NotRun(f"mpicc failed: {answer.stderr.strip().splitlines()[-1:]}")
    return program


class Field:
    """The subjects of one world size: who runs them, and which of them exist."""

    def __init__(self, context, ranks):
        self.context, self.ranks = context, ranks
        self.ours = context.options.ours
        self.by_backend = {}
        self.notes = []
        self.registered = False
        self.stack = contextlib.ExitStack()
        self.refused = {}  # (subject, collective) -> why

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def _start(self, stack):
        names = list(dict.fromkeys([self.ours, "gloo"]))
        workers = CollectiveWorkers(self.context, "collectives", self.ranks, names)
        hello = stack.enter_context(workers).hello
        self.by_backend["memcpy"] = workers
        for name in names:
            reason = hello["backends"].get(name, "not connected")
            if reason:
                self.notes.append(f"{name_of((name, ''))}: not run: {reason}")
            else:
                self.by_backend[name] = workers
        self.registered = hello["registers"].get(self.ours, False)
        if self.ours in self.by_backend and not self.registered:
            self.notes.append(f"ours, registered: not run: {self.ours} allocates no tensors")
        try:
            program = build_mpi(self.context.folder)
            mpi = stack.enter_context(MpiWorkers(self.context, self.ranks, program))
            self.notes.append(f"MPI: {mpi.answers('the start')[0]['version']}")
            self.by_backend["mpi"] = mpi
        except (NotRun, BenchmarkError) as missing:
            self.notes.append(f"MPI: not run: {str(missing).splitlines()[0]}")

    def subjects(self, collective):
        """Those that run `collective`, the control first."""
        found = [MEMCPY]
        if self.ours in self.by_backend and self.ours != "gloo":
            found.append((self.ours, "private"))
        if self.registered and collective == "allreduce":
            found.append((self.ours, "registered"))
        found += [subject for subject in (GLOO, MPI) if subject[0] in self.by_backend]
        return [subject for subject in found if (subject, collective) not in self.refused]

    def time(self, subject, collective, size, count):
        backend, memory = subject
        what = "copy" if backend == "memcpy" else collective
        request = f"time {backend} {what} {size} {memory} {count}"
        return self._ask(subject, collective, request)

    def _ask(self, subject, collective, request):
        answers = self.by_backend[subject[0]].ask(request)
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            self.refused[subject, collective] = failed[0]
            self.notes.append(f"{name_of(subject)}, {collective}: not run: {failed[0]}")
            return None
        return answers

    def check(self, subject, collective, size):
        """Raises when a result is wrong. Returns False when the subject cannot run it."""
        backend, memory = subject
        answers = self._ask(subject, collective, f"check {backend} {collective} {size} {memory}")
        wrong = [answer["wrong"] for answer in answers or []]
        if any(wrong):
            what = f"{name_of(subject)}: {collective} of {size} bytes on {self.ranks} ranks"
            raise BenchmarkError(f"{what}: wrong elements by rank: {wrong}")
        return answers is not None

    def pids(self):
        return [pid for side in set(self.by_backend.values()) for pid in side.pids()]


def measure(field, collective, size, rounds, quick):
    """Returns Rounds of one collective and size; the seconds are those of one call."""
    counts = {}
    for subject in field.subjects(collective):
        if subject != MEMCPY and size <= CHECKED_BYTES:
            if not field.check(subject, collective, size):
                continue
        # The first call is slow once: connections, pages.
        if field.time(subject, collective, size, 1) is None:
            continue
        seconds = seconds_of(field.time(subject, collective, size, 2), 2)
        counts[subject] = calls_for(seconds, BATCH_S[quick])
    measured = Rounds()
    watch = Watch(field.pids(), field.context.cpus)
    subjects = list(counts)
    for turn in range(rounds):
        times = {}
        watch.begin()
        shift = turn % len(subjects)
        for subject in subjects[shift:] + subjects[:shift]:
            answers = field.time(subject, collective, size, counts[subject])
            times[subject] = seconds_of(answers, counts[subject])
            if subject == MEMCPY:
                control = answers
        if seconds_of(control, 1) < LEAST_CONTROL_S:
            control = field.time(MEMCPY, collective, *LONG_CONTROL)
        # With more ranks than cores the copies of the ranks wait for each other.
        share = watch.end(control if field.ranks <= len(field.context.cpus) else [])
        measured.add(times, share)
    return measured


def run_collectives(context, section):
    context.require_cores(2)
    for ranks in context.options.ranks:
        with Field(context, ranks) as field:
            found = _run_field(context, section, field)
        section.gates += gates(found["allreduce"], ranks, context.options.ours)


def _run_field(context, section, field):
    ranks = field.ranks
    most = MOST_BYTES if ranks == 2 else MOST_BYTES // ranks
    most = min(most, 4 * MIB) if context.quick else most
    sizes = [size for size in SIZES if size <= most]
    if context.quick:
        sizes = sizes[::3]
    found = {}
    for collective in COLLECTIVES:
        found[collective] = {
            size: measure(field, collective, size, context.rounds(9, 3), context.quick)
            for size in sizes
        }
        print(f"  {collective} on {ranks} ranks: {len(sizes)} sizes", flush=True)
        _add_table(section, field, collective, found[collective])
        file = f"{collective}-{ranks}.svg"
        section.plots[file] = _plot(collective, ranks, found[collective])
    section.tables[-len(COLLECTIVES)].notes += field.notes
    section.data[f"{ranks} ranks"] = {
        collective: {str(size): rounds.as_json() for size, rounds in by_size.items()}
        for collective, by_size in found.items()
    }
    return found


def _add_table(section, field, collective, by_size):
    """A row for the quiet rounds of each size, and one for its disturbed rounds."""
    ours = field.context.options.ours
    subjects = list(dict.fromkeys(s for rounds in by_size.values() for s in rounds.times))
    mine = [subject for subject in subjects if subject[0] == ours and ours != "gloo"]
    ratios = [(subject, MEMCPY) for subject in mine]
    ratios += [(peer, subject) for peer in (GLOO, MPI) if peer in subjects for subject in mine]
    columns = ["size", "rounds", *(f"{name_of(subject)}, us" for subject in subjects)]
    columns += [f"{name_of(above)} / {name_of(below)}" for above, below in ratios]
    title = f"{collective}, {field.ranks} ranks on {len(field.context.cpus)} cores"
    table = section.table(title, columns)
    for size, rounds in by_size.items():
        for which, words in rounds.kinds():
            times = [rounds.seconds(subject, which, 1e6) for subject in subjects]
            found = [rounds.ratio(*pair, which) for pair in ratios]
            table.add(svg.size_text(size), words, *times, *found)


def _plot(collective, ranks, by_size):
    lines = {}
    for size, rounds in by_size.items():
        for subject in rounds.times:
            time = rounds.seconds(subject, False, 1e6)
            if time:
                points = lines.setdefault(subject, [])
                points.append((size, time.median, time.first, time.third))
    x = svg.Axis("bytes of a rank", log=True, base=4, name=svg.size_text)
    y = svg.Axis("us per call", log=True)
    shown = [svg.Line(name_of(s), points, dashed=s == MEMCPY) for s, points in lines.items()]
    return svg.Plot(f"{collective}, {ranks} ranks", x, y, shown)


def worst(by_size, chosen, subject, base, above):
    """The worst ratio of `subject` to `base` among the chosen sizes, and the fewest quiet rounds.

    (Quartiles, rounds). The quartiles are None when no chosen size has a quiet round. `above`: the
    ratio is that of base to subject, of which the smallest is the worst.
    """
    ratios, quiet = [], []
    for size, rounds in by_size.items():
        if not chosen(size) or subject not in rounds.times or base not in rounds.times:
            continue
        ratio = rounds.ratio(base, subject) if above else rounds.ratio(subject, base)
        quiet.append(len(rounds.indexes()))
        ratios += [ratio] if ratio else []
    pick = min if above else max
    found = pick(ratios, key=lambda ratio: ratio.median, default=None)
    return found, min(quiet, default=-1)


def gates(by_size, ranks, ours):
    """The gates of allreduce on `ranks` ranks."""
    private, registered = (ours, "private"), (ours, "registered")

    def between(low, high):
        return lambda size: low <= size <= high

    def gate(make, name, limit, subject, base, chosen, above):
        found = worst(by_size, chosen, subject, base, above)
        return make(f"allreduce, {ranks} ranks, {name}", limit, *found)

    below, above = figures.gate_below, figures.gate_above
    if ranks != 2:
        everywhere = between(0, 1 << 40)
        name = "Gloo's time to ours, worst of all sizes"
        return [gate(above, name, 1, private, GLOO, everywhere, True)]
    big = between(16 * MIB, 64 * MIB)
    name = "16 to 64 MiB"
    found = [gate(below, f"{name}, registered, to memcpy", 0.70, registered, MEMCPY, big, False)]
    found.append(gate(below, f"{name}, unregistered, to memcpy", 1.2, private, MEMCPY, big, False))
    for subject, word in ((registered, "registered"), (private, "unregistered")):
        for name, limit, chosen in (
            ("1 MiB and more", 8, between(MIB, 1 << 40)),
            ("up to 64 KiB", 100, between(0, 65536)),
        ):
            what = f"{name}, {word}, Gloo's time to ours"
            found.append(gate(above, what, limit, subject, GLOO, chosen, True))
    return found
