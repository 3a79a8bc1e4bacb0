import torch

from rlx.engine.residency import Parking


def test_parked_tensors_give_their_memory_back_and_return_as_they_were():
    whole = torch.arange(6.0)
    view, other = whole[2:4], torch.ones(3, dtype=torch.int32)
    parking = Parking()
    parking.park([view, whole, other, torch.empty(0)])
    assert parking.occupied
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    parking.unpark()
    assert not parking.occupied
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3] and other.tolist() == [1, 1, 1]
    view.add_(1)
    assert whole.tolist() == [0, 1, 3, 4, 4, 5], "views still share the storage"
