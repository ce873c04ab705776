"""The parts of ``conformance/benchmarks/paper.py`` that can be right or wrong: statistics, journal, tables, sandbox."""

import gzip
import json
import math
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specsampling

sys.path.append(str(Path(__file__).parents[2] / "conformance" / "benchmarks"))

from _paper_analysis import Profile, analyse, parse_profile, predict
from _paper_bench import Bench
from _paper_journal import CallsStep, Journal, RunKey, Sizes, kind_and_key, make_batches, make_plan, parse_lookaheads
from _paper_sandbox import isolation, passes
from _paper_statistics import bootstrap_mean, bootstrap_timings, swap_test
from _paper_tables import by_lookahead_table, tables
from _paper_tasks import ByteCodec, Text, load_tasks, num_kept

PAPER = Path(__file__).parents[2] / "conformance" / "benchmarks" / "paper.py"


def key(**changes):
    defaults = {
        "study": "speed",
        "backend": "numpy",
        "target": "t",
        "drafter": "plain",
        "task": "text",
        "setting": "greedy",
        "lookahead": 0,
        "prompt": 0,
        "repeat": 0,
        "max_new_tokens": 12,
    }
    return {**defaults, **changes}


def a_run(*, seconds=1.0, rounds=4, emitted=12, tested=0, accepted=0, undrafted=0, tokens=(1,), **changes):
    return {
        "kind": "run",
        "key": key(**changes),
        "rounds": rounds,
        "emitted": emitted,
        "tested": tested,
        "accepted": accepted,
        "undrafted": undrafted,
        "decode_seconds": seconds,
        "decoded": emitted - 1,
        "tokens": list(tokens),
        "digest": str(tokens),
    }


def both(*, repeats=2, prompts=2, lookahead=4, gain=2.0):
    """Return plain and speculative runs, the latter `gain` times faster, under noise that is common to both."""
    runs = []
    for repeat in range(repeats):
        for prompt in range(prompts):
            noise = 1.0 + repeat + 3 * prompt
            place = {"repeat": repeat, "prompt": repeat * prompts + prompt}
            runs.append(a_run(seconds=noise, rounds=12, **place))
            mode = {"drafter": "d", "lookahead": lookahead, "tested": 12, "accepted": 8}
            runs.append(a_run(seconds=noise / gain, **mode, **place))
    return runs


# --- statistics


def test_noise_common_to_all_modes_drops_out_of_speedups():
    noise = np.random.default_rng(0).uniform(1, 10, size=(5, 4))
    timings = bootstrap_timings(np.stack([noise, noise / 2]), np.full((2, 5, 4), 10))
    assert np.allclose(timings.speedups[1], 2)
    assert timings.per_token[0].low < timings.per_token[0].value < timings.per_token[0].high
    assert timings.best_shares == [0.0, 1.0]


def test_time_per_token_is_the_median_over_repeats_of_all_time_over_all_tokens():
    seconds = [[[1.0, 2.0], [1.0, 5.0], [100.0, 2.0]]]
    assert bootstrap_timings(seconds, [[[1, 2], [2, 1], [1, 1]]]).per_token[0].value == 2.0


@pytest.mark.statistical  # false-alarm rate 5e-4: the share of 400 intervals that miss is binomial, of 0.05 to 0.06
def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng()
    spreads = [bootstrap_mean(rng.normal(3, 1, size=60), resamples=400) for _ in range(400)]
    missed = sum(not spread.low <= 3 <= spread.high for spread in spreads)
    assert 5 <= missed <= 44


@pytest.mark.statistical  # false-alarm rate below 1e-4: binomial, 150 tests at level 0.1
def test_swap_test_keeps_its_level_though_the_tokens_of_a_text_depend_on_each_other():
    rng = np.random.default_rng()
    alarms = np.zeros(2)
    for _ in range(150):
        sides = [[np.full(rng.integers(1, 30), rng.normal()) for _ in range(12)] for _ in range(2)]
        found = swap_test(*sides, swaps=99, seed=int(rng.integers(2**31)))
        alarms += found.p_mean <= 0.1, found.p_distance <= 0.1
    assert (alarms <= 30).all()


