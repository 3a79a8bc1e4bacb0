"""How many nodes a run takes, without a cluster."""

from rlx.cluster.nodes import WAIT_S, nodes_to_take


def taken(wanted: int, least: int, coming: dict[float, int]) -> tuple[int, float]:
    """The number of nodes and the seconds waited; `coming` maps a second to the number of nodes from then on."""
    now = [0.0]

    def alive() -> int:
        return max((count for second, count in coming.items() if second <= now[0]), default=0)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return nodes_to_take(wanted, least, alive, lambda: now[0], sleep), now[0]


def test_a_node_that_comes_back_in_time_is_waited_for():
    assert taken(4, 2, {0: 4}) == (4, 0.0)
    assert taken(4, 2, {0: 3, 30: 4}) == (4, 30.0)


def test_without_it_the_run_takes_those_that_are_there_but_not_too_few():
    assert taken(4, 2, {0: 3}) == (3, WAIT_S)
    assert taken(4, 2, {0: 1}) == (2, WAIT_S), "then the reservation fails and says so"
    assert taken(4, 2, {0: 9}) == (4, 0.0)
