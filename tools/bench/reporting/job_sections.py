"""The parts around a job: store, start, restart, loss of a node, checkpoint, sharded optimizer."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time

import benchmark_tools as tools
import ddp_step_benchmark as steps
import launcher_benchmark
import node_loss_benchmark
import recovery_benchmark
import torchrun_benchmark
import zero_step_benchmark as zero
from reporting import figures
from reporting import context as contexts
from reporting.context import NotRun, build_of, require
from reporting.disturbance import Watch, off_cpu_share
from reporting.document import Table
from reporting.figures import Rounds

# How long one program may take.
PATIENCE_S = 900
BLOCK = 1 << 20  # of a file that is written or read
ZERO_LIMIT = 0.9  # of plain DDP with the plain optimizer
# How lines of rendezvous_benchmark start -> the column of the report.
RENDEZVOUS_LINES = {
    "joined and running": "s until all have joined",
    "a failure is known to all": "s until all know of a failure",
    "and all have joined again": "s until all have joined again",
    "heartbeats each": "% of a core for heartbeats",
}
STORE_LINE = re.compile(
    r"^(?P<what>.{24}) (?P<who>\S.{17}) +(?P<us>[\d.]+) us +"
    r"\[(?P<first>[\d.]+), (?P<third>[\d.]+)\](?:  ratio (?P<ratio>[\d.]+))?"
)


def run_program(command):
    """The output of a program. Raises BenchmarkError when it fails or takes too long."""
    try:
        answer = subprocess.run(
            command, cwd=tools.ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise tools.BenchmarkError(f"{command[0]} took over {PATIENCE_S} s") from None
    if answer.returncode != 0:
        tail = (answer.stdout + answer.stderr)[-1500:]
        raise tools.BenchmarkError(f"{command[0]} ended with {answer.returncode}:\n{tail}")
    return answer.stdout


def require_redis():
    if shutil.which("redis-server") is None:
        raise NotRun("redis-server is not installed")


# ---- Store, rendezvous ------------------------------------------------------------------------


def parse_store(text):
    """Rows of store_benchmark's output: (what, who, us, first, third, ratio or "")."""
    rows, what = [], ""
    for line in text.splitlines():
        found = STORE_LINE.match(line)
        if found:
            what = found["what"].strip() or what
            ratio = found["ratio"] or ""
            numbers = [float(found[x]) for x in ("us", "first", "third")]
            rows.append((what, found["who"].strip(), *numbers, ratio))
    return rows


def run_store(context, section):
    require_redis()
    program = context.options.store_benchmark
    require(program, build_of("//tools/bench:store_benchmark"))
    command = [program]
    if context.quick:
        command += ["--rounds=3", "--calls=50", "--members=16", "--join_rounds=2"]
    text = run_program(command)
    table = Table("One operation", ["operation", "store", "us", "to TCPStore"])
    rows = parse_store(text)
    for what, who, median, first, third, ratio in rows:
        us = figures.text(figures.Quartiles(first, median, third))
        table.rows.append([what, who, us, ratio or figures.NONE])
    section.tables = [table]
    section.data = {"rows": rows, "output": text}


def parse_rendezvous(text):
    """A row for each size of rendezvous_benchmark's output: the agents, then RENDEZVOUS_LINES."""
    rows = []
    for line in text.splitlines():
        agents = re.match(r"(\d+) agents, ", line)
        if agents:
            rows.append([f"{int(agents[1]):,}", *([figures.NONE] * len(RENDEZVOUS_LINES))])
        for column, start in enumerate(RENDEZVOUS_LINES, 1):
            if rows and line.startswith(start):
                rows[-1][column] = re.search(r"([\d.]+)(?: s on the wall| s, worst| %)", line)[1]
    return rows


def run_rendezvous(context, section):
    require_redis()
    program = context.options.rendezvous_benchmark
    require(program, build_of("//tools/bench:rendezvous_benchmark"))
    command = [program, "--agents=1000,10000"]
    if context.quick:
        command = [program, "--agents=50", "--failures=2", "--heartbeat_seconds=2"]
        command += ["--heartbeat_times=1"]
    section.text = run_program(command)
    columns = ["agents", *RENDEZVOUS_LINES.values()]
    section.tables = [Table("One Redis", columns, parse_rendezvous(section.text))]


