"""Training steps: five models beside PyTorch's modes, many ranks, many parameters, and memory.

A step is forward and backward, without an optimizer, of ranks with one thread each, each pinned to
a core. It lasts from when all have begun until the slowest one has done. What data parallelism
costs is the ratio to the plain step: the same model in the same program without DDP, and again
until the slower rank has done, so a synchronization that takes no time would have the ratio 1. A
program per model and side lives through the whole run, and does some steps of each mode in each
round.
"""

import contextlib
import dataclasses
import os
import statistics

from reporting import figures, processes, svg
from reporting.disturbance import Referee
from reporting.figures import Gate
from reporting.models import MODELS, MORE_MODELS, Model
from reporting.processes import BenchmarkError, NotRun

RANKS = 2
PLAIN = "plain"
OURS, THEIRS = "ours", "PyTorch"
CONTROL = ("control", "memcpy")
SHARED_MODES = ["default", "view", "static", "find_unused", "view+static"]
OUR_MODES = SHARED_MODES + ["check"]
CAPS_MIB = [1, 5, 25, 100]
THEIR_MODES = SHARED_MODES + [f"view+static+cap{cap}" for cap in CAPS_MIB]
BATCHED = ["batched", "batched+view"]  # where the peer has batched_grad_copy
QUICK_MODES = ["default", "view+static"]
# Model -> the most that a step may take of the plain step.
STEP_LIMITS = {"small": 1.05, "medium": 1.05, "large": 1.15}
# Relative difference between the gradients of both sides that rounding explains.
SAME_GRADIENTS = 1e-3
# Sums of gradients that are equal but for the order of additions differ by less than this.
TOLERANCE = 1e-4


def step_times_ms(answers):
    """The length of each step but the first, given every rank's answer: the slowest rank's."""
    spans = [zip(answer["starts_ns"], answer["ends_ns"]) for answer in answers]
    per_rank = [[(end - start) / 1e6 for start, end in span] for span in spans]
    return [max(times) for times in zip(*per_rank)][1:]


def check_average(mode, sums, plain_sums):
    """Raises unless the gradients of all ranks are the average of the plain ones."""
    expected = statistics.fmean(plain_sums)
    for rank, found in enumerate(sums):
        if abs(found - expected) > TOLERANCE * max(1.0, *(abs(x) for x in plain_sums)):
            raise BenchmarkError(
                f"mode {mode}: the gradients of rank {rank} have the sum {found}, the average "
                f"of the ranks has {expected}: nothing was averaged"
            )


def same_gradients(ours, theirs):
    """Whether both sides run the same model on the same input, given sums of gradients by rank."""
    return all(
        abs(a - b) <= SAME_GRADIENTS * max(1.0, abs(a), abs(b)) for a, b in zip(ours, theirs)
    )


class Side(processes.Ranks):
    """The ranks of one side for one model, each pinned to a core."""

    def __init__(self, context, name, command, model, ranks=RANKS):
        super().__init__(name, context.folder)
        label = f"{name}-{model.name}-{ranks}"
        path = os.path.join(context.folder, f"barrier-{label}")
        barrier, port = processes.barrier_file(path, ranks), processes.free_port()
        for rank in range(ranks):
            pinned = ["taskset", "--cpu-list", str(context.cpu_of(rank)), *command]
            pinned += [*model.arguments(), f"--barrier={barrier}"]
            self.start(label, pinned, processes.environment(rank, port, ranks))

    def steps(self, mode, count):
        return self.ask(f"steps {mode} {count}")


def run_round(side, modes, model, plain=PLAIN, check=check_average):
    """(side's name, mode) -> (ms of a step, page faults per step). Every mode once, plain first."""
    found, plain_sums = {}, None
    for mode in [plain, *modes]:
        # The first step finds the caches full of what another program did.
        answers = side.steps(mode, model.steps + 1)
        sums = [answer["gradient_sum"] for answer in answers]
        if mode == plain:
            plain_sums = sums
        elif "noop" not in mode:
            check(f"{side.name} {mode}", sums, plain_sums)
        faults = sum(answer["minor_faults"] for answer in answers) / (model.steps + 1)
        found[side.name, mode] = (statistics.median(step_times_ms(answers)), faults)
    return found


