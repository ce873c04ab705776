import dataclasses
import html.parser
import json
import math
import re
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from specsampling import CONTRACT_VERSION, Capabilities
from specsampling_conformance import CheckResult, Measured, Report, TierCost
from specsampling_conformance import _plots as plots

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads(files("specsampling_conformance").joinpath("report.schema.json").read_text(encoding="utf-8"))

PLOT = {
    "exact_law": [["0 1", 0.25, 0.26], ["1 0", 0.75, 0.74], ["1 1", 0.0, 0.0]],
    "e_path": [[4096, -3.0], [8192, math.inf]],
    "threshold": 17.7,
    "acceptance_per_slot": [0.8, 0.5],
    "expected_acceptance_per_slot": [0.75, 0.5],
}

RESULTS = (
    CheckResult(
        id="T0.score.shape",
        clause="`score` returns a <pair>.",
        status="passed",
        seed=3,
        measured={"float32": Measured(tolerance=2e-4, values={"delta": 3e-7}), "float64": Measured()},
    ),
    CheckResult(id="T0.rows.limit", clause="A limit.", status="not-applicable", seed=3, diagnosis="no limit"),
    CheckResult(id="T0.cache.kept", clause="Kept.", status="expected-failure", seed=3, diagnosis="known\nfloat32: bad"),
    CheckResult(
        id="T1.law.plain",
        clause="The law.",
        status="passed",
        seed=3,
        measured={
            "float32": Measured(exact_tv=1e-8, tolerance=1e-6),
            "float64": Measured(exact_tv=5e-13, tolerance=1e-12),
        },
    ),
    CheckResult(
        id="T2.law.plain",
        clause="Samples.",
        status="failed",
        seed=3,
        diagnosis="float32: <script>alert('x')</script> & \"quotes\"\nexpected: the law\nreproduce: run `it` --seed 3",
        measured={"float32": Measured(ln_e=math.inf, n=8192, certified_tv=0.05, values={"plot": PLOT})},
    ),
    CheckResult(id="T3.mixed.plain", clause="Mixed.", status="not-run", seed=3, diagnosis="T2 failed (T2.law.plain)"),
)


@pytest.fixture
def report():
    return Report(
        backend="mine <v2>",
        device="cpu",
        capabilities=Capabilities(dtypes=("float32", "float64"), select=True),
        tier="pr",
        seed=3,
        checks=RESULTS,
        costs=(TierCost(tier="T0", num_checks=3, seconds=1.25, num_samples=60, peak_mib=70.4),),
    )


