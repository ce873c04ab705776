import sys
import time

import numpy as np
import pytest

from specsampling import Capabilities
from specsampling_conformance import Measured, check_backend
from specsampling_conformance import _runner as runner
from specsampling_conformance._checks import CheckFailure, NotApplicable

FLOAT32 = Capabilities()
BOTH = Capabilities(dtypes=("float32", "float64"))


def never(checkpoint, dtype):
    raise AssertionError("no check here loads a model")


def statuses(report):
    return {result.id: result.status for result in report.checks}


@pytest.mark.slow
def test_the_reference_backend_keeps_the_contract(numpy_load):
    report = check_backend(numpy_load, Capabilities(dtypes=("float32", "float64"), select=True), tier="contract")
    assert report.failures == []
    assert (report.passed, report.level, report.exit_status) == (True, "contract", 0)
    (cost,) = report.costs
    assert cost.tier == "T0"
    assert cost.seconds > 0
    assert cost.num_samples > 0
    assert cost.num_checks > 30


class TestBadAdapters:
    """Whatever an adapter does is a result."""

    def faulty(self, kind, wrapped, numpy_load):
        class Faulty(wrapped):
            def score(self, cache, tokens, /, *, num_logits=None):
                logits, cache = super().score(cache, tokens, num_logits=num_logits)
                made = {
                    "text": lambda: "logits",
                    "nothing": lambda: None,
                    "a tuple of three": lambda: (logits, cache, None),
                    "no array": lambda: (object(), cache),
                    "integers": lambda: (np.zeros(logits.shape, dtype=np.int64), cache),
                    "one row too many": lambda: (np.concatenate([logits, logits[:1]]), cache),
                    "nan": lambda: (logits * np.nan, cache),
                    "recursion": lambda: self.score(cache, tokens, num_logits=num_logits),
                    "exit": sys.exit,
                    "generator exit": lambda: (_ for _ in ()).throw(GeneratorExit()),
                    "unprintable": lambda: (_ for _ in ()).throw(UnprintableError()),
                }
                return made[kind]()

        return lambda checkpoint, dtype: Faulty(numpy_load(checkpoint, dtype))

    @pytest.mark.parametrize(
        "kind",
        [
            *("text", "nothing", "a tuple of three", "no array", "integers", "one row too many", "nan"),
            *("recursion", "exit", "generator exit", "unprintable"),
        ],
    )
    def test_what_score_does_wrong_is_reported(self, kind, wrapped, numpy_load):
        load = self.faulty(kind, wrapped, numpy_load)
        report = check_backend(load, FLOAT32, tier="contract", checks=["T0.model.*", "T0.score.shape"])
        assert report.failures == ["T0.score.shape"]
        assert report.level is None
        assert report.exit_status == 1
        assert "T0.score.shape" in str(report)

    @pytest.mark.parametrize(
        "load",
        [
            pytest.param(lambda checkpoint, dtype: None, id="no model"),
            pytest.param(lambda checkpoint, dtype: 1 / 0, id="raises"),
            pytest.param(lambda checkpoint, dtype: sys.exit(3), id="exits"),
            pytest.param(lambda checkpoint: None, id="wrong signature"),
            pytest.param(never, id="assertion"),
            pytest.param("a string", id="no callable"),
        ],
    )
    def test_an_adapter_without_a_model_fails_once_and_the_rest_is_not_run(self, load):
        report = check_backend(load, FLOAT32)
        assert report.failures == ["T0.model.members"]
        assert set(statuses(report).values()) == {"failed", "not-run"}
        assert report.level is None

    def test_a_loader_that_fails_in_one_dtype_ends_the_tier(self, numpy_load):
        def load(checkpoint, dtype):
            if dtype == "float64":
                raise OSError("no such weights")
            return numpy_load(checkpoint, dtype)

        report = check_backend(load, BOTH, tier="contract")
        assert report.failures == ["T0.model.members"]
        assert "float64: raised OSError: no such weights" in report.checks[0].diagnosis

    def test_a_check_that_takes_too_long_fails(self, suite):
        suite.add("T0.a.sleeps", lambda subject: time.sleep(60))
        suite.add("T0.a.swallows", swallow_everything)
        suite.add("T0.a.quick")
        start = time.monotonic()
        report = check_backend(never, FLOAT32, time_limit=0.2)
        assert time.monotonic() - start < 30
        assert report.failures == ["T0.a.sleeps", "T0.a.swallows"]
        assert "took longer than 0.2 s" in report.checks[0].diagnosis

    def test_an_interrupt_is_the_callers_own(self, suite):
        suite.add("T0.a.b", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            check_backend(never, FLOAT32)

    def test_capabilities_that_are_none_of_the_adapters_fail(self, wrapped, numpy_load):
        load = self.faulty("nothing", wrapped, numpy_load)
        report = check_backend(load, Capabilities(select=True), tier="contract", checks=["T0.select.*"])
        assert report.failures == ["T0.select.keeps_rows", "T0.select.in_order"]


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def swallow_everything(subject):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(60)
        except Exception:  # what an adapter may do
            continue


class TestTiers:
    @pytest.fixture
    def four_tiers(self, suite):
        for tier in ("T0", "T1", "T2", "T3"):
            suite.add(f"{tier}.a.first")
            suite.add(f"{tier}.a.second")
        suite.add("T2.sequences.plain", Measured(certified_tv=0.01, n=100))
        return suite

    def test_each_tier_runs_what_it_says_and_gets_its_level(self, four_tiers):
        levels = {
            tier: check_backend(never, FLOAT32, tier=tier).level for tier in ("contract", "exact", "pr", "nightly")
        }
        assert levels == {"contract": "contract", "exact": "exact", "pr": "exact", "nightly": "certified"}
        assert statuses(check_backend(never, FLOAT32, tier="contract"))["T1.a.first"] == "not-run"

    def test_a_tier_that_fails_is_finished_and_ends_the_run(self, four_tiers):
        four_tiers.add("T1.a.first", CheckFailure("wrong"))
        report = check_backend(never, FLOAT32)
        assert statuses(report) == {
            "T0.a.first": "passed",
            "T0.a.second": "passed",
            "T1.a.first": "failed",
            "T1.a.second": "passed",
            "T2.a.first": "not-run",
            "T2.a.second": "not-run",
            "T2.sequences.plain": "not-run",
            "T3.a.first": "not-run",
            "T3.a.second": "not-run",
        }
        assert (report.passed, report.level, report.exit_status) == (False, None, 1)
        assert report.checks[-1].diagnosis == "T1 failed (T1.a.first)"

    def test_an_expected_failure_does_not_end_the_run_and_takes_the_levels_on_its_tier(self, four_tiers):
        for tier, level in (("T0", None), ("T1", "contract"), ("T2", "exact"), ("T3", "exact")):
            check_id = f"{tier}.a.first"
            four_tiers.add(check_id, CheckFailure("wrong"))
            report = check_backend(never, FLOAT32, tier="nightly", expected_failures={check_id: "known"})
            assert (report.passed, report.level, report.exit_status) == (True, level, 0)
            four_tiers.add(check_id)

    def test_some_checks_get_no_level(self, four_tiers):
        report = check_backend(never, FLOAT32, checks=["*.first"])
        assert report.passed
        assert report.level is None
        assert report.exit_status == 0
        assert {result.status for result in report.checks if result.id.endswith("second")} == {"not-run"}

    def test_a_tier_without_checks_proves_nothing(self, suite):
        suite.add("T0.a.first")
        assert check_backend(never, FLOAT32, tier="nightly").level == "contract"

    def test_what_does_not_apply_anywhere_leaves_the_level(self, four_tiers):
        four_tiers.add("T0.a.second", NotApplicable("nothing to see"))
        report = check_backend(never, FLOAT32)
        assert report.level == "exact"
        assert statuses(report)["T0.a.second"] == "not-applicable"

    @pytest.mark.parametrize(
        ("tier", "level"), [("T0", None), ("T1", "contract"), ("T2", "exact"), ("T3", "certified")]
    )
    def test_whole_systems_alone_need_not_apply(self, four_tiers, tier, level):
        for check_id in four_tiers.checks:
            if check_id.startswith(tier):
                four_tiers.add(check_id, NotApplicable("no foreign weights"))
        report = check_backend(never, FLOAT32, tier="nightly")
        assert report.level == level
        assert [line for line in report.remarks if f"nothing of {tier} applies" in line] == report.remarks
        assert bool(report.remarks) == (tier != "T3")

    def test_nothing_that_applies_is_no_pass(self, suite):
        suite.add("T0.a.first", NotApplicable("nothing to see"))
        report = check_backend(never, FLOAT32)
        assert not report.passed
        assert report.level is None
        assert report.exit_status == 1

    @pytest.mark.parametrize(
        ("measured", "level"),
        [
            ({"certified_tv": 0.05}, "exact"),
            ({"certified_tv": None}, "exact"),
            ({"certified_tv": 0.0100001}, "certified"),
        ],
    )
    def test_samples_that_certify_less_take_the_highest_level(self, four_tiers, measured, level):
        four_tiers.add("T2.rows.neighbours", Measured(certified_tv=0.014, n=50))
        four_tiers.add("T2.sequences.plain", Measured(n=100, **measured))
        assert check_backend(never, FLOAT32, tier="nightly").level == level

    @pytest.mark.parametrize(
        ("check_id", "outcome", "options", "why"),
        [
            (
                "T0.a.first",
                None,
                {},
                "Not certified: its samples are drawn in the nightly tier, and this run was of the",
            ),
            (
                "T0.a.first",
                None,
                {"tier": "contract"},
                "Not exact: `T1.a.first` was not run (tier 'contract' ends before",
            ),
            ("T0.a.first", None, {"checks": ["*.first"]}, "Not contract: `T0.a.second` was not run (not among the"),
            (
                "T2.sequences.plain",
                Measured(certified_tv=0.013, n=50),
                {"tier": "nightly"},
                "Not certified: `T2.sequences.plain` leaves a total variation of 0.013 open, more than 0.01.",
            ),
            (
                "T2.sequences.plain",
                Measured(n=50),
                {"tier": "nightly"},
                "Not certified: `T2.sequences.plain` certifies nothing, because its law has a single sequence.",
            ),
            (
                "T1.a.first",
                CheckFailure("wrong"),
                {"tier": "nightly", "expected_failures": {"T1.a.first": "known"}},
                "Not exact: `T1.a.first` is expected to fail.",
            ),
        ],
    )
    def test_a_run_says_why_its_level_is_not_the_next(self, four_tiers, check_id, outcome, options, why):
        four_tiers.add(check_id, outcome)
        report = check_backend(never, FLOAT32, **options)
        (line,) = report.remarks
        assert line.startswith(why)
        assert str(report).splitlines()[-2] == line

    def test_the_highest_level_and_a_failure_have_no_next(self, four_tiers):
        assert check_backend(never, FLOAT32, tier="nightly").remarks == []
        four_tiers.add("T1.a.first", CheckFailure("wrong"))
        assert check_backend(never, FLOAT32, tier="nightly").remarks == []

    def test_the_failure_with_the_fewest_calls_is_where_to_begin(self, four_tiers):
        four_tiers.add("T0.a.first", CheckFailure("wrong", calls=["score [[1]]", "rollback [0]"], setting="B=1"))
        four_tiers.add("T0.a.second", CheckFailure("off", calls=["score [[1,2]]"], setting="B=1", expected="what"))
        four_tiers.add("T0.a.third", CheckFailure("without calls"))
        report = check_backend(never, FLOAT32)
        assert report.remarks == ["Start with `T0.a.second`: float32: B=1: score [[1,2]] -> off"]
        assert str(report).splitlines()[-2] == report.remarks[0]

    def test_equations_that_nothing_was_compared_with_are_named(self, four_tiers):
        four_tiers.add("T3.logits.reference", NotApplicable("hosts no foreign weights"))
        lines = check_backend(never, FLOAT32, tier="nightly").remarks
        assert [line.partition(":")[0] for line in lines] == ["Not compared with another implementation"]

    @pytest.mark.parametrize(("influences", "is_faint"), [((9e-4, 9e-4), True), ((9e-4, 1.0), False)])
    def test_a_model_too_flat_to_show_a_fault_in_any_dtype_is_named(self, four_tiers, influences, is_faint):
        def run(subject):
            number = ("float32", "float64").index(subject.dtype)
            return Measured(tolerance=2e-4, values={"influence": influences[number]})

        four_tiers.add("T0.a.first", run)
        report = check_backend(never, Capabilities(dtypes=("float32", "float64")), tier="nightly")
        assert [line.startswith("Faint: one token") and "4.5 times" in line for line in report.remarks] == [
            True
        ] * is_faint

    def test_what_is_left_to_the_nightly_tier_is_counted_by_dtype(self, four_tiers):
        def run(subject):
            subject.check_leads(None)
            return Measured()

        for name in ("T1.a.first", "T2.a.first"):
            four_tiers.add(name, run)
        dtypes = Capabilities(dtypes=("bfloat16", "float32", "float16"))
        (line,) = (line for line in check_backend(never, dtypes).remarks if line.startswith("Left to the nightly tier"))
        assert line.endswith(": 2 checks in bfloat16, 2 checks in float16.")
        assert not any("Left to" in line for line in check_backend(never, dtypes, tier="nightly").remarks)

    def test_no_sampled_law_is_none_certified(self, four_tiers):
        four_tiers.add("T2.sequences.plain", NotApplicable("one row only"))
        assert check_backend(never, FLOAT32, tier="nightly").level == "exact"

    def test_tiers_try_as_hard_as_they_say(self, four_tiers):
        check_backend(never, FLOAT32, tier="nightly", checks=["T0.a.first"])
        check_backend(never, FLOAT32, tier="pr", checks=["T0.a.first"])
        nightly, quick = (subject.effort for _, subject in four_tiers.ran)
        assert nightly.examples > quick.examples
        assert (nightly.tv, quick.tv) == (0.01, 0.05)


class TestExpectedFailures:
    def test_are_counted_apart_with_their_reason_and_what_came(self, suite, failing_in):
        suite.add("T0.a.b", failing_in("float32"))
        report = check_backend(never, FLOAT32, expected_failures={"T0.a.b": "see issue 1"})
        (result,) = report.checks
        assert (result.status, report.failures) == ("expected-failure", [])
        assert result.diagnosis.startswith("expected to fail: see issue 1\nfloat32: score [[1]] -> wrong")

    def test_that_pass_are_failures(self, suite):
        suite.add("T0.a.b")
        report = check_backend(never, FLOAT32, expected_failures={"T0.a.b": "see issue 1"})
        assert report.failures == ["T0.a.b"]
        assert report.exit_status == 1
        assert "it passed: take it out of `expected_failures`" in report.checks[0].diagnosis

    def test_that_do_not_apply_are_failures(self, suite):
        suite.add("T0.a.b", NotApplicable("no limit"))
        report = check_backend(never, FLOAT32, expected_failures={"T0.a.b": "see issue 1"})
        assert report.failures == ["T0.a.b"]

    @pytest.mark.parametrize(
        ("fails", "expected", "status"),
        [
            (("float32", "float64"), {"T0.a.b": "known"}, "expected-failure"),
            (("float32",), {"T0.a.b": "known"}, "failed"),
            (("float64",), {"T0.a.b": "known"}, "failed"),
            (("float64",), {"T0.a.b[float64]": "known"}, "expected-failure"),
            (("float32",), {"T0.a.b[float64]": "known"}, "failed"),
            (("float32", "float64"), {"T0.a.b[float64]": "known"}, "failed"),
            ((), {"T0.a.b[float64]": "known"}, "failed"),
        ],
    )
    def test_are_strict_in_every_dtype(self, suite, failing_in, fails, expected, status):
        suite.add("T0.a.b", failing_in(*fails))
        assert statuses(check_backend(never, BOTH, expected_failures=expected)) == {"T0.a.b": status}

    def test_are_run_without_shrinking(self, suite, failing_in):
        suite.add("T0.a.b", failing_in("float32"))
        suite.add("T0.a.c", failing_in("float32"))
        check_backend(never, FLOAT32, expected_failures={"T0.a.b": "known"})
        assert {check_id: subject.effort.shrink for check_id, subject in suite.ran} == {"T0.a.b": False, "T0.a.c": True}

    @pytest.mark.parametrize(
        ("expected", "message"),
        [
            ({"T0.rollback.to_zer": "typo"}, "T0.rollback.to_zer', which is no check's id"),
            ({"T0.rows.limit": "no limit"}, "does not apply to an adapter with these capabilities"),
            ({"T0.rollback.to_zero": " "}, "must give a reason"),
            ({"T0.rollback.to_zero": None}, "must give a reason"),
            ({"T0.rollback.to_zero[float16]": "known"}, "must name a dtype"),
        ],
    )
    def test_that_name_nothing_are_errors(self, expected, message):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            check_backend(never, FLOAT32, expected_failures=expected)


class TestManifest:
    """The number of checks that a run has is written down outside the code that runs them."""

    def test_a_check_that_is_gone_fails_the_run(self, suite):
        suite.add("T0.a.b")
        suite.add("T0.a.c")
        suite.manifest = suite._manifest()
        del suite.checks["T0.a.b"]
        report = check_backend(never, FLOAT32)
        assert report.failures == ["T0.a.b"]
        assert not report.passed
        assert "and the suite has it 0 times" in report.checks[-1].diagnosis

    def test_a_check_that_nobody_listed_fails_the_run(self, suite):
        suite.add("T0.a.b")
        suite.manifest = suite._manifest()
        suite.add("T0.a.c")
        assert check_backend(never, FLOAT32).failures == ["T0.a.c"]

    def test_a_check_that_no_longer_applies_fails_the_run(self, suite):
        suite.add("T0.a.b")
        suite.add("T0.a.c")
        suite.manifest = suite._manifest()
        suite.add("T0.a.c", requires=("select",))
        assert check_backend(never, FLOAT32).failures == ["T0.a.c"]
        assert check_backend(never, Capabilities(select=True)).failures == []


def test_what_a_failed_check_measured_is_reported(suite):
    measured = Measured(exact_tv=0.25, tolerance=1e-6, values={"plot": {"exact_law": [["0", 0.5, 0.75]]}})
    suite.add("T1.a.b", CheckFailure("wrong", measured=measured))
    (result,) = check_backend(never, FLOAT32).to_json()["checks"]
    assert (result["status"], result["exact_tv"], result["tolerance"]) == ("failed", 0.25, 1e-6)


class TestSeeds:
    def test_a_seed_replays_and_none_is_fresh(self, suite):
        suite.add("T2.a.b", lambda subject: Measured(ln_e=float(subject.rng("T2.a.b").random()), n=1))
        suite.add("T0.a.b")
        first, second, third = (check_backend(never, FLOAT32, seed=seed) for seed in (1, 1, 2))
        assert first.checks[1].measured == second.checks[1].measured != third.checks[1].measured
        assert len({check_backend(never, FLOAT32).seed for _ in range(3)}) == 3
        assert "Seed: 2." in str(third)

    def test_a_failure_says_how_to_repeat_it(self, suite, failing_in):
        suite.add("T0.a.b", failing_in("float64"))
        named = check_backend(never, BOTH, seed=5, tier="nightly", backend="mine", device="cuda:0")
        assert named.checks[0].diagnosis.endswith(
            "reproduce: python -m specsampling_conformance --backend mine --device cuda:0 --tier nightly"
            " --dtype float64 --checks T0.a.b --seed 5"
        )
        unnamed = check_backend(never, BOTH, seed=5)
        assert unnamed.checks[0].diagnosis.endswith(
            "reproduce: check_backend(load, capabilities, checks=['T0.a.b'], seed=5)"
        )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tier": "weekly"}, ValueError),
        ({"capabilities": {"select": True}}, TypeError),
        ({"capabilities": Capabilities(dtypes=())}, ValueError),
        ({"capabilities": Capabilities(dtypes=("float32", "float32"))}, ValueError),
        ({"capabilities": Capabilities(dtypes="float32")}, ValueError),
        ({"checks": ["T9.*"]}, ValueError),
        ({"checks": ["T0.*", "T0.rows.limit"]}, ValueError),
        ({"seed": -1}, ValueError),
    ],
)
def test_what_the_caller_does_wrong_is_raised(arguments, error):
    with pytest.raises(error):
        check_backend(never, **{"capabilities": FLOAT32, **arguments})


def test_progress_is_shown_where_it_is_wanted(suite, capsys):
    suite.add("T0.a.b")
    check_backend(never, FLOAT32)
    assert capsys.readouterr() == ("", "")
    check_backend(never, FLOAT32, progress=True)
    assert "T0" in capsys.readouterr().err


def test_what_a_tier_cost_is_measured(suite):
    suite.add("T2.a.b", Measured(n=100))
    suite.add("T2.a.c", Measured(n=20))
    (cost,) = check_backend(never, BOTH, checks=["T2.*"]).costs
    assert (cost.tier, cost.num_checks, cost.num_samples) == ("T2", 2, 240)
    assert cost.peak_mib is None or cost.peak_mib > 10


def test_no_checkpoint_is_left_behind(numpy_load):
    seen = []

    def load(checkpoint, dtype):
        seen.append(checkpoint)
        return numpy_load(checkpoint, dtype)

    check_backend(load, FLOAT32, checks=["T0.model.members"])
    assert seen
    assert not seen[0].exists()


def test_time_limit_gives_the_alarm_back():
    import signal

    with runner.time_limit(5):
        pass
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
