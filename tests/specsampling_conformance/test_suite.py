import os
import re
import subprocess
import sys

import pytest

ADAPTERS = '''
import specsampling
from specsampling_conformance import BackendSuite, Capabilities


class Model:
    """A sound adapter of somebody else's, around the reference backend."""

    max_rollback = None

    def __init__(self, checkpoint, dtype):
        self.inner = specsampling.load_model("numpy", checkpoint, dtype=dtype)
        self.vocab_size = self.inner.vocab_size

    def init_cache(self, batch_size, capacity):
        return self.inner.init_cache(batch_size, capacity)

    def score(self, cache, tokens, /, *, num_logits=None):
        return self.inner.score(cache, tokens, num_logits=num_logits)

    def rollback(self, cache, lengths, /):
        return self.inner.rollback(cache, lengths)


class Forgetful(Model):
    def rollback(self, cache, lengths, /):
        return cache


'''

SOUND = """
class TestMyBackend(BackendSuite):
    capabilities = Capabilities(dtypes=("float32", "float64"))

    def load(self, checkpoint, dtype):
        return Model(checkpoint, dtype)
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Run pytest as a third party would, in a folder with nothing but one test file."""

    def run(body, *arguments, **environment):
        (tmp_path / "test_mine.py").write_text(ADAPTERS + body)
        # Empty, and there only to end pytest's search for a project: under nox this folder lies inside ours.
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE_", "COV_"))
        }
        command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:randomly", "-W", "error"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env=kept | {"SPECSAMPLING_CONFORMANCE_TIER": "contract"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def outcomes(text):
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", text)}


@pytest.mark.slow
def test_a_sound_adapter_passes_in_two_workers(run_pytest):
    status, text = run_pytest(SOUND, "-n", "2", "-q")
    assert status == 0, text
    from specsampling import Capabilities
    from specsampling_conformance import _catalogue as catalogue

    counted = outcomes(text)
    expected = [one for one in catalogue.manifest_ids(Capabilities()) if one.startswith("T0")]
    assert counted["passed"] + counted["skipped"] == 2 * len(expected)
    # No limit on rollback, none on length, and no entry point that a fresh process could load.
    assert counted["skipped"] == 6


def test_every_check_and_dtype_is_an_item_with_its_id(run_pytest):
    status, text = run_pytest(SOUND, "--collect-only", "-q")
    assert status == 0, text
    for dtype in ("float32", "float64"):
        assert f"test_mine.py::TestMyBackend::test_clause[T0.rollback.to_zero-{dtype}]" in text
    assert "select.keeps_rows" not in text
    assert "T0.select.absent" in text


def test_the_tier_of_the_class_is_what_runs(run_pytest):
    body = SOUND + '    tier = "contract"\n'
    _, text = run_pytest(body, "--collect-only", "-q", SPECSAMPLING_CONFORMANCE_TIER="")
    assert "[T0." in text
    assert "[T1." not in text


def test_a_failure_tells_the_story_the_values_and_how_to_repeat_it(run_pytest):
    body = """
class TestForgetful(BackendSuite):
    def load(self, checkpoint, dtype):
        return Forgetful(checkpoint, dtype)
"""
    status, text = run_pytest(body, "-k", "to_zero", SPECSAMPLING_CONFORMANCE_SEED="77")
    assert status == 1
    assert "T0.rollback.to_zero: A row rolled back to length 0 is an empty row." in text
    assert re.search(r"score \[\[.*rollback \[0,0\]; score .* -> row \d logits off by", text)
    assert "assert 'failed' == 'passed'" in text
    item = "test_mine.py::TestForgetful::test_clause[T0.rollback.to_zero"
    line = f'SPECSAMPLING_CONFORMANCE_SEED=77 python -m pytest "{item}'
    assert line in text


def test_assertions_of_the_suite_keep_their_introspection_without_a_message(run_pytest):
    body = """
def test_rewritten():
    from specsampling_conformance import _suite
    assert any(name.startswith("@py") for name in vars(_suite)), sorted(vars(_suite))
"""
    status, text = run_pytest(body)
    assert status == 0, text