@pytest.mark.statistical  # false-alarm rate below 1e-6: the shift is over five standard errors
def test_swap_test_sees_a_shift_of_the_mean_and_a_change_of_spread():
    rng = np.random.default_rng()
    texts = [rng.normal(0, 1, size=(40, 30)) for _ in range(2)]
    shifted = swap_test(texts[0], texts[1] + 0.5)
    assert shifted.p_mean < 0.01
    assert shifted.mean_difference.low > 0
    wider = swap_test(texts[0], 3 * texts[1])
    assert wider.p_distance < 0.01


def test_swap_test_is_two_sided():
    found = swap_test([[0.0], [0.0]], [[1.0], [1.0]], swaps=4000)  # two of the four ways to swap are as different
    assert found.p_mean == pytest.approx(0.5, abs=0.05)  # by a fixed seed
    assert found.p_distance == pytest.approx(0.5, abs=0.05)


def test_equal_numbers_are_no_distance_apart():
    assert swap_test([[0.0, 0.0], [0.0]], [[0.0], [0.0, 0.0]], swaps=10).distance == 0.0


# --- predictions and profiles


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.95])
def test_predicted_best_lookahead_is_the_librarys(acceptance):
    blocks = {0: 2.0, 1: 2.2, 2: 2.5, 4: 3.0, 7: 4.4}
    times = {k: predict(acceptance, k, draft=0.2, block=block) for k, block in blocks.items()}
    costs = {k: block / 2 for k, block in blocks.items()}
    assert min(times, key=lambda k: (times[k], k)) == specsampling.best_lookahead(
        acceptance, draft_cost=0.1, block_costs=costs
    )


def test_rounds_without_a_proposal_emit_one_token():
    assert predict(0.9, 4, draft=0.0, block=6.0, coverage=0.0) == 6.0
    assert predict(1.0, 4, draft=0.0, block=6.0, coverage=0.5) == 6.0 / 3


def test_profile_replays_rounds_not_times():
    (row,) = analyse(both(), [Profile(1.8, 14.1), Profile(1.0, 10.0, 0.5)])["speed"]
    plain, drafted = row["computed"]["1.8:14.1"]
    assert plain["ms_per_token"].value == pytest.approx(14.1)  # 12 rounds for 12 tokens
    assert drafted["ms_per_token"].value == pytest.approx(4 * (4 * 1.8 + 14.1) / 12)
    assert row["computed"]["1:10:0.5"][1]["ms_per_token"].value == pytest.approx(4 * (4 * 1.0 + 10 + 4 * 0.5) / 12)


def test_prompt_lookup_takes_no_draft_step_in_a_profile():
    runs = [a_run(rounds=12), a_run(drafter="lookup", lookahead=4, tested=12, accepted=8, undrafted=1)]
    (row,) = analyse(runs, [Profile(1.8, 14.1)])["speed"]
    assert row["computed"]["1.8:14.1"][1]["ms_per_token"].value == pytest.approx(4 * 14.1 / 12)
    assert row["by_lookahead"][1]["coverage"] == 0.75


@pytest.mark.parametrize("text", ["1.8", "a:b", "1:0", "-1:2", "1:2:3:4"])
def test_profile_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="profile"):
        parse_profile(text)


# --- from runs to rows


def test_speed_row_holds_what_was_measured_and_what_the_formula_makes_of_it():
    calls = {"target": {"1": [0.010, 0.012, 0.011], "5": [0.020] * 3}, "d": {"1": [0.001]}}
    entry = {"kind": "calls", "key": CallsStep("numpy", "t", "text", 0)._asdict(), "length": 9, "seconds": calls}
    (row,) = analyse([*both(gain=2.5), entry])["speed"]
    plain, drafted = row["by_lookahead"]
    assert drafted["speedup"].value == pytest.approx(2.5)
    assert drafted["acceptance"] == row["pooled_acceptance"] == pytest.approx(8 / 12)
    assert (plain["target_block_ms"], drafted["target_block_ms"]) == pytest.approx((11.0, 20.0))
    tokens = sum((8 / 12) ** i for i in range(5))
    assert drafted["predicted_ms_per_token"] == pytest.approx((4 * 1.0 + 20.0) / tokens)
    assert (row["best_lookahead"], row["predicted_best_lookahead"]) == (4, 4)


