"""A job's life under ddprun, beside torchrun: its start, the kill of a rank, the loss of a host."""

import os
import random
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass

from reporting import figures, processes
from reporting.figures import target
from reporting.processes import BenchmarkError, Logged, NotRun, read_events, wait_for

sys.path.insert(0, os.path.join(processes.ROOT, "testing/hosts"))
import hosts  # noqa: E402
import hosts_job  # noqa: E402

RANKS = 2
WORKERS = 8  # of an idle job
START_TARGET_MS, START_WITH_REDIS_TARGET_MS = 30, 80
MEMORY_TARGET_MIB, IDLE_TARGET_PERCENT = 20, 0.5
RECOVERY_TARGET_S = 1


def torchrun(python):
    return [python, "-m", "torch.distributed.run"]


def worst(values):
    return f"{max(values):.3f}"


# ---- Start --------------------------------------------------------------------------------------


def start_ms(command):
    """From here to the first moment of a worker that prints the time: its own start is included."""
    begun = time.time_ns()
    output = processes.run_program([*command, "--no-python", "date", "+%s%N"])
    return (int(output) - begun) / 1e6


def measure_starts(context, folder, python):
    """name -> times in ms. The kinds take turns."""
    ddprun = context.program("ddprun")
    with processes.redis_server(folder) as socket:
        commands = {
            "ddprun, Redis runs already": [ddprun, f"--rdzv-endpoint=unix://{socket}"],
            "ddprun --standalone": [ddprun, "--standalone"],
        }
        if python:
            commands["torchrun --standalone"] = [*torchrun(python), "--standalone"]
        times = {name: [] for name in commands}
        for _ in range(context.rounds(20, 5)):
            for name, command in commands.items():
                times[name].append(start_ms(command))
    return times


def measure_idle(ddprun, seconds, folder):
    """Of ddprun's two processes, keeper and agent, and of its Redis: [(MiB, % of a core)]."""
    log = os.path.join(folder, "events.jsonl")
    command = [ddprun, "--standalone", f"--nproc-per-node={WORKERS}", "--no-python"]
    command += [f"--event-log-file={log}", "sleep", "1000"]
    with Logged(command, os.path.join(folder, "output")) as job:
        wait_for("start of the workers", lambda: latest_generation(read_events(log)), job.why_ended)
        below = processes.descendants_of(job.process.pid)

        def named(prefix):
            return [pid for pid in below if _command_name(pid).startswith(prefix)]

        groups = [[job.process.pid, *named("ddp")], named("redis-server")]
        time.sleep(1)  # what belongs to the start is over

        def spent():
            return [sum(processes.cpu_seconds(pid) for pid in group) for group in groups]

        begun, before = time.monotonic(), spent()
        time.sleep(seconds)
        wall, after = time.monotonic() - begun, spent()
        memory = [sum(processes.memory_mb(p, "VmRSS") for p in group) * 1e6 / 2**20
                  for group in groups]  # fmt: skip
        return [(mib, 100 * (b - a) / wall) for mib, a, b in zip(memory, before, after)]


def _command_name(pid):
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
        return stream.read().strip()


def run_launch(context, section):
    """The start of a worker, and what ddprun takes while nothing happens."""
    context.require_redis()
    ddprun = context.program("ddprun")
    table = section.table("Start", ["", "ms to the first moment of the worker", "worst"])
    try:
        python = context.torch_python()
    except NotRun as missing:
        python = ""
        table.notes.append(f"torchrun: not run: {missing}")
    folder = context.place("launch")
    times = measure_starts(context, folder, python)
    for name, values in times.items():
        table.add(name, figures.of(values), worst(values))
    for (name, values), limit in zip(times.items(), (START_TARGET_MS, START_WITH_REDIS_TARGET_MS)):
        table.notes.append(target(f"{name}, worst", max(values), limit, "ms"))
    found = measure_idle(ddprun, 2 if context.quick else 20, folder)
    idle = section.table(f"{WORKERS} workers that do nothing", ["", "resident, MiB", "% of a core"])
    for name, (mib, percent) in zip(("ddprun", "its Redis"), found):
        idle.add(name, f"{mib:.1f}", f"{percent:.3f}")
    idle.notes.append(target("ddprun's memory", found[0][0], MEMORY_TARGET_MIB, "MiB"))
    idle.notes.append(target("ddprun's time", found[0][1], IDLE_TARGET_PERCENT, "% of a core"))
    section.data = {"start_ms": times}


