"""From the journal to figures: time per token, what the formula predicts, and whether quality is unchanged."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from _paper_bench import median_seconds
from _paper_statistics import bootstrap_mean, bootstrap_timings, swap_test

from specsampling import expected_tokens

__all__ = ["Profile", "analyse", "parse_profile", "predict", "solve_acceptance"]

Entries = Sequence[Mapping[str, Any]]


class Profile(NamedTuple):
    """Call times to replay measured acceptance with, in milliseconds.

    Attributes
    ----------
    draft, target : float
        One draft step, and one single-token pass of the target.
    per_token : float
        What each further token of the target's block adds; 0 where reading the weights is all that takes time.
    """

    draft: float
    target: float
    per_token: float = 0.0

    @property
    def name(self) -> str:
        """How the command line writes it."""
        return ":".join(f"{value:g}" for value in (self if self.per_token else self[:2]))


def parse_profile(text: str) -> Profile:
    """Read ``draft_ms:target_ms`` or ``draft_ms:target_ms:ms_per_further_token``.

    Examples
    --------
    >>> parse_profile("1.8:14.1")
    Profile(draft=1.8, target=14.1, per_token=0.0)
    """
    try:
        profile = Profile(*map(float, text.split(":")))
    except (TypeError, ValueError):
        raise ValueError(f"a profile must be draft_ms:target_ms[:ms_per_further_token], got {text!r}") from None
    if profile.target <= 0 or min(profile) < 0:
        raise ValueError(f"times of a profile must be positive, got {text!r}")
    return profile


def predict(acceptance: float, lookahead: int, *, draft: float, block: float, coverage: float = 1.0) -> float:
    """Return the predicted time per token: that of a round's model calls over the tokens it is expected to emit.

    Parameters
    ----------
    acceptance : float
        Chance that a tested token is kept.
    lookahead : int
        Tokens drafted, K.
    draft, block : float
        Time of one draft step, and of the target's block of K + 1.
    coverage : float
        Share of the rounds in which the drafter proposed anything; less than 1 for prompt lookup.

    Returns
    -------
    float
        Time per token, in the unit of the call times.

    Examples
    --------
    >>> round(predict(0.8, 4, draft=1.8, block=14.1), 2)
    6.34
    """
    tokens: float = 1 + coverage * (expected_tokens(acceptance, lookahead) - 1)
    return (lookahead * draft + block) / tokens


def solve_acceptance(tokens_per_round: float, lookahead: int) -> float:
    """Return the acceptance with which a round is expected to emit so many tokens.

    Examples
    --------
    >>> round(solve_acceptance(expected_tokens(0.7, 4), 4), 6)
    0.7
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, lookahead) < tokens_per_round else (low, middle)
    return low


def analyse(entries: Iterable[Mapping[str, Any]], profiles: Sequence[Profile] = ()) -> dict[str, Any]:
    """Return everything that tables and figures show, from the entries of a journal.

    Parameters
    ----------
    entries : iterable of mapping
        Of the kinds "run", "calls" and "greedy"; others are left alone.
    profiles : sequence of Profile
        Call times to replay the measured rounds with.

    Returns
    -------
    dict
        ``speed``: per backend, target, task and setting the plain times and, by drafter, everything by K.
        ``quality``: per drafter and K the scores and tests beside plain decoding.
    """
    runs: list[Mapping[str, Any]] = []
    calls: list[Mapping[str, Any]] = []
    greedy: list[Mapping[str, Any]] = []
    for entry in entries:
        {"run": runs, "calls": calls, "greedy": greedy}.get(entry["kind"], []).append(entry)
    names = ("backend", "target", "task", "setting")
    found: dict[str, list[dict[str, Any]]] = {"speed": [], "quality": []}
    for study in found:
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for run in runs:
            if run["key"]["study"] == study:
                groups.setdefault(tuple(run["key"][name] for name in names), []).append(run)
        for group, members in groups.items():
            place: dict[str, Any] = dict(zip(names, group, strict=True))
            if study == "speed":
                own_calls = [call for call in calls if all(call["key"][name] == place[name] for name in names[:3])]
                found[study] += _speed(place, members, own_calls, profiles)
            else:
                own_greedy = [entry for entry in greedy if all(entry["key"][name] == place[name] for name in names)]
                found[study] += _quality(place, members, own_greedy)
    return found


def _modes_of(runs: Entries) -> list[tuple[str, int]]:
    """Return every (drafter, K), plain decoding first."""
    found = {(run["key"]["drafter"], run["key"]["lookahead"]) for run in runs}
    return sorted(found, key=lambda mode: (mode[1] > 0, mode))


