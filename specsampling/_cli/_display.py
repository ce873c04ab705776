"""What a person sees: text in colours by origin, and the numbers in words."""

import os
from typing import Literal, TextIO

from specsampling._results import Generation, Stats

__all__ = ["Kind", "Palette", "describe", "kinds_of", "table", "wants_color"]

Kind = Literal["accepted", "replacement", "bonus", "plain"]
"""Where a token came from: an accepted proposal, the residual, the row after a fully accepted block, or a round in
which nothing was proposed."""

# Bold besides colour, so that the kinds differ for readers who do not tell these colours apart.
_STYLES: dict[str, str] = {
    "accepted": "\x1b[32m",
    "replacement": "\x1b[1;35m",
    "bonus": "\x1b[1;36m",
    "plain": "",
    "prompt": "\x1b[2m",
}
_RESET = "\x1b[0m"

# A terminal obeys control characters and a model may emit any.
_CONTROLS = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def kinds_of(num_emitted: int, num_accepted: int, num_proposed: int) -> list[Kind]:
    """Name the origin of each token that one row committed in one round.

    Parameters
    ----------
    num_emitted : int
        Tokens committed.
    num_accepted : int
        How many of them were proposed; they come first.
    num_proposed : int
        Tokens proposed to begin with.

    Returns
    -------
    list of str
        One entry per token.
    """
    last: Kind = "plain" if num_proposed == 0 else "bonus" if num_accepted == num_proposed else "replacement"
    return ["accepted" if index < num_accepted else last for index in range(num_emitted)]


def wants_color(stream: TextIO, choice: str) -> bool:
    """Say whether to colour what goes to `stream`: as chosen, as NO_COLOR or FORCE_COLOR says, else on a terminal."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Palette:
    """Dress text for one stream.

    Parameters
    ----------
    stream : file
        Where the text goes.
    color : {"auto", "always", "never"}
        As `wants_color` reads it.
    """

    def __init__(self, stream: TextIO, color: str) -> None:
        self._has_color = wants_color(stream, color)
        self._is_terminal = stream.isatty()

    def __call__(self, kind: str, text: str) -> str:
        """Return `text` in the style of `kind`, harmless for a terminal."""
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        style = _STYLES[kind]
        return f"{style}{text}{_RESET}" if self._has_color and style and text else text

    def legend(self) -> str:
        """Return the names of the kinds in their colours, or nothing without colours."""
        names = (self(kind, kind) for kind in ("accepted", "replacement", "bonus"))
        return ", ".join(names) if self._has_color else ""


def describe(result: Generation, seconds: float) -> str:
    """Sum up a run in one line."""
    stats = result.stats
    unit = "token" if stats.emitted == 1 else "tokens"
    speed = stats.emitted / max(seconds, 1e-9)
    parts = [f"{stats.emitted} {unit} in {seconds:.2f} s ({speed:.{0 if speed >= 10 else 2}f} per second)"]
    if stats.tokens_per_target_call is not None:
        parts.append(f"{stats.tokens_per_target_call:.2f} tokens per target call")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of tested draft tokens accepted")
    return ", ".join([*parts, f"seed {result.seed}"])


def table(stats: Stats, finish_reason: str) -> str:
    """Lay out every count of a run, as `specsampling.Stats` defines them."""
    rate = "none tested" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%} of tested"
    expected = f"{stats.expected_accepted:.1f}"
    times = ", ".join(f"{name} {seconds:.3f}" for name, seconds in stats.times._asdict().items())
    slots = [pair for pair in zip(stats.accepted_per_slot, stats.tested_per_slot, strict=True) if pair[1]]
    histogram = list(stats.accepted_histogram)
    while histogram and not histogram[-1]:
        histogram.pop()
    rows = [
        ("emitted", f"{stats.emitted} (ended by {finish_reason})"),
        ("rounds", str(stats.rounds)),
        ("target calls", str(stats.target_calls)),
        ("draft calls", str(stats.draft_calls)),
        ("proposed", str(stats.proposed)),
        ("tested", str(stats.tested)),
        ("accepted", f"{stats.accepted} ({rate}; expected {expected})"),
        ("accepted by slot", " ".join(f"{accepted}/{tested}" for accepted, tested in slots) or "-"),
        ("rounds by accepted", " ".join(map(str, histogram)) or "-"),
        ("seconds", f"{sum(stats.times):.3f}: {times}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