# ---- A rank is killed: one Python program under ddprun and torchrun -----------------------------

PROGRAM = os.path.join(processes.BENCH, "torchrun_program.py")
MAX_RESTARTS = 4  # the kill costs one
LINE_SHARE = 0.33  # the most that ddprun may take of torchrun's time to the first line
HANG_S = 60  # a job that has not come back by then counts as given up


def read_log(path):
    """(what, restart, rank) -> (pid, monotonic_ns)."""
    entries = {}
    if os.path.exists(path):
        with open(path, encoding="ascii") as stream:
            for line in stream.read().split("\n")[:-1]:
                what, *numbers = line.split()
                restart, rank, pid, at = (int(x) for x in numbers)
                entries[what, restart, rank] = (pid, at)
    return entries


def slowest(entries, what, restart):
    """When the last rank got there; None while one has not."""
    times = [entries.get((what, restart, rank)) for rank in range(RANKS)]
    return None if None in times else max(at for _, at in times)


@dataclass
class Restart:
    line_s: float  # from the kill to the first line of all new workers
    sum_s: float  # to their first all-reduce; infinite when there was none
    burnt: int  # restarts beyond the one that the kill cost


def restart_of(entries, killed_at, over):
    """What followed the kill; None while it may still come.

    A new worker may fail by itself, because it meets addresses of the attempt before. Then the
    launcher restarts it again, or gives up, or hangs.
    """
    first = slowest(entries, "line", 1)
    sums = [slowest(entries, "sum", restart) for restart in range(1, MAX_RESTARTS + 1)]
    done = next((i for i, at in enumerate(sums) if at is not None), None)
    if first is None or (done is None and not over):
        return None
    if done is None:
        last = max(restart for _, restart, _ in entries)
        return Restart((first - killed_at) / 1e9, float("inf"), last - 1)
    return Restart((first - killed_at) / 1e9, (sums[done] - killed_at) / 1e9, done)


def measure_restart(command, python, rank, folder):
    """Kills one rank of a job of its own, and returns what followed."""
    log = os.path.join(folder, "log")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, "DDP_BENCHMARK_LOG": log}
    flags = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={MAX_RESTARTS}"]
    with Logged([*command, *flags, PROGRAM], os.path.join(folder, "output"), env) as job:
        wait_for("first sum", lambda: slowest(read_log(log), "sum", 0), job.why_ended)
        time.sleep(0.2)  # well into the loop
        killed_at = time.monotonic_ns()
        os.kill(read_log(log)["line", 0, rank][0], signal.SIGKILL)

        def restart():
            hangs = time.monotonic_ns() - killed_at > HANG_S * 1e9
            return restart_of(read_log(log), killed_at, hangs or job.why_ended() != "")

        return wait_for("sum after the kill", restart)


def _beside_torchrun(context, table):
    python = context.torch_python()
    commands = {"ddprun": [context.program("ddprun")], "torchrun": torchrun(python)}
    restarts = {name: [] for name in commands}
    for i in range(context.rounds(10, 1)):
        for name, command in commands.items():
            folder = context.place(f"restart-{name}-{i}")
            restarts[name].append(measure_restart(command, python, i % RANKS, folder))
    for name, those in restarts.items():
        known = [r for r in those if r.sum_s != float("inf")]
        table.add(name, figures.of([r.line_s for r in those]), figures.of([r.sum_s for r in known]))
        table.notes.append(
            f"{name}: {len(those)} kills, {sum(r.burnt for r in known)} restarts beyond them, "
            f"{len(those) - len(known)} jobs given up."
        )
    for what, kind, limit in (("line", "line_s", LINE_SHARE), ("all-reduce", "sum_s", 1)):
        ours, theirs = (statistics.median(getattr(r, kind) for r in restarts[name])
                        for name in commands)  # fmt: skip
        words = f"ddprun's time to the first {what}"
        table.notes.append(target(words, ours / theirs, limit, "of torchrun's"))
    return {name: [[r.line_s, r.sum_s] for r in those] for name, those in restarts.items()}


