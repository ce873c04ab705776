"""From text to text: chat templates, stop strings, and pieces that end where characters do."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import transformers

from specsampling import Decoder, DecoderState, PromptLookup

from ._model import TorchModel

__all__ = ["Prompt", "TextEvent", "TextGeneration", "TextGenerator"]

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A text to continue, or the messages of a chat to answer."""

# Decoding starts this many ids before the new ones: some tokenizers drop the space in front of the first id they see.
_NUM_CONTEXT_IDS = 8

# What `DecoderState.status` says of a row that met a stop.
_STOP = 1


class TextEvent(NamedTuple):
    """What one round added to one row.

    Attributes
    ----------
    row : int
        Which prompt it belongs to.
    text : str
        The new text; only complete characters, so it may be empty.
    finish_reason : str or None
        "stop", "length", or None while the row goes on.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import TextGenerator
    >>> target, draft = specsampling.bundled("target"), specsampling.bundled("draft")
    >>> generator = TextGenerator.from_pretrained(target, draft, device="cpu")
    >>> events = list(generator.stream("ROMEO:", max_new_tokens=16))
    >>> {event.row for event in events}, events[0].finish_reason, events[-1].finish_reason
    ({0}, None, 'length')
    >>> "".join(event.text for event in events) == generator.generate("ROMEO:", max_new_tokens=16).texts[0]
    True
    """

    row: int
    text: str
    finish_reason: str | None


class TextGeneration(NamedTuple):
    """What `TextGenerator.generate` returns; each list has an entry per prompt.

    Attributes
    ----------
    texts : list of str
        The new text, a stop string at its end included.
    tokens : list of list of int
        The new ids, up to the one that completed the stop string.
    from_draft : list of list of bool
        Which of them the draft proposed.
    finish_reasons : list of str
        "stop" or "length".
    rounds : int
        Rounds of the batch: calls of the target besides feeding the prompts.
    seed : int or None
        What repeats the run.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import TextGenerator
    >>> target, draft = specsampling.bundled("target"), specsampling.bundled("draft")
    >>> generator = TextGenerator.from_pretrained(target, draft, device="cpu")
    >>> result = generator.generate(["ROMEO:", "JULIET:"], max_new_tokens=8)
    >>> result.texts == [bytes(ids).decode() for ids in result.tokens]  # this pair's ids are bytes
    True
    >>> [len(row) for row in result.from_draft], result.finish_reasons, result.seed
    ([8, 8], ['length', 'length'], 0)
    """

    texts: list[str]
    tokens: list[list[int]]
    from_draft: list[list[bool]]
    finish_reasons: list[str]
    rounds: int
    seed: int | None


