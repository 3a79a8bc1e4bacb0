"""One simulated step: cases computed by hand, and the same simulated naively, transfer by transfer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Operation, Point
from rlx.offload.plan.step import choose_fetch_points, estimate_layer, held_bytes, predict, recompute_s, sent_bytes

# A layer of 1 s forward and 2 s backward, half of whose recomputation of 0.8 s are two operations.
FIRST, SECOND = Operation("first", 0.5, 0.3, 4), Operation("second", 1.0, 0.1, 2)
LAYER = LayerCost(1.0, 2.0, 0.8, 10, saved_bytes=30, working_bytes=40, late_bytes=20, operations=(FIRST, SECOND))
FAST = Budget(1e9, 1e9, 0)
ROOM = 1 << 40
KEPT, STAYS, BOUNDARY = LayerPlan(keep=True), LayerPlan(offload_boundary=False), LayerPlan()


def saving(off=(), on=(), leaves=True):
    return LayerPlan(offload_boundary=leaves, on_device=frozenset(on), off_device=frozenset(off))


def play(plans, machine=FAST, early=False, cost=LAYER):
    return predict([cost] * len(plans), plans, replace(machine, device_bytes=ROOM * early))


@pytest.mark.parametrize(
    ("plan", "held", "sent", "seconds"),
    [
        (KEPT, 30, 0, 0),
        (BOUNDARY, 0, 10, 0.8),
        (STAYS, 10, 0, 0.8),
        (saving(off=[0]), 0, 14, 0.5),
        (saving(on=[0, 1]), 6, 10, 0.4),
        (saving(off=[1], on=[0], leaves=False), 14, 2, 0.4),
    ],
)
def test_what_a_layer_holds_sends_and_computes_again(plan, held, sent, seconds):
    assert (held_bytes(LAYER, plan), sent_bytes(LAYER, plan)) == (held, sent)
    assert recompute_s(LAYER, plan) == pytest.approx(seconds)


def test_what_follows_the_layers_gives_the_link_time():
    # All but the last layer's has left at 7.5 s, forward ends at 6 and backward could begin at 7.25, or at 8.
    for loss_s, stall_s in ((1.25, 2.25), (2.0, 2.0)):
        step = play([BOUNDARY] * 4, Budget(4, 1e9, 0, loss_s=loss_s))
        assert step.stall_s == pytest.approx(stall_s)
        assert step.step_s == pytest.approx(4 * (3 + 0.8) + loss_s + stall_s)


POINTED = replace(LAYER, points=(Point(0.25, 30, "up"), Point(0.5, 25, "o"), Point(0.75, 15, "q")))


@pytest.mark.parametrize(
    ("room", "stall_s", "peak"),
    [(50, 0.0, 50), (49, 0.5, 40), (40, 0.5, 40), (39, 1.0, 40), (34, 1.5, 40), (0, 1.5, 40)],
)
def test_bytes_are_asked_for_at_the_first_point_with_room_for_them(room, stall_s, peak):
    # The input is 10 bytes and takes 2 s; the layer behind holds 40, then 30, 25 and 15 with 1.5, 1 and 0.5 s left.
    step = predict([POINTED] * 2, [BOUNDARY] * 2, Budget(1e9, 5, room))
    assert (step.stall_s, step.peak_bytes) == (pytest.approx(stall_s), peak)


def test_with_each_layer_that_is_done_there_is_more_room():
    machine = Budget(1e9, 5, 0)
    stay = [estimate_layer(POINTED, STAYS, machine)] * 4
    assert choose_fetch_points(stay, 0) == [0] * 4  # nothing comes
    sends = [saving(on=[0])] * 4
    # 10 bytes come each time, beside 4, 8 and 12 that lie below the second, third and fourth layer.
    found = {
        room: choose_fetch_points([estimate_layer(POINTED, plan, machine) for plan in sends], room)
        for room in (54, 58, 62, 51)
    }
    assert found == {54: [0, 0, 1, 1], 58: [0, 0, 0, 1], 62: [0, 0, 0, 0], 51: [0, 1, 1, 2]}


def test_what_a_layer_keeps_and_autograd_does_not_stays_to_the_end_of_its_backward():
    cost = replace(LAYER, operations=(replace(FIRST, extra_bytes=3), SECOND), extra_bytes=10)
    for plan, more in (
        (saving(on=[0, 1]), 3),
        (saving(off=[0, 1]), 0),
        (STAYS, 10),
        (saving(on=[0], leaves=False), 13),
    ):
        assert play([plan], cost=cost).peaks.last == 40 + more
    assert play([KEPT], cost=cost).peaks.last == 40


def test_the_peak_stands_in_the_last_layers():
    assert play([BOUNDARY] * 3).peak_bytes == 40
    assert play([STAYS] * 3).peak_bytes == 2 * 10 + 40
    assert play([saving(on=[0])] * 3).peak_bytes == 2 * 4 + 40
    assert play([KEPT] * 3).peak_bytes == 2 * 30 + 40


def test_what_is_on_its_way_counts():
    sends = saving(off=[0, 1])
    assert play([sends] * 3, early=True).peak_bytes == 16 + 40
    wide = LayerCost(1.0, 2.0, 0.8, 30, 10, 40, 20)
    assert play([BOUNDARY] * 3, cost=wide).peak_bytes == 30 + 20  # in the second half of a backward
    # Of two layers the first's input takes 5 s to leave, for which backward waits.
    slow = play([BOUNDARY, KEPT], Budget(2, 1e9, 0))
    assert (slow.peak_bytes, slow.stall_s) == (40, pytest.approx(3))


def test_in_forward_all_that_a_layer_saves_is_there_beside_what_the_one_before_is_sending():
    sends = LayerCost(1.0, 2.0, 0.8, 25, 30, 40, 10)
    assert play([BOUNDARY], cost=sends).peak_bytes == 40
    assert play([BOUNDARY] * 3, cost=sends).peak_bytes == 25 + 30
    # 45 with its inputs and what it just computes, and of the results that are kept what autograd does not keep.
    some = replace(sends, forward_bytes=45, operations=(replace(FIRST, extra_bytes=3), SECOND))
    for plan, forward in ((BOUNDARY, 25 + 45), (saving(off=[0, 1]), 25 + 6 + 45 + 3), (KEPT, 2 * 30 + 45)):
        assert play([plan] * 4, cost=some).peaks.forward == forward
    assert play([saving(on=[0])] * 4, cost=some).peaks.forward == 2 * 4 + 25 + 45 + 3


def test_what_follows_the_layers_stands_on_what_they_hold_and_what_the_last_two_sent():
    plans = [saving(on=[0]), saving(off=[0]), BOUNDARY]
    assert play(plans, replace(FAST, loss_bytes=60)).peaks.last == 4 + 14 + 10 + 60
    assert play([*plans[:2], KEPT], replace(FAST, loss_bytes=60)).peaks.last == 4 + 14 + 30 + 60
    assert play(plans, replace(FAST, loss_bytes=1)).peaks == play(plans).peaks


def test_a_result_that_may_leave_late_leaves_late_and_comes_back_in_that_order():
    # `first` is there at 0.5 s, may leave at 1, and has left at 1 + 4 / 2 = 3: before that the third layer does not begin.
    cost = replace(LAYER, operations=(replace(FIRST, offload_at=1.0), SECOND))
    machine, plans = Budget(2, 1e9, 0), [saving(off=[0], leaves=False), STAYS, STAYS]
    assert play(plans, machine, cost=cost).forward_s == pytest.approx(3 + 1)
    assert play(plans, machine).forward_s == pytest.approx(2.5 + 1)
    # Asked for at 3.8 s; `second`, which left first, is there at 5.8, `first` at 9.8, for which `second` does not wait.
    cost = replace(cost, operations=(replace(FIRST, at=0.5, offload_at=1.0), replace(SECOND, offload_at=0.6)))
    late = play([saving(off=[0, 1], leaves=False), BOUNDARY], Budget(1e9, 1, 0), cost=cost)
    assert late.step_s == pytest.approx(9.8 + 0.2 + 2)


def test_what_the_host_has_no_room_for_goes_to_disk_and_is_read_when_all_is_written():
    def step(host, disk):
        return play([BOUNDARY] * 4, Budget(100, 100, 0, host_bytes=host, disk_bytes_per_s=disk))

    fits, spills = step(40, 4), step(25, 4)
    assert (fits.host_bytes, fits.disk_bytes) == (40, 0)
    assert fits == play([BOUNDARY] * 4, Budget(100, 100, 0, host_bytes=40))._replace(disk_bytes=0)
    assert (spills.host_bytes, spills.disk_bytes) == (20, 20)
    # The third layer's 10 bytes are on disk at 2 + 2.5 s, the fourth's at 7: reading begins then. The last layer is there
    # and done at 4 + 2.8, the third's input at 9.5, so that it ends at 12.3. The others come by the link in time.
    assert spills.step_s == pytest.approx(9.5 + 2.8 + 2 * 2.8)
    assert step(25, 1000).step_s == pytest.approx(step(40, 4).step_s)  # no faster than the link


# The same, naively

SIZES, TIMES = st.integers(0, 100), st.integers(0, 40).map(lambda n: n / 10)


@st.composite
def layers(draw):
    """Costs and plans of a few layers."""
    costs, plans = [], []
    for _ in range(draw(st.integers(1, 5))):
        places = sorted(draw(st.lists(st.integers(0, 10).map(lambda n: n / 10), max_size=3)))
        operations = tuple(Operation("", at, draw(TIMES) / 4, draw(SIZES)) for at in places)
        rest = draw(TIMES) / 4
        recompute = rest + sum(op.seconds for op in operations)
        costs.append(LayerCost(draw(TIMES), draw(TIMES), recompute, *(draw(SIZES) for _ in range(4)), operations))
        place = [draw(st.integers(0, 2)) for _ in operations]
        on, off = ([i for i, p in enumerate(place) if p == which] for which in (1, 2))
        plans.append(KEPT if draw(st.integers(0, 3)) == 0 else saving(off, on, draw(st.booleans())))
    return costs, plans


def naive_step_s(costs, plans, early, machine):
    now = link = 0.0
    gone = []
    for index, (cost, plan) in enumerate(zip(costs, plans, strict=True)):
        now = max([now, *gone[: index - 1]]) if index > 1 else now
        for at, nbytes in pieces(cost, plan):
            link = max(link, now + at * cost.forward_s) + nbytes / machine.out_bytes_per_s
        now += cost.forward_s
        gone.append(link if pieces(cost, plan) else 0.0)
    now = max([now, *gone[:-1]])
    link = asked = now
    for index in reversed(range(len(costs))):
        cost, plan = costs[index], plans[index]
        link = max(link, asked)
        arrivals = {}
        if index < len(costs) - 1 and not plan.keep:
            names = (["inputs"] if plan.offload_boundary else []) + sorted(plan.off_device)
            for name, (_, nbytes) in zip(names, pieces(cost, plan), strict=True):
                link += nbytes / machine.in_bytes_per_s
                arrivals[name] = link
        begins = now
        if not plan.keep:
            now = max(now, arrivals.get("inputs", 0.0))
            rest, before = cost.recompute_s - sum(op.seconds for op in cost.operations), 0.0
            for i, op in enumerate(cost.operations):
                now, before = now + rest * (op.at - before), op.at
                now = max(now, arrivals.get(i, 0.0)) if i in plan.on_device | plan.off_device else now + op.seconds
            now += rest * (1 - before)
        began, now = now, now + cost.backward_s
        asked = begins if early else (began + now) / 2
    return now


def pieces(cost, plan):
    if plan.keep:
        return []
    inputs = [(0.0, cost.boundary_bytes)] if plan.offload_boundary else []
    return inputs + [(cost.operations[i].at, cost.operations[i].nbytes) for i in sorted(plan.off_device)]


@settings(max_examples=100)
@given(layers(), st.booleans(), st.integers(1, 100), st.integers(1, 100))
def test_the_same_as_piece_by_piece(drawn, early, out, back):
    machine = Budget(out, back, 0)
    step = predict(*drawn, replace(machine, device_bytes=ROOM * early))
    assert step.step_s == pytest.approx(naive_step_s(*drawn, early, machine), abs=1e-9)
    assert step.stall_s >= 0
    assert step.step_s >= step.forward_s


def test_what_is_kept_of_a_layer_is_there_when_backward_is_through_with_it():
    """But for what autograd would hold as well at the point: results of operations before it."""
    cost = replace(POINTED, points=tuple(point._replace(forward_at=SECOND.at) for point in POINTED.points))
    machine = Budget(1e9, 5, 1000)
    none, first, second = (estimate_layer(cost, saving(on=on), machine).points for on in ([], [0], [1]))
    assert first == none
    assert [after[1] - before[1] for after, before in zip(second, none, strict=True)] == [0, *[SECOND.nbytes] * 3]
