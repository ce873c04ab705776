"""Small plots as inline SVG, drawn in the colours of the page around them, light or dark.

Matplotlib would fix the colours when the page is written and add a hundred kilobytes a plot; these need bars, dots and
lines only. Every plot has a title for screen readers, and says with shapes what it says with colours.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Dot", "Path", "law_plot", "log_dots", "nice_step", "path_plot", "slot_plot"]

_WIDTH = 440
_MOST_CELLS = 27


class Dot(NamedTuple):
    """One row of :func:`log_dots`.

    Attributes
    ----------
    label : str
        At the left.
    value : float
        Where the dot is.
    limit : float or None
        Where the bar that it must not pass is.
    """

    label: str
    value: float
    limit: float | None


class Path(NamedTuple):
    """One line of :func:`path_plot`.

    Attributes
    ----------
    label : str
        What it is called.
    points : sequence of (float, float)
        Number of samples and logarithm of the e-value.
    failed : bool
        Whether it is drawn as one that failed.
    """

    label: str
    points: Sequence[tuple[float, float]]
    failed: bool


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "", turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _dot(x: float, y: float, kind: str, tip: str, radius: float = 4) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"><title>{escape(tip)}</title></circle>'


def _bar(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}" class="{kind}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def nice_step(span: float, most: int) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest step of which at most `most` make the span."""
    if not span > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(step * power for step in (1, 2, 5, 10) if step * power * most >= span * (1 - 1e-9))


def law_plot(title: str, cells: Sequence[tuple[str, float, float]]) -> str:
    """Return bars for what each cell of a law should be, and dots for what it is.

    Parameters
    ----------
    title : str
        For screen readers.
    cells : sequence of (label, expected, got)
        The likeliest are drawn, in their order.

    Returns
    -------
    str
        An ``svg`` element.
    """
    kept = sorted(range(len(cells)), key=lambda cell: -max(cells[cell][1:]))[:_MOST_CELLS]
    shown = [cells[cell] for cell in sorted(kept)]
    left, top, bottom, height = 40.0, 8.0, 150.0, 150.0 + 8 + 7 * max(len(label) for label, _, _ in shown)
    most = max(max(expected, got) for _, expected, got in shown) or 1.0
    step = nice_step(most, 4)
    ceiling = step * math.ceil(most / step - 1e-9)
    scale = (bottom - top) / ceiling
    parts = []
    for tick in range(round(ceiling / step) + 1):
        y = bottom - tick * step * scale
        parts += [_line(left, y, _WIDTH - 4, y, "grid"), _text(left - 5, y + 4, f"{tick * step:g}", anchor="end")]
    width = (_WIDTH - 4 - left) / len(shown)
    for index, (label, expected, got) in enumerate(shown):
        x = left + index * width
        tip = f"{label}: expected {expected:.6g}, got {got:.6g}"
        parts.append(_bar(x + 0.15 * width, bottom - expected * scale, 0.7 * width, expected * scale, "expected", tip))
        parts.append(_dot(x + width / 2, bottom - got * scale, "got", tip, min(4, 0.3 * width)))
        parts.append(_text(x + width / 2 + 4, bottom + 8, label, anchor="end", turn=-90, kind="label"))
    return _svg(title, height, parts)


def path_plot(title: str, paths: Sequence[Path], threshold: float | None) -> str:
    """Return the logarithms of e-values over samples, and the line at which they reject.

    Parameters
    ----------
    title : str
        For screen readers.
    paths : sequence of Path
        One a check; e-values of infinity are drawn at the top.
    threshold : float or None
        Where the dashed line is.

    Returns
    -------
    str
        An ``svg`` element.
    """
    left, top, bottom = 40.0, 12.0, 190.0
    ceiling = 1.25 * (threshold or 20.0)
    points = [(n, e) for path in paths for n, e in path.points]
    most = max((n for n, _ in points), default=1.0) or 1.0
    floor = min([e for _, e in points if math.isfinite(e)] + [0.0])
    floor = max(floor * 1.1, -3 * ceiling)
    step = nice_step(ceiling - floor, 6)

    def at(n: float, e: float) -> tuple[float, float]:
        inside = min(max(e, floor), ceiling) if not math.isnan(e) else ceiling
        return left + (_WIDTH - 8 - left) * n / most, bottom - (bottom - top) * (inside - floor) / (ceiling - floor)

    parts = []
    for tick in range(math.ceil(floor / step), math.floor(ceiling / step) + 1):
        _, y = at(0, tick * step)
        parts += [_line(left, y, _WIDTH - 8, y, "grid"), _text(left - 5, y + 4, f"{tick * step:g}", anchor="end")]
    across = nice_step(most, 4)
    for tick in range(1, math.floor(most / across) + 1):
        x, _ = at(tick * across, floor)
        parts.append(_text(x, bottom + 16, f"{tick * across:,.0f}", anchor="end" if x > _WIDTH - 40 else "middle"))
    for path in sorted(paths, key=lambda path: path.failed):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(n, e) for n, e in [(0.0, 0.0), *path.points]))
        kind = "path failed-path" if path.failed else "path"
        parts.append(f'<polyline points="{drawn}" class="{kind}"><title>{escape(path.label)}</title></polyline>')
        if path.points:
            parts.append(_dot(*at(*path.points[-1]), "bad" if path.failed else "got", path.label, 3))
    if threshold is not None:
        _, y = at(0, threshold)
        parts.append(_line(left, y, _WIDTH - 8, y, "limit"))
        parts.append(_text(_WIDTH - 10, y - 5, f"fails from {threshold:.1f} up", anchor="end", kind="strong"))
    parts.append(_text(_WIDTH - 8, bottom + 32, "sequences drawn", anchor="end"))
    return _svg(title, bottom + 38, parts)