def test_repeat_that_is_not_whole_is_left_out():
    runs = both(repeats=2)
    runs[-1]["decode_seconds"] = 1e9
    (row,) = analyse([run for run in runs if run is not runs[-2]])["speed"]
    assert row["repeats"] == 1
    assert row["by_lookahead"][1]["speedup"].value == pytest.approx(2.0)


def quality_runs(task="code", plain=(0, 1), other=(0, 1), **changes):
    shared = {"study": "quality", "task": task, "trivial_score": None, "logprobs": [-1.0, -2.0], **changes}
    extra = {name: shared.pop(name) for name in ("trivial_score", "logprobs")}
    runs = []
    for prompt, scores in enumerate(zip(plain, other, strict=True)):
        for score, mode in zip(scores, ({}, {"drafter": "d", "lookahead": 4, "tokens": (1, prompt)}), strict=True):
            runs.append({**a_run(prompt=prompt, **shared, **mode), "score": float(score), **extra})
    return runs


def test_difference_of_scores_is_speculative_less_plain():
    (row,) = analyse(quality_runs(plain=(0, 0, 0), other=(1, 0, 0), setting="nucleus"))["quality"]
    assert row["score_difference"].value == pytest.approx(1 / 3)
    assert row["law"]["p_mean"] == 1.0


def test_greedy_texts_that_differ_are_counted_by_verdict():
    runs = quality_runs(plain=(0,) * 4, other=(0,) * 4)
    runs[1]["digest"] = runs[0]["digest"]

    def verdict(prompt, plain, other):
        found = key(study="quality", task="code", prompt=prompt, drafter="d", lookahead=4)
        margins = {"numeric tie": 1e-6, "bug": 0.5, "equal": None}
        verdicts = {
            name: {"verdict": verdict, "margin": margins[verdict], "tolerance": 1e-5}
            for name, verdict in (("plain", plain), ("other", other))
        }
        return {"kind": "greedy", "key": found, "first_difference": 3, **verdicts}

    entries = [*runs, verdict(1, "equal", "numeric tie"), verdict(2, "numeric tie", "bug")]
    analysis = analyse(entries)
    found = analysis["quality"][0]["greedy"]
    assert (found["equal"], found["examined"], found["bugs"]) == (1, 2, 1)
    line = next(line for line in tables(analysis, [SESSION]).splitlines() if "| 1e-06 (1e-05), 0.5 (1e-05) |" in line)
    assert "| 4 | 1 | 1 | 1 | 1 |" in line  # texts, equal, ties, bugs, not examined


SESSION = {
    "clock": "wall time",
    "load_average": [0.1, 0.1, 0.1],
    "machine": {"processor": "P", "cores": 2, "cores_allowed": 2, "system": "S", "python": "3"},
    "threads": {"OMP_NUM_THREADS": "2", "torch": None},
    "versions": {"numpy": "2"},
    "models": {"t": {"parameters": 1e6, "num_hidden_layers": 2}},
}


def test_tables_stand_beside_the_papers_and_say_what_is_computed():
    analysis = analyse(both(), [Profile(1.8, 14.1)])
    text = tables(analysis, [SESSION])
    for line in ("| 14.1 | 7.52 | 1.92 | 4 |", "| 14.1 | 7.0 | 2.01 | 4 |", "| 14.1 | 5.73 | 2.46 | 4 |"):
        assert line in text
    assert "(computed)" in text.split("## Computed")[1]
    assert "busy" not in text
    assert "busy" in tables(analysis, [{**SESSION, "load_average": [5.0, 5.0, 5.0]}])
    assert "CPU time" in tables(analysis, [{**SESSION, "clock": "CPU time"}])
    assert by_lookahead_table(analysis).count("\n") == 4


