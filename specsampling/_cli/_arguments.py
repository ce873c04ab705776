"""What the command line accepts."""

import argparse
from importlib.metadata import version
from typing import NoReturn

__all__ = ["build_parser", "in_options"]

_DESCRIPTION = (
    "Speculative sampling: a cheap draft proposes tokens, the target checks them, and the law is the target's."
)

_EXAMPLES = """\
examples:
  specsampling generate "ROMEO:"
  specsampling generate "ROMEO:" --temperature 0.8 --top-p 0.9 --stats --compare
  echo "To be, or not to be" | specsampling generate --draft lookup --json
"""


# The library's names of what options set, where they are not the options' own.
_OTHERWISE = {"name": "--backend", "end_tokens": "--end-token", "stop_sequences": "--stop"}
_ALIKE = (
    *("device", "dtype", "lookahead", "max_new_tokens", "min_new_tokens", "min_p", "pad_vocab", "seed"),
    *("temperature", "top_k", "top_p"),
)
_OPTIONS = _OTHERWISE | {name: "--" + name.replace("_", "-") for name in _ALIKE}


def in_options(message: str) -> str:
    """Return an error message of the library in the words of the command line: options, one prompt, nothing unset."""
    for name, option in _OPTIONS.items():
        message = message.replace(f"`{name}`", f"`{option}`")
    return message.replace(" (None is off)", "").replace(" in row 0", "").replace("`pad_vocab=True`", "`--pad-vocab`")


class _Parser(argparse.ArgumentParser):
    """A parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what was wrong and leave with status 2."""
        if message.startswith(("unrecognized", "ambiguous")):
            message += "; quote a prompt of several words, and put one that begins with - last, after --"
        self.exit(2, f"specsampling: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``specsampling``."""
    parser = _Parser(prog="specsampling", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"specsampling {version('specsampling')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt, printing text as it is committed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_models(generate)
    _add_sampling(generate)
    _add_output(generate)
    backends = commands.add_parser(
        "backends", help="list backends", description="List the known backends, and why one is not installed."
    )
    backends.add_argument("--json", action="store_true", help="print one JSON array and nothing else")
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help='text to continue (default: "ROMEO:"); "-", or none where text is piped in, reads stdin',
    )
    group.add_argument(
        "--backend", default="numpy", metavar="NAME", help="as listed by `specsampling backends` (%(default)s)"
    )
    group.add_argument("--target", metavar="DIR|FILE", help="checkpoint of the target (default: the bundled one)")
    group.add_argument(
        "--draft",
        metavar="DIR|FILE|lookup|none",
        help="checkpoint of the draft; lookup: n-grams of the text itself; none: plain decoding "
        "(default: the bundled draft for the bundled target, else lookup)",
    )
    group.add_argument("--dtype", default="float32", help="dtype of both models (%(default)s)")
    group.add_argument("--device", help="device, in the backend's words (default: the backend's choice)")
    group.add_argument(
        "--pad-vocab", action="store_true", help="allow vocabularies of different sizes whose shared ids mean the same"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--lookahead", type=int, default=4, metavar="K", help="tokens drafted per round (%(default)s)")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (%(default)s)")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable ids")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the fewest ids that hold this probability")
    group.add_argument("--min-p", type=float, metavar="P", help="keep ids at least this probable, relative to the best")
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="where to end at the latest (256, or what the context leaves)"
    )
    group.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="no end token before that many (0)")
    group.add_argument(
        "--end-token",
        type=int,
        action="append",
        metavar="ID",
        help="id that ends the text, repeatable (default: eos_token_id of the target's config)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end after this text, repeatable; matched as the ids it has on its own",
    )
    group.add_argument("--seed", type=int, metavar="N", help="repeat a run (default: fresh, and printed)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--stats", action="store_true", help="print every count")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    group.add_argument("--compare", action="store_true", help="time it against plain decoding with the same target")
    group.add_argument("--compare-runs", type=int, metavar="N", help="interleaved runs of each, with --compare (5)")
    group.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on terminals, unless NO_COLOR is set (%(default)s)",
    )