def test_expected_failures_are_xfails_and_strict(run_pytest):
    body = """
class TestForgetful(BackendSuite):
    expected_failures = {"T0.rollback.to_zero": "see issue 12"}

    def load(self, checkpoint, dtype):
        return Forgetful(checkpoint, dtype)


class TestMended(BackendSuite):
    capabilities = Capabilities(dtypes=("float32", "float64"))
    expected_failures = {"T0.rollback.to_zero[float64]": "see issue 12"}

    def load(self, checkpoint, dtype):
        return Model(checkpoint, dtype)
"""
    status, text = run_pytest(body, "-k", "to_zero", "-rxf")
    assert status == 1
    assert outcomes(text) == {"xfailed": 1, "failed": 1, "passed": 1}
    assert "expected to fail: see issue 12" in text
    assert re.search(r"FAILED test_mine.py::TestMended::test_clause\[T0.rollback.to_zero-float64\]", text)
    assert "it passed: take it out of `expected_failures`" in text


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ('expected_failures = {"T0.rollback.to_zer": "typo"}', "which is no check's id"),
        ('expected_failures = {"T0.rollback.to_zero": ""}', "must give a reason"),
        ('capabilities = {"select": True}', "must be a specsampling.Capabilities"),
        ('tier = "weekly"', "`tier` must be one of"),
    ],
)
def test_what_is_declared_wrong_is_an_error_of_collection(run_pytest, declared, message):
    body = f"class TestWrong(BackendSuite):\n    {declared}\n"
    status, text = run_pytest(body, SPECSAMPLING_CONFORMANCE_TIER="")
    assert status == 2
    assert message in text
    assert outcomes(text) == {"error": 1}


def test_a_class_without_load_is_told_what_to_write(run_pytest):
    status, text = run_pytest("class TestEmpty(BackendSuite):\n    pass\n", "-k", "members")
    assert status == 1
    assert "TestEmpty must define `load(self, checkpoint, dtype)`" in text


def test_a_manifest_that_differs_stops_collection(run_pytest):
    body = (
        """
from specsampling_conformance._checks import CHECKS
del CHECKS["T0.rollback.twice"]
"""
        + SOUND
    )
    status, text = run_pytest(body)
    assert status == 2
    assert "T0.rollback.twice: the suite's manifest lists this check once, and the suite has it 0 times" in text


def test_later_tiers_are_skipped_after_a_failure(run_pytest):
    body = (
        """
from specsampling_conformance import _catalogue
from specsampling_conformance._checks import CHECKS, Check, CheckFailure

def fail(subject):
    raise CheckFailure("wrong")

CHECKS.clear()
CHECKS["T0.a.fails"] = Check(id="T0.a.fails", clause="C.", requires=(), run=fail)
CHECKS["T1.a.later"] = Check(id="T1.a.later", clause="C.", requires=(), run=lambda subject: None)
manifest = _catalogue.build_manifest(_catalogue.all_checks())
_catalogue.shipped_manifest = lambda: manifest
"""
        + SOUND
    )
    status, text = run_pytest(body, "-rs", SPECSAMPLING_CONFORMANCE_TIER="pr")
    assert status == 1
    assert outcomes(text) == {"failed": 2, "skipped": 2}
    assert "not run: T0 failed (T0.a.fails)" in text


def test_workers_share_the_seed(run_pytest):
    body = """
from specsampling_conformance import _suite

class TestSeeds(BackendSuite):
    def load(self, checkpoint, dtype):
        raise RuntimeError(f"seed {_suite._session(type(self)).seed}")
"""
    _, text = run_pytest(body, "-n", "2", "-k", "score")
    assert len(set(re.findall(r"raised RuntimeError: seed (\d+)", text))) == 1


def test_without_the_package_hypothesis_the_suite_says_what_to_install(tmp_path):
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'hypothesis' else found(name, *rest);"
        "import specsampling_conformance"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'specsampling[conformance]'" in done.stderr
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['hypothesis'] = None")
    command = [sys.executable, "-m", "specsampling_conformance", "--list"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("specsampling_conformance: error: the conformance suite needs")
    assert len(done.stderr.splitlines()) == 1