def _complete(runs: Entries, modes: Sequence[tuple[str, int]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the runs of the repeats that are whole, by mode, repeat and place of the prompt in the repeat."""
    written: dict[int, dict[int, dict[tuple[str, int], Mapping[str, Any]]]] = {}
    for run in runs:
        key = run["key"]
        texts = written.setdefault(key["repeat"], {}).setdefault(key["prompt"], {})
        texts[key["drafter"], key["lookahead"]] = run
    most = max(map(len, written.values()))
    return {
        (mode, repeat, place): texts[mode]
        for repeat, prompts in written.items()
        if len(prompts) == most and all(len(texts) == len(modes) for texts in prompts.values())
        for place, (_, texts) in enumerate(sorted(prompts.items()))
        for mode in modes
    }


def _table(cells: Mapping[tuple[Any, ...], Mapping[str, Any]], modes: Sequence[tuple[str, int]], value: Any) -> Any:
    repeats = sorted({repeat for _, repeat, _ in cells})
    prompts = sorted({prompt for _, _, prompt in cells})
    return np.array([[[value(cells[mode, r, p]) for p in prompts] for r in repeats] for mode in modes], dtype=float)


def _speed(
    place: Mapping[str, Any], runs: Entries, calls: Entries, profiles: Sequence[Profile]
) -> list[dict[str, Any]]:
    modes = _modes_of(runs)
    cells = _complete(runs, modes)
    if not cells or modes[0][1] != 0:
        return []  # not one whole repeat, or nothing to compare with
    rows = []
    for drafter in sorted({drafter for drafter, lookahead in modes if lookahead}):
        own = [mode for mode in modes if mode[1] == 0 or mode[0] == drafter]
        chosen = {cell: run for cell, run in cells.items() if cell[0] in own}
        timings = bootstrap_timings(
            _table(chosen, own, lambda run: run["decode_seconds"] * 1e3),
            _table(chosen, own, lambda run: run["decoded"]),
        )
        drafted = [run for (mode, _, _), run in chosen.items() if mode[1]]
        pooled = _acceptance(drafted)
        draft_ms = 1e3 * (median_seconds(calls, drafter, 1) or 0.0)
        by_lookahead = []
        for index, (mode, per_token, speedup, share) in enumerate(
            zip(own, timings.per_token, timings.speedups, timings.best_shares, strict=True)
        ):
            members = [run for (other, _, _), run in chosen.items() if other == mode]
            block = median_seconds(calls, "target", mode[1] + 1)
            rounds = sum(run["rounds"] - 1 for run in members)
            coverage = _coverage(members)
            by_lookahead.append(
                {
                    "lookahead": mode[1],
                    "ms_per_token": per_token,
                    "speedup": speedup,
                    "share_of_resamples_in_which_best": share,
                    "ms_per_round": 1e3 * sum(run["decode_seconds"] for run in members) / max(rounds, 1),
                    "ms_per_round_by_repeat": _by_repeat(members, lambda run: run["decode_seconds"] * 1e3, "rounds"),
                    "tokens_per_round": sum(run["emitted"] for run in members) / sum(run["rounds"] for run in members),
                    "acceptance": _acceptance(members),
                    "acceptance_by_text": _spread_of_acceptance(members),
                    "coverage": coverage,
                    "draft_step_ms": draft_ms if index else None,
                    "target_block_ms": None if block is None else 1e3 * block,
                    "predicted_ms_per_token": None
                    if block is None
                    else predict(pooled or 0.0, mode[1], draft=draft_ms, block=1e3 * block, coverage=coverage),
                }
            )
        predicted = {row["lookahead"]: row["predicted_ms_per_token"] for row in by_lookahead}
        known = {lookahead: ms for lookahead, ms in predicted.items() if ms is not None}
        rows.append(
            {
                **place,
                "drafter": drafter,
                "repeats": len({repeat for _, repeat, _ in chosen}),
                "prompts": len({run["key"]["prompt"] for run in chosen.values()}),
                "pooled_acceptance": pooled,
                "by_lookahead": by_lookahead,
                "best_lookahead": min(by_lookahead, key=lambda row: row["ms_per_token"].value)["lookahead"],
                "predicted_best_lookahead": min(known, key=lambda lookahead: (known[lookahead], lookahead))
                if known
                else None,
                "computed": {profile.name: _replay(profile, chosen, own) for profile in profiles},
            }
        )
    return rows


def _by_repeat(runs: Entries, value: Any, count: str) -> list[float]:
    """Return, for each repeat, the sum of a value over the rounds after the first of each text."""
    repeats = sorted({run["key"]["repeat"] for run in runs})
    groups = [[run for run in runs if run["key"]["repeat"] == repeat] for repeat in repeats]
    return [sum(map(value, group)) / max(sum(run[count] - 1 for run in group), 1) for group in groups]


def _acceptance(runs: Entries) -> float | None:
    tested = sum(run["tested"] for run in runs)
    return sum(run["accepted"] for run in runs) / tested if tested else None


def _spread_of_acceptance(runs: Entries) -> Any:
    """Return the acceptance with an interval over texts; those of one prompt go together."""
    prompts = sorted({run["key"]["prompt"] for run in runs})
    counts = np.array(
        [
            [sum(run[name] for run in runs if run["key"]["prompt"] == prompt) for prompt in prompts]
            for name in ("accepted", "tested")
        ]
    )
    if not counts[1].sum():
        return None
    chosen = np.random.default_rng(0).integers(len(prompts), size=(2_000, len(prompts)))
    drawn = counts[0][chosen].sum(axis=1) / np.maximum(counts[1][chosen].sum(axis=1), 1)
    return [float(counts[0].sum() / counts[1].sum()), *(float(x) for x in np.percentile(drawn, [2.5, 97.5]))]


def _coverage(runs: Entries) -> float:
    return 1 - float(sum(run["undrafted"] for run in runs) / sum(run["rounds"] for run in runs))


def _replay(
    profile: Profile, cells: Mapping[tuple[Any, ...], Mapping[str, Any]], modes: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return what the measured rounds would have taken with other call times. Computed, not measured."""

    def milliseconds(run: Mapping[str, Any]) -> float:
        lookahead = run["key"]["lookahead"]
        # Prompt lookup takes no draft step.
        draft = 0.0 if run["key"]["drafter"] == "lookup" else profile.draft
        return float(run["rounds"] * (lookahead * (draft + profile.per_token) + profile.target))

    timings = bootstrap_timings(_table(cells, modes, milliseconds), _table(cells, modes, lambda run: run["emitted"]))
    return [
        {"lookahead": mode[1], "ms_per_token": per_token, "speedup": speedup, "share_of_resamples_in_which_best": share}
        for mode, per_token, speedup, share in zip(
            modes, timings.per_token, timings.speedups, timings.best_shares, strict=True
        )
    ]


def _quality(place: Mapping[str, Any], runs: Entries, greedy: Entries) -> list[dict[str, Any]]:
    by_mode: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_mode.setdefault((run["key"]["drafter"], run["key"]["lookahead"]), {})[run["key"]["prompt"]] = run
    plain = by_mode.get(("plain", 0), {})
    rows = []
    for (drafter, lookahead), texts in sorted(by_mode.items()):
        prompts = sorted(texts.keys() & plain.keys())
        if lookahead == 0 or not prompts:
            continue
        pairs = [(plain[prompt], texts[prompt]) for prompt in prompts]
        scores = np.array([[run["score"] for run in pair] for pair in pairs], dtype=float)
        trivial = [pair[0]["trivial_score"] for pair in pairs if pair[0]["trivial_score"] is not None]
        row: dict[str, Any] = {
            **place,
            "drafter": drafter,
            "lookahead": lookahead,
            "texts": len(pairs),
            "tokens": sum(len(run["tokens"]) for run in itertools.chain.from_iterable(pairs)),
            "score_plain": float(scores[:, 0].mean()),
            "score": float(scores[:, 1].mean()),
            "score_difference": bootstrap_mean(scores[:, 1] - scores[:, 0]),
            "score_without_a_model": statistics.fmean(trivial) if trivial else None,
        }
        if place["setting"] == "greedy":
            differ = [prompt for prompt in prompts if plain[prompt]["digest"] != texts[prompt]["digest"]]
            found = [
                entry
                for entry in greedy
                if entry["key"]["drafter"] == drafter and entry["key"]["lookahead"] == lookahead
            ]
            row["greedy"] = {
                "equal": len(prompts) - len(differ),
                "examined": len(found),
                "bugs": sum("bug" in (entry["plain"]["verdict"], entry["other"]["verdict"]) for entry in found),
                "ties": [
                    {"prompt": entry["key"]["prompt"], "first_difference": entry["first_difference"], **_margins(entry)}
                    for entry in found
                ],
            }
        elif any(pair[0]["logprobs"] for pair in pairs) and any(pair[1]["logprobs"] for pair in pairs):
            row["law"] = swap_test(
                [pair[0]["logprobs"] for pair in pairs], [pair[1]["logprobs"] for pair in pairs]
            )._asdict()
        rows.append(row)
    return rows


def _margins(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far the less likely of two greedy texts falls short, and what rounding explains."""
    found = [entry[name] for name in ("plain", "other") if entry[name]["margin"] is not None]
    worst = max(found, key=lambda verdict: verdict["margin"], default={"margin": None, "tolerance": None})
    return {"margin": worst["margin"], "tolerance": worst["tolerance"]}
