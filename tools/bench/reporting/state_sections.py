"""The state of a job: the sharded optimizer, and a checkpoint beside the disk."""

import os
import shutil
import tempfile
import time

from reporting import figures
from reporting.disturbance import Referee, off_cpu_share
from reporting.figures import Rounds
from reporting.models import MODELS
from reporting.processes import BenchmarkError
from reporting.step_sections import RANKS, Contest, Side

BLOCK = 1 << 20  # of a file that is written or read
ZERO_LIMIT = 0.9  # of plain DDP with the plain optimizer
ZERO_PLAIN = "default+adam"
ZERO_MODES = ["zero", "zero_scatter", "zero_overlap", "zero_whole"]


def check_parameters(mode, sums, plain_sums):
    """Raises unless all modes have the same parameters after the same steps."""
    if sums != plain_sums:
        raise BenchmarkError(f"mode {mode}: sums of parameters {sums}, expected {plain_sums}")


def run_zero(context, section):
    """A step with ZeroRedundancyOptimizer beside plain DDP with the plain optimizer."""
    context.require_cores(RANKS)
    command = [context.program("step-worker"), f"--backend={context.options.backend}"]
    for model in context.options.models or MODELS[1 : 2 if context.quick else 3]:
        contest = Contest(context, model, [("zero", command, ZERO_MODES)], plain=ZERO_PLAIN,
                          check=check_parameters)  # fmt: skip
        contest.run(context.rounds(15, 2), 2 if context.quick else 5)
        rounds = contest.rounds
        # The rows are named by the mode alone.
        rounds.times = {mode: column for (_, mode), column in rounds.times.items()}
        title = f"{model.name}: {model.describe()}, Adam; rounds: {rounds.count()}"
        table = section.table(title, ["", "rounds", "step / plain optimizer", "ms"])
        for mode in rounds.times:
            table.add_rounds(
                rounds,
                [mode],
                lambda which, mode=mode: rounds.ratio(mode, ZERO_PLAIN, which),
                lambda which, mode=mode: rounds.seconds(mode, which, 1e3),
            )
        section.data[model.name] = rounds.as_json()
        if model.name == "large":
            name = f"step with sharded Adam, {model.describe()}, to plain Adam"
            ratio = rounds.ratio("zero", ZERO_PLAIN)
            quiet = len(rounds.indexes())
            section.gates.append(figures.gate_below(name, ZERO_LIMIT, ratio, quiet))


# ---- Checkpoint ---------------------------------------------------------------------------------


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
    context.require_cores(RANKS)
    command = [context.program("step-worker")]
    model = MODELS[1 if context.quick else 2]
    size = model.tensors()[1] * 4
    rounds = Rounds()
    chosen = context.options.checkpoint_folder
    place = tempfile.TemporaryDirectory(prefix="checkpoint.", dir=chosen or context.folder)
    with place as folder, Referee(context) as control:
        with Side(context, "checkpoint", command, model) as side:
            side.answers("the start")
            checkpoint_round(side, folder, size)  # what is slow once: folders, connections
            for _ in range(context.rounds(7, 2)):
                # Threads of the kernel write to the disk: the control alone tells other programs.
                times = checkpoint_round(side, folder, size)
                rounds.add(times, off_cpu_share(control.copy()[1]))
    where = chosen or "the temporary folder"
    title = f"Checkpoint of {size / 1e6:.0f} MB by {RANKS} ranks, in {where}"
    table = section.table(title, ["", "rounds", "MB/s", "time to the disk's own"])
    for key, name, base in (
        ("write", "write and fsync of a file", None),
        ("save", "save, durable", "write"),
        ("read", "read of that file, cached", None),
        ("restore", "restore, checked", "read"),
    ):

        def rate(which, key=key):
            return figures.of([size / 1e6 / rounds.times[key][i] for i in rounds.indexes(which)])

        table.add_rounds(
            rounds, [name], rate, lambda which, key=key, base=base: rounds.ratio(key, base, which)
        )
    section.data = {"bytes": size, **rounds.as_json()}