def best_mode(ratios, side):
    """The mode with the lowest median; None where the side has none that synchronizes."""
    modes = [key for key in ratios if key[0] == side and key[1] != PLAIN and "noop" not in key[1]]
    return min(modes, key=lambda key: ratios[key].median, default=None)


class Contest:
    """The sides of one model and their control: rounds in which all modes take turns."""

    def __init__(self, context, model, sides, ranks=RANKS, plain=PLAIN, check=check_average):
        self.context, self.model, self.ranks = context, model, ranks
        self.plain, self.check = plain, check
        self.wanted = sides  # of (name, command, modes)
        self.sides, self.faults = [], {}
        self.rounds = None
        self.versions, self.notes = {}, []

    def run(self, rounds, warm_up):
        with contextlib.ExitStack() as stack:
            referee = stack.enter_context(Referee(self.context))
            self._start(stack, warm_up)
            sides = [side for side, _ in self.sides]
            self.rounds = referee.measure(rounds, sides, self._round, CONTROL)
        return self

    def _start(self, stack, warm_up):
        for name, command, modes in self.wanted:
            side = stack.enter_context(Side(self.context, name, command, self.model, self.ranks))
            hello = side.answers("the start")[0]
            self.versions[name] = hello["version"]
            if BATCHED[0] in modes and not hello.get("batched"):
                modes = [mode for mode in modes if "batched" not in mode]
                self.notes.append(f"{name} batched: not run: {hello['version']} has no such option")
            self.sides.append((side, modes))
        sums = {}
        for side, modes in self.sides:
            for mode in [self.plain, *modes]:
                answers = side.steps(mode, warm_up)
                if mode == PLAIN:
                    sums[side.name] = [answer["gradient_sum"] for answer in answers]
        if OURS in sums and THEIRS in sums and not same_gradients(sums[OURS], sums[THEIRS]):
            raise BenchmarkError(f"{self.model.name}: the sides compute other gradients: {sums}")

    def _round(self, turn):
        times = {}
        first = turn % len(self.sides)
        for side, modes in self.sides[first:] + self.sides[:first]:
            for key, (ms, faults) in run_round(side, modes, self.model, self.plain,
                                               self.check).items():  # fmt: skip
                times[key] = ms / 1e3
                self.faults.setdefault(key, []).append(faults)
        return times

    def ratio(self, key, disturbed=False):
        """Of a mode's step to the plain step of its own side, in the same round."""
        return self.rounds.ratio(key, (key[0], self.plain), disturbed)

    def best(self, side, disturbed=False):
        """The mode of `side` with the lowest median ratio; None where it has none."""
        found = {key: self.ratio(key, disturbed) for key in self.rounds.times}
        return best_mode({k: v for k, v in found.items() if v}, side)

    def extra_us(self, key, disturbed=False):
        """Quartiles of the time beyond the plain step, in us per step."""
        above, below = self.rounds.times[key], self.rounds.times[key[0], self.plain]
        chosen = self.rounds.indexes(disturbed)
        return figures.of([(above[i] - below[i]) * 1e6 for i in chosen])

    def extra_us_per_parameter(self, key, disturbed=False):
        return figures.scaled(self.extra_us(key, disturbed), 1 / self.model.tensors()[0])

    def synchronized(self):
        return [key for key in self.rounds.times if key != CONTROL and key[1] != PLAIN]

    def add_table(self, section, notes):
        title = f"{self.model.name}: {self.model.describe()}, {self.ranks} ranks; rounds: "
        columns = ["", "rounds", "step / plain step", "ms", "page faults per step"]
        table = section.table(title + self.rounds.count(), columns, self.notes)
        for key in self.rounds.times:
            faults = figures.NONE
            if key in self.faults:
                faults = f"{statistics.median(self.faults[key]):.0f}"
            table.add_rounds(
                self.rounds,
                [" ".join(key)],
                lambda which, key=key: None if key == CONTROL else self.ratio(key, which),
                lambda which, key=key: self.rounds.seconds(key, which, 1e3),
                lambda _, faults=faults: faults,
            )
        best, mine = self.best(THEIRS), (OURS, "default")
        if best is not None and self.ratio(mine) is not None:
            word = figures.verdict(self.ratio(mine), self.ratio(best))
            table.notes.append(
                f"Ours with default options against PyTorch's best mode here, {best[1]}: {word}; "
                f"time to time in the same round {figures.text(self.rounds.ratio(mine, best))}."
            )
        table.notes += notes

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
        elif best is None or mine is None:
            gate.why = "no PyTorch beside it"
        else:
            gate.figure = f"{figures.text(mine)} beside {figures.text(self.ratio(best))}"
            gate.met = figures.verdict(mine, self.ratio(best)) == "ahead"
            if quiet < figures.FEWEST_QUIET_ROUNDS:
                gate.undecided(f"{quiet} quiet rounds are too few")
        return [*gates, gate]


