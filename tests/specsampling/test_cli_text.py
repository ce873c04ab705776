import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import __main__ as program
from specsampling._cli._text import TextStream, load_tokenizer


def from_bytes(ids):
    return bytes(ids).decode(errors="replace")


@given(st.binary(max_size=40), st.text(max_size=9))
def test_pieces_add_up_to_the_text(content, prompt):
    # The prompt's characters are whole; the text may be any bytes.
    stream = TextStream(from_bytes, list(prompt.encode(errors="replace")))
    pieces = [stream.push(byte) for byte in content]
    assert "".join(pieces) + stream.flush() == content.decode(errors="replace")


def test_a_character_appears_with_its_last_byte():
    stream = TextStream(from_bytes)
    assert [stream.push(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert stream.push("é".encode()[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.fixture
def word_tokenizer(tmp_path):
    """Write a tokenizer of four words that puts a begin token in front and drops leading spaces when decoding."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "▁to": 1, "▁be": 2, "▁or": 3, "▁": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_checkpoints_own_tokenizer_is_used(word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer, 5)
    assert tokenizer.name.endswith("tokenizer.json")
    assert tokenizer.encode("to be") == [0, 1, 2]
    assert tokenizer.encode_bare("to be") == [1, 2]
    stream = TextStream(tokenizer.decode, [0, 1])
    assert [stream.push(token) for token in (2, 3)] == [" be", " or"]


def test_the_command_line_reads_and_writes_with_it(word_tokenizer, write_checkpoint, capsys):
    write_checkpoint(word_tokenizer, vocab_size=5)
    assert program.main(["generate", "to be", "--target", str(word_tokenizer), "--json", "--max-new-tokens", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt"], result["prompt_tokens"]) == ("to be", [0, 1, 2])
    # A file inside the checkpoint stands for it, as for backends that take a file.
    assert load_tokenizer(word_tokenizer / "model.safetensors", 5).encode_bare("be") == [2]


def test_a_tokenizer_needs_its_package(word_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="needs the package `tokenizers`: pip install tokenizers"):
        load_tokenizer(word_tokenizer, 5)


def test_a_broken_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json` is not a tokenizer"):
        load_tokenizer(tmp_path, 5)


def test_text_needs_a_tokenizer_or_256_ids(tmp_path):
    with pytest.raises(ValueError, match=r"has 300 token ids and no tokenizer\.json"):
        load_tokenizer(tmp_path, 300)
    assert load_tokenizer(tmp_path, 256).encode("é") == [0xC3, 0xA9]
