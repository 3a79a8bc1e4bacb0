import gc

import pytest

from rlx.environments.garbage import YOUNG_OBJECTS, rare_collections


@pytest.mark.parametrize(("before", "inside"), [(700, YOUNG_OBJECTS), (10**6, 10**6), (0, 0)])
def test_collections_are_rare_for_a_while(before, inside):
    usual = gc.get_threshold()
    gc.set_threshold(before, 10, 10)
    try:
        with pytest.raises(ValueError, match="fails"), rare_collections():
            assert gc.get_threshold() == (inside, 10, 10)
            raise ValueError("fails")
        assert gc.get_threshold() == (before, 10, 10)
    finally:
        gc.set_threshold(*usual)