def test_tables_say_when_a_score_means_nothing():
    few = tables(analyse(quality_runs(plain=(0, 1), other=(1, 1), setting="nucleus")), [SESSION])
    assert "too few for a difference in pass rates" in few
    many = tables(analyse(quality_runs(plain=(1,) * 20, other=(1,) * 20, setting="nucleus")), [SESSION])
    assert "too few" not in many
    summaries = quality_runs("summarization", plain=(4,), other=(4,), setting="nucleus", trivial_score=9.0)
    assert "below those of the article's first three" in tables(analyse(summaries), [SESSION])


def test_figures_are_drawn(tmp_path):
    figures = pytest.importorskip("_paper_figures")
    speed = analyse(both())["speed"]
    figures.draw_times(speed, tmp_path / "time.svg")
    figures.draw_acceptance(speed, tmp_path / "acceptance.svg")
    assert all("<svg" in (tmp_path / f"{name}.svg").read_text() for name in ("time", "acceptance"))


# --- plan and journal


def plan(**changes):
    options = {
        "backend": "numpy",
        "target": "t",
        "drafters": ["a", "b"],
        "tasks": {"text": Sizes(["greedy", "as is"], 2, 3, 8)},
        "lookaheads": (0, 2, 4),
        "quality_lookaheads": (0, 4),
        "repeats": 5,
    }
    return list(make_plan(**{**options, **changes}))


def test_plan_runs_plain_once_and_every_mode_on_every_prompt():
    steps = plan()
    runs = [step for step in steps if isinstance(step, RunKey)]
    assert len(set(runs)) == len(runs) == 5 * 2 * 2 * 5 + 2 * 3 * 3
    assert sum(isinstance(step, CallsStep) for step in steps) == 5
    assert {step.drafter for step in runs if step.lookahead == 0} == {"plain"}


def test_plan_finishes_a_repeat_before_the_next_and_begins_with_another_mode_each_time():
    runs = [step for step in plan() if isinstance(step, RunKey) and step.study == "speed"]
    assert [step.repeat for step in runs] == sorted(step.repeat for step in runs)
    firsts = {(step.drafter, step.lookahead) for step in runs[::5]}
    assert len(firsts) == 5
    assert {step.prompt for step in runs} == set(range(10))  # each repeat has prompts of its own


def test_texts_that_are_compared_are_drawn_under_row_ids_of_their_own():
    runs = {(step.prompt, step.repeat, step.lookahead): step.row_id for step in plan() if isinstance(step, RunKey)}
    assert len(set(runs.values())) == len(runs)


def test_lookaheads_are_read_as_they_are_written():
    assert parse_lookaheads("0-7") == tuple(range(8))
    with pytest.raises(ValueError, match="lookaheads"):
        parse_lookaheads("0-99")


def test_journal_drops_the_line_that_a_kill_cut_off(tmp_path):
    first, second = plan()[1:3]
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (first, second):
        kind, where = kind_and_key(step)
        journal.append(kind, where, tokens=[1, 2])
    with journal.path.open("r+b") as file:
        file.truncate(journal.path.stat().st_size - 5)
    again = Journal(journal.path)
    assert again.has_step(first)
    assert not again.has_step(second)
    again.append(kind, where, tokens=[1, 2])
    assert Journal(journal.path).has_step(second)