# ---- A rank is killed: the digits trainer under ddprun ------------------------------------------


@dataclass
class Kill:
    generation: int  # the one it ended
    rank: int
    pid: int
    monotonic_ns: int


@dataclass
class Recovery:
    """From a kill to the end of the first optimizer step of the new generation, restore included.

    The kill's time is taken here, the step's is the worker's own stamp in ddprun's event log. Both
    are CLOCK_MONOTONIC.
    """

    kill: Kill
    generation: int  # the new one
    step: int  # the first that it did
    noticed_s: float  # from the kill to the entry of the killed worker's end
    started_s: float  # to the start of the new workers
    stepped_s: float  # to the end of the first step on the slowest rank


def events_of(events, name, generation):
    return [e for e in events if e["event"] == name and e["generation"] == generation]


def latest_generation(events):
    return max((e["generation"] for e in events if e["event"] == "generation_started"), default=0)


def workers_of(events, generation):
    """rank -> pid of a generation; {} when it has not started."""
    started = events_of(events, "generation_started", generation)
    return dict(zip(started[0]["ranks"], started[0]["pids"])) if started else {}


def has_stepped(events, generation):
    """Whether every worker of the generation has done a step."""
    workers = workers_of(events, generation)
    stepped = {e["rank"] for e in events_of(events, "first_step", generation)}
    return bool(workers) and stepped == set(workers)


def recovery_of(events, kill):
    """What followed a kill; None while it is not over."""
    generation = latest_generation(events)
    if generation <= kill.generation or not has_stepped(events, generation):
        return None
    steps = events_of(events, "first_step", generation)
    last = max(steps, key=lambda e: e["monotonic_ns"])

    def since_kill(those):
        return (those[0]["monotonic_ns"] - kill.monotonic_ns) / 1e9 if those else float("nan")

    exits = [e for e in events if e["event"] == "worker_exited" and e["pid"] == kill.pid]
    started = events_of(events, "generation_started", generation)
    times = (since_kill(exits), since_kill(started), since_kill([last]))
    return Recovery(kill, generation, last["step"], *times)


class Training(Logged):
    """One run of the digits trainer under ddprun. Killed when it is left early."""

    def __init__(self, context, folder, kills, epochs):
        self.checkpoints = os.path.join(folder, "checkpoints")
        self.event_log = os.path.join(folder, "events.jsonl")
        command = [context.program("ddprun"), "--standalone", f"--nproc-per-node={RANKS}"]
        command += [f"--max-restarts={kills}", f"--event-log-file={self.event_log}"]
        command += [context.program("train"), f"--checkpoint_dir={self.checkpoints}"]
        command += [f"--epochs={epochs}", "--checkpoint_every=10"]
        super().__init__(command, os.path.join(folder, "output"))

    def events(self):
        return read_events(self.event_log)

    def epochs(self):
        return len(re.findall(r"^epoch \d+ ", self.text(), re.MULTILINE))

    def wait_for(self, what, condition):
        return wait_for(what, condition, self.why_ended)

    def epoch_ends(self):
        """Waits for the end of an epoch. Returns its time."""
        seen = self.epochs()
        self.wait_for("end of an epoch", lambda: self.epochs() > seen)
        return time.monotonic()

    def kill_in_mid_epoch(self, rank, epoch_s):
        """Kills one rank half an epoch after the generation's first whole epoch."""
        generation = latest_generation(self.events())
        self.wait_for("first step", lambda: has_stepped(self.events(), generation))
        while True:
            self.epoch_ends()
            seen = self.epochs()
            time.sleep(epoch_s / 2)
            if self.epochs() == seen:  # else an epoch was faster than the ones before
                break
        pid = workers_of(self.events(), generation)[rank]
        kill = Kill(generation, rank, pid, time.monotonic_ns())
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise BenchmarkError("the job was done before all kills") from None
        return kill


