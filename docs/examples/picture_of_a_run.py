"""Draw the README's picture: text by the bundled pair, coloured by where each byte came from, as SVG.

Run ``python docs/examples/picture_of_a_run.py --out docs/_static/run.svg``.
"""

import argparse
from html import escape
from pathlib import Path

import specsampling

COLOURS = {"prompt": "#8b949e", "accepted": "#7ee787", "replacement": "#ff7b72", "bonus": "#79c0ff"}
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
CHAR_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 21, 24


def coloured_run(prompt: str, num_tokens: int, seed: int, lookahead: int) -> tuple[list[tuple[str, str]], str]:
    """Return (character, kind) pairs and a line of summary; the bundled models' ids are bytes."""
    target = specsampling.load_model("numpy", specsampling.bundled("target"))
    draft = specsampling.load_model("numpy", specsampling.bundled("draft"))
    pieces = [(character, "prompt") for character in prompt]
    events = specsampling.stream(
        target, draft, list(prompt.encode()), max_new_tokens=num_tokens, lookahead=lookahead, seed=seed
    )
    while True:
        try:
            event = next(events)
        except StopIteration as stop:
            stats = stop.value.stats
            break
        last = "bonus" if event.from_draft.count(True) == lookahead else "replacement"
        for token, from_draft in zip(event.tokens, event.from_draft, strict=True):
            pieces.append((bytes([token]).decode("ascii", errors="replace"), "accepted" if from_draft else last))
    summary = (
        f"{stats.emitted} tokens in {stats.target_calls} target calls: {stats.tokens_per_target_call:.2f} a call, "
        f"{stats.acceptance_rate:.0%} of tested draft tokens accepted"
    )
    return pieces, summary


def svg(pieces: list[tuple[str, str]], summary: str) -> str:
    """Return the picture of a terminal with the coloured text and a legend."""
    lines: list[list[tuple[str, str]]] = [[]]
    for character, kind in pieces:
        if character == "\n":
            lines.append([])
        else:
            lines[-1].append((character, kind))
    width = 2 * MARGIN + CHAR_WIDTH * max(len(summary), *(len(line) for line in lines), 64)
    height = 2 * MARGIN + LINE_HEIGHT * (len(lines) + 3)
    rows = [text_row(line, MARGIN + LINE_HEIGHT * (number + 1)) for number, line in enumerate(lines)]
    legend: list[tuple[str, str]] = []
    for kind in ("accepted", "replacement", "bonus"):
        legend += [(character, kind) for character in f"■ {kind}"] + [("\N{NO-BREAK SPACE}", "prompt")] * 3
    rows.append(text_row([(character, "prompt") for character in summary], MARGIN + LINE_HEIGHT * (len(lines) + 2)))
    rows.append(text_row(legend, MARGIN + LINE_HEIGHT * (len(lines) + 3)))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f"<title>Text by speculative sampling: {escape(summary)}</title>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#0d1117"/>',
            f'<g font-family="{FONTS}" font-size="14" style="white-space: pre">',
            *rows,
            "</g>",
            "</svg>",
            "",
        ]
    )


def text_row(line: list[tuple[str, str]], y: float) -> str:
    """Return one line of text, a span for each run of one colour."""
    spans: list[tuple[str, str, int]] = []
    for column, (character, kind) in enumerate(line):
        if spans and spans[-1][1] == kind:
            spans[-1] = (spans[-1][0] + character, kind, spans[-1][2])
        else:
            spans.append((character, kind, column))
    # Each span says its own place and length, so that no font can pull the columns apart.
    return f'<text y="{y}">' + "".join(
        f'<tspan x="{MARGIN + CHAR_WIDTH * column:.1f}" textLength="{CHAR_WIDTH * len(text):.1f}" '
        f'fill="{COLOURS[kind]}">{escape(text)}</tspan>'
        for text, kind, column in spans
    ) + "</text>"  # fmt: skip


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("run.svg"))
    parser.add_argument("--prompt", default="ROMEO:")
    parser.add_argument("--max-new-tokens", type=int, default=240)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    pieces, summary = coloured_run(arguments.prompt, arguments.max_new_tokens, arguments.seed, arguments.lookahead)
    arguments.out.write_text(svg(pieces, summary), encoding="utf-8")
    print(f"{arguments.out}: {summary}")


if __name__ == "__main__":
    main()
