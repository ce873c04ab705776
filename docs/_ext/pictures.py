"""The directive ``picture``: figures drawn while the site is built, from the library's own numbers, for light and dark.

    :::{picture} overlap
    :alt: what a reader who cannot see it should know
    The caption.
    :::

Each function below draws one picture. It is called twice, with the colours of either theme, and the reader's browser
shows the one that fits.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import matplotlib as mpl
import numpy as np
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

import specsampling
from specsampling import Label, Purpose

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the choice of a backend that needs no display

THEMES = {
    "light": {"text": "#24292f", "faint": "#8c959f", "target": "#0969da", "draft": "#bc4c00", "good": "#1a7f37"},
    "dark": {"text": "#cfd0d0", "faint": "#7d8590", "target": "#58a6ff", "draft": "#f0883e", "good": "#3fb950"},
}

PROMPT = "ROMEO:\nO, she doth teach the"
LOOKAHEAD = 4
SEED = 29


class Slot(NamedTuple):
    """One slot of a round: the token drafted, both its probabilities, the uniform, and what became of it."""

    token: int
    target_prob: float
    draft_prob: float
    uniform: float
    fate: str


class Round(NamedTuple):
    """A round of the bundled pair: its slots, the token that ended it, and both laws where it ended."""

    slots: list[Slot]
    next_token: int
    target_law: np.ndarray
    draft_law: np.ndarray | None


class _Notes:
    """A source of randomness that writes down what it is asked, and answers as `CounterSource` does."""

    def __init__(self, seed: int) -> None:
        self.source = specsampling.CounterSource(seed)
        self.lookahead = 0
        self.draft_laws: list[np.ndarray] = []

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> "_Notes":
        self.answers, self.lookahead = self.source.begin_round(row_ids, rounds, lookahead), lookahead
        return self

    def accept(self, numerator: Any, denominator: Any, label: Label) -> Any:
        self.target_probs, self.draft_probs = numerator[0], denominator[0]
        self.uniforms = self.answers.uniforms_like(numerator)[0, self.lookahead : 2 * self.lookahead, 0]
        return self.answers.accept(numerator, denominator, label)

    def categorical(self, weights: Any, label: Label) -> Any:
        if label.purpose == Purpose.DRAFT:
            self.draft_laws.append(weights[0])
        return self.answers.categorical(weights, label)


@functools.cache
def one_round() -> Round:
    """Run one round of the bundled pair, in which a token is rejected, and return what happened."""
    target, draft = (specsampling.load_model("numpy", specsampling.bundled(name)) for name in ("target", "draft"))
    notes = _Notes(SEED)
    prompt = list(PROMPT.encode())
    decoder = specsampling.Decoder(target, draft, lookahead=LOOKAHEAD, randomness=notes)
    _, info = decoder.step(decoder.init(prompt, max_new_tokens=32))
    accepted, emitted = int(info.num_accepted[0]), info.tokens[0].tolist()
    uniforms = notes.uniforms.tolist()
    # The tokens that were not emitted: drawn once more from the laws they were drawn from.
    source = specsampling.CounterSource(SEED).begin_round([0], [0], LOOKAHEAD)
    tokens = [
        int(source.categorical(law[None], Label(Purpose.DRAFT, slot))[0]) for slot, law in enumerate(notes.draft_laws)
    ]
    fates = (["accepted"] * accepted + ["rejected"] + ["dropped"] * LOOKAHEAD)[:LOOKAHEAD]
    slots = [
        Slot(token, float(p), float(q), u, fate)
        for token, p, q, u, fate in zip(tokens, notes.target_probs, notes.draft_probs, uniforms, fates, strict=True)
    ]
    text = np.array([prompt + emitted[:accepted]])
    logits, _ = target.score(target.init_cache(1, text.shape[1]), text, num_logits=1)
    law = specsampling.to_probs(logits[0, 0], specsampling.Sampling())
    draft_law = notes.draft_laws[accepted] if accepted < LOOKAHEAD else None
    return Round(slots, emitted[accepted], law, draft_law)


def shown(token: int) -> str:
    """Return a byte as a reader can tell it."""
    return {10: "⏎", 32: "␣"}.get(token, chr(token))


def draw_round(colours: dict[str, str]) -> plt.Figure:
    """Draw one round, slot by slot, with the numbers of a real one."""
    round_ = one_round()
    figure, axes = plt.subplots(figsize=(5.6, 4.4))
    axes.set_xlim(-1.25, LOOKAHEAD + 0.1)
    axes.set_ylim(0, 5.6)
    axes.axis("off")
    of_fate = {"accepted": colours["good"], "rejected": colours["draft"], "dropped": colours["faint"]}
    labels = (
        (4.95, "drafted"),
        (4.1, "draft's q(x)"),
        (3.5, "target's p(x)"),
        (2.9, "min(1, p/q)"),
        (2.3, "uniform u"),
        (1.6, "verdict"),
        (0.6, "emitted"),
    )
    for y, label in labels:
        axes.text(-1.25, y, label, va="center", color=colours["faint"])
    for x, slot in enumerate(round_.slots):
        colour = of_fate[slot.fate]
        is_dropped = slot.fate == "dropped"
        _token(axes, x + 0.5, 4.95, slot.token, colour)
        values = (slot.draft_prob, slot.target_prob, min(1.0, slot.target_prob / slot.draft_prob), slot.uniform)
        for y, value, name in zip((4.1, 3.5, 2.9, 2.3), values, ("draft", "target", "text", "text"), strict=True):
            axes.text(
                *(x + 0.5, y, f"{value:.3f}"),
                ha="center",
                va="center",
                color=colours["faint" if is_dropped else name],
                alpha=0.55 if is_dropped else 1,
            )
        verdict = {"accepted": "u q < p\nkept", "rejected": "u q ≥ p\nrejected", "dropped": "not\nlooked at"}[slot.fate]
        axes.text(x + 0.5, 1.6, verdict, ha="center", va="center", color=colour, linespacing=1.25)
        if slot.fate == "accepted":
            _token(axes, x + 0.5, 0.6, slot.token, colour)
    x = next((x for x, slot in enumerate(round_.slots) if slot.fate == "rejected"), LOOKAHEAD)
    kind = "bonus" if x == LOOKAHEAD else "from the\nresidual"
    _token(axes, x + 0.5, 0.6, round_.next_token, colours["target"])
    axes.text(x + 0.85, 0.6, kind, va="center", color=colours["target"])
    return figure


def _token(axes: plt.Axes, x: float, y: float, token: int, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": colour, "linewidth": 1.4}
    axes.text(x, y, shown(token), ha="center", va="center", color=colour, bbox=box, family="monospace", fontsize=17)


def draw_overlap(colours: dict[str, str]) -> plt.Figure:
    """Draw both laws where the round ended: what they share is kept, what p has beyond q is the residual."""
    round_ = one_round()
    if round_.draft_law is None:
        raise ValueError("the round of the picture must end with a rejection: choose another seed")
    p, q = round_.target_law, round_.draft_law
    ids = np.argsort(-np.maximum(p, q))[:10]
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    x = np.arange(len(ids))
    shared = np.minimum(p, q)[ids]
    axes.bar(x, shared, 0.78, color=colours["good"], alpha=0.45, label="both: kept")
    axes.bar(x, p[ids] - shared, 0.78, shared, color=colours["target"], alpha=0.85, label="p beyond q: the residual")
    beyond = np.flatnonzero(q[ids] > shared)
    axes.bar(
        *(beyond, (q[ids] - shared)[beyond], 0.78, shared[beyond]),
        facecolor="none",
        edgecolor=colours["draft"],
        hatch="///",
        label="q beyond p",
    )
    axes.set_xticks(x, [shown(int(token)) for token in ids], family="monospace", fontsize=13)
    axes.set_ylabel("probability")
    overlap = float(np.minimum(p, q).sum())
    # Without a place matplotlib looks for the best one, and warns where that takes long: on a busy machine that fails.
    axes.legend(loc="upper right", frameon=False, labelcolor=colours["text"], title=f"overlap: {overlap:.3f}")
    plt.setp(axes.get_legend().get_title(), color=colours["text"])
    return figure


def draw_speedup(colours: dict[str, str]) -> plt.Figure:
    """Draw the expected speed-up against K for some acceptances, and mark the best K of each."""
    figure, panels = plt.subplots(1, 2, figsize=(5.6, 3.4), sharey=True)
    lookaheads = range(13)
    for axes, draft_cost in zip(panels, (0.05, 0.2), strict=True):
        lowest = 0.0
        for shade, acceptance in zip((0.4, 0.55, 0.7, 0.85, 1.0), (0.5, 0.6, 0.7, 0.8, 0.9), strict=True):
            gains = [
                specsampling.expected_speedup(acceptance, k, draft_cost=draft_cost if k else 0, block_cost=1 + 0.02 * k)
                for k in lookaheads
            ]
            axes.plot(lookaheads, gains, color=colours["target"], alpha=shade)
            best = int(np.argmax(gains))
            axes.plot(best, gains[best], "o", color=colours["draft"], markersize=5)
            # Names of curves that end close together are moved apart.
            lowest = max(gains[-1], lowest + 0.17)
            axes.text(12.2, lowest, f"{acceptance:.1f}", color=colours["text"], va="center", fontsize=9)
        axes.axhline(1, color=colours["faint"], linewidth=0.8, linestyle="--")
        axes.set_title(f"a draft step costs {draft_cost:g}", color=colours["text"], fontsize=10)
        axes.set_xlabel("lookahead K")
        axes.set_xlim(0, 13.6)
        axes.set_xticks(range(0, 13, 2))
    panels[0].set_ylabel("times plain decoding")
    return figure


def draw_best_lookahead(colours: dict[str, str]) -> plt.Figure:
    """Draw the best K against the acceptance for drafts of different cost, on a target whose blocks grow dearer."""
    figure, panels = plt.subplots(1, 2, figsize=(5.6, 3.4), sharey=True)
    acceptances = np.linspace(0.3, 0.95, 131)
    for axes, growth in zip(panels, (0.02, 0.2), strict=True):
        costs = {k: 1 + growth * k for k in range(1, 17)}
        for style, draft_cost in zip(("-", "--", ":"), (0.02, 0.1, 0.3), strict=True):
            best = [
                specsampling.best_lookahead(float(alpha), draft_cost=draft_cost, block_costs=costs)
                for alpha in acceptances
            ]
            axes.step(acceptances, best, style, color=colours["target"], label=f"{draft_cost:g}")
        axes.set_title(f"a block of K + 1 costs 1 + {growth:g} K", color=colours["text"], fontsize=10)
        axes.set_xlabel("acceptance rate")
    panels[0].set_ylabel("best lookahead K")
    panels[0].legend(loc="upper left", frameon=False, labelcolor=colours["text"], title="a draft step costs")
    plt.setp(panels[0].get_legend().get_title(), color=colours["text"])
    return figure


PICTURES: dict[str, Callable[[dict[str, str]], plt.Figure]] = {
    "round": draw_round,
    "overlap": draw_overlap,
    "speedup": draw_speedup,
    "best-lookahead": draw_best_lookahead,
}


def write_picture(name: str, folder: Path) -> dict[str, Path]:
    """Draw one picture for every theme and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for theme, colours in THEMES.items():
        settings = {
            "svg.hashsalt": name,  # the same picture gives the same file
            "font.size": 13 if name == "round" else 10,  # few words, which a phone shall show as well
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["text"]),
            "axes.edgecolor": colours["faint"],
            "hatch.linewidth": 1.0,
        }
        with mpl.rc_context(settings):
            figure = PICTURES[name](colours)
            files[theme] = folder / f"{name}-{theme}.svg"
            figure.savefig(files[theme], transparent=True, metadata={"Date": None})
            plt.close(figure)
    return files


class Picture(SphinxDirective):
    """Draw a picture and show it with its caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return a figure of two images, of which a stylesheet shows one."""
        (name,) = self.arguments
        if name not in PICTURES or "alt" not in self.options:
            raise self.error(f"a picture needs a name among {', '.join(PICTURES)}, and :alt:")
        self.env.note_dependency(__file__)
        files = write_picture(name, Path(self.env.srcdir) / "_generated")
        figure = nodes.figure(classes=["picture"])
        for theme, file in files.items():
            image = nodes.image(uri=f"/_generated/{file.name}", alt=self.options["alt"], classes=[f"only-{theme}"])
            figure += image
        caption = nodes.caption()
        parsed = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, parsed)
        for paragraph in parsed.children:
            caption += paragraph.children
        figure += caption
        return [figure]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