# ---- Start, restart, loss of a node -----------------------------------------------------------


def _worst(values):
    return f"{max(values):.3f}"


def run_launch(context, section):
    """The start of a worker, and what ddprun takes while nothing happens."""
    require_redis()
    require(context.options.ddprun, build_of("//launcher:ddprun"))
    arguments = [f"--ddprun={context.options.ddprun}", f"--starts={5 if context.quick else 20}"]
    arguments += [f"--idle-seconds={2 if context.quick else 20}"]
    notes = []
    try:
        context.peer()
        arguments.append(f"--torch-python={context.options.torch_python}")
    except NotRun as missing:
        notes.append(f"torchrun: not run: {missing}")
    options = launcher_benchmark.parse_arguments(arguments)
    folder = os.path.join(context.folder, "launch")
    os.mkdir(folder)
    times = launcher_benchmark.measure_starts(options, folder)
    columns = ["", "ms to the first moment of the worker", "worst"]
    table = Table("Start", columns, notes=notes)
    for name, values in times.items():
        table.rows.append([name, figures.text(figures.of(values)), _worst(values)])
    memory, redis, busy, redis_busy = launcher_benchmark.measure_idle(options, folder)
    idle = Table(
        f"{launcher_benchmark.WORKERS} workers that do nothing",
        ["", "resident, MiB", "% of a core"],
        [
            ["ddprun", f"{memory:.1f}", f"{busy:.3f}"],
            ["its Redis", f"{redis:.1f}", f"{redis_busy:.3f}"],
        ],
    )
    section.tables = [table, idle]
    section.data = {"start_ms": times}


def run_restart(context, section):
    """The same program under ddprun and torchrun, and the whole recovery of a training job."""
    require_redis()
    require(context.options.ddprun, build_of("//launcher:ddprun"))
    table = Table("One Python program", ["", "s to the first line", "s to the first all-reduce"])
    section.tables.append(table)
    try:
        context.peer()
        section.data["torchrun"] = _restart_beside_torchrun(context, table)
    except NotRun as missing:
        table.notes.append(f"ddprun beside torchrun: not run: {missing}")
    table = Table("Digits trainer, 2 ranks", ["s from the kill to", "", "worst"])
    section.tables.append(table)
    try:
        require(context.options.train, build_of("//launcher:ddprun", "//examples/digits:train"))
        section.data["recovery"] = _recovery(context, table)
    except NotRun as missing:
        table.notes.append(f"not run: {missing}")


