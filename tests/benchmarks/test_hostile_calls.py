"""Hostile calls in a small form; the command sends 10,000."""

import pytest

from benchmarks import hostile_calls


@pytest.mark.slow
def test_every_row_gets_an_answer():
    counts, wrong = hostile_calls.run(rows=150, processes=2, seed=1, limit_s=2.0)
    assert not wrong and counts.total() == 150
    assert counts["tool error"] > 30 and counts["answered"] >= 5