def final_files(checkpoints):
    """(name, name -> bytes) of the model and optimizer files of the last checkpoint."""
    folders = sorted(x for x in os.listdir(checkpoints) if x.startswith("step-"))
    if not folders:
        raise BenchmarkError(f"no checkpoint in {checkpoints}")
    folder = os.path.join(checkpoints, folders[-1])
    files = {}
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"(model|optimizer)-.*\.safetensors", name):
            with open(os.path.join(folder, name), "rb") as stream:
                files[name] = stream.read()
    if not any(x.startswith("model-") for x in files):
        raise BenchmarkError(f"no model file in {folder}")
    return folders[-1], files


def first_difference(left, right):
    """In words, or None when both hold the same files with the same bytes."""
    if set(left) != set(right):
        return f"the files are {sorted(left)} and {sorted(right)}"
    for name, data in left.items():
        if data != right[name]:
            pairs = zip(data, right[name])
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end of the shorter")
            return f"{name} differs at byte {at}"
    return None


def restarts_beyond(events, kills):
    """Why the job's restarts are not one for each kill, in words; "" when they are."""
    restarts = [e for e in events if e["event"] == "restart"]
    causes = {f"rank {kill.rank} was killed by SIGKILL" for kill in kills}
    others = [e["reason"] for e in restarts if e["reason"] not in causes]
    if len(restarts) == len(kills) and not others:
        return ""
    return f"{len(restarts)} restarts after {len(kills)} kills; other causes: {others}"


def _recovery(context, table):
    """Trains once in peace and once with kills of ranks left to chance. Both end the same."""
    kills = context.rounds(10, 2)
    epochs = 20 if context.quick else max(80, 4 * kills)
    with Training(context, context.place("peace"), 0, epochs) as job:
        begun, seen = job.epoch_ends(), job.epochs()
        job.finish()
        epoch_s = (time.monotonic() - begun) / max(1, job.epochs() - seen)
        _, expected = final_files(job.checkpoints)
    recoveries, chosen = [], random.Random(0)
    with Training(context, context.place("war"), kills, epochs) as job:
        job.wait_for("start of the workers", lambda: latest_generation(job.events()))
        for _ in range(kills):
            kill = job.kill_in_mid_epoch(chosen.randrange(RANKS), epoch_s)
            found = lambda kill=kill: recovery_of(job.events(), kill)  # noqa: E731
            recoveries.append(job.wait_for("recovery", found))
        job.finish()
        burnt = restarts_beyond(job.events(), [r.kill for r in recoveries])
        difference = first_difference(expected, final_files(job.checkpoints)[1])
    if burnt or difference:
        raise BenchmarkError(burnt or f"the models differ: {difference}")
    kinds = {
        "the notice": [r.noticed_s for r in recoveries],
        "the new workers' start": [r.started_s for r in recoveries],
        "the first step of all ranks": [r.stepped_s for r in recoveries],
    }
    for name, values in kinds.items():
        table.add(name, figures.of(values), worst(values))
    table.notes.append(f"{kills} kills; the model and optimizer are those of a run in peace.")
    last = max(r.stepped_s for r in recoveries)
    table.notes.append(target("First step, worst", last, RECOVERY_TARGET_S, "s"))
    return kinds


