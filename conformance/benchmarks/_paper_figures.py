"""The two figures: time per token against K, measured and predicted; acceptance and the time of a round against K."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

__all__ = ["draw_acceptance", "draw_times"]

_COLUMNS = 4
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_NAMES = ("backend", "target", "task", "setting")
_MARKERS = "os^Dv"


def _panels(speed: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the rows by panel: drafters of one target on one task share it."""
    panels: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in speed:
        panels.setdefault(tuple(row[name] for name in _NAMES), []).append(row)
    return panels


def _grid(panels: Mapping[tuple[str, ...], Any]) -> tuple[Any, list[Any]]:
    columns = min(_COLUMNS, len(panels))
    num_rows = -(-len(panels) // columns)
    size = (3.4 * columns + 0.4, 2.7 * num_rows + 0.7)
    figure, axes = plt.subplots(num_rows, columns, figsize=size, squeeze=False, layout="constrained")
    every = list(axes.flat)
    for axis, name in zip(every, panels, strict=False):
        backend, target, task, setting = name
        axis.set_title(f"{backend}, {target}\n{task}, {setting}", fontsize=8)
        axis.set_xlabel("K")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in every[len(panels) :]:
        axis.set_visible(False)
    return figure, every


def _error_bars(spreads: Sequence[Sequence[float]]) -> list[list[float]]:
    return [
        [max(value - low, 0.0) for value, low, _ in spreads],
        [max(high - value, 0.0) for value, _, high in spreads],
    ]


def _save(figure: Any, path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def draw_times(speed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time per token against K, with 95 % intervals, and what the model calls predict beside it."""
    panels = _panels(speed)
    figure, axes = _grid(panels)
    for axis, rows in zip(axes, panels.values(), strict=False):
        for row, colour, marker in zip(rows, _COLOURS, _MARKERS, strict=False):
            entries = row["by_lookahead"]
            ks = [entry["lookahead"] for entry in entries]
            spreads = [entry["ms_per_token"] for entry in entries]
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2, "capsize": 2}
            axis.errorbar(
                ks, [s[0] for s in spreads], _error_bars(spreads), label=f"{row['drafter']}, measured", **style
            )
            known = [entry for entry in entries if entry["predicted_ms_per_token"] is not None]
            axis.plot(
                [entry["lookahead"] for entry in known],
                [entry["predicted_ms_per_token"] for entry in known],
                color=colour,
                linestyle="--",
                linewidth=1,
                label=f"{row['drafter']}, predicted",
            )
        axis.set_ylim(bottom=0)
        axis.set_ylabel("ms a token")
        axis.legend(fontsize=6, frameon=False)
    _save(figure, path)


def draw_acceptance(speed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw acceptance (left, filled; 95 % intervals) and the time of a round (right, open; range of repeats) by K."""
    panels = _panels(speed)
    figure, axes = _grid(panels)
    for axis, rows in zip(axes, panels.values(), strict=False):
        other = axis.twinx()
        other.spines["top"].set_visible(False)
        for row, colour, marker in zip(rows, _COLOURS, _MARKERS, strict=False):
            drafted = [entry for entry in row["by_lookahead"] if entry["acceptance_by_text"]]
            spreads = [entry["acceptance_by_text"] for entry in drafted]
            ks = [entry["lookahead"] for entry in drafted]
            style = {"color": colour, "marker": marker, "markersize": 4, "capsize": 2, "linewidth": 1.2}
            axis.errorbar(ks, [s[0] for s in spreads], _error_bars(spreads), label=row["drafter"], **style)
            entries = row["by_lookahead"]
            rounds = [
                (entry["ms_per_round"], min(entry["ms_per_round_by_repeat"]), max(entry["ms_per_round_by_repeat"]))
                for entry in entries
            ]
            style |= {"linestyle": "--", "markerfacecolor": "none", "linewidth": 1}
            other.errorbar([e["lookahead"] for e in entries], [s[0] for s in rounds], _error_bars(rounds), **style)
        axis.set_ylim(0, 1)
        other.set_ylim(bottom=0)
        axis.set_ylabel("acceptance (filled)")
        other.set_ylabel("ms a round (open)")
        axis.legend(fontsize=6, frameon=False)
    _save(figure, path)
