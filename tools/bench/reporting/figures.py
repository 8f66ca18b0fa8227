"""Figures of interleaved rounds: quartiles, paired ratios, disturbed rounds kept apart, gates."""

import statistics
from dataclasses import dataclass, field

# A round is disturbed when something else took a larger share of its cores than this.
DISTURBED_SHARE = 0.05
# Fewer quiet rounds decide no gate.
FEWEST_QUIET_ROUNDS = 3
NONE = "-"
DISTURBED_ONLY = "see the disturbed rounds"


@dataclass(frozen=True)
class Quartiles:
    first: float
    median: float
    third: float


def percentile(values, share):
    """The value that `share` of `values` do not exceed, interpolated between two of them."""
    least_two = list(values) * (2 if len(values) == 1 else 1)
    inner = statistics.quantiles(least_two, n=100, method="inclusive")
    return [min(values), *inner, max(values)][round(100 * share)]


def of(values):
    """The quartiles of `values`; None without values."""
    return Quartiles(*(percentile(values, x) for x in (0.25, 0.5, 0.75))) if values else None


def number(value):
    """Three or four significant digits, without an exponent for what a reader meets here."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 3
    return f"{value:.{digits}f}" if size >= 0.01 else f"{value:.2g}"


def text(found):
    """The median with the first and third quartile."""
    if found is None:
        return NONE
    return f"{number(found.median)} [{number(found.first)}..{number(found.third)}]"


def scaled(found, factor):
    """Quartiles in another unit."""
    if found is None:
        return None
    return Quartiles(found.first * factor, found.median * factor, found.third * factor)


def verdict(ours, theirs):
    """Whether `ours` (Quartiles of ratios) is ahead of theirs, level or behind."""
    if ours.third < theirs.first:
        return "ahead"
    return "behind" if ours.first > theirs.third else "level"


def target(what, value, limit, unit):
    """A note: whether a figure is under the limit that this project has set itself."""
    word = "met" if value < limit else "MISSED"
    return f"{what}: {number(value)} {unit}; target under {limit:g} {unit}: {word}."


@dataclass
class Rounds:
    """The times of several subjects that took turns, round by round.

    `times` holds one list per subject, with one entry per round: seconds, or None when the subject
    did not run in that round. `shares` holds each round's disturbance, from 0 to 1.
    """

    times: dict = field(default_factory=dict)
    shares: list = field(default_factory=list)

    def add(self, times, share):
        for subject in times:
            self.times.setdefault(subject, [None] * len(self.shares))
        for subject, column in self.times.items():
            column.append(times.get(subject))
        self.shares.append(share)

    def indexes(self, disturbed=False):
        """The numbers of the quiet rounds, or of the disturbed ones."""
        return [i for i, x in enumerate(self.shares) if (x > DISTURBED_SHARE) == disturbed]

    def kinds(self):
        """(disturbed?, in words how many rounds) for the kinds of rounds that there are."""
        found = [(x, len(self.indexes(x))) for x in (False, True)]
        return [(x, f"{count} {'disturbed' if x else 'quiet'}") for x, count in found if count]

    def seconds(self, subject, disturbed=False, factor=1):
        """Quartiles of the subject's time, in another unit by `factor`; None when it has none."""
        column = self.times.get(subject, [])
        chosen = [column[i] for i in self.indexes(disturbed) if i < len(column) and column[i]]
        return scaled(of(chosen), factor)

    def ratio(self, subject, base, disturbed=False):
        """Quartiles of the subject's time to the base's time of the same round."""
        above, below = self.times.get(subject), self.times.get(base)
        if above is None or below is None:
            return None
        rounds = self.indexes(disturbed)
        return of([above[i] / below[i] for i in rounds if above[i] and below[i]])

    def count(self):
        """The numbers of quiet and of disturbed rounds, in words."""
        return f"{len(self.indexes())} quiet, {len(self.indexes(True))} disturbed"

    def as_json(self):
        names = {s: s if isinstance(s, str) else " ".join(s) for s in self.times}
        return {
            "disturbed_share": self.shares,
            "seconds": {names[s]: column for s, column in self.times.items()},
        }


@dataclass
class Gate:
    """One target, and whether the figures of this run meet it."""

    name: str
    limit: str
    figure: str = NONE
    met: bool = None  # None: not decided
    why: str = ""  # not decided: the reason

    def verdict(self):
        if self.met is None:
            return f"{'not run' if self.figure == NONE else 'not decided'}: {self.why}"
        return "met" if self.met else "MISSED"

    def undecided(self, why):
        """Keeps the figure and takes back the verdict."""
        if self.met is not None:
            self.met, self.why = None, why


def gate_below(name, limit, found, quiet_rounds, above=False):
    """Whether the median of `found` (Quartiles, or None) is at most `limit`; `above`: at least.

    `quiet_rounds`: how many `found` is made of; 0 when all were disturbed, -1 when there were none.
    """
    limits = f"at {'least' if above else 'most'} {limit:g}"
    if found is None and quiet_rounds == 0:
        return Gate(name, limits, DISTURBED_ONLY, why="no quiet round")
    if found is None:
        return Gate(name, limits, why="not measured")
    if quiet_rounds < FEWEST_QUIET_ROUNDS:
        return Gate(name, limits, text(found), why=f"{quiet_rounds} quiet rounds are too few")
    met = found.median >= limit if above else found.median <= limit
    return Gate(name, limits, text(found), met)


def gate_above(name, limit, found, quiet_rounds):
    return gate_below(name, limit, found, quiet_rounds, above=True)


def gate_under(name, limit, value, unit):
    """Whether one number, such as the largest of many, is under `limit`. None: not measured."""
    limits = f"under {limit:g} {unit}"
    if value is None:
        return Gate(name, limits, why="not measured")
    return Gate(name, limits, f"{number(value)} {unit}", value < limit)
