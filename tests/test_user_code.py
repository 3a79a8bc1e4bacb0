import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest

from rlx.user_code import (
    DATASET,
    POLICY_LOSS,
    ImportFailed,
    UserCodeError,
    call_within,
    load_callable,
    load_name,
    misfit,
)


def test_loads_what_is_named(tmp_path):
    file = tmp_path / "json.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass\nclass Thing:\n    x: int\n")
    thing = load_name(str(file), "Thing", "group")(5)
    assert thing.x == 5
    assert pickle.loads(pickle.dumps(thing)) == thing
    assert sys.modules["json"].__file__ != str(file)


def test_two_files_of_one_name(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.py").write_text(f"value = {number}")
    assert [load_name(str(tmp_path / n / "a.py"), "value", "group") for n in ("1", "2")] == [1, 2]


@pytest.mark.parametrize("name", ["no.py", ".", "notes.txt"])
def test_no_such_file(tmp_path, name):
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(UserCodeError, match=r"group\.path: got .* expected an existing Python file"):
        load_name(str(tmp_path / name), "x", "group")


@pytest.mark.parametrize(
    "text, what",
    [
        ("import nowhere_at_all", r"ModuleNotFoundError: No module .* \(line 1\)$"),
        ("\n\ndef f():\n    return json\n\nf()\n", r"NameError: name 'json' is not defined.* \(line 4\)$"),
        ("x = (", "SyntaxError"),
        ("import sys\nsys.exit('done')", r"SystemExit: done \(line 2\)$"),
    ],
)
def test_import_fails(tmp_path, text, what):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ImportFailed, match=rf"group\.path: importing .*bad\.py failed with {what}"):
        load_name(str(tmp_path / "bad.py"), "x", "group")


def test_no_such_name(tmp_path):
    (tmp_path / "good.py").write_text("import json\nfrom pathlib import Path\nfrom os import getcwd\nx = 1\n_y = 2\n")
    with pytest.raises(UserCodeError, match=r"group\.name: .*good\.py has no 'z', it has \['x'\]"):
        load_name(str(tmp_path / "good.py"), "z", "group")
    (tmp_path / "good.py").write_text("def policy_loss(): ...")
    with pytest.raises(UserCodeError, match=r"it has \['policy_loss'\]; did you mean policy_loss\?"):
        load_name(str(tmp_path / "good.py"), "polcy_loss", "group")


CALLABLES = """
class Data:
    def __init__(self, files, config, tokenizer, split): ...

class Poor: ...

class Loss:
    def __call__(self, *tensors): ...

loss, number = Loss(), 5
late = globals()["made"] = lambda log_probs, old_log_probs, advantages, mask, settings=None: None
"""


@pytest.mark.parametrize(
    ("name", "interface"), [("Data", DATASET), ("loss", POLICY_LOSS), ("late", POLICY_LOSS), ("made", POLICY_LOSS)]
)
def test_what_can_be_called(tmp_path, name, interface):
    (tmp_path / "mine.py").write_text(CALLABLES)
    assert callable(load_callable(str(tmp_path / "mine.py"), name, interface))


@pytest.mark.parametrize(("name", "why"), [("Poor", "too many positional"), ("number", "5 is not a callable object")])
def test_what_cannot_be_called(tmp_path, name, why):
    (tmp_path / "mine.py").write_text(CALLABLES)
    with pytest.raises(
        UserCodeError, match=rf"^data\.custom_cls: {name} in .* f\(files, config, tokenizer, split\) \({why}"
    ):
        load_callable(str(tmp_path / "mine.py"), name, DATASET)


def test_a_function_that_python_knows_no_signature_of_is_taken():
    assert misfit(type, ("a", "b")) is None and misfit(len, ()) is not None


def loop_until(until_s):
    for turn in count():
        if time.monotonic() > until_s:
            return turn


def test_a_call_that_takes_too_long_is_interrupted_in_any_thread():
    def stubborn():
        with suppress(Exception):  # as a library may
            loop_until(time.monotonic() + 60)

    def wait():
        with pytest.raises(TimeoutError, match=r"it takes longer than 0\.1 s"):
            call_within(0.1, stubborn)

    wait()
    with ThreadPoolExecutor() as other:
        other.submit(wait).result(timeout=50)
    assert call_within(60, max, [1, 2], key=lambda each: -each) == 1
    with pytest.raises(ZeroDivisionError):
        call_within(60, lambda: 1 / 0)


def test_an_interruption_never_comes_after_the_call():
    def calls():
        interrupted = 0
        for number in range(300):
            # Most calls end about when the limit is over; some are far too long, so that there are interruptions.
            taken_s = 0.002 if number % 50 else 0.2
            try:
                call_within(0.002, loop_until, time.monotonic() + taken_s)
            except TimeoutError:
                interrupted += 1
            loop_until(time.monotonic() + 0.001)
        return interrupted

    with ThreadPoolExecutor() as other:
        assert 0 < other.submit(calls).result() <= 300
