import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import specsampling
from specsampling import __main__ as program
from specsampling._cli import _compare, _generate
from specsampling._cli._display import Palette, kinds_of
from specsampling._registry import BackendStatus

COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def pipe(content: bytes):
    """Return standard input that `content` was piped into."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as writer:
        writer.write(content)
    return os.fdopen(read_end, encoding="utf-8")


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """Neither the caller's colour settings nor a piped stdin reach the tests."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", Terminal())


@pytest.fixture
def draft(tmp_path_factory, write_checkpoint):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "draft", seed=1)


@pytest.fixture
def run(capsys, checkpoint):
    """Run ``generate`` on the tiny checkpoint and return status, stdout and stderr."""

    def call(*arguments, target=checkpoint, command="generate"):
        models = ["--target", str(target)] if command == "generate" else []
        status = program.main([command, *models, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(capsys):
    """Run a command that must fail with one line and status 2; return that line."""

    def call(*arguments):
        try:
            status = program.main(list(map(str, arguments)))
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        assert captured.err.startswith("specsampling: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call


def test_prompt_and_text_go_to_stdout_and_everything_else_to_stderr(run, checkpoint):
    status, out, err = run("ab", "--seed", 3, "--max-new-tokens", 20)
    model = specsampling.load_model("numpy", checkpoint)
    expected = specsampling.generate(model, specsampling.PromptLookup(), list(b"ab"), max_new_tokens=20, seed=3)
    text = bytes(expected.tokens[0]).decode(errors="replace")
    assert (status, out) == (0, "ab" + text + ("" if text.endswith("\n") else "\n"))
    assert re.match(r"20 tokens in \d+\.\d\d s \(\d+ per second\), \d\.\d\d tokens per target call.*, seed 3\n$", err)


def test_json_is_one_object_and_nothing_else(run, draft):
    # fault #159: every option is visible in the result
    status, out, err = run(
        "ab", "--json", "--compare", "--compare-runs", 1, "--stats", "--draft", draft, "--seed", 5, "--lookahead", 2,
        "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9, "--min-p", 0.01, "--max-new-tokens", 12, "--stop", "zz",
        "--end-token", 0, "--min-new-tokens", 1,
    )  # fmt: skip
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["text"] == bytes(result["tokens"]).decode(errors="replace")
    assert (result["prompt"], result["prompt_tokens"], result["seed"]) == ("ab", [97, 98], 5)
    assert result["options"] == {
        "lookahead": 2, "max_new_tokens": 12, "min_new_tokens": 1, "end_tokens": [0], "stop_sequences": [[122, 122]],
        "pad_vocab": False, "seed": 5,
        "sampling": {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    }  # fmt: skip
    assert result["stats"]["emitted"] == len(result["tokens"])
    assert [kind == "accepted" for kind in result["kinds"]] == result["from_draft"]
    assert result["compare"]["runs"] == 1
    assert {"backend", "target", "draft", "tokenizer", "finish_reason", "seconds"} <= set(result)


def test_a_limit_of_zero_prints_the_prompt(run):
    status, out, err = run("ab\n", "--max-new-tokens", 0)
    assert (status, out) == (0, "ab\n")
    assert err.startswith("0 tokens in ")


def test_seed_is_fresh_by_default_and_printed_so_that_it_repeats_the_run(run):
    first, second = (json.loads(run("ab", "--json", "--max-new-tokens", 16)[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(run("ab", "--json", "--max-new-tokens", 16, "--seed", first["seed"])[1])
    assert again["tokens"] == first["tokens"]


def test_without_a_limit_the_context_is_the_limit(run):
    result = json.loads(run("ab", "--json", "--draft", "none")[1])
    assert (len(result["tokens"]), result["finish_reason"]) == (62, "length")


def test_without_a_limit_of_its_own_a_model_gets_256_tokens(run, write_checkpoint, tmp_path):
    target = write_checkpoint(tmp_path / "long", max_position_embeddings=512)
    assert len(json.loads(run("ab", "--json", "--draft", "none", target=target)[1])["tokens"]) == 256


def test_the_bundled_pair_is_the_default(capsys, monkeypatch, checkpoint, draft):
    monkeypatch.setattr(_generate, "bundled", {"target": checkpoint, "draft": draft}.__getitem__)
    assert program.main(["generate", "--json", "--max-new-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["target"], result["draft"], result["prompt"]) == (str(checkpoint), str(draft), "ROMEO:")


@pytest.mark.parametrize(
    ("arguments", "content", "prompt"),
    [
        ([], b"from a pipe\n", "from a pipe\n"),
        (["-"], b"from a pipe", "from a pipe"),
        (["given"], b"ignored", "given"),
        (["-"], b"not \xff UTF-8", "not \ufffd UTF-8"),
    ],
)
def test_prompt_comes_from_the_argument_or_a_pipe(run, monkeypatch, arguments, content, prompt):
    with pipe(content) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = json.loads(run(*arguments, "--json", "--max-new-tokens", 1)[1])
    assert result["prompt"] == prompt
    if b"\xff" in content:
        assert result["prompt_tokens"] == list(content)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_pipe_that_brings_nothing_is_refused(refused, monkeypatch, checkpoint, arguments):
    with pipe(b"") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        message = refused("generate", *arguments, "--target", checkpoint)
    assert "`PROMPT` must not be empty, and standard input was" in message


def test_a_background_programs_stdin_and_none_at_all_are_no_pipes(run, monkeypatch):
    options = ["--json", "--max-new-tokens", 1]
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        for stdin in (nothing, io.StringIO("no file"), None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert json.loads(run(*options)[1])["prompt"] == "ROMEO:"


def test_no_more_is_drafted_than_may_be_emitted(run, draft):
    options = ["ab", "--seed", 1, "--draft", draft, "--max-new-tokens", 5, "--json"]
    status, out, _ = run(*options, "--lookahead", 10**6)
    assert (status, json.loads(out)["options"]["lookahead"]) == (0, 4)
    assert json.loads(out)["tokens"] == json.loads(run(*options, "--lookahead", 4)[1])["tokens"]


def test_text_is_the_same_in_colour_and_in_json(run, draft):
    options = ["ab", "--seed", 1, "--draft", draft, "--max-new-tokens", 40, "--lookahead", 3]
    _, colored, summary = run(*options, "--color", "always")
    result = json.loads(run(*options, "--json")[1])
    assert COLORS.sub("", colored).removesuffix("\n") == "ab" + result["text"].removesuffix("\n")
    assert {"accepted", "replacement", "bonus"} >= set(result["kinds"])
    styles = set(COLORS.findall(colored))
    assert {"\x1b[32m", "\x1b[1;35m", "\x1b[1;36m", "\x1b[2m", "\x1b[0m"} >= styles
    assert "\x1b[32maccepted\x1b[0m, " in summary


def test_a_terminal_gets_colours_and_a_pipe_none(monkeypatch, run, draft):
    assert not COLORS.search("".join(run("ab", "--draft", draft, "--max-new-tokens", 20, "--seed", 1)[1:]))
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    run("ab", "--draft", draft, "--max-new-tokens", 20, "--seed", 1)
    assert COLORS.search(sys.stdout.getvalue())
    assert COLORS.search(sys.stderr.getvalue())


def test_origin_of_each_token():
    # fault #151
    assert kinds_of(5, 4, 4) == ["accepted"] * 4 + ["bonus"]
    assert kinds_of(3, 2, 4) == ["accepted"] * 2 + ["replacement"]
    assert kinds_of(1, 0, 4) == ["replacement"]
    assert kinds_of(1, 0, 0) == ["plain"]
    assert kinds_of(2, 2, 4) == ["accepted"] * 2  # an end token among the accepted


@pytest.mark.parametrize(
    ("stream", "environment", "choice", "expected"),
    [
        (Terminal, {}, "auto", True),
        (io.StringIO, {}, "auto", False),
        (Terminal, {"NO_COLOR": "1"}, "auto", False),
        (Terminal, {"NO_COLOR": ""}, "auto", True),
        (Terminal, {"TERM": "dumb"}, "auto", False),
        (io.StringIO, {"FORCE_COLOR": "1"}, "auto", True),
        (Terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", False),
        (Terminal, {"NO_COLOR": "1"}, "always", True),
        (Terminal, {}, "never", False),
    ],
)
def test_when_there_is_colour(monkeypatch, stream, environment, choice, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    palette = Palette(stream(), choice)
    assert (palette("bonus", "x") != "x") is expected
    assert bool(palette.legend()) is expected
    assert (palette("plain", "x"), palette("bonus", "")) == ("x", "")


def test_control_characters_of_a_model_do_not_reach_a_terminal():
    text = "a\x1b[2Jb\r\n\tc\x9b"
    assert Palette(Terminal(), "never")("plain", text) == "a\ufffd[2Jb\ufffd\n\tc\ufffd"
    assert Palette(io.StringIO(), "never")("plain", text) == text


def test_stats_show_every_count(run, draft):
    _, _, err = run("ab", "--stats", "--draft", draft, "--max-new-tokens", 30, "--seed", 0)
    for name in ("emitted", "target calls", "draft calls", "proposed", "tested", "accepted by slot", "seconds"):
        assert name in err
    assert "30 (ended by length)" in err
    _, _, err = run("ab", "--stats", "--draft", "none", "--max-new-tokens", 3)
    assert "none tested" in err


def test_compare_reports_the_ratio_of_medians(run, draft):
    _, _, err = run("ab", "--compare", "--compare-runs", 3, "--draft", draft, "--max-new-tokens", 8)
    assert re.search(r"\d\.\d\d times plain decoding: \S+ against \S+ ms a token \(medians of 3 interleaved runs", err)


def test_comparison_takes_turns_on_equal_seeds_and_compares_time_per_token(monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(_compare.time, "perf_counter", lambda: clock[0])

    def timed(name, seconds, emitted):
        def generate(seed):
            calls.append((name, seed))
            clock[0] += seconds
            return SimpleNamespace(stats=SimpleNamespace(emitted=emitted))

        return generate

    result = _compare.compare(timed("fast", 2.0, 4), timed("slow", 3.0, 2), seed=7, runs=2)
    assert calls == [("slow", 7), ("fast", 7), ("slow", 7), ("fast", 8), ("slow", 8)]
    assert result == (2, 0.5, 1.5, 3.0, 3.0, 3.0)


def test_generation_ends_at_the_configured_end_token(run, write_checkpoint, tmp_path):
    target = write_checkpoint(tmp_path / "ends", eos_token_id=[0, *range(64, 256)])
    result = json.loads(run("ab", "--json", "--seed", 0, target=target)[1])
    assert result["finish_reason"] == "stop"
    (target / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert json.loads(run("ab", "--json", "--max-new-tokens", 1, target=target)[1])["options"]["end_tokens"] == [7]
    (target / "generation_config.json").write_text("{}")
    assert len(json.loads(run("ab", "--json", "--max-new-tokens", 1, target=target)[1])["options"]["end_tokens"]) == 193


def test_stop_text_ends_the_output(run):
    text = json.loads(run("ab", "--json", "--seed", 2, "--temperature", 0, "--max-new-tokens", 9)[1])["tokens"]
    stop = bytes(text[3:5]).decode("utf-8", errors="surrogateescape")
    result = json.loads(run("ab", "--json", "--seed", 2, "--temperature", 0, "--stop", stop)[1])
    assert result["finish_reason"] == "stop"
    assert result["tokens"] == text[: len(result["tokens"])]
    assert len(result["tokens"]) <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--backend", "nonesuch"], "`--backend` must be a registered backend"),
        (["generate", "--target", "no/such/directory"], "cannot load the target `no/such/directory`: no config.json"),
        (["generate", "--target", "{checkpoint}", "--draft", "no/such"], "cannot load the draft `no/such`"),
        (["generate", "--target", "{checkpoint}", "--top-p", "0"], "`--top-p` must be above 0 and at most 1, got 0.0"),
        (["generate", "--target", "{checkpoint}", "--temperature", "-1"], "`--temperature` must be"),
        (
            ["generate", "--target", "{checkpoint}", "--temperature", "warm"],
            "--temperature: invalid float value: 'warm'",
        ),
        (["generate", "--target", "{checkpoint}", "--lookahead", "-1"], "`--lookahead` must be"),
        (["generate", "--target", "{checkpoint}", "--seed", "-1"], "`--seed` must"),
        (["generate", "--target", "{checkpoint}", "--end-token", "256"], "`--end-token` must"),
        (["generate", "--target", "{checkpoint}", "--draft", "no/such"], "`lookup` and `none` need no checkpoint"),
        (
            ["generate", "--target", "{checkpoint}", "--max-new-tokens", "8", "x" * 64],
            "`PROMPT` must be shorter than the target's context of 64 tokens, got 64 tokens",
        ),
        (
            ["generate", "--target", "{checkpoint}", "--max-new-tokens", "63", "abc"],
            "`--max-new-tokens` = 63 after a prompt of 3 tokens passes the target's context of 64 tokens",
        ),
        (
            ["generate", "--target", "{checkpoint}", "x" * 64],
            "`PROMPT` must be shorter than the target's context of 64",
        ),
        (["generate", "--target", "{checkpoint}", ""], "`PROMPT` must not be empty"),
        (["generate", "--target", "{checkpoint}", "--draft", "none", "--compare"], "`--compare` needs a draft"),
        (["generate", "--compare-runs", "3"], "`--compare-runs` has no effect without `--compare`"),
        (["generate", "--target", "{checkpoint}", "--compare", "--compare-runs", "0"], "`--compare-runs` must be"),
        (["generate", "--target", "{checkpoint}", "--device", "tpu"], "`--device` must be"),
        (["generate", "--target", "{checkpoint}", "--dtype", "float8"], "`--dtype` must be"),
        (["generate", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_status_2(refused, checkpoint, arguments, message):
    assert message in refused(*(argument.format(checkpoint=checkpoint) for argument in arguments))


def test_broken_checkpoints_are_one_line_and_status_2(refused, write_checkpoint, tmp_path):
    broken = write_checkpoint(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert "is not JSON" in refused("generate", "--target", broken)
    resized = write_checkpoint(tmp_path / "resized")
    config = json.loads((resized / "config.json").read_text())
    (resized / "config.json").write_text(json.dumps({**config, "hidden_size": 24}))
    assert "must have shape" in refused("generate", "--target", resized)
    ends = write_checkpoint(tmp_path / "ends")
    (ends / "generation_config.json").write_text("{")
    assert "is not valid JSON" in refused("generate", "--target", ends)


def test_vocabularies_of_different_sizes_are_refused_unless_asked_for(refused, run, write_checkpoint, tmp_path):
    small = write_checkpoint(tmp_path / "small", vocab_size=200)
    said = refused("generate", "--target", write_checkpoint(tmp_path / "whole"), "--draft", small)
    assert "256" in said
    assert "pass `--pad-vocab`" in said
    status, out, _ = run("ab", "--draft", small, "--pad-vocab", "--json", "--max-new-tokens", 4)
    assert (status, json.loads(out)["options"]["pad_vocab"]) == (0, True)


def test_whatever_a_loader_raises_is_reported_with_its_kind(refused, monkeypatch):
    def fail(*_, **__):
        raise KeyError("hidden_size")

    monkeypatch.setattr(_generate, "load_model", fail)
    assert "cannot load the target `x`: KeyError: 'hidden_size'" in refused("generate", "--target", "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 50256}', "generation_config.json`: `eos_token_id` must be an id from 0 to 255"),
        ('{"eos_token_id": [10, -1]}', "or a list of those, got -1"),
        ('{"eos_token_id": "2"}', "got '2'; `--end-token` takes its place"),
        ('{"eos_token_id": true}', "got True"),
        ("[" * 100_000, "generation_config.json` is not valid JSON: "),
    ],
)
def test_end_tokens_that_are_no_ids_are_refused_by_file_and_key(refused, checkpoint, tmp_path, content, message):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "generation_config.json").write_text(content)
    assert message in refused("generate", "ab", "--target", folder)


@pytest.mark.parametrize(
    ("words", "said"), [("", "not enough memory"), ("Unable to\nallocate 9 GiB", "allocate 9 GiB")]
)
def test_memory_that_runs_out_is_one_line(refused, monkeypatch, checkpoint, words, said):
    def exhaust(*_, **__):
        raise MemoryError(words)

    monkeypatch.setattr(_generate, "decode", exhaust)
    assert said in refused("generate", "ab", "--target", checkpoint)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_swallows_what_goes_there(monkeypatch, capsys, checkpoint, closed):
    monkeypatch.setattr(sys, closed, None)
    status = program.main(["generate", "ab", "--target", str(checkpoint), "--max-new-tokens", "3"])
    getattr(sys, closed).close()
    captured = capsys.readouterr()
    assert (status, bool(captured.out), bool(captured.err)) == (0, closed == "stderr", closed == "stdout")


def test_a_prompt_from_a_closed_stdin_is_refused(refused, monkeypatch, checkpoint):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed, got '-'" in refused("generate", "-", "--target", checkpoint)


@pytest.mark.parametrize("option", ["target", "draft"])
def test_an_empty_name_is_not_the_bundled_model(refused, option):
    assert f"`--{option}` must name a checkpoint, got ''" in refused("generate", "ab", f"--{option}", "")


def test_a_prompt_that_begins_with_a_dash_is_told_of_the_two_dashes(refused, run):
    assert "put one that begins with - last, after --" in refused("generate", "-Romeo")
    assert run("--max-new-tokens", 2, "--", "-Romeo")[1].startswith("-Romeo")


def test_an_interrupt_ends_neatly(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_generate, "decode", interrupt)
    assert run("ab") == (130, "", "\nspecsampling: interrupted\n")


def test_a_reader_that_leaves_is_no_error(checkpoint):
    # Without a reader at all: the write end of a pipe whose read end is closed.
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "specsampling", "generate", "ab", "--target", str(checkpoint)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_survives_an_encoding_that_lacks_the_characters(checkpoint):
    command = [sys.executable, "-m", "specsampling", "generate", "é", "--target", str(checkpoint), "--seed", "0"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=True)
    assert done.stdout.startswith(b"?")


def test_both_names_of_the_program_work():
    for command in ([Path(sys.executable).with_name("specsampling")], [sys.executable, "-m", "specsampling"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"specsampling {specsampling.__version__}\n"


def test_backends_says_what_is_installed_and_why_not(run, monkeypatch):
    known = (BackendStatus("numpy", True, "n:load", ""), BackendStatus("torch", False, "t:load", "needs `torch`"))
    monkeypatch.setattr(program, "available_backends", lambda: known)
    assert run(command="backends")[1] == "numpy  installed\ntorch  not installed: needs `torch`\n"
    listed = json.loads(run("--json", command="backends")[1])
    assert listed[1] == {"name": "torch", "installed": False, "target": "t:load", "reason": "needs `torch`"}
