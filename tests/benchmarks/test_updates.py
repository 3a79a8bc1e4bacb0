"""The comparison of forms of AdamW: masters learn as fp32 does, and bf16 alone hardly moves."""

import pytest

from benchmarks.updates import main


def test_masters_on_the_host_move_as_fp32_weights_and_plain_bf16_does_not(one_rank):
    (found,) = one_rank("updates", "forms", ["fp32", "masters", "bf16"], 5e-6, 20)
    exact, masters, narrow = found["fp32"], found["masters"], found["bf16"]
    gain = exact["after"] - exact["before"]
    assert gain > 0.005 and masters["before"] == pytest.approx(exact["before"], abs=1e-6)
    assert masters["after"] - masters["before"] == pytest.approx(gain, rel=0.01)
    assert masters["way"] == pytest.approx(exact["way"], rel=0.15), "the bf16 weights are the masters, rounded"
    assert narrow["way"] < 0.5 * exact["way"]
    assert narrow["after"] - narrow["before"] < 0.7 * gain
    assert narrow["share"] < 0.15 < exact["share"]


def test_a_form_that_is_unknown_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--forms", "fp32,fp8"])
    assert "got fp8, expected some of fp32, masters" in capsys.readouterr().err
