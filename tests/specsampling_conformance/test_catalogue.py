import ast
import itertools
import re
from pathlib import Path

import pytest

from specsampling import CONTRACT_VERSION, Capabilities, Model
from specsampling_conformance import _catalogue as catalogue
from specsampling_conformance import _generate as generate
from specsampling_conformance._contract_page import contract_page, protocol_source

ROOT = Path(__file__).parents[2]

EVERY_SET = [
    Capabilities(per_row_rollback=per_row, select=select, compile_round=compiled, max_batch_size=most)
    for per_row, select, compiled, most in itertools.product((False, True), (False, True), (False, True), (None, 1, 4))
]


def test_the_manifest_is_the_registrys():
    assert catalogue.shipped_manifest() == catalogue.build_manifest(catalogue.all_checks()), (
        "run `python -m specsampling_conformance._generate` and look at what changed"
    )


@pytest.mark.parametrize("capabilities", EVERY_SET, ids=repr)
def test_the_manifest_lists_what_the_registry_would_run(capabilities):
    entries = [entry.id for entry in catalogue.all_checks() if entry.applies(capabilities)]
    assert catalogue.manifest_ids(capabilities) == entries
    assert catalogue.manifest_faults(entries, capabilities) == {}
    counts = catalogue.shipped_manifest()["counts"][" ".join(sorted(catalogue.declared_names(capabilities)))]
    assert sum(counts.values()) == len(entries)


def test_every_set_of_capabilities_has_its_counts():
    sets = {" ".join(sorted(catalogue.declared_names(capabilities))) for capabilities in EVERY_SET}
    assert set(catalogue.shipped_manifest()["counts"]) == sets


def test_a_manifest_that_contradicts_itself_is_refused(suite):
    suite.add("T0.a.b")
    manifest = suite._manifest()
    manifest["counts"]["per_row_rollback rows"]["T0"] = 2
    suite.manifest = manifest
    with pytest.raises(RuntimeError, match="lists 1 checks .* and counts 2"):
        catalogue.manifest_ids(Capabilities())


@pytest.mark.skipif(not (ROOT / "docs" / "contract.md").exists(), reason="no checkout around these tests")
def test_the_generated_files_of_the_checkout_are_fresh(capsys):
    assert generate.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().out


def test_stale_files_are_found_and_written(tmp_path, capsys):
    for folder in ("docs", "conformance/specsampling_conformance"):
        (tmp_path / folder).mkdir(parents=True)
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert not list(tmp_path.rglob("*.*"))
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.rglob("*.*")} == {"contract.md", "_manifest.json"}
    assert generate.main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / "docs" / "contract.md").write_text("older")
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert "contract.md" in capsys.readouterr().out


def test_the_contracts_page_has_every_clause_and_whom_it_concerns():
    page = contract_page()
    for entry in catalogue.all_checks():
        assert f"`{entry.id}`\n: {entry.clause}" in page
    assert "(Adapters that take batches of two or more and declare `select`.)" in page
    assert f"Contract version {CONTRACT_VERSION}, {len(catalogue.all_checks())} clauses" in page


def test_the_contracts_page_has_the_protocols_as_the_core_writes_them():
    source = protocol_source(Model)
    ast.parse(source)
    lines = source.splitlines()
    assert lines[:2] == ["class Model(Protocol[CacheT]):", "    vocab_size: int"]
    assert "    def rollback(self, cache: CacheT, lengths: Array, /) -> CacheT: ..." in lines
    assert source in contract_page()
    with pytest.raises(TypeError, match="must be a class"):
        protocol_source(contract_page)


def test_ids_and_clauses_are_well_formed():
    for entry in catalogue.all_checks():
        assert entry.tier in catalogue.TIERS
        assert re.fullmatch(r"[A-Z`].*\.", entry.clause), entry.id
        assert re.fullmatch(r"T[0-3](\.[a-z0-9_]+)+", entry.id)


def test_there_are_sampled_laws_of_sequences_for_the_highest_level_to_rest_on():
    assert [entry.id for entry in catalogue.all_checks() if entry.id.startswith("T2.sequences.")]


def test_patterns_select_in_the_order_of_the_manifest():
    ids = ["T0.a.b", "T0.a.c", "T1.a.b"]
    assert catalogue.selected_ids(ids, ["T1.*", "*.b"]) == ["T0.a.b", "T1.a.b"]
    assert catalogue.selected_ids(ids, []) == ids