class TestJson:
    def test_has_exactly_the_keys_it_should(self, report):
        held = report.to_json()
        assert list(held) == [
            *("suite_version", "contract_version", "backend", "device", "dtypes", "capabilities", "level", "seed"),
            "checks",
        ]
        for check in held["checks"]:
            assert list(check) == [
                *("id", "status", "clause", "exact_tv", "tolerance", "ln_e", "n", "certified_tv", "seed", "diagnosis")
            ]
        assert held["contract_version"] == CONTRACT_VERSION
        assert (held["level"], held["seed"], held["dtypes"]) == (None, 3, ["float32", "float64"])

    def test_keeps_its_schema(self, report, tmp_path):
        report.write_json(tmp_path / "new" / "report.json")
        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        jsonschema.validate(read_strictly(tmp_path / "new" / "report.json"), SCHEMA)

    def test_schema_refuses_what_is_wrong(self, report):
        for change in ({"level": "gold"}, {"extra": 1}, {"dtypes": []}, {"checks": [{"id": "T0.a.b"}]}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(report.to_json() | change, SCHEMA)

    def test_reports_the_dtype_nearest_to_its_tolerance(self, report):
        law = report.to_json()["checks"][3]
        assert (law["exact_tv"], law["tolerance"]) == (5e-13, 1e-12)

    def test_holds_infinity_as_text(self, report):
        assert report.to_json()["checks"][4]["ln_e"] == "inf"

    def test_of_a_real_run_keeps_the_schema(self, numpy_load):
        from specsampling_conformance import check_backend

        report = check_backend(numpy_load, Capabilities(), checks=["T0.rollback.*"])
        jsonschema.validate(json.loads(json.dumps(report.to_json(), allow_nan=False)), SCHEMA)


def read_strictly(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


class TestSummary:
    def test_tells_failures_costs_and_level(self, report):
        text = str(report)
        assert "FAILED T2.law.plain" in text
        assert "reproduce: run `it` --seed 3" in text
        assert "EXPECTED-FAILURE T0.cache.kept" in text
        assert "T0  3 checks in 1.2 s, 60 samples, peak memory 70 MiB" in text
        assert text.splitlines()[-1].startswith("6 checks: 2 passed")
        assert text.endswith("Level: none. Seed: 3.")


class Page(html.parser.HTMLParser):
    """Elements of a page, each closed where it should be."""

    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.data = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data.append((self.open[-1] if self.open else "", data))


class TestHtml:
    @pytest.fixture
    def text(self, report, tmp_path):
        report.write_html(tmp_path / "new" / "report.html")
        return (tmp_path / "new" / "report.html").read_text(encoding="utf-8")

    def test_needs_nothing_from_elsewhere(self, text):
        page = Page(text)
        assert not {"link", "img", "iframe", "object"} & set(page.tags)
        assert [attributes for tag, attributes in page.attributes if "src" in attributes] == []
        assert {attributes["href"][0] for _, attributes in page.attributes if "href" in attributes} == {"#"}
        assert not re.search(r"url\(|@import|https?://", text)
        assert "prefers-color-scheme: dark" in text

    def test_runs_nothing_that_an_adapter_says(self, text):
        scripts = [attributes for tag, attributes in Page(text).attributes if tag == "script"]
        assert scripts == [{"type": "application/json", "id": "report"}]
        assert "<script>alert" not in text
        assert "mine <v2>" not in text

    def test_tells_every_check_and_links_to_it(self, text, report):
        page = Page(text)
        ids = {attributes.get("id") for _, attributes in page.attributes}
        links = {attributes["href"][1:] for _, attributes in page.attributes if "href" in attributes}
        assert {result.id for result in report.checks} <= ids & links

    def test_tells_the_diagnosis_and_the_line_that_reproduces_it(self, text):
        page = Page(text)
        told = [data for tag, data in page.data if tag == "pre"]
        assert any("alert('x')" in data and "reproduce" not in data for data in told)
        assert ("code", "run `it` --seed 3") in page.data

    def test_tells_where_to_begin_and_why_there_is_no_more(self, report):
        from specsampling_conformance._html import report_page

        assert [data for tag, data in Page(report_page(report)).data if "Start with" in data] == []
        failed = [
            CheckResult(id=f"T0.a.{n}", clause="C.", status="failed", seed=0, diagnosis=f"f: {n * 'call; '}c -> <x>")
            for n in (2, 1)
        ]
        text = report_page(dataclasses.replace(report, checks=tuple(failed)))
        assert "<p>Start with <code>T0.a.1</code>: f: call; c -&gt; &lt;x&gt;</p>" in text
        passed = report_page(dataclasses.replace(report, checks=RESULTS[:1]))
        assert "<p>Not exact: nothing of T1 applies.</p>" in passed

    def test_counts_what_does_not_apply_apart(self, report):
        from specsampling_conformance._html import report_page

        text = report_page(report)
        assert '<p class="tally">1 of 2 passed, 1 not applicable</p>' in text
        alone = dataclasses.replace(report, checks=(*RESULTS[:1], dataclasses.replace(RESULTS[1], id="T3.a.b")))
        assert '<p class="tally">1 not applicable</p>' in report_page(alone)

    def test_differences_that_another_check_limits_are_not_drawn(self, report):
        from specsampling_conformance._html import report_page

        by_the_way = CheckResult(
            id="T1.by.way", clause="C.", status="passed", seed=0, measured={"float32": Measured(values={"delta": 1e-7})}
        )
        assert "T1.by.way float32" not in report_page(dataclasses.replace(report, checks=(*RESULTS, by_the_way)))

    def test_has_every_plot(self, text):
        labels = [attributes["aria-label"] for tag, attributes in Page(text).attributes if tag == "svg"]
        assert labels == [
            "Largest delta",
            "Total variation by check",
            "Logarithm of e-values over samples",
            "T2.law.plain",
            "Acceptance per slot, T2.law.plain",
        ]

    def test_holds_the_numbers_as_json(self, text, report):
        (data,) = [data for tag, data in Page(text).data if tag == "script"]
        held = json.loads(data)
        assert held["report"] == json.loads(json.dumps(report.to_json()))
        assert held["detail"][4]["values"]["float32"]["plot"]["threshold"] == 17.7

    def test_of_nothing_measured_has_no_plots(self):
        bare = Report(
            backend="b",
            device=None,
            capabilities=Capabilities(),
            tier="pr",
            seed=0,
            checks=(CheckResult(id="T0.a.b", clause="C.", status="passed", seed=0),),
        )
        from specsampling_conformance._html import report_page

        assert "svg" not in Page(report_page(bare)).tags


class TestPlots:
    """Strange data is drawn too: a page about a broken adapter must not break."""

    @pytest.mark.parametrize(
        "drawing",
        [
            plots.law_plot("t", [("a", 0.0, 0.0)]),
            plots.law_plot("t", [(str(cell), 1 / 200, 1 / 200) for cell in range(200)]),
            plots.path_plot("t", [], None),
            plots.path_plot(
                "t", [plots.Path("a", [], False), plots.Path("b", [(1, math.nan), (2, math.inf)], True)], 17.7
            ),
            plots.path_plot("t", [plots.Path("a", [(10, -1e9)], False)], 17.7),
            plots.log_dots("t", [plots.Dot("a", 0.0, None)]),
            plots.log_dots("t", [plots.Dot("a<b" * 30, math.inf, 1e-300), plots.Dot("b", math.nan, 1.0)]),
            plots.slot_plot("t", [0.5] * 12, [0.5]),
            plots.slot_plot("t", [0.0, 1.0]),
        ],
    )
    def test_are_well_formed_and_inside_their_frame(self, drawing):
        root = ElementTree.fromstring(drawing)
        width, height = (float(x) for x in root.get("viewBox").split()[2:])
        assert not re.search("nan|inf", re.sub(r"<title>.*?</title>", "", drawing))
        for element in root.iter():
            for name, limit in (
                ("cx", width),
                ("x", width),
                ("x2", width),
                ("cy", height),
                ("y", height),
                ("y2", height),
            ):
                assert -1 <= float(element.get(name, 0)) <= limit + 1

    def test_a_slot_of_which_nothing_was_accepted_has_its_number(self):
        texts = [element.text for element in ElementTree.fromstring(plots.slot_plot("t", [0.0, 0.25])).iter("text")]
        assert [text for text in texts if "." in text] == ["0.0%", "25.0%"]

    def test_a_value_past_its_limit_is_drawn_as_bad(self):
        assert 'class="bad"' in plots.log_dots("t", [plots.Dot("a", 2.0, 1.0)])
        assert 'class="bad"' in plots.log_dots("t", [plots.Dot("a", math.nan, 1.0)])
        assert 'class="bad"' not in plots.log_dots("t", [plots.Dot("a", 1.0, 1.0)])

    @pytest.mark.parametrize(
        ("span", "most", "step"), [(1.0, 4, 0.5), (10, 5, 2), (0.0, 4, 1), (20480, 4, 10000), (3, 3, 1)]
    )
    def test_steps_are_round(self, span, most, step):
        assert plots.nice_step(span, most) == pytest.approx(step)
