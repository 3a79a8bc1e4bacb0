import numpy
import torch

from rlx.rollout.process_state import OwnRandomState


def drawn():
    return torch.rand(3).tolist(), numpy.random.randint(0, 2**62, 3).tolist()


def test_own_random_state_goes_on_where_it_ended_and_leaves_the_process_as_it_was():
    def in_uses(state, *pauses):
        state.seed(7)
        found = []
        for pause in pauses:
            with state.in_use():
                found.append(drawn())
            for _ in range(pause):
                drawn()
        return found

    torch.manual_seed(1)
    numpy.random.seed(1)
    first = in_uses(OwnRandomState(), 0, 0, 0)
    after = drawn()
    torch.manual_seed(1)
    numpy.random.seed(1)
    assert drawn() == after, "nothing was drawn from the process"
    assert in_uses(OwnRandomState(), 3, 1, 2) == first and first[0] != first[1]


def test_numpys_generator_can_stay_the_processs_own():
    state = OwnRandomState()
    numpy.random.seed(1)
    expected = numpy.random.randint(0, 2**62, 6).tolist()
    numpy.random.seed(1)
    with state.in_use(with_numpy=False):
        first, of_process = drawn()
    assert of_process == expected[:3]
    with state.in_use():
        second, own = drawn()
    assert second != first and own != expected[3:], "torch's stream goes on, numpy's own begins"
    assert drawn()[1] == expected[3:]
