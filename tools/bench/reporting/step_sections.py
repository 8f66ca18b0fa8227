"""Training steps: five models beside PyTorch's modes, many ranks, many parameters, and memory."""

import contextlib
import dataclasses
import os
import re
import statistics

import ddp_step_benchmark as steps
from ddp_step_benchmark import OURS, PLAIN, THEIRS
from reporting import context as contexts
from reporting import figures, svg
from reporting.context import NotRun
from reporting.disturbance import Watch
from reporting.document import Table
from reporting.figures import Gate, Rounds

SHARED_MODES = ["default", "view", "static", "find_unused", "view+static"]
OUR_MODES = SHARED_MODES + ["check"]
CAPS_MIB = [1, 5, 25, 100]
THEIR_MODES = SHARED_MODES + [f"view+static+cap{cap}" for cap in CAPS_MIB]
BATCHED = ["batched", "batched+view"]  # where the peer has batched_grad_copy
# Model -> the most that a step may take of the plain step.
STEP_LIMITS = {"small": 1.05, "medium": 1.05, "large": 1.15}
# Relative difference between the gradients of both sides that rounding explains.
SAME_GRADIENTS = 1e-3
CONTROL = ("control", "memcpy")


def same_gradients(ours, theirs):
    """Whether both sides run the same model on the same input, given sums of gradients by rank."""
    return all(
        abs(a - b) <= SAME_GRADIENTS * max(1.0, abs(a), abs(b)) for a, b in zip(ours, theirs)
    )


class Contest:
    """The sides of one model and their control: rounds in which all modes take turns."""

    def __init__(self, context, model, sides, ranks=steps.RANKS):
        self.context, self.model, self.ranks = context, model, ranks
        self.wanted = sides  # of (name, command, modes)
        self.results = {}  # as ddp_step_benchmark keeps them
        self.rounds = Rounds()
        self.sides = []
        self.watch = None
        self.control = None
        self.versions = {}
        self.notes = []

    def run(self, rounds, warm_up):
        with contextlib.ExitStack() as stack:
            self._start(stack, warm_up)
            for turn in range(rounds):
                self._round(turn)
        return self

    def _start(self, stack, warm_up):
        cpus = self.context.cpus
        self.control = stack.enter_context(contexts.Copiers(self.context))
        for name, command, modes in self.wanted:
            side = steps.Side(name, command, self.model, cpus, self.context.folder, self.ranks)
            stack.enter_context(side)
            hello = side.answers("the start")[0]
            self.versions[name] = hello["version"]
            if BATCHED[0] in modes and not hello.get("batched"):
                modes = [mode for mode in modes if "batched" not in mode]
                self.notes.append(f"{name} batched: not run: {hello['version']} has no such option")
            self.sides.append((side, modes))
        sums = {}
        for side, modes in self.sides:
            for mode in [PLAIN, *modes]:
                answers = side.steps(mode, warm_up)
                if mode == PLAIN:
                    sums[side.name] = [answer["gradient_sum"] for answer in answers]
        if OURS in sums and THEIRS in sums and not same_gradients(sums[OURS], sums[THEIRS]):
            raise steps.BenchmarkError(
                f"{self.model.name}: the sides compute other gradients: {sums}"
            )
        pids = [pid for side, _ in self.sides for pid in side.pids()] + self.control.pids()
        self.watch = Watch(pids, cpus)

    def _round(self, turn):
        self.watch.begin()
        copy_s, answers = self.control.copy()
        order = self.sides[turn % len(self.sides) :] + self.sides[: turn % len(self.sides)]
        for side, modes in order:
            steps.run_round(side, modes, self.model, self.results)
        times = {key: series.step_ms[-1] / 1e3 for key, series in self.results.items()}
        times[CONTROL] = copy_s
        self.rounds.add(times, self.watch.end(answers))

    def ratio(self, key, disturbed=False):
        """Of a mode's step to the plain step of its own side, in the same round."""
        return self.rounds.ratio(key, (key[0], PLAIN), disturbed)

    def best(self, side, disturbed=False):
        """The mode of `side` with the lowest median ratio; None where it has none."""
        found = {key: self.ratio(key, disturbed) for key in self.rounds.times}
        return steps.best_mode({k: v for k, v in found.items() if v}, side)

    def table(self):
        quiet, disturbed = len(self.rounds.indexes()), len(self.rounds.indexes(True))
        table = Table(
            f"{self.model.name}: {self.model.describe()}, {self.ranks} ranks; rounds: "
            f"{self.rounds.count()}",
            ["", "rounds", "step / plain step", "ms", "page faults per step"],
        )
        for key in self.rounds.times:
            name = " ".join(key)
            faults = figures.NONE
            if key in self.results:
                faults = f"{statistics.median(self.results[key].faults):.0f}"
            for which, count in ((False, quiet), (True, disturbed)):
                if count == 0:
                    continue
                ratio = None if key == CONTROL else self.ratio(key, which)
                ms = figures.scaled(self.rounds.seconds(key, which), 1e3)
                word = "disturbed" if which else "quiet"
                table.rows.append(
                    [name, f"{count} {word}", figures.text(ratio), figures.text(ms), faults]
                )
        table.notes = [*self.notes, *self._verdicts()]
        return table

    def _verdicts(self):
        best, mine = self.best(THEIRS), (OURS, "default")
        if best is None or self.ratio(mine) is None:
            return []
        word = steps.verdict(self.ratio(mine), self.ratio(best))
        paired = figures.text(self.rounds.ratio(mine, best))
        return [
            f"Ours with default options against PyTorch's best mode here, {best[1]}: {word}; "
            f"time to time in the same round {paired}."
        ]

    def gates(self):
        quiet = len(self.rounds.indexes())
        mine, best = self.ratio((OURS, "default")), self.best(THEIRS)
        gates = []
        if self.model.name in STEP_LIMITS:
            name = f"step, {self.model.describe()}, to the plain step"
            gates.append(figures.gate_below(name, STEP_LIMITS[self.model.name], mine, quiet))
        gate = Gate(f"step, {self.model.name}, beside PyTorch's best mode", "ahead")
        if quiet == 0:
            gate.figure, gate.why = figures.DISTURBED_ONLY, "no quiet round"
        elif best is None:
            gate.why = "no PyTorch beside it"
        else:
            gate.figure = f"{figures.text(mine)} beside {figures.text(self.ratio(best))}"
            if quiet < figures.FEWEST_QUIET_ROUNDS:
                gate.why = f"{quiet} quiet rounds are too few"
            else:
                gate.met = steps.verdict(mine, self.ratio(best)) == "ahead"
        return [*gates, gate]