@pytest.mark.slow
def test_run_that_was_killed_goes_on_to_the_same_results(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "tinyshakespeare.txt").write_bytes(rng.integers(97, 123, size=4000, dtype=np.uint8).tobytes())

    def command(out):
        options = "--tasks text --settings greedy --lookahead 0,2 --repeats 2 --prompts 2 --quality-prompts 3"
        places = ["--data", str(tmp_path), "--out", str(tmp_path / out)]
        return [sys.executable, str(PAPER), *options.split(), "--max-new-tokens", "6", *places]

    def results(out):
        entries = Journal(tmp_path / out / "journal.jsonl").of("run")
        return [(json.dumps(entry["key"], sort_keys=True), entry["row_id"], entry["digest"]) for entry in entries]

    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command("killed"), stderr=stderr)
        journal, deadline = tmp_path / "killed" / "journal.jsonl", time.monotonic() + 120
        while not (journal.exists() and journal.read_bytes().count(b'"kind": "run"') >= 3):
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.wait()
    before = results("killed")
    for out in ("killed", "whole"):
        subprocess.run(command(out), check=True, stderr=subprocess.DEVNULL)
    after = results("killed")
    assert 3 <= len(before) < len(after) == 2 * 2 * 2 + 3 * 2
    assert after[: len(before)] == before
    assert sorted(after) == sorted(results("whole"))
    assert len(json.loads((tmp_path / "killed" / "results.json").read_text())["runs"]["rows"]) == len(after)
    other = subprocess.run([*command("killed"), "--seed", "1"], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "of the seed 0" in other.stderr


# --- models


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "tinyshakespeare.txt").write_bytes(b"To be, or not to be, that is the question. " * 100)
    target, draft = (specsampling.load_model("numpy", specsampling.bundled(name)) for name in ("target", "draft"))
    return Bench(
        target=target,
        drafters={"d": draft, "lookup": specsampling.PromptLookup()},
        tasks=load_tasks(["text"], folder, ByteCodec()),
        codec=ByteCodec(),
        lookaheads=(0, 2),
        seed=0,
    )


def test_run_reports_the_text_that_was_asked_for(bench):
    [plain] = bench.run(RunKey(**key(study="quality", max_new_tokens=9)))
    [drafted] = bench.run(RunKey(**key(study="quality", max_new_tokens=9, drafter="d", lookahead=2)))
    assert plain["tokens"] == drafted["tokens"]
    assert min(plain["first_round_seconds"], plain["decode_seconds"]) > 0
    assert (plain["rounds"], plain["decoded"], plain["emitted"]) == (9, 8, 9)
    assert drafted["rounds"] == drafted["emitted"] - drafted["accepted"] < 9
    assert plain["score"] == pytest.approx(drafted["score"], rel=1e-4)


def test_texts_written_together_are_those_written_alone(bench):
    keys = [
        RunKey(**key(study="quality", setting="as is", max_new_tokens=9, drafter="d", lookahead=2, prompt=prompt))
        for prompt in (0, 3, 1)
    ]
    names = ("row_id", "tokens", "digest", "text", "rounds", "accepted", "tested", "decoded", "prompt_tokens")
    alone = [bench.run(one)[0] for one in keys]
    together = bench.run(*keys)
    assert [[x[name] for name in names] for x in together] == [[x[name] for name in names] for x in alone]
    assert [x["score"] for x in together] == pytest.approx([x["score"] for x in alone], rel=1e-4)
    assert len({x["digest"] for x in together}) == 3


def test_text_that_is_complete_ends_there_and_its_company_goes_on(bench):
    task = bench.tasks["text"]
    keys = [RunKey(**key(study="quality", setting="as is", max_new_tokens=40, prompt=prompt)) for prompt in (0, 1)]
    whole = bench.run(*keys)
    stop = next(c for c in whole[0]["text"] if c not in whole[1]["text"])
    stopping = replace(bench, tasks={"text": replace(task, stops=(stop,))})
    ended, other = stopping.run(*keys)
    assert ended["text"] == whole[0]["text"].partition(stop)[0]
    assert ended["rounds"] == len(ended["tokens"]) < 40
    assert other["tokens"] == whole[1]["tokens"]


