"""Profiles of earlier runs with several ranks: the first rank reads them, and all plan with them or none does."""

import json
from dataclasses import replace

import pytest

from rlx.offload.autotune.consensus import Consensus, RankReport
from rlx.offload.autotune.profile_cache import from_json, to_json
from rlx.offload.autotune.profile_key import digest
from rlx.offload.autotune.step_limits import Limits


def replaced(measurement, **changes):
    """With other costs of its layers."""
    return measurement._replace(
        kinds=tuple(kind._replace(cost=replace(kind.cost, **changes)) for kind in measurement.kinds)
    )


def test_ranks_with_and_without_files_end_with_equal_plans(two_ranks, tmp_path):
    tokens = (6, 40, 300)
    full, empty, other = (str(tmp_path / name) for name in ("full", "empty", "other"))
    two_ranks("auto", "with_files", (full, other), tokens, 3)
    assert not (tmp_path / "other").exists(), "the first rank writes what all have measured"
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", (full, empty), tokens, 2)
    # The first round has no plan. In the second all lengths have one: the files of the first rank count for both.
    assert plans == others
    assert [plan is None for plan in plans] == [True, False, False, False]
    assert counts == other_counts == [3, 0]
    # Where the first rank has no files the lengths are measured first, whatever the other has.
    for folders in ([str(tmp_path / name) for name in ("a", "b")], (str(tmp_path / "c"), full)):
        (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", folders, tokens, 3)
        assert plans == others and [plan is None for plan in plans[:4]] == [True] * 4 and None not in plans[4:]
        assert counts == other_counts == [3, 9, 0]


@pytest.mark.parametrize("is_damaged", [False, True], ids=["other bytes", "damaged"])
def test_ranks_measure_where_the_files_of_the_first_are_wrong(two_ranks, tmp_path, is_damaged):
    tokens = (6, 40)
    folders = [str(tmp_path / name) for name in ("one", "two")]
    two_ranks("auto", "with_files", folders, tokens, 3)
    (path,) = (tmp_path / "one").iterdir()
    content = json.loads(path.read_text())
    for name, data in content["profiles"].items():
        content["profiles"][name] = to_json(from_json(data)._replace(loss_bytes=1 << 30))
    text = json.dumps({**content, "check": digest(content["profiles"])})
    path.write_text(text[:-100] if is_damaged else text)
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", folders, tokens, 3)
    assert plans == others and [plan is None for plan in plans] == [True] * 3 + [False] * 2
    assert counts == other_counts == [3, 6, 0]
    (plans, counts), (others, other_counts) = two_ranks("auto", "with_files", folders, tokens, 3)
    assert plans == others and None not in plans[1:] and counts == other_counts == [3, 0, 0], "they were written anew"


SHORT, LONG = (0, 20), (0, 30)
LIMITS = Limits(None, None, None, None)


def report(measured=(), warm_up=(), cached=()):
    return RankReport(dict(measured), dict(warm_up), dict(cached), LIMITS)


def test_profiles_wait_for_the_first_rank_to_know_the_cache_key(two_ranks, tmp_path):
    one, other = two_ranks("auto", "first_rank_comes_late", str(tmp_path / "cache"))
    assert len(one) == 1 and set(other) <= set(one)


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


def test_a_cache_counts_once_all_ranks_have_found_its_bytes_right(one):
    first = report(warm_up={SHORT: one}, cached={SHORT: one, LONG: one})
    fuller = report(warm_up={SHORT: replaced(one, saved_bytes=round(1.05 * held(one)))})
    # A rank that has only measured another length, and one whose first pass holds a little more.
    consensus = Consensus()
    assert consensus.join([first, report(measured={LONG: one})]) == {LONG: one}
    assert consensus.accepted() == {SHORT: one, LONG: one}
    consensus = Consensus()
    assert consensus.join([first, fuller]) == {}
    for profile in consensus.accepted().values():
        assert held(profile) == pytest.approx(1.05 * held(one), rel=1e-3)
        assert profile.kinds[0].cost.forward_s == one.kinds[0].cost.forward_s
    # A rank that has met no length of the cache yet is waited for.
    consensus = Consensus()
    assert consensus.join([first, report(warm_up={(0, 5): one})]) == {} == consensus.accepted()
    assert consensus.join([report(), report(measured={(0, 5): one})]) == {(0, 5): one} and consensus.accepted() == {}
    consensus.join([report(), report(measured={LONG: one})])
    assert consensus.accepted().keys() == {SHORT, LONG}


def test_a_cache_with_other_bytes_is_ignored_from_then_on(one):
    other = replaced(one, saved_bytes=2 * held(one))
    consensus = Consensus()
    first = report(warm_up={SHORT: one}, cached={SHORT: one, LONG: one})
    consensus.join([first, report(warm_up={SHORT: other})])
    assert consensus.accepted() == {} and not consensus.is_refuted, "in the first pass kernels may have taken memory"
    consensus.join([report(), report(measured={SHORT: one})])
    assert consensus.accepted().keys() == {SHORT, LONG}
    assert consensus.join([report(), report(measured={SHORT: other})]) == {SHORT: other}
    assert consensus.is_refuted and consensus.accepted() == {}
    consensus.join([report(warm_up={SHORT: one}, cached={SHORT: one})] * 2)
    assert consensus.accepted() == {}


def test_of_several_ranks_the_longest_times_and_most_bytes_count(one):
    slower, fuller = replaced(one, forward_s=1e9), replaced(one, saved_bytes=1 << 30)
    joined = Consensus().join([report(measured={SHORT: slower}), report(measured={SHORT: fuller, LONG: one})])
    assert joined == {SHORT: replaced(one, forward_s=1e9, saved_bytes=1 << 30), LONG: one}
    assert Consensus().join([report(warm_up={SHORT: one})] * 2) == {}, "bytes without times are no measurement"