def _sides(context, our_modes, their_modes):
    """Both sides, and a note where PyTorch is missing."""
    sides = [(OURS, context.our_sides(), our_modes)]
    try:
        return [*sides, (THEIRS, context.peer(), their_modes)], []
    except NotRun as missing:
        return sides, [f"PyTorch: not run: {missing}"]


def run_steps(context, section):
    """The models, ours in its modes beside PyTorch in its own."""
    context.require_cores(steps.RANKS)
    ours, theirs = OUR_MODES, THEIR_MODES + BATCHED
    if context.quick:
        ours, theirs = ["default"], ["default", "view+static"]
    sides, missing = _sides(context, ours, theirs)
    contests = []
    models = steps.MODELS + steps.MORE_MODELS
    if context.quick:
        chosen = [steps.MODELS[0], *steps.MORE_MODELS]
        models = [dataclasses.replace(model, steps=2) for model in chosen]
    for model in models:
        contest = Contest(context, model, sides)
        contest.run(context.rounds(15, 3), 5 if not context.quick else 2)
        # The table of ddp_step_benchmark, in its own form, over all rounds.
        steps.report(model, contest.results)
        table = contest.table()
        table.notes += missing
        section.tables.append(table)
        section.gates += contest.gates()
        section.data[model.name] = contest.rounds.as_json()
        section.data["versions"] = contest.versions
        contests.append(contest)
    section.plots["steps.svg"] = _step_bars(contests)