class TextGenerator:
    """Generate text by speculative sampling.

    Parameters
    ----------
    target : TorchModel
        The model whose law the text follows; any model of the library will do.
    draft : model, drafter or None
        What proposes tokens.
    tokenizer : transformers tokenizer
        Of the target.
    draft_tokenizer : transformers tokenizer, optional
        Of the draft, to be compared with the target's: equal ids must stand for equal text.

    Raises
    ------
    ValueError
        If the tokenizers disagree about an id.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import TextGenerator
    >>> target, draft = specsampling.bundled("target"), specsampling.bundled("draft")
    >>> generator = TextGenerator.from_pretrained(target, draft, device="cpu")
    >>> result = generator.generate("ROMEO:", max_new_tokens=32, stop=["."])
    >>> result.texts[0].endswith(".") or result.finish_reasons == ["length"]
    True
    """

    def __init__(self, target: Any, draft: Any, tokenizer: Any, *, draft_tokenizer: Any = None) -> None:
        if draft_tokenizer is not None:
            _check_tokenizers(tokenizer, draft_tokenizer)
        self.target, self.draft, self.tokenizer = target, draft, tokenizer

    @classmethod
    def from_pretrained(cls, target: Any, draft: Any = "lookup", **options: Any) -> "TextGenerator":
        """Load everything from checkpoints.

        Parameters
        ----------
        target : str or path
            Checkpoint of the target, with its tokenizer; a model of 256 ids that brings none reads bytes.
        draft : str, path or None
            Checkpoint of the draft; "lookup" for n-grams of the text itself, None for plain decoding.
        **options
            For both models, as in `TorchModel.from_pretrained`.

        Returns
        -------
        TextGenerator
            Ready to generate.
        """
        model = TorchModel.from_pretrained(target, **options)
        tokenizer = _load_tokenizer(target, model.vocab_size)
        if draft is None or draft == "lookup":
            return cls(model, None if draft is None else PromptLookup(), tokenizer)
        draft_model = TorchModel.from_pretrained(draft, **options)
        draft_tokenizer = _load_tokenizer(draft, draft_model.vocab_size)
        return cls(model, draft_model, tokenizer, draft_tokenizer=draft_tokenizer)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end a text: the tokenizer's, and those of the target's generation config."""
        config = getattr(getattr(self.target, "module", None), "generation_config", None)
        found: set[int] = set()
        for ids in (self.tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
            found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
        return tuple(sorted(found))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt.

        Parameters
        ----------
        prompt : str or sequence of messages
            A text gets what the tokenizer puts in front of one; a chat goes through its template, up to where the
            answer begins.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        ValueError
            If the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("`prompts` holds the messages of a chat, and the tokenizer has no chat template")
        text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)  # the template has put them in

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
        **options: Any,
    ) -> TextGeneration:
        """Continue texts or answer chats.

        Parameters
        ----------
        prompts : str, chat, or list of those
            What to continue; a chat is a list of messages with "role" and "content".
        max_new_tokens : int
            Most tokens that a row may emit.
        stop : str or sequence of str
            A row ends with the first of these that its new text holds, wherever tokens begin and end.
        skip_special_tokens : bool
            Leave special tokens out of the text; stop strings then cannot match them.
        **options
            As in `specsampling.Decoder`; `end_tokens` are `end_tokens` of this object by default.

        Returns
        -------
        TextGeneration
            The new texts.

        Raises
        ------
        ValueError, TypeError, CapabilityError
            For what does not fit, before the first round.
        """
        events = self.stream(
            prompts, max_new_tokens=max_new_tokens, stop=stop, skip_special_tokens=skip_special_tokens, **options
        )
        while True:
            try:
                next(events)
            except StopIteration as end:
                result: TextGeneration = end.value
                return result

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
        **options: Any,
    ) -> Generator[TextEvent, None, TextGeneration]:
        """Generate as `generate` does, and yield each row's text as it comes.

        Parameters
        ----------
        prompts, max_new_tokens, stop, skip_special_tokens, **options
            As in `generate`. They are checked when `stream` is called, not at the first event.

        Returns
        -------
        TextGeneration
            As the generator's value (of ``yield from``).

        Yields
        ------
        TextEvent
            One per unfinished row and round.
        """
        stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"`stop` must hold texts that are not empty, got {stop!r}")
        many: list[Any] = [prompts] if isinstance(prompts, str) or _is_chat(prompts) else list(prompts)
        ids = [self.encode(prompt) for prompt in many]
        decoder = Decoder(self.target, self.draft, **{"end_tokens": self.end_tokens, **options})
        state = decoder.init(ids, max_new_tokens=max_new_tokens)
        rows = [_Row(self.tokenizer, prompt, stops, skip_special_tokens) for prompt in ids]
        return _rounds(decoder, state, rows)


def _rounds(decoder: Decoder, state: DecoderState, rows: list["_Row"]) -> Generator[TextEvent, None, TextGeneration]:
    rounds = 0
    while not state.is_done:
        state, info = decoder.step(state)
        rounds += 1
        status = np.array(state.status)
        for index, number in enumerate(info.rows.tolist()):
            row, count = rows[number], int(info.num_emitted[index])
            tokens, from_draft = info.tokens[index, :count].tolist(), info.from_draft[index, :count].tolist()
            piece = row.push(tokens, from_draft, info.finish_reasons[index])
            if row.finish_reason == "stop":
                status[number] = _STOP
            yield TextEvent(number, piece, row.finish_reason)
        state = state._replace(status=status)
    return TextGeneration(
        texts=[row.text for row in rows],
        tokens=[row.tokens for row in rows],
        from_draft=[row.from_draft for row in rows],
        finish_reasons=[row.finish_reason or "length" for row in rows],
        rounds=rounds,
        seed=decoder.seed,
    )


class _Row:
    """One row's text so far: complete characters only, and nothing after a stop string."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: tuple[str, ...], skip_special: bool) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason: str | None = None
        self._tokenizer, self._stops, self._skip_special = tokenizer, stops, skip_special
        self._reach = max(map(len, stops), default=0)
        self._ids = list(prompt[-_NUM_CONTEXT_IDS:])
        self._num_read = len(self._ids)

    def push(self, tokens: Sequence[int], from_draft: Sequence[bool], finish_reason: str | None) -> str:
        """Take a round's tokens and return the text they add."""
        before = len(self.text)
        for index, (token, flag) in enumerate(zip(tokens, from_draft, strict=True)):
            self.tokens.append(token)
            self.from_draft.append(flag)
            self._ids.append(token)
            is_last = finish_reason is not None and index + 1 == len(tokens)
            piece = self._complete(is_last)
            end = self._end_of_stop(piece)
            self.text += piece
            if end is not None:
                self.text = self.text[:end]
                self.finish_reason = "stop"
                return self.text[before:]
        self.finish_reason = finish_reason
        return self.text[before:]

    def _complete(self, is_last: bool) -> str:
        """Return the text that the new ids complete; at the end, what there is."""
        known, text = self._decode(self._ids[: self._num_read]), self._decode(self._ids)
        if text.endswith("\ufffd") and not is_last:
            return ""
        self._ids = self._ids[-_NUM_CONTEXT_IDS:]
        self._num_read = len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that was returned already.
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def _end_of_stop(self, piece: str) -> int | None:
        """Return where the text ends with `piece` behind it: at the stop string that begins first, or None."""
        start = max(0, len(self.text) - self._reach + 1)
        window = self.text[start:] + piece
        found = [(at, -len(stop)) for stop in self._stops if (at := window.find(stop)) >= 0]
        if not found:
            return None
        at, length = min(found)
        return start + at - length


