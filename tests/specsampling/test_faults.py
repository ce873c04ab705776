"""The table of reported faults (tests/FAULTS.md) names tests that exist and say so."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = {
    int(row[0]): re.findall(r"`(\S+?)::(\w+)`", row[1])
    for row in re.findall(
        r"^\| (\d+) \|.*\| ([^|]+) \|$", (TESTS / "FAULTS.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}


@pytest.mark.parametrize("number", [number for number, tests in TABLE.items() if tests])
def test_tests_in_the_table_exist_and_name_the_fault(number):
    for path, name in TABLE[number]:
        source = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path} has no {name}"
        assert re.search(rf"# fault [^\n]*#{number}\b", source), f"{path} does not mention #{number}"


def test_every_fault_that_a_test_mentions_has_its_row():
    mentioned = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for comment in re.findall(r"# fault ([#\d, ]+)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"#(\d+)", comment)
    }
    assert mentioned <= {number for number, tests in TABLE.items() if tests}
