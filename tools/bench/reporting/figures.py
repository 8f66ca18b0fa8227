"""Figures of interleaved rounds: quartiles, paired ratios, and disturbed rounds kept apart."""

from dataclasses import dataclass, field

from ddp_step_benchmark import Quartiles, quartiles

# A round is disturbed when something else took a larger share of its cores than this.
DISTURBED_SHARE = 0.05
# Fewer quiet rounds decide no gate.
FEWEST_QUIET_ROUNDS = 3
NONE = "-"
DISTURBED_ONLY = "see the disturbed rounds"


def of(values):
    """The quartiles of `values`; None without values."""
    return quartiles(list(values)) if values else None


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


def percentile(values, share):
    """The value that `share` of `values` do not exceed, interpolated between two of them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def scaled(found, factor):
    """Quartiles in another unit."""
    if found is None:
        return None
    return Quartiles(found.first * factor, found.median * factor, found.third * factor)


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

    def seconds(self, subject, disturbed=False):
        """Quartiles of the subject's time; None when it has none."""
        column = self.times.get(subject, [])
        return of([column[i] for i in self.indexes(disturbed) if i < len(column) and column[i]])

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
    """One target of the issue, and whether the figures of this run meet it."""

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


def gate_below(name, limit, found, quiet_rounds, unit=""):
    """Whether the median of `found` (Quartiles, or None) is at most `limit`.

    `quiet_rounds`: how many `found` is made of; 0 when all were disturbed, -1 when there were none.
    """
    limits = f"at most {limit:g}{unit}"
    if found is None and quiet_rounds == 0:
        return Gate(name, limits, DISTURBED_ONLY, why="no quiet round")
    if found is None:
        return Gate(name, limits, why="not measured")
    if quiet_rounds < FEWEST_QUIET_ROUNDS:
        return Gate(name, limits, text(found), why=f"{quiet_rounds} quiet rounds are too few")
    return Gate(name, limits, text(found), found.median <= limit)


def gate_under(name, limit, value, unit):
    """Whether one number, such as the largest of many, is under `limit`. None: not measured."""
    limits = f"under {limit:g} {unit}"
    if value is None:
        return Gate(name, limits, why="not measured")
    return Gate(name, limits, f"{number(value)} {unit}", value < limit)


def gate_above(name, limit, found, quiet_rounds, unit=""):
    """Whether the median of `found` is at least `limit`."""
    gate = gate_below(name, limit, found, quiet_rounds, unit)
    gate.limit = f"at least {limit:g}{unit}"
    if gate.met is not None:
        gate.met = found.median >= limit
    return gate
