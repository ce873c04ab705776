import json
import subprocess
import sys

import pytest

import specsampling
from specsampling_conformance import __main__ as cli
from specsampling_conformance import _catalogue as catalogue
from specsampling_conformance import _entry_point
from specsampling_conformance._tiny import write_tiny_checkpoint


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_run_writes_both_reports_and_says_what_it_found(tmp_path, capsys):
    files = [tmp_path / "deep" / "report.json", tmp_path / "report.html"]
    where = ["--backend", "numpy", "--device", "cpu", "--dtype", "float64", "--seed", "11"]
    what = ["--tier", "contract", "--checks", "T0.rollback.*"]
    status = cli.main([*where, *what, "--json", str(files[0]), "--html", str(files[1])])
    assert status == 0
    report = json.loads(files[0].read_text())
    assert (report["backend"], report["device"], report["dtypes"]) == ("numpy", "cpu", ["float64"])
    assert (report["seed"], report["level"], report["capabilities"]["select"]) == (11, None, True)
    assert {check["status"] for check in report["checks"]} == {"passed", "not-applicable", "not-run"}
    assert "<!doctype html>" in files[1].read_text()
    out = lines(capsys)
    assert out[-1].endswith("Level: none. Seed: 11.")
    assert out[-4].startswith("T0  ")
    assert out[-3].endswith(" in 1 process")
    assert out[-2].startswith("Not contract: `T0.model.members` was not run (not among the checks asked for), and ")


def test_a_failure_is_the_exit_status(tmp_path, capsys, monkeypatch):
    def broken(name, checkpoint, *, dtype, device):
        raise OSError("no weights here")

    monkeypatch.setattr(_entry_point, "load_model", broken)
    status = cli.main(["--json", str(tmp_path / "report.json")])
    assert status == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["level"] is None
    assert report["checks"][0]["status"] == "failed"
    out = capsys.readouterr().out
    assert "FAILED T0.model.members" in out
    assert "no weights here" in out
    assert (
        "reproduce: python -m specsampling_conformance --backend numpy --dtype float32 --checks T0.model.members" in out
    )


