import doctest
import importlib
import json
import subprocess
import sys

import pytest

import specsampling
from specsampling_conformance import TRANSFORMERS_CASES, audit_transformers
from specsampling_conformance import _audit_transformers as module

SECOND = 1 / 60


def needs_transformers():
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="tested with the framework torch")


@pytest.fixture
def small(monkeypatch):
    """Make batches so small that every case is looked at, however slow the machine."""
    needs_transformers()
    monkeypatch.setattr(module, "_BATCH", 4)
    monkeypatch.setattr(module, "_GREEDY_SEQUENCES", 4)


def test_every_mode_is_sampled_and_greedy_with_temperature_and_top_p():
    for mode in ("assistant", "prompt_lookup"):
        cases = [case for case in TRANSFORMERS_CASES.values() if case.mode == mode]
        assert {case.is_greedy for case in cases} == {True, False}
        assert any(case.sampling.temperature == 0.7 and case.sampling.top_p == 0.9 for case in cases)
        assert any(case.end_tokens for case in cases)


# False alarms: 9 cases at 2e-8 each.
@pytest.mark.slow
@pytest.mark.statistical
def test_every_case_runs_and_says_how_it_was_called(small):
    reports = audit_transformers(minutes=3 * SECOND, seed=5)
    assert [report.name for report in reports] == [f"transformers {name}" for name in TRANSFORMERS_CASES]
    for report, case in zip(reports, TRANSFORMERS_CASES.values(), strict=True):
        assert report.passed, str(report)
        assert report.n >= 4
        assert report.seed == 5
        assert report.settings["mode"] == case.mode
        assert report.settings["top_p"] == case.sampling.top_p
        assert set(report.settings["versions"]) == {"python", "torch", "transformers"}


@pytest.mark.slow
def test_the_example_runs_where_the_frameworks_are(small):
    source = module.audit_transformers.__doc__.replace("# doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(source, {}, "audit_transformers", module.__file__, 0)
    runner = doctest.DocTestRunner()
    assert runner.run(example) == (0, 3)


@pytest.mark.slow
def test_an_assistant_whose_tokens_are_all_accepted_is_found_out(small, monkeypatch):
    import torch
    from transformers.generation import utils

    def lenient(candidate_input_ids, candidate_logits, candidate_length, new_logits, **_):
        last = torch.multinomial(new_logits[:, -1].softmax(-1), 1)
        return torch.cat([candidate_input_ids[:, -candidate_length:], last], dim=-1), candidate_length

    monkeypatch.setattr(utils, "_speculative_sampling", lenient)
    monkeypatch.setattr(module, "_BATCH", 64)
    (report,) = audit_transformers(["assistant"], minutes=10)
    assert not report.passed
    assert report.n < 5000


def test_cases_are_chosen_by_name_or_by_mode():
    assert module._chosen(None) == list(TRANSFORMERS_CASES)
    assert module._chosen(["prompt_lookup", "assistant.greedy"]) == ["prompt_lookup", "assistant.greedy"]
    assert set(module._chosen(["prompt_lookup.*"])) == {name for name in TRANSFORMERS_CASES if "lookup" in name}
    with pytest.raises(ValueError, match="`cases` must be among assistant, .*, got 'beam'"):
        audit_transformers(["beam"])
    with pytest.raises(ValueError, match="`minutes` must be positive, got 0"):
        audit_transformers(minutes=0)


def test_missing_frameworks_are_told_with_the_remedy(monkeypatch, capsys):
    def absent(name):
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(specsampling.BackendNotInstalledError, match="needs the packages `torch` and `transformers`"):
        audit_transformers()
    assert module.main([]) == 2
    assert "pip install 'specsampling[torch,conformance]'" in capsys.readouterr().err


def test_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, specsampling_conformance; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_the_command_line_writes_what_it_found(small, tmp_path, capsys):
    arguments = ["--minutes", "0.02", "--cases", "prompt_lookup.greedy", "prompt_lookup", "--seed", "3"]
    assert module.main([*arguments, "--json", str(tmp_path / "deep" / "audit.json")]) == 0
    out = capsys.readouterr().out
    assert "transformers prompt_lookup.greedy: no deviation after 4 sequences" in out
    assert "certifies a total variation of" in out
    assert out.endswith("Seed: 3.\n")
    held = json.loads((tmp_path / "deep" / "audit.json").read_text())
    assert [one["name"] for one in held] == ["transformers prompt_lookup.greedy", "transformers prompt_lookup"]


def test_the_command_line_exists_beside_the_function_of_its_name():
    command = [sys.executable, "-m", "specsampling_conformance.transformers_audit", "--help"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--minutes" in run.stdout
    assert run.stderr == ""
    assert callable(audit_transformers)
