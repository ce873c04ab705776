"""The tasks: real prompts, the paper's sampling settings, and a score for each text."""

import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from _paper_sandbox import passes

from specsampling import Sampling

__all__ = ["FILES", "Prompt", "SETTINGS", "Task", "Text", "load_tasks", "read_codec"]

FILES = {"summarization": "spec_bench.jsonl", "code": "HumanEval.jsonl.gz", "text": "tinyshakespeare.txt"}

GREEDY = Sampling(temperature=0.0)
SETTINGS: dict[str, dict[str, Sampling]] = {
    "summarization": {"nucleus 0.8": Sampling(top_p=0.8), "greedy": GREEDY},
    "code": {"nucleus 0.95, T 0.8": Sampling(temperature=0.8, top_p=0.95), "greedy": GREEDY},
    "text": {"nucleus 0.8": Sampling(top_p=0.8), "greedy": GREEDY, "as is": Sampling()},
}

# What begins the next thing after the function; as in the paper that brought the tasks (Chen et al. 2021).
_CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_TEXT_PROMPT_BYTES = 64


class Prompt(NamedTuple):
    """Token ids, and what the score needs: the reference, or the problem."""

    ids: list[int]
    reference: Any


class Text(NamedTuple):
    """What was written: its tokens, their log-probabilities under the target, and what they read."""

    tokens: list[int]
    logprobs: list[float]
    text: str


class Codec(Protocol):
    """Texts to token ids and back."""

    end_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that is to be gone on with."""
        ...

    def encode_request(self, text: str) -> list[int]:
        """Return the ids of a request that is to be answered."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return what tokens read."""
        ...