def test_batches_hold_texts_that_differ_in_their_prompt_only():
    plan = [
        CallsStep("numpy", "t", "text", 0),
        *(RunKey(**key(study="speed", prompt=prompt)) for prompt in range(2)),
        *(RunKey(**key(study="quality", prompt=prompt, setting=name)) for prompt in range(3) for name in ("a", "b")),
    ]
    batches = list(make_batches(plan, 2))
    assert batches[0] == plan[0]
    assert [len(batch) for batch in batches[1:]] == [1, 1, 2, 2, 1, 1]
    assert [(step.setting, step.prompt) for step in batches[3] + batches[5]] == [("a", 0), ("a", 1), ("a", 2)]
    assert sorted(map(str, plan[1:])) == sorted(str(step) for batch in batches[1:] for step in batch)


def test_calls_are_timed_for_the_target_at_every_width_and_for_draft_models(bench):
    timed = bench.time_calls(CallsStep("numpy", "t", "text", 0), 9)
    assert {name: set(widths) for name, widths in timed["seconds"].items()} == {"target": {"1", "3"}, "d": {"1"}}
    assert timed["length"] == 64 + 4
    assert {len(samples) for widths in timed["seconds"].values() for samples in widths.values()} == {5}


def test_greedy_text_with_a_wrong_token_is_a_bug_where_it_differs(bench):
    plain = bench.run(RunKey(**key(max_new_tokens=6)))[0]["tokens"]
    other = [*plain[:3], (plain[3] + 1) % 256, *plain[4:]]
    found = bench.compare_greedy("text", 0, plain, other)
    assert found["first_difference"] == 3
    assert (found["plain"]["verdict"], found["other"]["verdict"]) == ("equal", "bug")
    assert found["other"]["margin"] > found["other"]["tolerance"]


# --- tasks and sandbox


def test_text_ends_at_its_stop_whatever_came_after_it_in_the_same_round():
    codec = ByteCodec()
    text = list(b"  return 1\n\ndef more():\n    pass\nclass")
    kept = num_kept(text, codec.decode, ("\nclass", "\ndef"))
    assert bytes(text[:kept]) == b"  return 1\n\ndef"
    assert all(num_kept(text[:end], codec.decode, ("\nclass", "\ndef")) == kept for end in range(kept, len(text)))
    assert num_kept(text[: kept - 1], codec.decode, ("\nclass", "\ndef")) is None


def test_prompts_of_the_text_task_are_held_out(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"a" * 9000 + b"b" * 1000)
    task = load_tasks(["text"], tmp_path, ByteCodec())["text"]
    assert {token for prompt in task.prompts for token in prompt.ids} == {ord("b")}
    assert task.score(task.prompts[0], Text([1, 2], [math.log(0.5), math.log(0.25)], "ab")) == pytest.approx(1.5)


def test_code_is_scored_by_running_the_tests_on_prompt_and_completion(tmp_path):
    problem = {
        "prompt": '\ndef double(x):\n    """Return twice x."""\n',
        "test": "def check(candidate):\n    assert candidate(2) == 4",
        "entry_point": "double",
    }
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(problem) + "\n")
    task = load_tasks(["code"], tmp_path, ByteCodec())["code"]
    (prompt,) = task.prompts
    assert bytes(prompt.ids).endswith(b'twice x."""')
    assert task.score(prompt, Text([], [], "\n    return 2 * x\n\ndef more(:")) == 1.0
    assert task.score(prompt, Text([], [], "\n    return 3 * x")) == 0.0


def test_sandbox_tells_programs_that_end_well_from_others():
    assert passes("assert True")
    assert not passes("assert False")
    assert not passes("import sys; sys.exit(0)")
    assert not passes("import os; os._exit(0)")
    assert not passes("def f(:")
    assert not passes("print('x' * 2**22)")
    start = time.monotonic()
    assert not passes("while True: pass", seconds=1.0)
    assert not passes("import time; time.sleep(60)", seconds=1.0)
    assert time.monotonic() - start < 30


def test_sandbox_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not passes(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        if isolation() == "network namespace":
            assert not passes(f"import _socket; _socket.socket(2, 1).connect(('127.0.0.1', {port}))")
