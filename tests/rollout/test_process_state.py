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