class ByteCodec:
    """Ids are bytes; there is no end token, and requests are texts like any other."""

    end_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        return list(text.encode())

    def encode_request(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return what the bytes read, replacement characters where they are none."""
        return bytes(tokens).decode(errors="replace")


class TokenizerCodec:
    """The tokenizer of a Hugging Face directory, with its chat template where it has one."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.end_tokens: tuple[int, ...] = (
            () if self._tokenizer.eos_token_id is None else (int(self._tokenizer.eos_token_id),)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids, nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_request(self, text: str) -> list[int]:
        """Return the ids of a user's message and the beginning of the answer."""
        if not self._tokenizer.chat_template:
            return self.encode(text)
        message = [{"role": "user", "content": text}]
        return self.encode(self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return what the tokens read, those with a meaning of their own left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def read_codec(folder: Path) -> Codec:
    """Return the codec of a checkpoint: its tokenizer, or bytes where it has none."""
    return TokenizerCodec(folder) if (folder / "tokenizer.json").exists() else ByteCodec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts of one kind, and how texts are scored.

    Attributes
    ----------
    name, metric : str
        What it is called, and what the score is.
    more_is_better : bool
        Whether a higher score is a better one.
    prompts : list of Prompt
        All of them, in the order of the file.
    score : callable
        The score of one text, ``(prompt, text) -> float``.
    stops : tuple of str
        Strings at which a text ends, itself not included; looked for in what the tokens read.
    trivial : callable or None
        The score, for one prompt, of an answer that takes no model.
    digest : str
        SHA-256 of the file.
    """

    name: str
    metric: str
    more_is_better: bool
    prompts: list[Prompt]
    score: Callable[[Prompt, Text], float]
    digest: str
    stops: tuple[str, ...] = ()
    trivial: Callable[[Prompt], float] | None = None

    @property
    def settings(self) -> dict[str, Sampling]:
        """The sampling settings, by name."""
        return SETTINGS[self.name]


def load_tasks(names: Sequence[str], folder: Path, codec: Codec) -> dict[str, Task]:
    """Read the tasks' files from `folder`."""
    readers = {"summarization": _summarization, "code": _code, "text": _text}
    return {name: readers[name](folder / FILES[name], codec) for name in names}


def cut(text: str, stops: Sequence[str]) -> str:
    r"""Return `text` up to the first of `stops`.

    Examples
    --------
    >>> cut("  return 1\ndef g():", ("\nclass", "\ndef"))
    '  return 1'
    """
    ends = [end for end in (text.find(stop) for stop in stops) if end >= 0]
    return text[: min(ends)] if ends else text


def num_kept(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> int | None:
    """Return with how many tokens the first of `stops` is complete, or None where none is.

    That many is a function of the text alone, not of the rounds it came in.
    """

    def is_complete(count: int) -> bool:
        text = decode(tokens[:count])
        return cut(text, stops) != text

    if not stops or not is_complete(len(tokens)):
        return None
    low, high = 1, len(tokens)  # a stop that is complete stays so with every further token
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_complete(middle) else (middle + 1, high)
    return low


def _summarization(path: Path, codec: Codec) -> Task:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge2"], use_stemmer=True)

    def bigram_overlap(reference: str, text: str) -> float:
        return 100 * float(scorer.score(reference, text)["rouge2"].fmeasure)

    content = path.read_bytes()
    entries = [json.loads(line) for line in content.decode().splitlines()]
    prompts = []
    for entry in entries:
        if entry["category"] == "summarization":
            request, reference = entry["turns"][0], entry["reference"][0]
            prompts.append(Prompt(codec.encode_request(request), {"article": request, "summary": reference}))
    return Task(
        name="summarization",
        metric="ROUGE-2 (F, times 100)",
        more_is_better=True,
        prompts=prompts,
        score=lambda prompt, text: bigram_overlap(prompt.reference["summary"], text.text),
        trivial=lambda prompt: bigram_overlap(
            prompt.reference["summary"], _first_sentences(prompt.reference["article"], 3)
        ),
        digest=hashlib.sha256(content).hexdigest(),
    )


def _first_sentences(article: str, count: int) -> str:
    body = article.removeprefix("Summarize: ")
    return " ".join(re.split(r"(?<=[.!?])\s+", body)[:count])


def _code(path: Path, codec: Codec) -> Task:
    content = path.read_bytes()
    problems = [json.loads(line) for line in gzip.decompress(content).decode().splitlines()]

    def score(prompt: Prompt, text: Text) -> float:
        problem = prompt.reference
        parts = (
            problem["prompt"].strip() + cut(text.text, _CODE_STOPS),
            problem["test"],
            f"check({problem['entry_point']})",
        )
        return float(passes("\n\n".join(parts)))

    # Tokenizers put a line's end and its indentation into one token: a prompt that ends with a line cuts that in two.
    return Task(
        name="code",
        metric="problems solved, of one try each",
        more_is_better=True,
        prompts=[Prompt(codec.encode(problem["prompt"].strip()), problem) for problem in problems],
        score=score,
        stops=_CODE_STOPS,
        digest=hashlib.sha256(content).hexdigest(),
    )


def _text(path: Path, codec: Codec) -> Task:
    content = path.read_bytes()
    held_out = content[len(content) * 9 // 10 :]  # the bundled pair was trained on what comes before
    count = min(MOST_TEXT_PROMPTS, max(len(held_out) // _TEXT_PROMPT_BYTES, 1))
    starts = [i * (len(held_out) - _TEXT_PROMPT_BYTES) // count for i in range(count)]
    pieces = [held_out[start : start + _TEXT_PROMPT_BYTES].decode(errors="ignore") for start in starts]

    def score(prompt: Prompt, text: Text) -> float:  # noqa: ARG001 - a text's own law needs no reference
        return -math.fsum(text.logprobs) / math.log(2) / max(len(text.text.encode()), 1)

    return Task(
        name="text",
        metric="bits per byte under the target",
        more_is_better=False,
        prompts=[Prompt(codec.encode(piece), None) for piece in pieces],
        score=score,
        digest=hashlib.sha256(content).hexdigest(),
    )


MOST_TEXT_PROMPTS = 80