class _ByteTokenizer:
    """Every byte is its own id."""

    eos_token_id = None
    chat_template = None

    class _Encoded(NamedTuple):
        input_ids: list[int]

    def __call__(self, text: str, **options: Any) -> "_ByteTokenizer._Encoded":  # noqa: ARG002 (what a tokenizer accepts)
        return self._Encoded(list(text.encode()))

    def decode(self, ids: Sequence[int], **options: Any) -> str:  # noqa: ARG002 (what a tokenizer accepts)
        return bytes(ids).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}


def _load_tokenizer(checkpoint: Any, vocab_size: int) -> Any:
    if vocab_size == 256 and Path(checkpoint).is_dir() and not [*Path(checkpoint).glob("*token*")]:
        return _ByteTokenizer()
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


def _is_chat(prompts: Any) -> bool:
    return bool(prompts) and all(isinstance(message, Mapping) for message in prompts)


def _check_tokenizers(target: Any, draft: Any) -> None:
    of_target = {index: token for token, index in target.get_vocab().items()}
    of_draft = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(of_target.keys() & of_draft.keys()):
        if of_target[index] != of_draft[index]:
            raise ValueError(
                f"the tokenizers disagree: id {index} is {of_target[index]!r} to the target and {of_draft[index]!r} to "
                "the draft; a draft must share the target's vocabulary"
            )
