"""Plots as SVG files, by the standard library alone: lines or points over numbers or groups."""

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 76, WIDTH - 214, 46, HEIGHT - 62  # of the plot's area
# Colors that remain apart for color-blind readers (Okabe and Ito).
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933"]


@dataclass
class Axis:
    label: str  # with its unit
    log: bool = False
    base: int = 10  # of a log axis' ticks
    name: object = None  # value -> text of a tick; None: the number
    from_zero: bool = False
    groups: list = None  # names at 0, 1, 2 and so on; None: the axis has numbers


@dataclass
class Line:
    name: str
    points: list  # of (x, y) or (x, y, first quartile, third quartile)
    dashed: bool = False
    joined: bool = True


@dataclass
class Plot:
    title: str
    x: Axis
    y: Axis
    lines: list
    marks: list = field(default_factory=list)  # (y, text): horizontal lines, such as a limit


def short(value):
    """A number as a tick shows it."""
    for limit, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def size_text(count):
    """A number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"


def ticks(low, high, axis):
    """The values of the ticks within [low, high]."""
    if axis.groups:
        return range(len(axis.groups))
    if axis.log:
        first = math.floor(math.log(low, axis.base) + 1e-9)
        last = math.ceil(math.log(high, axis.base) - 1e-9)
        step = max(1, math.ceil((last - first) / 9))
        return [float(axis.base) ** i for i in range(first, last + 1, step)]
    raw = (high - low) / 6
    power = 10 ** math.floor(math.log10(raw))
    step = next(x * power for x in (1, 2, 5, 10) if x * power >= raw * 0.999)
    begin, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(begin, end + 1)]


def bounds(values, axis):
    """The ends of an axis that holds `values`. A log axis ends at a tick and leaves out zero."""
    if axis.groups:
        return (-0.5, len(axis.groups) - 0.5)
    if axis.log:
        values = [v for v in values if v > 0]
    if not values:
        return (1.0, 10.0) if axis.log else (0.0, 1.0)
    low, high = min(values), max(values)
    if axis.log:
        low = axis.base ** math.floor(math.log(low, axis.base) + 1e-9)
        high = axis.base ** math.ceil(math.log(high, axis.base) - 1e-9)
        return (low, high) if high > low else (low, low * axis.base)
    low = 0.0 if axis.from_zero else low
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if axis.from_zero else low - margin, high + margin)


class _Canvas:
    def __init__(self, title):
        size = f"width='{WIDTH}' height='{HEIGHT}'"
        box = f"viewBox='0 0 {WIDTH} {HEIGHT}'"
        self.parts = [f"<svg xmlns='http://www.w3.org/2000/svg' {size} {box}>"]
        self.add("rect", size, fill="white")
        self.text(LEFT, 24, title, size=15, anchor="start", weight="bold")

    def add(self, tag, place, words="", **style):
        more = "".join(f" {name.replace('_', '-')}='{value}'" for name, value in style.items())
        self.parts.append(f"<{tag} {place}{more}>{escape(words)}</{tag}>")

    def text(self, x, y, words, anchor="middle", size=12, **style):
        self.add("text", f"x='{x:.1f}' y='{y:.1f}'", words, text_anchor=anchor, font_size=size,
                 font_family="sans-serif", **style)  # fmt: skip

    def line(self, x1, y1, x2, y2, color="#ccc", width=1.0, dashes="none"):
        self.add("line", f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'",
                 stroke=color, stroke_width=width, stroke_dasharray=dashes)  # fmt: skip

    def axis(self, axis, values, start, end, draw):
        """Draws the ticks by draw(position, text). Returns value -> position on the picture."""
        low, high = bounds(values, axis)
        scale = math.log if axis.log else float
        span = scale(high) - scale(low)

        def place(value):
            return start + (scale(value) - scale(low)) / span * (end - start)

        for tick in ticks(low, high, axis):
            if low * 0.999 <= tick <= high * 1.001 or not axis.log:
                draw(place(tick), axis.groups[tick] if axis.groups else (axis.name or short)(tick))
        return place

    def y_axis(self, axis, values):
        def draw(y, words):
            self.line(LEFT, y, RIGHT, y)
            self.text(LEFT - 6, y + 4, words, anchor="end")

        place = self.axis(axis, values, BOTTOM, TOP, draw)
        middle = (TOP + BOTTOM) / 2
        self.text(18, middle, axis.label, transform=f"rotate(-90 18 {middle:.1f})")
        self.line(LEFT, TOP, LEFT, BOTTOM, "#000")
        self.line(LEFT, BOTTOM, RIGHT, BOTTOM, "#000")
        return place

    def x_axis(self, axis, values):
        def draw(x, words):
            self.line(x, BOTTOM, x, BOTTOM + 5, "#000")
            self.text(x, BOTTOM + 20, words)

        self.text((LEFT + RIGHT) / 2, HEIGHT - 16, axis.label)
        return self.axis(axis, values, LEFT, RIGHT, draw)

    def finish(self, marks, place, entries):
        """Draws the marks and the legend of `entries`, (name, dashes). Returns the file's text."""
        for value, words in marks:
            y = place(value)
            self.line(LEFT, y, RIGHT, y, "#b00", 1.2, "6 4")
            self.text(RIGHT - 4, y - 4, words, anchor="end", size=11)
        for i, (name, dashes) in enumerate(entries):
            x, y = RIGHT + 14, TOP + 10 + 20 * i
            self.line(x, y, x + 22, y, color_of(i), 3, dashes)
            self.text(x + 28, y + 4, name, anchor="start")
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def color_of(number):
    return COLORS[number % len(COLORS)]


def dashes_of(line):
    return "5 3" if line.dashed else "none"


def render(plot):
    """The text of the SVG file."""
    canvas = _Canvas(plot.title)
    shown = [[p for p in line.points if p[1] is not None and (p[1] > 0 or not plot.y.log)]
             for line in plot.lines]  # fmt: skip
    every = [point for points in shown for point in points]
    place_y = canvas.y_axis(plot.y, [y for p in every for y in p[1:]] + [m[0] for m in plot.marks])
    place_x = canvas.x_axis(plot.x, [p[0] for p in every])
    for i, (line, points) in enumerate(zip(plot.lines, shown)):
        way = " ".join(f"{place_x(p[0]):.1f},{place_y(p[1]):.1f}" for p in points)
        if line.joined:
            canvas.add("polyline", f"points='{way}'", fill="none", stroke=color_of(i),
                       stroke_width=2, stroke_dasharray=dashes_of(line))  # fmt: skip
        for p in points:
            x = place_x(p[0])
            if len(p) == 4 and (p[2] > 0 or not plot.y.log):
                canvas.line(x, place_y(p[2]), x, place_y(p[3]), color_of(i), 1.2)
            canvas.add("circle", f"cx='{x:.1f}' cy='{place_y(p[1]):.1f}'", r=3, fill=color_of(i))
    return canvas.finish(plot.marks, place_y, [(x.name, dashes_of(x)) for x in plot.lines])
