import pytest

from benchmarks.packed_attention import main
from rlx.models import packed_attention

SMALL = ["--heads", "2", "--key-heads", "1", "--width", "4", "--rounds", "1", "--device", "cpu"]


def test_the_command_prints_a_row_for_each_case_and_leaves_the_limit_as_it_was(capsys):
    before = packed_attention.LONG_TOKENS
    main([*SMALL, "--lengths", "3x5", "1x8"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["3", "5"], ["1", "8"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
    assert before == packed_attention.LONG_TOKENS


@pytest.mark.parametrize("text", ["8", "8x", "x8", "0x8", "8x8x8"])
def test_a_case_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--lengths", text])
    assert f"got {text}, expected such as 8x4096" in capsys.readouterr().err