def _step_bars(contests):
    """Of the quiet rounds; where none was quiet, of the disturbed ones, as the name then says."""

    def column(contest, side, mode):
        disturbed = not contest.rounds.indexes()
        key = (side, mode) if mode else contest.best(side, disturbed)
        found = contest.ratio(key, disturbed) if key else None
        return (found.median, found.first, found.third) if found else None

    def name(contest):
        return contest.model.name + ("" if contest.rounds.indexes() else " (disturbed)")

    wanted = [("ours, default", OURS, "default"), ("PyTorch, default", THEIRS, "default")]
    wanted.append(("PyTorch, best mode", THEIRS, ""))
    return svg.Bars(
        "Step with gradient synchronization, 2 ranks",
        svg.Axis("ratio to the plain step", from_zero=True),
        [name(c) for c in contests],
        [(words, [column(c, side, mode) for c in contests]) for words, side, mode in wanted],
        marks=[(1.0, "plain step")],
    )


def run_world(context, section):
    """The same model on 1 to 8 ranks of this host."""
    sides, missing = _sides(context, ["default"], ["default", "view+static"])
    model = dataclasses.replace(steps.MODELS[0], steps=4)
    title = f"{model.name}: {model.describe()}; {len(context.cpus)} cores"
    table = _cost_table(title, "ranks", missing)
    section.tables = [table]
    contests = {}
    for ranks in [1, 2] if context.quick else [1, 2, 4, 8]:
        contests[ranks] = Contest(context, model, sides, ranks).run(context.rounds(9, 2), 3)
        table.rows += _cost_rows(ranks, contests[ranks])
        section.data[str(ranks)] = contests[ranks].rounds.as_json()
    x = svg.Axis("ranks (on one host)", log=True, base=2)
    y = svg.Axis("ratio to the plain step", from_zero=True)
    title = "Step against the number of ranks"
    section.plots["world.svg"] = _cost_plot(title, x, y, contests, Contest.ratio)


def run_parameters(context, section):
    """Models of 10 to 100,000 small parameters."""
    context.require_cores(steps.RANKS)
    sides, missing = _sides(context, ["default"], ["default", "view+static"])
    table = _cost_table("Linear layers of 16", "parameters", missing)
    section.tables = [table]
    contests = {}
    for count in [10, 1000] if context.quick else [10, 100, 1000, 10_000, 100_000]:
        # Short rounds are long enough for the clocks, and long ones end.
        model = steps.Model(f"parameters-{count}", count // 2, 16, max(2, min(20, 20_000 // count)))
        rounds = context.rounds(9 if count < 50_000 else 5, 2)
        contests[count] = _contest_without_the_slow(context, model, sides, rounds, table)
        table.rows += _cost_rows(count, contests[count])
        section.data[str(count)] = contests[count].rounds.as_json()
    x = svg.Axis("parameters of the model", log=True)
    y = svg.Axis("us per parameter and step, beyond the plain step", log=True)
    title = "Cost of one parameter"
    section.plots["parameters.svg"] = _cost_plot(title, x, y, contests, _per_parameter)


def _contest_without_the_slow(context, model, sides, rounds, table):
    """A contest of both sides; of ours alone where PyTorch cannot make the model in time."""
    warm_up = 3 if model.tensors()[0] < 50_000 else 2
    try:
        return Contest(context, model, sides).run(rounds, warm_up)
    except steps.BenchmarkError as error:
        if len(sides) == 1 or not str(error).startswith(THEIRS):
            raise
        why = str(error).splitlines()[0]
        table.notes.append(f"{model.tensors()[0]:,} parameters: PyTorch: not run: {why}")
        return Contest(context, model, sides[:1]).run(rounds, warm_up)


def extra_us(contest, key, disturbed=False):
    """Quartiles of the time beyond the plain step, in us per step."""
    rounds, plain = contest.rounds, (key[0], PLAIN)
    above, below = rounds.times[key], rounds.times[plain]
    return figures.of([(above[i] - below[i]) * 1e6 for i in rounds.indexes(disturbed)])


def _per_parameter(contest, key, disturbed=False):
    return figures.scaled(extra_us(contest, key, disturbed), 1 / contest.model.tensors()[0])


def _synchronized(contest):
    return [key for key in contest.rounds.times if key != CONTROL and key[1] != PLAIN]


def _cost_table(title, what, notes):
    columns = [what, "", "rounds", "step / plain step", "us beyond the plain step"]
    return Table(title, [*columns, "us per parameter"], notes=list(notes))


def _cost_rows(value, contest):
    rows = []
    for key in _synchronized(contest):
        for disturbed in (False, True):
            count = len(contest.rounds.indexes(disturbed))
            if count == 0:
                continue
            row = [f"{value:,}", " ".join(key)]
            row.append(f"{count} {'disturbed' if disturbed else 'quiet'}")
            found = [contest.ratio(key, disturbed), extra_us(contest, key, disturbed)]
            found.append(_per_parameter(contest, key, disturbed))
            rows.append([*row, *(figures.text(x) for x in found)])
    return rows


def _cost_plot(title, x, y, contests, figure):
    """`figure(contest, key, disturbed)` over the contests: of the quiet rounds where it has any."""
    lines = {}
    for value, contest in contests.items():
        disturbed = not contest.rounds.indexes()
        for key in _synchronized(contest):
            found = figure(contest, key, disturbed)
            point = (value, found.median, found.first, found.third)
            lines.setdefault(key, []).append(point)
    if any(not contest.rounds.indexes() for contest in contests.values()):
        title += " (in part disturbed rounds)"
    return svg.Plot(title, x, y, [svg.Line(" ".join(key), lines[key]) for key in lines])


# ---- Memory -----------------------------------------------------------------------------------


def status_mb(text, name):
    """A line of /proc/PID/status or smaps_rollup in MB."""
    return int(re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE).group(1)) * 1024 / 1e6


