import pickle
import sys

import pytest

from rlx.user_code import UserCodeError, load_name


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
    "text, what", [("import nowhere_at_all", "ModuleNotFoundError: No module"), ("x = (", "SyntaxError")]
)
def test_import_fails(tmp_path, text, what):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserCodeError, match=rf"group\.path: importing .*bad\.py failed with {what}"):
        load_name(str(tmp_path / "bad.py"), "x", "group")


def test_no_such_name(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n_y = 2\n")
    with pytest.raises(UserCodeError, match=r"group\.name: .*good\.py has no 'z', it has \['x'\]"):
        load_name(str(tmp_path / "good.py"), "z", "group")