def log_dots(title: str, rows: Sequence[Dot]) -> str:
    """Return values on a logarithmic axis, each with the bar that it must not pass.

    Parameters
    ----------
    title : str
        For screen readers.
    rows : sequence of Dot
        One a line; a value of 0 is drawn at the left end.

    Returns
    -------
    str
        An ``svg`` element.
    """
    positive = [x for row in rows for x in (row.value, row.limit) if x and 0 < x < math.inf]
    low = math.floor(math.log10(min(positive, default=1e-3))) - 1
    high = max(math.ceil(math.log10(max(positive, default=1.0))), low + 2)
    labels = [_short(row.label, 30) for row in rows]
    left, right, pitch, top = 14 + 6.7 * max(map(len, labels)), _WIDTH - 12.0, 22.0, 6.0
    bottom = top + pitch * len(rows)

    def at(value: float) -> float:
        exponent = low if not value > 0 else min(math.log10(value), high) if value < math.inf else high
        return left + (right - left) * (max(exponent, low) - low) / (high - low)

    parts = []
    every = max(1, math.ceil((high - low) / 5))
    for exponent in range(low, high + 1):
        if (exponent - low) % every == 0:
            x = at(10.0**exponent)
            name = "0" if exponent == low else f"1e{exponent}"
            parts += [_line(x, top, x, bottom, "grid"), _text(x, bottom + 15, name, anchor="middle")]
    for index, (row, label) in enumerate(zip(rows, labels, strict=True)):
        y = top + pitch * (index + 0.5)
        past = row.limit is not None and not row.value <= row.limit
        tip = f"{row.label}: {row.value:.3g}" + ("" if row.limit is None else f", at most {row.limit:.3g}")
        parts.append(_text(left - 8, y + 4, label, anchor="end", kind="label"))
        parts.append(_line(left, y, at(row.value), y, "stem"))
        if row.limit is not None:
            parts.append(_line(at(row.limit), y - 7, at(row.limit), y + 7, "limit solid"))
        parts.append(_dot(at(row.value), y, "bad" if past else "got", tip))
    return _svg(title, bottom + 22, parts)


def slot_plot(title: str, rates: Sequence[float], expected: Sequence[float] | None = None) -> str:
    """Return a bar for the fraction of tested tokens accepted in each slot, and dots where it should be.

    Parameters
    ----------
    title : str
        For screen readers.
    rates, expected : sequence of float
        By slot, from the first.

    Returns
    -------
    str
        An ``svg`` element.
    """
    left, top, bottom = 40.0, 20.0, 142.0
    parts = []
    for tick in (0.0, 0.5, 1.0):
        y = bottom - (bottom - top) * tick
        parts += [_line(left, y, _WIDTH - 4, y, "grid"), _text(left - 5, y + 4, f"{tick:.0%}", anchor="end")]
    width = min((_WIDTH - 4 - left) / max(len(rates), 1), 90.0)
    for slot, rate in enumerate(rates):
        x, height = left + slot * width, (bottom - top) * rate
        tip = f"slot {slot + 1}: {rate:.4f}"
        parts.append(_bar(x + 0.2 * width, bottom - height, 0.6 * width, height, "expected", tip))
        if expected is not None and slot < len(expected):
            y = bottom - (bottom - top) * expected[slot]
            parts.append(_dot(x + width / 2, y, "got", f"{tip}, expected {expected[slot]:.4f}"))
        # The number, because a bar of nothing looks like a plot of nothing.
        highest = max(rate, expected[slot] if expected is not None and slot < len(expected) else 0.0)
        above = bottom - (bottom - top) * highest - 7
        parts.append(_text(x + width / 2, above, f"{rate:.1%}", anchor="middle", kind="label"))
        parts.append(_text(x + width / 2, bottom + 16, f"slot {slot + 1}", anchor="middle"))
    return _svg(title, bottom + 24, parts)


def _short(label: str, most: int) -> str:
    return label if len(label) <= most else f"…{label[1 - most :]}"
