"""The report as one page that needs nothing else: no script, no font, no picture from elsewhere, light and dark."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any, TypeAlias

from specsampling import CONTRACT_VERSION
from specsampling_conformance._catalogue import TIERS
from specsampling_conformance._checks import CheckResult
from specsampling_conformance._plots import Dot, Path, law_plot, log_dots, path_plot, slot_plot
from specsampling_conformance._report import SUITE_VERSION, Report, finite
from specsampling_conformance._trial import DELTA_CAPS

__all__ = ["report_page"]

_SIGNS = {"passed": "✓", "failed": "✗", "expected-failure": "!", "not-applicable": "–", "not-run": "·"}
_TIER_TITLES = {"T0": "the cache", "T1": "the law, enumerated", "T2": "the law, sampled", "T3": "whole systems"}
_LEVELS = {
    "certified": "Every check that applies passed, with the samples that certify a total variation of 0.01.",
    "exact": "The contract holds, and the output law is that of the model's own one-token calls, to rounding.",
    "contract": "The cache does what it says. The output law was not proved in this run.",
}
_PlotData: TypeAlias = tuple[CheckResult, str, Any, dict[str, Any]]

# Columns of the tables; each group is shown where its first has a value.
_COLUMNS = (("exact_tv", "tolerance"), ("ln_e", "n"), ("certified_tv",))
_HEADS = {"exact_tv": "exact TV", "tolerance": "limit", "ln_e": "ln E", "n": "n", "certified_tv": "certified TV"}
_MOST_LAWS = 4
_MOST_DOTS = 24


def report_page(report: Report) -> str:
    """Return the page.

    Parameters
    ----------
    report : Report
        What a run found.

    Returns
    -------
    str
        A whole HTML document.
    """
    style = files("specsampling_conformance").joinpath("report.css").read_text(encoding="utf-8")
    title = f"{report.backend}: {report.level or 'no level'}"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style></head>",
        "<body><main>",
        _header(report),
        *_troubles(report),
        _glance(report),
        _plots(report),
        _costs(report),
        *(_table(report, tier) for tier in TIERS),
        _footer(report),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _header(report: Report) -> str:
    if not report.passed:
        kind, word = "failed", "failed"
        told = f"{_count(len(report.failures), 'check')} failed. {_not_run(report)}"
    elif report.level is None:
        kind, word = "no-level", "no level"
        told = "Nothing failed, but no level is given."
    else:
        kind, word, told = "passed", report.level, _LEVELS[report.level]
    known = {
        "device": report.device or "the backend's choice",
        "dtypes": ", ".join(report.capabilities.dtypes),
        "tier": report.tier,
        "seed": str(report.seed),
        "capabilities": _declared(report),
    }
    remarks = "".join(f"<p>{_prose(line)}</p>" for line in report.remarks)
    facts = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in known.items())
    return (
        f'<header class="{kind}"><p class="what">Speculative sampling conformance</p>'
        f"<h1>{escape(report.backend)}</h1>"
        f'<p class="level">{escape(word)}</p><div class="told"><p>{escape(told)}</p>{remarks}</div>'
        f"<dl>{facts}</dl></header>"
    )


def _declared(report: Report) -> str:
    flags = ("per_row_rollback", "select", "compile_round")
    names = [name if getattr(report.capabilities, name) else f"no {name}" for name in flags]
    if report.capabilities.max_batch_size is not None:
        names.append(f"max_batch_size {report.capabilities.max_batch_size}")
    return ", ".join(names).replace("_", " ")


def _not_run(report: Report) -> str:
    left = sum(result.status == "not-run" for result in report.checks)
    return f"{_count(left, 'check')} were not run." if left else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _troubles(report: Report) -> Iterator[str]:
    for status, title in (("failed", "What failed"), ("expected-failure", "Expected failures")):
        results = [result for result in report.checks if result.status == status]
        if not results:
            continue
        yield f"<section><h2>{title}</h2>"
        for index, result in enumerate(results):
            shown = " open" if status == "failed" and index < 5 else ""
            story, _, line = (result.diagnosis or "").partition("\nreproduce: ")
            again = f'<p class="again"><span>reproduce</span><code>{escape(line)}</code></p>' if line else ""
            yield (
                f'<details class="{status}"{shown}><summary>{_sign(status)} <code>{escape(result.id)}</code></summary>'
                f"<p>{_prose(result.clause)}</p><pre>{escape(story)}</pre>{again}</details>"
            )
        yield "</section>"


def _glance(report: Report) -> str:
    rows = []
    for tier in TIERS:
        results = [result for result in report.checks if result.id.startswith(f"{tier}.")]
        if not results:
            continue
        cells = "".join(
            f'<a href="#{escape(result.id)}" class="cell {result.status}" title="{escape(result.id)}: {result.status}">'
            f"{_SIGNS[result.status]}</a>"
            for result in results
        )
        counted = Counter(result.status for result in results)
        asked, beside = len(results) - counted["not-applicable"], counted["not-applicable"]
        tally = [f"{counted['passed']} of {asked} passed"] if asked else []
        tally += [f"{beside} not applicable"] if beside else []
        rows.append(
            f'<div class="tier"><h3>{tier} <span>{_TIER_TITLES[tier]}</span></h3><p class="cells">{cells}</p>'
            f'<p class="tally">{", ".join(tally)}</p></div>'
        )
    counts = Counter(result.status for result in report.checks)
    legend = " ".join(
        f'<span><i class="cell {status}">{sign}</i> {counts[status]} {status.replace("-", " ")}</span>'
        for status, sign in _SIGNS.items()
        if counts[status]
    )
    return f'<section><h2>At a glance</h2>{"".join(rows)}<p class="legend">{legend}</p></section>'


def _plots(report: Report) -> str:
    figures = [*_delta_figures(report), *_tv_figures(report), *_path_figures(report)]
    figures += [*_law_figures(report), *_slot_figures(report)]
    return f'<section><h2>Measured</h2><div class="figures">{"".join(figures)}</div></section>' if figures else ""


def _figure(title: str, note: str, drawing: str, legend: str = "") -> str:
    keys = f'<p class="legend">{legend}</p>' if legend else ""
    return f"<figure><figcaption><strong>{_prose(title)}</strong>{_prose(note)}</figcaption>{drawing}{keys}</figure>"


def _plot_data(report: Report, key: str) -> Iterator[_PlotData]:
    """Yield check, dtype and plot data for every check that has some: failures first, and the dtype that failed."""
    order = ("T2", "T3", "T1", "T0")
    for result in sorted(report.checks, key=lambda one: (one.status != "failed", order.index(one.id[:2]))):
        dtypes = list(result.measured.items())
        for dtype, measured in reversed(dtypes) if result.status == "failed" else dtypes:
            plot = dict(measured.values.get("plot", {}))
            if plot.get(key):
                yield result, dtype, plot[key], plot


def _delta_figures(report: Report) -> Iterator[str]:
    largest: dict[str, float] = {}
    limits: dict[str, float | None] = dict(DELTA_CAPS)
    for result in report.checks:
        for dtype, measured in result.measured.items():
            delta = measured.values.get("delta")
            if not isinstance(delta, int | float):
                continue
            # In T0 it is relative to logits of about 1; elsewhere a check has a model, and so a limit, of its own.
            name = dtype if result.id.startswith("T0.") else f"{result.id} {dtype}"
            largest[name] = max(largest.get(name, 0.0), float(delta))
            limits.setdefault(name, measured.tolerance)
    for name in [name for name in largest if limits[name] is None]:
        del largest[name]  # measured by the way: another check holds it against a limit
    for _, _, deltas, _ in _plot_data(report, "delta"):
        for dtype, (delta, cap) in deltas.items():
            largest[dtype], limits[dtype] = max(largest.get(dtype, 0.0), float(delta)), float(cap)
    if largest:
        rows = [Dot(name, delta, limits.get(name)) for name, delta in largest.items()]
        note = "How far logits of a block differ from those of single steps, delta, and the most they may."
        yield _figure("Rounding", note, log_dots("Largest delta", rows), _LEGEND_LIMIT)


def _tv_figures(report: Report) -> Iterator[str]:
    rows = [
        Dot(result.id.partition(".")[2] + f" {dtype}", measured.exact_tv, measured.tolerance)
        for result in report.checks
        for dtype, measured in result.measured.items()
        if measured.exact_tv is not None
    ]
    if rows:
        rows.sort(key=lambda row: -(row.value / row.limit if row.limit else row.value))
        note = "Total variation between the enumerated law and the law it should be, and the most it may be."
        if len(rows) > _MOST_DOTS:
            note += f" The {_MOST_DOTS} nearest to their limit, of {len(rows)}."
            rows = rows[:_MOST_DOTS]
        yield _figure("Exact laws", note, log_dots("Total variation by check", rows), _LEGEND_LIMIT)


def _path_figures(report: Report) -> Iterator[str]:
    paths: list[Path] = []
    thresholds: list[float] = []
    for result, dtype, points, plot in _plot_data(report, "e_path"):
        label = f"{result.id}, {dtype}"
        paths.append(Path(label, [(float(n), float(e)) for n, e in points], result.status == "failed"))
        thresholds += [float(plot["threshold"])] if plot.get("threshold") else []
    if paths:
        note = "Logarithm of the e-value as sequences were drawn: down is agreement, a line each check."
        drawing = path_plot("Logarithm of e-values over samples", paths, min(thresholds, default=math.log(1 / 2e-8)))
        yield _figure("Evidence against the law", note, drawing)


def _law_figures(report: Report) -> Iterator[str]:
    legend = '<span><i class="key expected"></i> expected</span> <span><i class="key got"></i> got</span>'
    for result, dtype, cells, _ in _first_of_each(_plot_data(report, "exact_law")):
        drawn = [(str(label), float(expected), float(got)) for label, expected, got in cells]
        yield _figure(f"`{result.id}`", f"The law of sequences, {dtype}.", law_plot(result.id, drawn), legend)


def _first_of_each(found: Iterator[_PlotData]) -> Iterator[_PlotData]:
    """Yield plot data of the first few checks, one dtype each."""
    seen: set[str] = set()
    for one in found:
        if one[0].id not in seen and len(seen) < _MOST_LAWS:
            seen.add(one[0].id)
            yield one


def _slot_figures(report: Report) -> Iterator[str]:
    for result, dtype, rates, plot in _first_of_each(_plot_data(report, "acceptance_per_slot")):
        expected = plot.get("expected_acceptance_per_slot")
        legend = '<span><i class="key expected"></i> measured</span>'
        legend += ' <span><i class="key got"></i> exact</span>' if expected else ""
        drawing = slot_plot(f"Acceptance per slot, {result.id}", [float(rate) for rate in rates], expected)
        yield _figure(f"`{result.id}`", f"Draft tokens accepted, of those tested, {dtype}.", drawing, legend)


_LEGEND_LIMIT = '<span><i class="key got"></i> measured</span> <span><i class="key limit"></i> limit</span>'


def _costs(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{cost.tier}</td><td>{cost.num_checks}</td><td>{cost.seconds:.1f}</td>"
        f"<td>{cost.num_samples:,}</td><td>{_number(cost.peak_mib, '.0f')}</td></tr>"
        for cost in report.costs
    )
    head = "<tr><th>tier</th><th>checks run</th><th>seconds</th><th>samples</th><th>peak MiB</th></tr>"
    return f'<section><h2>What it cost</h2><div class="wide"><table class="costs">{head}{rows}</table></div></section>'


def _table(report: Report, tier: str) -> str:
    results = [result for result in report.checks if result.id.startswith(f"{tier}.")]
    if not results:
        return ""
    held = [result.to_json() for result in results]
    shown = [name for names in _COLUMNS for name in names if any(one[names[0]] is not None for one in held)]
    head = "".join(f'<th class="number">{_HEADS[name]}</th>' for name in shown)
    rows = "".join(_row(result, shown) for result in results)
    return (
        f"<section><h2>{tier}: {_TIER_TITLES[tier]}</h2>"
        f'<div class="wide"><table class="checks"><tr><th></th><th>clause</th>{head}<th class="number">s</th></tr>'
        f"{rows}</table></div></section>"
    )


def _row(result: CheckResult, shown: Sequence[str]) -> str:
    held = result.to_json()
    numbers = "".join(
        f'<td class="number" data-name="{_HEADS[name]}">{_number(held[name], ".3g")}</td>' for name in shown
    )
    why = ""
    if result.status in ("not-applicable", "not-run") and result.diagnosis:
        why = f'<br><small class="why">{result.status.replace("-", " ")}: {_prose(result.diagnosis)}</small>'
    return (
        f'<tr id="{escape(result.id)}"><td>{_sign(result.status)}</td>'
        f"<td><code>{escape(result.id)}</code><br><small>{_prose(result.clause)}</small>{why}</td>"
        f'{numbers}<td class="number" data-name="seconds">{result.seconds:.2f}</td></tr>'
    )


def _footer(report: Report) -> str:
    detail = [
        {
            "id": result.id,
            "seconds": round(result.seconds, 4),
            "values": {dtype: dict(measured.values) for dtype, measured in result.measured.items()},
        }
        for result in report.checks
    ]
    whole = json.dumps(_held({"report": report.to_json(), "detail": detail}), ensure_ascii=False, allow_nan=False)
    data = whole.replace("<", "\\u003c")
    return (
        f"<footer><p>Suite {SUITE_VERSION}, contract {CONTRACT_VERSION}. Every clause: docs/contract.md;"
        " how to read the page: docs/conformance.md. The numbers behind it are in its source as JSON.</p></footer>"
        f'<script type="application/json" id="report">{data}</script>'
    )


def _held(value: Any) -> Any:
    """Return a value that JSON can hold, all the way down."""
    if isinstance(value, dict):
        return {str(key): _held(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_held(item) for item in value]
    if isinstance(value, str | int | bool) or value is None:
        return value
    return finite(float(value))


def _sign(status: str) -> str:
    return f'<i class="cell {status}" title="{status}">{_SIGNS[status]}</i>'


def _prose(text: str) -> str:
    """Return text as HTML, with what stands in backticks as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _number(value: Any, form: str) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else format(float(value), form)
