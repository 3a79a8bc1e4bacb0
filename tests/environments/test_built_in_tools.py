"""The calculator computes what it should, and runs no code."""

import pytest

from rlx.environments.built_in_tools import calc

VALUES = {
    **{"4821+3977": "8798", "3 + 4*2": "11", "(3+4)*2": "14", "-7//2": "-4", "7%4": "3", "2**10": "1024"},
    **{"8/2": "4", "1/3": "0.3333333333333333", "1.5+1.5": "3", " +3\n": "3", "2**-1": "0.5", "0**0": "1"},
    **{"9" * 150: "9" * 150, "1e20": "1e+20"},
}
OTHERS = [
    *[
        "9**9**9",
        "2**99999999",
        "10**400*1.0",
        "1e400",
        "1/0",
        "7%0",
        "(-8)**0.5",
        "1<<99",
        "True",
        "'a'*9",
        "[1]",
        "x",
    ],
    *[
        "__import__('os')",
        "(lambda: 1)()",
        "print(1)",
        "a.b",
        "3+",
        "",
        "\x00",
        "\ud800",
        "(" * 150,
        "1+" * 90 + "1" * 50,
    ],
    *[
        "1" * 5000,
        "f'{1}'",
        "1 if 1 else 2",
        "1;2",
        "0x" + "f" * 190 + "**99",
        "-" * 190 + "1" * 30,
        "1j",
        "...",
        "None",
    ],
]


@pytest.mark.parametrize("expression", VALUES)
def test_values(expression):
    assert calc(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", OTHERS)
def test_nothing_else_is_computed(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calc(expression)