def test_expected_failures_are_strict(capsys):
    arguments = ["--checks", "T0.rollback.no_op", "--expect-failure", "T0.rollback.no_op=issue 7"]
    assert cli.main(arguments) == 1
    assert "expected to fail (issue 7), but it passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nosuch"], "`--backend` must be one of"),
        (["--draft-backend", "nosuch"], "`--draft-backend` must be one of"),
        (["--draft-backend", "numpy", "--checkpoint", "no/such/folder"], "cannot be combined with `--checkpoint`"),
        (["--checks", "T7.*"], "`checks` must match ids"),
        (["--expect-failure", "T0.rollback.no_op"], "must be ID=REASON"),
        (["--expect-failure", "T0.nothing=reason"], "is no check's id"),
        (["--seed", "-1"], "`seed` must be non-negative"),
        (["--list", "--checks", "T7.*"], "`checks` must match ids"),
        (["--dtype", "float16"], "numpy loads nothing with `--dtype float16`"),
        (["--device", "cuda", "--dtype", "float32"], "numpy loads nothing with `--dtype float32` `--device cuda`"),
        (["--checkpoint", "no/such/folder"], "`checkpoint` must be a directory"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("specsampling_conformance: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("ids", "status"), [(3, 2), (4, 2), (5, 0)])
def test_a_checkpoint_of_too_few_ids_is_refused_before_anything_runs(ids, status, tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "own", vocab_size=ids)
    assert cli.main(["--checkpoint", str(folder), "--checks", "T0.model.members"]) == status
    line = f"specsampling_conformance: error: `--checkpoint` must have at least 5 ids, got a model of {ids}\n"
    assert capsys.readouterr().err == (line if status else "")


def test_a_backend_that_is_not_installed_is_told_before_anything_runs(capsys, monkeypatch):
    from specsampling import available_backends

    (status,) = (backend for backend in available_backends() if backend.name == "numpy")
    missing = status._replace(name="absent", installed=False, reason="pip install absent")
    monkeypatch.setattr(cli, "available_backends", lambda: (missing,))
    assert cli.main(["--backend", "absent"]) == 2
    assert "pip install absent" in capsys.readouterr().err


def test_an_interrupt_has_its_own_status(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check_backend", interrupted)
    assert cli.main([]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_list_shows_what_would_run_for_this_backend(capsys):
    assert cli.main(["--list"]) == 0
    shown = [line.partition("  ")[0] for line in lines(capsys)]
    from specsampling_numpy import NumpyModel

    assert shown == catalogue.manifest_ids(NumpyModel.capabilities)
    assert cli.main(["--list", "--checks", "T0.select.*"]) == 0
    assert [line.partition("  ")[0] for line in lines(capsys)] == ["T0.select.keeps_rows", "T0.select.in_order"]


def test_it_runs_as_a_module_in_an_empty_folder(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "specsampling_conformance", "--checks", "T0.cache.fresh_processes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 passed" in done.stdout


def test_target_and_draft_may_be_of_two_backends(tmp_path, capsys, monkeypatch):
    loaded = set()

    def load(name, checkpoint, *, dtype, device=None):
        loaded.add((name, checkpoint.name, dtype, device))
        return specsampling.load_model("numpy", checkpoint, dtype=dtype)

    monkeypatch.setattr(_entry_point, "load_model", load)
    status = dict.fromkeys(("numpy", "jax"), specsampling.BackendStatus("", True, "", ""))
    monkeypatch.setattr(
        cli, "available_backends", lambda: [entry._replace(name=name) for name, entry in status.items()]
    )
    where = ["--backend", "numpy", "--draft-backend", "jax", "--device", "cpu", "--dtype", "float32"]
    what = [
        "--tier",
        "exact",
        "--checks",
        "T1.law.self_draft",
        "--checks",
        "T1.law.short_draft",
        "--checks",
        "T1.law.growing_lookahead",
    ]
    assert cli.main([*where, *what]) == 0
    assert ("numpy", "target", "float32", "cpu") in loaded
    assert {(name, role) for name, role, *_ in loaded if role.endswith("draft")} <= {
        ("jax", "draft"),
        ("jax", "short_draft"),
    }
    assert ("jax", "draft", "float32", None) in loaded
    assert capsys.readouterr().out.startswith("numpy with drafts of jax on cpu")


def test_an_adapter_that_hosts_no_foreign_weights_is_given_its_own(tmp_path, capsys, monkeypatch, write_checkpoint):
    mine = write_checkpoint(tmp_path / "my model", vocab_size=16)
    loaded = []

    def load(name, checkpoint, *, dtype, device):
        loaded.append(checkpoint)
        return specsampling.load_model(name, checkpoint, dtype=dtype, device=device)

    monkeypatch.setattr(_entry_point, "load_model", load)
    checks = ["--checks", "T1.law.self_draft", "--checks", "T0.cache.fresh_processes", "--checks", "T0.model.*"]
    assert cli.main(["--checkpoint", str(mine), "--dtype", "float32", "--tier", "exact", *checks]) == 0
    assert "3 passed" in capsys.readouterr().out
    assert set(loaded) == {mine}


def test_a_failure_with_an_own_checkpoint_is_reproduced_with_it(tmp_path, capsys, monkeypatch, write_checkpoint):
    mine = write_checkpoint(tmp_path / "my model")
    monkeypatch.setattr(_entry_point, "load_model", lambda *_, **__: None)
    assert cli.main(["--checkpoint", str(mine), "--tier", "contract"]) == 1
    assert f"--backend numpy --checkpoint '{mine}' --tier contract" in capsys.readouterr().out


def test_a_backend_that_cannot_load_the_suites_checkpoint_is_told_of_the_option(tmp_path, capsys, monkeypatch):
    def load(*_, **__):
        raise ValueError("`model_type` must be 'rwkv',\n got 'llama'")

    monkeypatch.setattr(_entry_point, "load_model", load)
    assert cli.main(["--checks", "T0.model.members", "--dtype", "float32"]) == 1
    told = capsys.readouterr().err
    assert "numpy cannot load the suite's own checkpoint" in told
    assert "(ValueError: `model_type` must be 'rwkv', got 'llama'); name one that it can load with --checkpoint" in told
    mine = tmp_path / "mine"
    mine.mkdir()
    assert cli.main(["--checks", "T0.model.members", "--dtype", "float32", "--checkpoint", str(mine)]) == 1
    assert capsys.readouterr().err == ""
