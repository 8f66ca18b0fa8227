"""Plots as SVG files, by the standard library alone: lines over a log or linear axis, and bars."""

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 76, 214, 46, 62
# Colors that remain apart for color-blind readers (Okabe and Ito).
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933"]
FONT = "font-family='sans-serif' font-size='12'"


@dataclass
class Axis:
    label: str  # with its unit
    log: bool = False
    base: int = 10  # of a log axis' ticks
    name: object = None  # value -> text of a tick; None: the number
    from_zero: bool = False


@dataclass
class Line:
    name: str
    points: list  # of (x, y) or (x, y, first quartile, third quartile)
    dashed: bool = False


@dataclass
class Plot:
    title: str
    x: Axis
    y: Axis
    lines: list
    marks: list = field(default_factory=list)  # (y, text): horizontal lines, such as a limit


@dataclass
class Bars:
    title: str
    y: Axis
    groups: list  # names along the x axis
    series: list  # of (name, one value, (value, first, third) or None per group)
    marks: list = field(default_factory=list)


def short(value):
    """A number as a tick shows it."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
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
    if axis.log:
        first = math.floor(math.log(low, axis.base) + 1e-9)
        last = math.ceil(math.log(high, axis.base) - 1e-9)
        step = max(1, math.ceil((last - first) / 9))
        return [float(axis.base) ** i for i in range(first, last + 1, step)]
    span = high - low
    raw = span / 6
    power = 10 ** math.floor(math.log10(raw))
    step = next(x * power for x in (1, 2, 5, 10) if x * power >= raw * 0.999)
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def bounds(values, axis):
    """The ends of an axis that holds `values`. A log axis ends at a tick and leaves out zero."""
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
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
            f"viewBox='0 0 {WIDTH} {HEIGHT}'>",
            f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        ]
        self.text(LEFT, 24, title, size=15, anchor="start", weight="bold")

    def text(self, x, y, words, anchor="middle", turn=0, size=12, weight="normal"):
        spin = f" transform='rotate({turn} {x:.1f} {y:.1f})'" if turn else ""
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-family='sans-serif' "
            f"font-size='{size}' font-weight='{weight}'{spin}>{escape(words)}</text>"
        )

    def line(self, x1, y1, x2, y2, color="#ccc", width=1.0, dashes=""):
        dash = f" stroke-dasharray='{dashes}'" if dashes else ""
        self.parts.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' "
            f"stroke-width='{width}'{dash}/>"
        )

    def add(self, part):
        self.parts.append(part)

    def finish(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _scale(axis, low, high, start, end):
    """value -> position on the picture."""
    if axis.log:
        span = math.log(high) - math.log(low)
        return lambda v: start + (math.log(v) - math.log(low)) / span * (end - start)
    return lambda v: start + (v - low) / (high - low) * (end - start)


def _y_axis(canvas, axis, values):
    low, high = bounds(values, axis)
    place = _scale(axis, low, high, HEIGHT - BOTTOM, TOP)
    for tick in ticks(low, high, axis):
        if low * 0.999 <= tick <= high * 1.001 or not axis.log:
            y = place(tick)
            canvas.line(LEFT, y, WIDTH - RIGHT, y)
            canvas.text(LEFT - 6, y + 4, (axis.name or short)(tick), anchor="end")
    canvas.text(18, (TOP + HEIGHT - BOTTOM) / 2, axis.label, turn=-90)
    canvas.line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#000")
    canvas.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#000")
    return place


def _marks(canvas, marks, place):
    for value, words in marks:
        y = place(value)
        canvas.line(LEFT, y, WIDTH - RIGHT, y, "#b00", 1.2, "6 4")
        canvas.text(WIDTH - RIGHT - 4, y - 4, words, anchor="end", size=11)


def _legend(canvas, entries):
    for i, (name, color, dashed) in enumerate(entries):
        y = TOP + 10 + 20 * i
        x = WIDTH - RIGHT + 14
        canvas.line(x, y, x + 22, y, color, 3, "5 3" if dashed else "")
        canvas.text(x + 28, y + 4, name, anchor="start")


def render_plot(plot):
    """The text of the SVG file."""
    canvas = _Canvas(plot.title)
    shown = [
        (line, [p for p in line.points if p[1] is not None and (p[1] > 0 or not plot.y.log)])
        for line in plot.lines
    ]
    ys = [v for _, points in shown for p in points for v in p[1:]] + [m[0] for m in plot.marks]
    xs = [p[0] for _, points in shown for p in points]
    place_y = _y_axis(canvas, plot.y, ys)
    low, high = bounds(xs, plot.x)
    place_x = _scale(plot.x, low, high, LEFT, WIDTH - RIGHT)
    for tick in ticks(low, high, plot.x):
        if low * 0.999 <= tick <= high * 1.001 or not plot.x.log:
            x = place_x(tick)
            canvas.line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5, "#000")
            canvas.text(x, HEIGHT - BOTTOM + 20, (plot.x.name or short)(tick))
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, plot.x.label)
    _marks(canvas, plot.marks, place_y)
    for i, (line, points) in enumerate(shown):
        color = COLORS[i % len(COLORS)]
        way = " ".join(f"{place_x(p[0]):.1f},{place_y(p[1]):.1f}" for p in points)
        dash = " stroke-dasharray='5 3'" if line.dashed else ""
        canvas.add(
            f"<polyline points='{way}' fill='none' stroke='{color}' stroke-width='2'{dash}/>"
        )
        for p in points:
            x = place_x(p[0])
            if len(p) == 4 and (p[2] > 0 or not plot.y.log):
                canvas.line(x, place_y(p[2]), x, place_y(p[3]), color, 1.2)
            canvas.add(f"<circle cx='{x:.1f}' cy='{place_y(p[1]):.1f}' r='3' fill='{color}'/>")
    _legend(canvas, [(x.name, COLORS[i % len(COLORS)], x.dashed) for i, x in enumerate(plot.lines)])
    return canvas.finish()


def render_bars(bars):
    """The text of the SVG file."""
    canvas = _Canvas(bars.title)
    cells = [
        [v if isinstance(v, tuple) or v is None else (v, v, v) for v in values]
        for _, values in bars.series
    ]
    ys = [x for values in cells for v in values if v for x in v] + [m[0] for m in bars.marks]
    place = _y_axis(canvas, bars.y, ys)
    floor = HEIGHT - BOTTOM
    room = (WIDTH - RIGHT - LEFT) / max(1, len(bars.groups))
    width = room * 0.8 / max(1, len(bars.series))
    for g, group in enumerate(bars.groups):
        canvas.text(LEFT + room * (g + 0.5), floor + 20, group)
        for s, values in enumerate(cells):
            if values[g] is None:
                continue
            value, first, third = values[g]
            x = LEFT + room * (g + 0.1) + width * s
            color = COLORS[s % len(COLORS)]
            top = min(place(value), floor)
            canvas.add(
                f"<rect x='{x:.1f}' y='{top:.1f}' width='{width * 0.92:.1f}' "
                f"height='{floor - top:.1f}' fill='{color}'/>"
            )
            middle = x + width * 0.46
            canvas.line(middle, place(first), middle, place(third), "#000", 1.2)
    _marks(canvas, bars.marks, place)
    _legend(canvas, [(x[0], COLORS[i % len(COLORS)], False) for i, x in enumerate(bars.series)])
    return canvas.finish()


def render(picture):
    return render_bars(picture) if isinstance(picture, Bars) else render_plot(picture)