def run_restart(context, section):
    """The same program under ddprun and torchrun, and the whole recovery of a training job."""
    context.require_redis()
    context.program("ddprun")
    columns = ["", "s to the first line", "s to the first all-reduce"]
    table = section.table("One Python program", columns)
    try:
        section.data["torchrun"] = _beside_torchrun(context, table)
    except NotRun as missing:
        table.notes.append(f"ddprun beside torchrun: not run: {missing}")
    table = section.table("Digits trainer, 2 ranks", ["s from the kill to", "", "worst"])
    try:
        section.data["recovery"] = _recovery(context, table)
    except NotRun as missing:
        table.notes.append(f"not run: {missing}")


# ---- A host is lost -----------------------------------------------------------------------------

NAMES = ["a", "b", "c"]
# Lease in ms, None: the default; and the most seconds that a loss may take.
CASES = [(None, 5), (1000, 2.5)]


def lose_host(job, lost, folder):
    """Takes one host's power, waits for the others, and brings it back.

    Returns the seconds until the last survivor knew, and until the slowest rank had done a step.
    """
    survivors = [name for name in NAMES if name != lost]
    wait_for("checkpoint", lambda: os.listdir(os.path.join(folder, "checkpoints")))
    time.sleep(random.uniform(0.5, 1.5))  # anywhere in a step and between two heartbeats
    lost_at = time.monotonic_ns()
    job.network[lost].power_off()
    generation = job.await_running(survivors, RANKS * len(survivors))
    nodes = [job.nodes[name] for name in survivors]
    over = [e for node in nodes for e in node.events("generation_over")]
    steps = [step for node in nodes for step in node.first_steps(generation).values()]
    noticed, stepped = (max((e["monotonic_ns"] for e in those), default=float("nan"))
                        for those in (over, steps))  # fmt: skip
    job.network[lost].boot()
    job.start_node(lost)
    job.await_running(NAMES, RANKS * len(NAMES))
    if any(job.nodes[name].last("joined")["restarts"] for name in NAMES):
        raise BenchmarkError(job.quote("a lost host was charged to the budget"))
    return (noticed - lost_at) / 1e9, (stepped - lost_at) / 1e9


def lose_hosts(context, lease_ms, count, folder):
    """Returns what lose_host() does, for hosts that are left to chance."""
    program = [context.program("train"), "--epochs=1000000", "--checkpoint_every=20"]
    program += [f"--checkpoint_dir={os.path.join(folder, 'checkpoints')}"]
    flags = ["--nnodes=2:3", f"--nproc-per-node={RANKS}", "--no-python", "--max-restarts=0"]
    flags += ["--rdzv-id=loss"] + ([f"--lease-ms={lease_ms}"] if lease_ms else [])
    flags += ["--quarantine-strikes=0"]  # a host is lost again and again
    chosen = random.Random(0)
    with hosts.Network(["store", *NAMES]) as network:
        job = hosts_job.Job(network, folder, context.program("ddprun"), program, flags)
        job.start_store("store")
        for name in NAMES:
            job.start_node(name)
        job.await_running(NAMES, RANKS * len(NAMES))
        return [lose_host(job, chosen.choice(NAMES), folder) for _ in range(count)]


def run_node_loss(context, section):
    """A host of three loses its power."""
    context.require_redis()
    for program in ("ddprun", "train"):
        context.program(program)
    if hosts.why_not():
        raise NotRun(hosts.why_not())
    columns = ["", "s to the notice", "s to the survivors' first step", "worst"]
    table = section.table("Network namespaces, two ranks each", columns)
    for lease_ms, limit_s in CASES[-1:] if context.quick else CASES:
        folder = context.place(f"loss-{lease_ms}")
        losses = lose_hosts(context, lease_ms, context.rounds(10, 1), folder)
        name = f"--lease-ms={lease_ms}" if lease_ms else "default settings"
        noticed, stepped = zip(*losses)
        table.add(name, figures.of(noticed), figures.of(stepped), worst(stepped))
        table.notes.append(target(f"{name}, worst", max(stepped), limit_s, "s"))
        section.data[name] = stepped
