"""Text in, text out: what tokens hide, characters and stop strings, is put right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import PromptLookup, Sampling, bundled
from specsampling_numpy import TableModel

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from specsampling_torch import TextGenerator  # noqa: E402 (after importorskip)

TEXT = "Ünïcode — naïve café, 你好 🙂 end"
GREEDY = Sampling(temperature=0.0)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer whose merges span words, and split characters."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the end of the end of a tale"] * 9, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def reciting(tokenizer: Any, prompt: str, text: str, *, end: bool = True) -> TableModel:
    """A model that continues `prompt` with `text`, token by token, and then ends."""
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(text).input_ids + [tokenizer.eos_token_id] * (64 if end else 0)
    laws = np.eye(len(tokenizer))
    return TableModel(lambda prefix: laws[ids[max(0, len(prefix) - start)]], vocab_size=len(tokenizer))


@pytest.fixture(params=["plain", "lookup", "self"])
def generator(request: pytest.FixtureRequest, tokenizer: Any) -> TextGenerator:
    model = reciting(tokenizer, "Say: ", TEXT)
    draft = {"plain": None, "lookup": PromptLookup(), "self": model}[request.param]
    return TextGenerator(model, draft, tokenizer)


def test_text_ends_with_the_end_token_which_is_not_shown(generator: TextGenerator):
    result = generator.generate("Say: ", sampling=GREEDY)
    assert (result.texts, result.finish_reasons) == ([TEXT], ["stop"])
    assert result.tokens[0][-1] == generator.tokenizer.eos_token_id
    assert len(result.from_draft[0]) == len(result.tokens[0])
    shown = generator.generate("Say: ", sampling=GREEDY, skip_special_tokens=False)
    assert shown.texts == [TEXT + "</s>"]


def test_streamed_pieces_are_whole_characters(generator: TextGenerator):
    pieces = [event.text for event in generator.stream("Say: ", sampling=GREEDY)]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_by_the_length_limit_is_shown_as_such(generator: TextGenerator):
    length = len(generator.tokenizer("Ünïcode — naïve café, 你").input_ids)
    result = generator.generate("Say: ", sampling=GREEDY, max_new_tokens=length - 1)
    assert result.finish_reasons == ["length"]
    assert result.texts[0].startswith("Ünïcode — naïve café, ")
    assert result.texts[0].endswith("\ufffd")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("ve ca", "Ünïcode — naïve ca"),
        ("好", "Ünïcode — naïve café, 你好"),
        (["🙂", "é, 你"], "Ünïcode — naïve café, 你"),
        (["café", "caf"], "Ünïcode — naïve caf"),
        (["nothing like it"], TEXT),
    ],
)
def test_stop_strings_may_span_tokens(generator: TextGenerator, stop: Any, expected: str):
    result = generator.generate("Say: ", sampling=GREEDY, stop=stop)
    assert (result.texts, result.finish_reasons) == ([expected], ["stop"])
    streamed = "".join(event.text for event in generator.stream("Say: ", sampling=GREEDY, stop=stop))
    assert streamed == expected
    assert len(result.tokens[0]) <= len(generator.tokenizer(TEXT).input_ids) + 1


def test_the_stop_string_that_begins_first_wins(tokenizer: Any):  # fault #92
    text = "user is a tale of the end"
    generator = TextGenerator(reciting(tokenizer, "x", text), None, tokenizer)
    assert generator.generate("x", sampling=GREEDY, stop=["a", "is"]).texts == ["user is"]


def test_a_stop_string_inside_one_token_cuts_it(tokenizer: Any):
    text = "of the end of the end"
    longest = max(tokenizer(text).input_ids, key=lambda token: len(tokenizer.decode([token])))
    inside = tokenizer.decode([longest])[1:-1]
    assert len(inside) >= 1
    generator = TextGenerator(reciting(tokenizer, "x", text), None, tokenizer)
    expected = text[: text.index(inside) + len(inside)]
    assert generator.generate("x", sampling=GREEDY, stop=inside).texts == [expected]


def test_a_stop_string_in_the_prompt_does_not_count(tokenizer: Any):
    generator = TextGenerator(reciting(tokenizer, "the end", " of a"), None, tokenizer)
    assert generator.generate("the end", sampling=GREEDY, stop=["end", "d of"]).texts == [" of a"]


def test_rows_stop_on_their_own(tokenizer: Any):
    prompts = ["aaa", "b"]
    texts = {3: "one end two", 1: "three four end of it"}
    start = {len(tokenizer(prompt).input_ids): prompt for prompt in prompts}
    assert sorted(start) == [1, 3]
    laws = np.eye(len(tokenizer))
    ids = {length: tokenizer(text).input_ids + [tokenizer.eos_token_id] * 40 for length, text in texts.items()}
    first = {length: tokenizer(prompt).input_ids[0] for length, prompt in start.items()}

    def law(prefix: tuple[int, ...]) -> Any:
        length = 3 if prefix[0] == first[3] else 1
        return laws[ids[length][max(0, len(prefix) - length)]]

    model = TableModel(law, vocab_size=len(tokenizer))
    for draft in (None, model):
        result = TextGenerator(model, draft, tokenizer).generate(prompts, sampling=GREEDY, stop="end")
        assert result.texts == ["one end", "three four end"]


def test_a_chat_goes_through_the_template(tokenizer: Any):
    generator = TextGenerator(reciting(tokenizer, "<user>Hi<a>", "Hello!"), None, tokenizer)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(generator.encode(chat)) == "<user>Hi<a>"
    assert generator.generate(chat, sampling=GREEDY).texts == ["Hello!"]
    assert generator.generate([chat, chat], sampling=GREEDY).texts == ["Hello!", "Hello!"]


def test_a_chat_without_a_template_is_refused(tokenizer: Any):
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    with pytest.raises(ValueError, match="no chat template"):
        TextGenerator(reciting(bare, "x", "y"), None, bare).generate([{"role": "user", "content": "Hi"}])


def test_tokenizers_that_disagree_are_refused(tokenizer: Any):
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "hello": 1}, unk_token="</s>"))
    )
    with pytest.raises(ValueError, match="id 1 is '!' to the target and 'hello' to the draft"):
        TextGenerator(None, None, tokenizer, draft_tokenizer=other)
    TextGenerator(None, None, tokenizer, draft_tokenizer=tokenizer)


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_stop_strings_must_be_texts(generator: TextGenerator, stop: Any):
    with pytest.raises(ValueError, match="`stop` must hold texts"):
        generator.stream("x", stop=stop)


def test_arguments_are_checked_when_stream_is_called(generator: TextGenerator):
    with pytest.raises(TypeError, match="nonsense"):
        generator.stream("x", nonsense=1)


def test_everything_comes_from_checkpoints(tokenizer: Any, tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("target", "draft"):
        build("Llama", "float32", vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    texts = []
    for draft in (None, "lookup", tmp_path / "draft"):
        generator = TextGenerator.from_pretrained(tmp_path / "target", draft, device="cpu", dtype="float64")
        assert tokenizer.eos_token_id in generator.end_tokens
        texts.append(generator.generate(["the end", "of"], max_new_tokens=8, sampling=GREEDY).tokens)
    assert texts[0] == texts[1] == texts[2]


def test_a_model_of_bytes_needs_no_tokenizer():
    generator = TextGenerator.from_pretrained(bundled("target"), bundled("draft"), device="cpu")
    result = generator.generate("ROMEO: ", max_new_tokens=24, seed=5)
    assert "".join(event.text for event in generator.stream("ROMEO: ", max_new_tokens=24, seed=5)) == result.texts[0]
    assert result.texts[0].encode() == bytes(result.tokens[0])


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_wins(tokenizer: Any):  # fault #92
    text = "of the end of the end"
    longest = tokenizer.decode([max(tokenizer(text).input_ids, key=lambda token: len(tokenizer.decode([token])))])
    assert len(longest) > 3
    generator = TextGenerator(reciting(tokenizer, "x", text), None, tokenizer)
    stops = [longest[2], longest[1]]
    expected = min((text[: text.index(stop) + 1] for stop in stops), key=len)
    at = text.index(longest)
    assert len(expected) <= at + 2
    assert generator.generate("x", sampling=GREEDY, stop=stops).texts == [expected]