def _restart_beside_torchrun(context, table):
    python = context.options.torch_python
    flags = ["--standalone", f"--nproc-per-node={torchrun_benchmark.RANKS}"]
    flags += [f"--max-restarts={torchrun_benchmark.MAX_RESTARTS}", torchrun_benchmark.PROGRAM]
    commands = {
        "ddprun": [context.options.ddprun, *flags],
        "torchrun": [python, "-m", "torch.distributed.run", *flags],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    restarts = {name: [] for name in commands}
    for i in range(context.rounds(10, 1)):
        for name, command in commands.items():
            folder = os.path.join(context.folder, f"restart-{name}-{i}")
            os.mkdir(folder)
            found = torchrun_benchmark.measure(
                command, environment, i % torchrun_benchmark.RANKS, folder
            )
            restarts[name].append(found)
    for name, those in restarts.items():
        lines, sums = [r.line_s for r in those], [r.sum_s for r in those]
        known = [s for s in sums if s != float("inf")]
        table.rows.append([name, figures.text(figures.of(lines)), figures.text(figures.of(known))])
        given_up = len(sums) - len(known)
        burnt = sum(r.burnt for r in those if r.sum_s != float("inf"))
        table.notes.append(
            f"{name}: {len(those)} kills, {burnt} restarts beyond them, {given_up} jobs given up."
        )
    return {name: [[r.line_s, r.sum_s] for r in those] for name, those in restarts.items()}


def _recovery(context, table):
    kills = context.rounds(10, 2)
    options = recovery_benchmark.parse_arguments(
        [
            f"--ddprun={context.options.ddprun}",
            f"--train={context.options.train}",
            f"--kills={kills}",
            f"--epochs={20 if context.quick else 80}",
        ]
    )
    folder = os.path.join(context.folder, "recovery")
    os.mkdir(folder)
    measured = recovery_benchmark.measure(options, folder)
    difference = recovery_benchmark.first_difference(measured.expected[1], measured.found[1])
    if measured.burnt or difference:
        raise tools.BenchmarkError(measured.burnt or f"the models differ: {difference}")
    kinds = {
        "the notice": [r.noticed_s for r in measured.recoveries],
        "the new workers' start": [r.started_s for r in measured.recoveries],
        "the first step of all ranks": [r.stepped_s for r in measured.recoveries],
    }
    for name, values in kinds.items():
        table.rows.append([name, figures.text(figures.of(values)), _worst(values)])
    table.notes.append(f"{kills} kills; the model and optimizer are those of a run in peace.")
    return kinds


def run_node_loss(context, section):
    """A host of three loses its power."""
    require_redis()
    programs = [context.options.ddprun, context.options.train]
    for program in programs:
        require(program, build_of("//launcher:ddprun", "//examples/digits:train"))
    if node_loss_benchmark.hosts.why_not():
        raise NotRun(node_loss_benchmark.hosts.why_not())
    options = node_loss_benchmark.parse_arguments(
        [
            f"--ddprun={programs[0]}",
            f"--train={programs[1]}",
            f"--losses={context.rounds(10, 1)}",
        ]
    )
    columns = ["", "s to the notice", "s to the survivors' first step", "worst"]
    table = Table("Network namespaces, two ranks each", columns)
    cases = node_loss_benchmark.CASES[-1:] if context.quick else node_loss_benchmark.CASES
    for lease_ms, _ in cases:
        folder = os.path.join(context.folder, f"loss-{lease_ms}")
        try:
            losses = node_loss_benchmark.measure_case(options, lease_ms, folder)
        except node_loss_benchmark.hosts.HostsError as error:
            raise tools.BenchmarkError(str(error)) from None
        name = f"--lease-ms={lease_ms}" if lease_ms else "default settings"
        noticed = [loss.noticed_s for loss in losses]
        stepped = [loss.stepped_s for loss in losses]
        row = [name, figures.text(figures.of(noticed)), figures.text(figures.of(stepped))]
        table.rows.append([*row, _worst(stepped)])
        section.data[name] = stepped
    section.tables = [table]


# ---- Checkpoint -------------------------------------------------------------------------------


def write_file(path, size):
    """Writes and syncs a file, and its folder. Returns the seconds."""
    block = bytes(BLOCK)
    begun = time.monotonic()
    with open(path, "wb", buffering=0) as stream:
        for _ in range(size // BLOCK):
            stream.write(block)
        stream.write(block[: size % BLOCK])
        os.fsync(stream.fileno())
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return time.monotonic() - begun


def read_file(path):
    """Reads a file into one buffer. Returns the seconds."""
    block = bytearray(BLOCK)
    begun = time.monotonic()
    with open(path, "rb", buffering=0) as stream:
        while stream.readinto(block):
            pass
    return time.monotonic() - begun


def checkpoint_round(side, folder, size):
    """One round in `folder`, on the disk that is measured: name -> seconds."""
    path, checkpoints = os.path.join(folder, "file"), os.path.join(folder, "checkpoints")
    times = {"write": write_file(path, size)}
    answers = side.ask(f"checkpoint {checkpoints}")
    times["save"] = max(answer["save_ns"] for answer in answers) / 1e9
    times["read"] = read_file(path)
    times["restore"] = max(answer["restore_ns"] for answer in answers) / 1e9
    os.remove(path)
    shutil.rmtree(checkpoints)
    return times


def run_checkpoint(context, section):
    """A durable save beside a synced file of as many bytes, and a restore beside a read of it."""
    context.require_cores(steps.RANKS)
    command = context.our_sides()
    model = steps.MODELS[1 if context.quick else 2]
    size = model.tensors()[1] * 4
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        place = context.options.checkpoint_folder or context.folder
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint.", dir=place))
        control = stack.enter_context(contexts.Copiers(context))
        side = steps.Side("checkpoint", command, model, context.cpus, context.folder)
        stack.enter_context(side)
        side.answers("the start")
        checkpoint_round(side, folder, size)  # what is slow once: folders, connections
        for _ in range(context.rounds(7, 2)):
            # Threads of the kernel write to the disk: other programs' share is not told from it.
            times = checkpoint_round(side, folder, size)
            rounds.add(times, off_cpu_share(control.copy()[1]))
    where = context.options.checkpoint_folder or "the temporary folder"
    title = f"Checkpoint of {size / 1e6:.0f} MB by {steps.RANKS} ranks, in {where}"
    section.tables = [_checkpoint_table(title, size, rounds)]
    section.data = {"bytes": size, **rounds.as_json()}


def _checkpoint_table(title, size, rounds):
    table = Table(title, ["", "rounds", "MB/s", "time to the disk's own"])
    names = {
        "write": ("write and fsync of a file", None),
        "save": ("save, durable", "write"),
        "read": ("read of that file, cached", None),
        "restore": ("restore, checked", "read"),
    }
    for key, (name, base) in names.items():
        for disturbed in (False, True):
            chosen = rounds.indexes(disturbed)
            if not chosen:
                continue
            rates = figures.of([size / 1e6 / rounds.times[key][i] for i in chosen])
            ratio = rounds.ratio(key, base, disturbed) if base else None
            word = "disturbed" if disturbed else "quiet"
            row = [name, f"{len(chosen)} {word}", figures.text(rates), figures.text(ratio)]
            table.rows.append(row)
    return table


# ---- Sharded optimizer ------------------------------------------------------------------------


def run_zero(context, section):
    """A step with ZeroRedundancyOptimizer beside plain DDP with the plain optimizer."""
    context.require_cores(steps.RANKS)
    command = context.our_sides()
    names = ["medium"] if context.quick else ["medium", "large"]
    columns = ["", "rounds", "step / plain optimizer", "ms"]
    for model in steps.parse_models(",".join(names)):
        rounds = _zero_rounds(context, command, model)
        title = f"{model.name}: {model.describe()}, Adam; rounds: {rounds.count()}"
        table = Table(title, columns)
        for mode in rounds.times:
            for disturbed in (False, True):
                count = len(rounds.indexes(disturbed))
                if count == 0:
                    continue
                row = [mode, f"{count} {'disturbed' if disturbed else 'quiet'}"]
                row.append(figures.text(rounds.ratio(mode, zero.PLAIN, disturbed)))
                ms = figures.scaled(rounds.seconds(mode, disturbed), 1e3)
                table.rows.append([*row, figures.text(ms)])
        section.tables.append(table)
        section.data[model.name] = rounds.as_json()
        if model.name == "large":
            name = f"step with sharded Adam, {model.describe()}, to plain Adam"
            ratio = rounds.ratio("zero", zero.PLAIN)
            quiet = len(rounds.indexes())
            section.gates.append(figures.gate_below(name, ZERO_LIMIT, ratio, quiet))


def _zero_rounds(context, command, model):
    results, rounds = {}, Rounds()
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(contexts.Copiers(context))
        side = steps.Side("zero", command, model, context.cpus, context.folder)
        stack.enter_context(side)
        side.answers("the start")
        for mode in [zero.PLAIN] + zero.MODES:
            side.steps(mode, 2 if context.quick else 5)
        watch = Watch(side.pids() + control.pids(), context.cpus)
        for _ in range(context.rounds(15, 2)):
            watch.begin()
            copy_s, answers = control.copy()
            zero.run_round(side, model, results)
            times = {mode: series.step_ms[-1] / 1e3 for mode, series in results.items()}
            rounds.add({**times, "memcpy": copy_s}, watch.end(answers))
    return rounds
