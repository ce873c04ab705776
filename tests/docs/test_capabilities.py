"""The table of capabilities says what the backends say."""

import json
import sys
from pathlib import Path

import pytest

import specsampling

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

import capabilities

RECORD = json.loads(capabilities.RECORD.read_text(encoding="utf-8"))
OURS = [status for status in specsampling.available_backends() if status.target.startswith("specsampling_")]


@pytest.mark.parametrize("status", OURS, ids=lambda status: status.name)
def test_record_is_what_the_backend_declares(status):
    if not status.installed:
        pytest.skip(status.reason)
    assert capabilities.ask(status.name) == RECORD[status.name], "run python docs/_ext/capabilities.py"


def test_table_has_every_backend():
    assert sorted(RECORD) == sorted(status.name for status in OURS)
    rows = capabilities.table(RECORD)
    assert {len(row) for row in rows} == {len(capabilities.HEADINGS)}