def memory_of(pids):
    """(highest peak of a rank's resident memory, mean proportional share), in MB."""
    peaks, shares = [], []
    for pid in pids:
        with open(f"/proc/{pid}/status", encoding="utf-8") as stream:
            peaks.append(status_mb(stream.read(), "VmHWM"))
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as stream:
            shares.append(status_mb(stream.read(), "Pss"))
    return max(peaks), statistics.fmean(shares)


def run_memory(context, section):
    """A fresh program for each mode, so that no mode sees another's memory."""
    context.require_cores(steps.RANKS)
    theirs = ["default"] if context.quick else ["default", "view", "view+static"]
    sides, missing = _sides(context, ["default"], theirs)
    models = [m for m in steps.MODELS if m.name == ("medium" if context.quick else "large")]
    for model in models:
        found = {}
        for name, command, modes in sides:
            for mode in [PLAIN, *modes]:
                folder = os.path.join(context.folder, f"memory-{name}-{mode}")
                os.makedirs(folder, exist_ok=True)
                with steps.Side(name, command, model, context.cpus, folder) as side:
                    side.answers("the start")
                    for _ in range(3):
                        side.steps(mode, 3)
                    found[name, mode] = memory_of(side.pids())
        section.tables.append(_memory_table(model, found))
        section.tables[-1].notes += missing
        section.data[model.name] = {" ".join(k): v for k, v in found.items()}
        section.gates.append(_memory_gate(model, found))


def _memory_table(model, found):
    columns = ["", "peak resident, MB", "beyond plain, MB", "in gradients"]
    columns += ["proportional share, MB", "beyond plain, MB", "in gradients"]
    title = f"{model.name}: {model.describe()}; one rank of {steps.RANKS}, 9 steps"
    table = Table(title, columns)
    for (side, mode), values in found.items():
        row = [f"{side} {mode}"]
        for value, plain in zip(values, found[side, PLAIN]):
            beyond = value - plain
            row += [f"{value:.1f}", f"{beyond:.1f}", f"{beyond / model.megabytes():.2f}"]
        table.rows.append(row)
    table.notes = [
        "Resident memory counts a page that several ranks share in each of them; the proportional "
        "share divides it among them."
    ]
    return table


def _memory_gate(model, found):
    beyond = found[OURS, "default"][1] - found[OURS, PLAIN][1]
    part = beyond / model.megabytes()
    gate = Gate(f"memory of a rank beyond plain, {model.describe()}", "at most 1 gradients")
    gate.figure = f"{part:.2f} gradients ({beyond:.1f} MB)"
    gate.met = round(part, 1) <= 1.0
    return gate
