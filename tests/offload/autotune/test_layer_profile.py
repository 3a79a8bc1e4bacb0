"""What a measured layer is charged with: device memory of a pass played by hand."""

import pytest
import torch

from rlx.offload.autotune.measure import DeviceMemoryProbe, Inputs, LayerProfile, OpProfile, PassState, measured
from rlx.offload.plan.costs import Budget, LayerPlan
from rlx.offload.plan.step import predict

CPU = torch.device("cpu")
BASE, INPUT, SAVED = 1000, 10, 300  # bytes of weights and gradients, of a layer's input, of what autograd saves of it
TABLE, TABLE_BYTES = torch.zeros(1), 4  # shared by all layers


class Memory(DeviceMemoryProbe):
    """Takes and gives as it is told."""

    def __init__(self):
        super().__init__(CPU)
        self.now = self.peak = BASE

    def take(self, *nbytes):
        for one in nbytes:
            self.now += one
            self.peak = max(self.peak, self.now)

    def look(self):
        return self.now, self.peak

    def reset(self):
        self.peak = self.now


@pytest.fixture(params=[0, 70], ids=["gradients are there", "gradients are made"])
def samples(request):
    """Three layers of a pass, and what they share: the head holds 40 more for a moment, and makes some gradients."""
    memory, made, own = Memory(), [0], [0]
    backward, found = PassState(lambda: made[0]), []
    memory.take(TABLE_BYTES, INPUT)
    for index in range(3):
        saved = [torch.zeros(SAVED, dtype=torch.uint8), TABLE]
        inputs = Inputs(INPUT, {}, {TABLE.untyped_storage().data_ptr(): TABLE_BYTES})
        sample = LayerProfile(index, CPU, inputs, backward, memory=memory, gradient_bytes=lambda: own[0])
        if index > 1:
            memory.take(-INPUT)  # that of the layer two before has left; the model keeps the first one for itself
            memory.take(INPUT * (index == 2))
        # Three calls, of attention, what follows it and the MLP, of which autograd saves two tensors each.
        sample.calls = [OpProfile(name, "", 0.0, stop=0.0, slots=2 * place) for place, name in enumerate("aom", 1)]
        sample.begin_forward()
        memory.take(SAVED, INPUT, -INPUT, INPUT)  # the output at last, and something as large before
        sample.end_forward(saved, [False] * 3)
        memory.take(-SAVED)
        sample.leave_forward()
        found.append(sample)
    memory.take(40, -40, INPUT, -INPUT)  # the output is the user's, and its gradient comes
    memory.take(request.param)
    made[0] = request.param
    memory.take(INPUT)
    for sample in reversed(found):
        sample.begin_recompute()
        if sample.index == 2:
            memory.take(-INPUT)  # that of the layer before has left
        memory.take(SAVED)
        assert sample.begin_thresholds(prefetch_below=4) == 6
        sample.end_recompute()
        memory.take(50)
        assert sample.pass_threshold(5) == 4
        memory.take(50, -100 - SAVED // 2)  # backward of the MLP
        memory.take(request.param)  # gradients of its weights are made when it is over, where there are none yet
        own[0] += request.param
        assert sample.pass_threshold(3) == 2
        memory.take(INPUT * (sample.index > 0), 30, -30 - SAVED // 4)  # the next input comes
        assert sample.pass_threshold(1) == 0
        memory.take(-SAVED // 4)
        memory.take(-INPUT)  # the own one goes
    return found, backward


def test_what_follows_the_layers_is_not_charged_with_what_the_last_one_saved(samples):
    _, backward = samples
    assert backward.baseline_bytes == BASE
    assert backward.other_bytes == TABLE_BYTES + 3 * INPUT  # the first layer's input, the output and its gradient
    # The 40 come before the gradient, and before gradients of weights, which count elsewhere.
    assert backward.loss_bytes in (backward.other_bytes - INPUT + 40, backward.other_bytes)


def test_a_layer_is_charged_with_what_is_there_beside_it(samples):
    found, backward = samples
    for sample in found[1:]:
        assert sample.saved_bytes == SAVED
        assert sample.working_bytes == INPUT + SAVED + 100 + backward.other_bytes
        assert sample.late_bytes == SAVED // 2 + INPUT + 30 + backward.other_bytes
        assert sample.forward_bytes == TABLE_BYTES + INPUT + SAVED + INPUT + INPUT * (sample.index == 2)


def test_a_plan_of_it_needs_what_the_pass_needed(samples):
    found, backward = samples
    cost = measured(found, backward.loss_bytes).kinds[0].cost
    prediction = predict([cost] * 3, [LayerPlan()] * 3, Budget(1e12, 1e12, 0))
    assert prediction.peaks.backward == TABLE_BYTES + 4 * INPUT + SAVED + 100
    assert prediction.peaks.forward == TABLE_BYTES + 2 * INPUT + SAVED + 2 * INPUT


def test_what_is_held_once_backward_has_come_to_a_call(samples):
    found, backward = samples
    beside = backward.other_bytes
    cost = measured(found, backward.loss_bytes).kinds[0].cost
    # The map of the MLP comes when nothing has been given back.
    assert [(point.name, point.call, point.slots) for point in cost.points] == [("o", 1, 4), ("a", 0, 2)]
    assert [point.nbytes for point in cost.points] == [SAVED // 2 + INPUT + 30 + beside, SAVED // 4 + INPUT + beside]
    assert 0 <= cost.points[0].at <= cost.points[1].at <= 1


GATHERED, REDUCED, SHARD = (
    200,
    190,
    90,
)  # bytes of a layer's parameters, of its gradients being reduced, of those that stay


@pytest.mark.parametrize("are_gradients_there", [False, True])
def test_what_fsdp2_holds_is_charged_to_each_layer(are_gradients_there):
    """Parameters of two layers are gathered in backward, and gradients are reduced while the next layer is at work."""
    memory, made, highest = Memory(), [SHARD * are_gradients_there], [0]
    window, found = PassState(lambda: made[0], is_sharded=True, gathered_bytes=GATHERED), []
    memory.take(INPUT, GATHERED)
    for index in range(3):
        sample = LayerProfile(index, CPU, Inputs(INPUT, {}, {}), window, memory=memory)
        sample.calls = [OpProfile(name, "", 0.0, stop=0.0, slots=2 * place) for place, name in enumerate("am", 1)]
        sample.begin_forward()
        memory.take(SAVED, INPUT)
        sample.end_forward([torch.zeros(SAVED, dtype=torch.uint8)], [False] * 2)
        memory.take(-SAVED, -INPUT, INPUT)
        sample.leave_forward()
        memory.take(-GATHERED, GATHERED * (index < 2))
        memory.take(-INPUT * (index > 0))  # its inputs have left; those of the first layer are the model's
        found.append(sample)
    memory.take(INPUT)  # the gradient from above
    for sample in reversed(found):
        if sample.index == 2:
            memory.take(INPUT, GATHERED)
        memory.take(GATHERED * (sample.index > 0))  # of the layer before, ahead of time
        sample.begin_recompute()
        memory.take(SAVED)
        sample.begin_thresholds(prefetch_below=3)
        sample.end_recompute()
        memory.take(REDUCED // 2, 60)
        highest[0] = max(highest[0], memory.now - (0 if are_gradients_there else made[0]))
        memory.take(-60 - SAVED // 2)
        sample.pass_threshold(2)
        memory.take(INPUT * (sample.index > 0), REDUCED - REDUCED // 2)
        sample.pass_threshold(0)
        memory.take(-SAVED // 2, -INPUT)
        memory.take(-GATHERED)
        memory.take(
            -REDUCED * (sample.index < 2)
        )  # of the layer after; that of this layer stays until its own are reduced
        if not are_gradients_there:
            memory.take(SHARD)
            made[0] += SHARD
    needed = highest[0] - window.baseline_bytes
    assert window.baseline_bytes == BASE
    assert found[2].working_bytes == needed - REDUCED and found[1].working_bytes == needed
    cost = measured(found, window.loss_bytes).kinds[0].cost
    assert predict([cost] * 3, [LayerPlan()] * 3, Budget(1e12, 1e12, 0)).peaks.backward == needed


WIDEST = INPUT + SAVED + 100


@pytest.mark.parametrize(
    ("call", "nbytes", "most"),
    [("m", 50, WIDEST + 50), ("o", 350, SAVED // 2 + INPUT + 30 + 350), ("o", 50, WIDEST), ("a", 50, WIDEST)],
)
def test_a_layer_that_is_kept_holds_an_input_until_the_gradient_of_a_bias_is_summed(samples, call, nbytes, most):
    """Of the widest part it comes on top; elsewhere only if it is more than what has been given back by then."""
    found, backward = samples
    for sample in found:
        (biased,) = (one for one in sample.calls if one.name == call)
        biased.summed_bytes = nbytes
    cost = measured(found, backward.loss_bytes).kinds[0].cost
    assert cost.kept_bytes == most + backward.other_bytes
    machine = Budget(1e12, 1e12, 1 << 40)
    kept, again = (predict([cost] * 3, [LayerPlan(keep=keep)] * 3, machine).peaks.last for keep in (True, False))
    assert kept - 2 * SAVED == cost.kept_bytes, "what the layers before the last one keep comes on top"
    assert again == cost.working_bytes + INPUT, "with that of the layer before, which has come back"


def test_a_bias_that_wants_a_gradient_is_seen(toys, enable, decided):
    """Queries, keys, values and the MLP have one, the map behind attention has none; of what goes in 2 x 6 x 16 floats."""
    model = toys.decoder()
    model.layers[1].q.bias.requires_grad_(False)
    found = decided(enable(model, True, save="auto", max_device_bytes=0), LayerProfile)
    for _ in range(2):
        toys.read(model).backward()
    size = 2 * 6 * 16 * 4
    assert [call.summed_bytes for call in found[0].calls] == [size, size, size, 0, 0, size, 2 * size]
    assert [call.summed_bytes for call in found[1].calls] == [0, size, size, 0, 0, size, 2 * size]