def sides_of(context, our_modes, their_modes):
    """Both sides, and a note where PyTorch is missing."""
    sides = [(OURS, [context.program("step-worker")], our_modes)]
    try:
        program = os.path.join(processes.BENCH, "step_worker_torch.py")
        return [*sides, (THEIRS, [context.torch_python(), program], their_modes)], []
    except NotRun as missing:
        return sides, [f"PyTorch: not run: {missing}"]


def run_steps(context, section):
    """The models, ours in its modes beside PyTorch in its own."""
    context.require_cores(RANKS)
    options, models = context.options, MODELS + MORE_MODELS
    ours, theirs = OUR_MODES, THEIR_MODES + BATCHED
    if context.quick:
        ours, theirs = ["default"], QUICK_MODES
        models = [dataclasses.replace(x, steps=2) for x in [MODELS[0], *MORE_MODELS]]
    sides, missing = sides_of(context, options.modes or ours, options.torch_modes or theirs)
    contests = []
    for model in options.models or models:
        contest = Contest(context, model, sides)
        contest.run(context.rounds(15, 3), 2 if context.quick else 5)
        contest.add_table(section, missing)
        section.gates += contest.gates()
        section.data[model.name] = contest.rounds.as_json()
        section.data["versions"] = contest.versions
        contests.append(contest)
    section.plots["steps.svg"] = _step_plot(contests)


def _step_plot(contests):
    """Of the quiet rounds; where none was quiet, of the disturbed ones, as the name then says."""
    wanted = [("ours, default", OURS, "default"), ("PyTorch, default", THEIRS, "default")]
    wanted.append(("PyTorch, best mode", THEIRS, ""))
    lines = []
    for beside, (words, side, mode) in enumerate(wanted):
        points = []
        for place, contest in enumerate(contests):
            disturbed = not contest.rounds.indexes()
            key = (side, mode) if mode else contest.best(side, disturbed)
            found = contest.ratio(key, disturbed) if key else None
            if found:
                x = place + 0.2 * (beside - 1)
                points.append((x, found.median, found.first, found.third))
        lines.append(svg.Line(words, points, joined=False))
    names = [c.model.name + ("" if c.rounds.indexes() else " (disturbed)") for c in contests]
    title = "Step with gradient synchronization, 2 ranks"
    y = svg.Axis("ratio to the plain step", from_zero=True)
    return svg.Plot(title, svg.Axis("model", groups=names), y, lines, [(1.0, "plain step")])


# ---- Cost against the number of ranks, and of parameters ----------------------------------------


def _cost_table(section, title, what, notes):
    columns = [what, "", "rounds", "step / plain step", "us beyond the plain step"]
    return section.table(title, [*columns, "us per parameter"], notes)


def _add_cost(section, table, value, contest):
    for key in contest.synchronized():
        table.add_rounds(
            contest.rounds,
            [f"{value:,}", " ".join(key)],
            *(lambda which, key=key, figure=figure: figure(key, which)
              for figure in (contest.ratio, contest.extra_us, contest.extra_us_per_parameter)),
        )  # fmt: skip
    section.data[str(value)] = contest.rounds.as_json()


def _cost_plot(title, x, y, contests, figure):
    """`figure(contest, key, disturbed)` over the contests: of the quiet rounds where it has any."""
    lines = {}
    for value, contest in contests.items():
        for key in contest.synchronized():
            found = figure(contest, key, not contest.rounds.indexes())
            point = (value, found.median, found.first, found.third)
            lines.setdefault(key, []).append(point)
    if any(not contest.rounds.indexes() for contest in contests.values()):
        title += " (in part disturbed rounds)"
    return svg.Plot(title, x, y, [svg.Line(" ".join(key), lines[key]) for key in lines])


