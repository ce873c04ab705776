"""From text to token ids and back, a piece at a time."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TextStream", "Tokenizer", "end_tokens", "load_tokenizer"]

_NUM_BYTES = 256

# Decoding starts this many ids before the new ones: some tokenizers drop the space in front of the first id they see.
_NUM_CONTEXT_IDS = 8


class Tokenizer(NamedTuple):
    """A way of turning text into ids and back.

    Attributes
    ----------
    name : str
        ``"bytes"`` or the file it was read from.
    encode : callable
        Ids of a prompt, with whatever the tokenizer puts in front of one.
    encode_bare : callable
        Ids of the text alone.
    decode : callable
        Text of ids; an incomplete character becomes U+FFFD.
    """

    name: str
    encode: Callable[[str], list[int]]
    encode_bare: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_tokenizer(checkpoint: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a checkpoint; a model of 256 ids that brings none reads bytes.

    Raises
    ------
    ValueError
        If the checkpoint has no usable tokenizer, or the package that reads it is missing.
    """
    path = _folder(checkpoint) / "tokenizer.json"
    if path.is_file():
        return _tokenizer_from_file(path)
    if vocab_size == _NUM_BYTES:
        return Tokenizer("bytes", _encode_bytes, _encode_bytes, _decode_bytes)
    raise ValueError(
        f"`{checkpoint}` has {vocab_size} token ids and no tokenizer.json: text needs one "
        f"(without one only models of {_NUM_BYTES} ids work, whose ids are bytes)"
    )


def _tokenizer_from_file(path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"`{path}` needs the package `tokenizers`: pip install tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        raise ValueError(f"`{path}` is not a tokenizer that `tokenizers` can read: {error}") from error

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(_printable(text)).ids)

    def encode_bare(text: str) -> list[int]:
        return list(tokenizer.encode(_printable(text), add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    return Tokenizer(str(path), encode, encode_bare, decode)


def _encode_bytes(text: str) -> list[int]:
    # Arguments that were not UTF-8 arrive with surrogate escapes, which stand for the bytes themselves.
    return list(text.encode("utf-8", errors="surrogateescape"))


def _decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _printable(text: str) -> str:
    return _decode_bytes(_encode_bytes(text))


class TextStream:
    """Decode ids as they come, holding back a character until its last byte is there.

    Parameters
    ----------
    decode : callable
        Text of ids, with U+FFFD for an incomplete character.
    prompt : sequence of int
        Ids that came before, whose text is not returned.

    Examples
    --------
    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(byte) for byte in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-_NUM_CONTEXT_IDS:])
        self._num_read = len(self._ids)

    def push(self, token: int) -> str:
        """Take one id and return the text that is now complete."""
        self._ids.append(token)
        return self._take(complete_only=True)

    def flush(self) -> str:
        """Return what is left, incomplete characters included."""
        return self._take(complete_only=False)

    def _take(self, *, complete_only: bool) -> str:
        known = self._decode(self._ids[: self._num_read])
        text = self._decode(self._ids)
        if complete_only and text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[-_NUM_CONTEXT_IDS:]
        self._num_read = len(self._ids)
        return text[len(known) :]


def end_tokens(checkpoint: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text, from ``generation_config.json``, else ``config.json``, else none."""
    for name in ("generation_config.json", "config.json"):
        path = _folder(checkpoint) / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`{path}` is not valid JSON: {error}") from error
        ids = _eos(config, path, vocab_size)
        if ids:
            return ids
    return ()


def _eos(config: Any, path: Path, vocab_size: int) -> tuple[int, ...]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ValueError(
                f"`{path}`: `eos_token_id` must be an id from 0 to {vocab_size - 1} or a list of those, got {token!r}; "
                "`--end-token` takes its place"
            )
    return tuple(ids)


def _folder(checkpoint: Path) -> Path:
    return checkpoint if checkpoint.is_dir() else checkpoint.parent
