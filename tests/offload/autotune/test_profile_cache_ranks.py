"""Measurements of earlier runs where ranks agree: all of them end with the same figures."""

import json
from dataclasses import replace

import pytest

from rlx.offload.autotune.consensus import Means, Shared, join
from rlx.offload.autotune.profile_files import ProfileFolder


def replaced(measurement, **changes):
    """With other costs of its layers."""
    return measurement._replace(
        kinds=tuple(kind._replace(cost=replace(kind.cost, **changes)) for kind in measurement.kinds)
    )


def test_ranks_with_and_without_files_end_with_equal_plans(two_ranks, tmp_path):
    tokens = (6, 40, 300)
    full, empty, other = (str(tmp_path / name) for name in ("full", "empty", "other"))
    two_ranks("auto", "with_files", (full, other), tokens, 3)
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", (full, empty), tokens, 2)
    # The first round has no plan. In the second all lengths have one: the files of one rank count for both.
    assert plans == others
    assert [plan is None for plan in plans] == [True, False, False, False]
    assert counts == other_counts == [3, 0]
    # Where nobody has files the lengths are measured first.
    nobody = [str(tmp_path / name) for name in ("a", "b")]
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", nobody, tokens, 3)
    assert plans == others and [plan is None for plan in plans[:4]] == [True] * 4 and None not in plans[4:]
    assert counts == other_counts == [3, 9, 0]


def test_a_rank_whose_files_are_wrong_takes_those_of_another_with_which_its_own_bytes_agree(two_ranks, tmp_path):
    tokens = (6, 40)
    right, wrong = str(tmp_path / "right"), tmp_path / "wrong"
    two_ranks("auto", "with_files", (right, str(wrong)), tokens, 3)
    for path in wrong.glob("*/*.json"):
        content, folder = json.loads(path.read_text()), ProfileFolder(wrong)
        measurement = folder.read(content["about"], content["length"])
        folder.write(content["about"], content["length"], measurement._replace(outside_bytes=1 << 30))
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", (right, str(wrong)), tokens, 3)
    assert plans == others and None not in plans[1:]
    assert counts == other_counts == [3, 0, 0]


SHORT, LONG = (0, 20), (0, 30)
MEANS = Means(None, None, None, None)


@pytest.fixture
def one(toys, enable):
    """A measurement."""
    model = toys.decoder(4)
    handle = enable(model, True, save="auto", max_device_bytes=0, cache_directory=None)
    for _ in range(3):
        toys.read(model).backward()
    return handle.measurement()


def held(measurement):
    return measurement.kinds[0].cost.saved_bytes


def test_ranks_join_what_they_know(one):
    files = Shared({SHORT: one}, {}, {LONG: one}, MEANS, believes=True)
    # A rank that has compared nothing has only measured another length; and one whose first pass holds a little more.
    unknown = Shared({LONG: one}, {}, {}, MEANS, believes=None)
    fuller = Shared({}, {SHORT: replaced(one, saved_bytes=round(1.05 * held(one)))}, {}, MEANS, believes=None)
    joint = join([files, files])
    assert joint.are_files_checked and joint.measurements == {SHORT: one, LONG: one}
    assert join([files, unknown]).are_files_checked, "what it has measured is what files say"
    joint = join([files, fuller])
    assert joint.are_files_checked and joint.ratio == pytest.approx(1.05, rel=1e-3)
    assert held(joint.measurements[SHORT]) == round(1.05 * held(one)), (
        "of the length that it has met it is its own bytes"
    )
    assert held(joint.measurements[LONG]) == pytest.approx(1.05 * held(one), rel=1e-3), (
        "of others files' have as much more"
    )
    assert joint.measurements[SHORT].kinds[0].cost.forward_s == one.kinds[0].cost.forward_s


def test_ranks_that_cannot_know_keep_to_what_is_measured(one):
    files = Shared({SHORT: one}, {}, {LONG: one}, MEANS, believes=True)
    elsewhere = Shared({(0, 5): one}, {}, {}, MEANS, believes=None)
    joint = join([files, elsewhere])
    assert not joint.are_files_checked and not joint.are_files_wrong
    assert joint.measurements.keys() == {SHORT, (0, 5)}
    assert join([files, elsewhere], were_files_checked=True).measurements.keys() == {SHORT, LONG, (0, 5)}
    for wrong in (
        elsewhere._replace(believes=False),
        elsewhere._replace(first={SHORT: replaced(one, saved_bytes=2 * held(one))}),
    ):
        joint = join([files, wrong], were_files_checked=True)
        assert joint.are_files_wrong and not joint.are_files_checked
        assert joint.measurements.keys() == {SHORT, (0, 5)}
    nobody = Shared({}, {SHORT: one}, {}, MEANS, believes=None)
    assert join([nobody, nobody]).measurements == {}, "bytes without times are no measurement"