def run_world(context, section):
    """The same model on 1 to 8 ranks of this host."""
    sides, missing = sides_of(context, ["default"], QUICK_MODES)
    model = dataclasses.replace(MODELS[0], steps=4)
    title = f"{model.name}: {model.describe()}; {len(context.cpus)} cores"
    table = _cost_table(section, title, "ranks", missing)
    contests = {}
    for ranks in [1, 2] if context.quick else [1, 2, 4, 8]:
        contests[ranks] = Contest(context, model, sides, ranks).run(context.rounds(9, 2), 3)
        _add_cost(section, table, ranks, contests[ranks])
    x = svg.Axis("ranks (on one host)", log=True, base=2)
    y = svg.Axis("ratio to the plain step", from_zero=True)
    title = "Step against the number of ranks"
    section.plots["world.svg"] = _cost_plot(title, x, y, contests, Contest.ratio)


def run_parameters(context, section):
    """Models of 10 to 100,000 small parameters; of ours alone where PyTorch takes too long."""
    context.require_cores(RANKS)
    sides, missing = sides_of(context, ["default"], QUICK_MODES)
    table = _cost_table(section, "Linear layers of 16", "parameters", missing)
    contests = {}
    for count in [10, 1000] if context.quick else [10, 100, 1000, 10_000, 100_000]:
        # Short rounds are long enough for the clocks, and long ones end.
        model = Model(f"parameters-{count}", count // 2, 16, max(2, min(20, 20_000 // count)))
        much = count >= 50_000
        run = (context.rounds(5 if much else 9, 2), 2 if much else 3)
        try:
            contests[count] = Contest(context, model, sides).run(*run)
        except BenchmarkError as error:
            if len(sides) == 1 or not str(error).startswith(THEIRS):
                raise
            why = str(error).splitlines()[0]
            table.notes.append(f"{count:,} parameters: PyTorch: not run: {why}")
            contests[count] = Contest(context, model, sides[:1]).run(*run)
        _add_cost(section, table, count, contests[count])
    x = svg.Axis("parameters of the model", log=True)
    y = svg.Axis("us per parameter and step, beyond the plain step", log=True)
    figure = Contest.extra_us_per_parameter
    section.plots["parameters.svg"] = _cost_plot("Cost of one parameter", x, y, contests, figure)


# ---- Memory -------------------------------------------------------------------------------------


def run_memory(context, section):
    """A fresh program for each mode, so that no mode sees another's memory."""
    context.require_cores(RANKS)
    theirs = ["default"] if context.quick else ["default", "view", "view+static"]
    sides, missing = sides_of(context, ["default"], theirs)
    model = MODELS[1 if context.quick else 2]
    found = {}  # (side, mode) -> (highest peak of a rank's resident memory, mean share), in MB
    for name, command, modes in sides:
        for mode in [PLAIN, *modes]:
            with Side(context, name, command, model) as side:
                side.answers("the start")
                for _ in range(3):
                    side.steps(mode, 3)
                peak = max(processes.memory_mb(pid, "VmHWM") for pid in side.pids())
                shares = [processes.memory_mb(pid, "Pss", "smaps_rollup") for pid in side.pids()]
                found[name, mode] = (peak, statistics.fmean(shares))
    columns = ["", "peak resident, MB", "beyond plain, MB", "in gradients"]
    columns += ["proportional share, MB", "beyond plain, MB", "in gradients"]
    title = f"{model.name}: {model.describe()}; one rank of {RANKS}, 9 steps"
    note = "Resident memory counts a page that several ranks share in each of them; the "
    note += "proportional share divides it among them."
    table = section.table(title, columns, [note, *missing])
    for (side, mode), values in found.items():
        row = [f"{side} {mode}"]
        for value, plain in zip(values, found[side, PLAIN]):
            beyond = value - plain
            row += [f"{value:.1f}", f"{beyond:.1f}", f"{beyond / model.megabytes():.2f}"]
        table.add(*row)
    section.data[model.name] = {" ".join(k): v for k, v in found.items()}
    section.gates.append(memory_gate(model, found))


def memory_gate(model, found):
    beyond = found[OURS, "default"][1] - found[OURS, PLAIN][1]
    part = beyond / model.megabytes()
    gate = Gate(f"memory of a rank beyond plain, {model.describe()}", "at most 1 gradients")
    gate.figure = f"{part:.2f} gradients ({beyond:.1f} MB)"
    gate.met = round(part, 1) <= 1.0
    return gate
