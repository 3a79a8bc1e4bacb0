"""Options of activation offloading: faults and warnings of the validator, and the engine refuses the same ones.

Each table below lists options and whether they are a fault, a warning or fine, both for the validator before anything
starts and for the engine on its own. The engine also names the same options as without effect.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch import nn

from rlx.config.check.validate import Verdict, check
from rlx.config.compose.build import build
from rlx.config.compose.command_line import Composed, compose
from rlx.config.machine import Cluster, Machine
from rlx.config.schema.tree import as_text
from rlx.offload import OffloadOptions, enable_activation_offloading
from rlx.offload.storage.ranges import MIN_STAGING_BYTES

FINE, WARNING, FAULT = "fine", "warning", "fault"
MODEL = "actor_rollout_ref.model"
MIB = 1 << 20

# (save, enable_gradient_checkpointing)
SAVES = {
    (None, True): FINE,
    (None, False): FINE,
    ("boundary", True): FINE,
    ("boundary", False): FAULT,
    ("attention", True): FINE,
    ("attention", False): FAULT,
    ("all", True): FAULT,
    ("all", False): FINE,
    ("auto", True): FINE,
    ("auto", False): FAULT,
}
# (tier, directory, max_host_bytes)
PLACES = {
    ("cpu", None, None): FINE,
    ("cpu", None, 64 * MIB): FINE,
    ("cpu", "folder", None): WARNING,
    ("cpu", "folder", 64 * MIB): FINE,
    ("cpu", "missing", None): WARNING,
    ("cpu", "missing", 64 * MIB): FAULT,
    ("cpu", "file", 64 * MIB): FAULT,
    ("disk", None, None): FAULT,
    ("disk", None, 64 * MIB): FAULT,
    ("disk", "folder", None): FINE,
    ("disk", "folder", 64 * MIB): FINE,
    ("disk", "folder", MIN_STAGING_BYTES): FINE,
    ("disk", "folder", MIN_STAGING_BYTES - 1): FAULT,
    ("cpu", "folder", 4 * MIN_STAGING_BYTES): FINE,
    ("cpu", "folder", 4 * MIN_STAGING_BYTES - 1): FAULT,
    ("cpu", None, 1): FINE,
    ("disk", "missing", None): FAULT,
    ("disk", "file", None): FAULT,
}
# (option, value), on a machine without accelerators
FINE_VALUES = [("prefetch_layers", 0), ("prefetch_layers", 9), ("min_bytes", 0), ("max_device_bytes", "auto")]
USELESS = [("max_inflight_bytes", MIB), ("max_device_bytes", MIB), ("pin_memory", False), ("use_streams", False)]
WRONG = {
    **{"prefetch_layers": [-1, True], "min_bytes": [-1, None, 1.5], "max_host_bytes": [-1], "max_inflight_bytes": [-1]},
    **{"max_device_bytes": [-1, "most", None], "pin_memory": ["sometimes"], "use_streams": [None], "directory": [3]},
    **{"save": ["everything"], "tier": ["tape"]},
}
OTHERS = dict.fromkeys(FINE_VALUES, FINE) | dict.fromkeys(USELESS, WARNING)
OTHERS |= {(name, value): FAULT for name, values in WRONG.items() for value in values}


@pytest.fixture(scope="module")
def tree() -> dict:
    return OmegaConf.to_container(OmegaConf.create(compose([]).yaml))


@pytest.fixture
def validate(tree: dict, cpu_machine: Machine) -> Callable[..., Verdict]:
    """The verdict on these options of the actor's engine, as if all were given on the command line."""

    def of(options: dict, machine: Machine = cpu_machine, **model: object) -> Verdict:
        changed = {**tree["actor_rollout_ref"]["model"], "enable_activation_offload": True, **model}
        changed["activation_offload"] = {**changed["activation_offload"], "min_bytes": 1 << 20, **options}
        config, faults = build({**tree, "actor_rollout_ref": {**tree["actor_rollout_ref"], "model": changed}})
        keys = frozenset(f"{MODEL}.activation_offload.{name}" for name in options)
        return check(Composed(config, keys, tuple(faults)), machine)

    return of


@pytest.fixture
def ask_engine(caplog: pytest.LogCaptureFixture) -> Callable[[dict, bool], tuple[str, str]]:
    """What the engine itself makes of the same options, and its error or the line on those without effect."""

    def of(options: dict, enable_ckpt: bool) -> tuple[str, str]:
        caplog.clear()
        caplog.set_level(logging.INFO, "rlx.offload")
        model = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
        try:
            handle = enable_activation_offloading(model, enable_ckpt, OffloadOptions(**options))
        except (ValueError, OSError) as error:
            return FAULT, str(error)
        handle.disable()
        lines = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
        return (WARNING if lines else FINE), "".join(lines)

    return of


@pytest.fixture
def paths(tmp_path: Path) -> dict:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    return {None: None, **{name: str(tmp_path / name) for name in ("folder", "file", "missing")}}


def said(verdict: Verdict) -> str:
    return FAULT if verdict.faults else WARNING if verdict.warnings else FINE


@pytest.mark.parametrize("saved", SAVES, ids=str)
def test_what_is_saved(saved, validate, ask_engine):
    save, recompute = saved
    verdict = validate({"save": save}, enable_gradient_checkpointing=recompute)
    assert said(verdict) == SAVES[saved]
    assert len(verdict.faults) == (SAVES[saved] == FAULT)
    assert ask_engine({"save": save}, recompute)[0] == SAVES[saved]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_where_it_goes(place, validate, ask_engine, paths):
    tier, directory, cap = place
    options = {"tier": tier, "directory": paths[directory], "max_host_bytes": cap}
    verdict = validate(options)
    assert said(verdict) == PLACES[place]
    assert len(verdict.faults) == (PLACES[place] == FAULT)
    assert ask_engine(options, True)[0] == PLACES[place]


def test_all_faults_are_listed_at_once(validate, paths):
    for tier, directory, cap in [place for place, outcome in PLACES.items() if outcome == FAULT]:
        options = {"save": "all", "tier": tier, "directory": paths[directory], "max_host_bytes": cap}
        assert len(validate(options, enable_gradient_checkpointing=True).faults) == 2


@pytest.mark.parametrize("option", OTHERS, ids=str)
def test_each_other_option(option, validate, ask_engine):
    (name, value), expected = option, OTHERS[option]
    verdict = validate({name: value})
    assert said(verdict) == expected, verdict
    outcome, line = ask_engine({name: value}, True)
    assert outcome == expected
    if expected == WARNING:
        assert f"{MODEL}.activation_offload.{name}={as_text(value)}" in verdict.warnings[0]
        assert name in line
    if expected == FAULT:
        assert f"{MODEL}.activation_offload.{name}" in verdict.faults[0].what
        assert name in line and repr(value) in line


def test_every_option_is_in_a_table():
    listed = {"save", "tier", "directory", "max_host_bytes", *(name for name, _ in OTHERS)}
    assert listed == set(vars(OffloadOptions()))


def test_a_budget_of_the_device_is_read_where_layers_are_planned(validate):
    assert said(validate({"save": "auto", "max_device_bytes": MIB}, enable_gradient_checkpointing=True)) == FINE


@pytest.mark.parametrize(("save", "recompute"), [("all", True), ("auto", False)])
def test_with_the_flag_off_nothing_is_a_fault_and_each_option_is_named(save, recompute, validate, paths):
    options = {"save": save, "tier": "disk", "directory": paths["missing"], "max_host_bytes": 0}
    verdict = validate(options, enable_activation_offload=False, enable_gradient_checkpointing=recompute)
    assert verdict.faults == ()
    (warning,) = verdict.warnings
    assert all(f"{MODEL}.activation_offload.{name}={value}" in warning for name, value in options.items())


def test_on_an_accelerator_streams_and_pinning_have_an_effect(validate):
    gpu = Machine(gpus=1, cpus=4, packages=frozenset())
    options = {"pin_memory": False, "use_streams": False, "max_inflight_bytes": MIB}
    assert said(validate(options, gpu)) == FINE
    assert [line.split("=")[0].rpartition(".")[2] for line in validate(options).warnings[0].splitlines()[1:]] == [
        "max_inflight_bytes",
        "pin_memory",
        "use_streams",
    ]


@pytest.mark.parametrize("directory", ["folder", "missing", "file"])
def test_on_a_cluster_the_workers_look_for_the_directory(directory, validate, paths):
    cluster = Machine(gpus=0, cpus=4, packages=frozenset(), cluster=Cluster("head:6379", (0, 0)))
    options = {"tier": "disk", "directory": paths[directory]}
    assert said(validate(options, cluster)) == FINE
    assert said(validate(options)) == (FINE if directory == "folder" else FAULT)
    assert said(validate({"tier": "disk", "directory": None}, cluster)) == FAULT


def test_a_fault_names_the_directory_and_what_is_wrong_with_it(validate, paths, monkeypatch):
    faults = {name: validate({"tier": "disk", "directory": paths[name]}).faults for name in (None, "missing", "file")}
    got = {name: found[0].got for name, found in faults.items()}
    assert got[None] == f"{MODEL}.activation_offload.directory=null"
    assert got["missing"].endswith("missing, which does not exist")
    assert got["file"].endswith("file, which is not a folder")
    monkeypatch.setenv("HOME", str(Path(paths["folder"]).parent))
    assert said(validate({"tier": "disk", "directory": "~/folder"})) == FINE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("save", ["boundary", "attention"])
def test_saving_attention_without_a_fused_kernel_is_warned_of(save, attention, validate):
    verdict = validate({"save": save}, attn_implementation=attention)
    assert said(verdict) == (WARNING if (save, attention) == ("attention", "eager") else FINE)


def test_a_cap_of_nothing_is_warned_of(validate):
    assert "nothing is offloaded" in validate({"max_host_bytes": 0}).warnings[0]


def test_too_little_room_on_the_disk_is_warned_of(validate, tree, paths):
    large = {"tiny": {**tree["actor_rollout_ref"]["model"]["tiny"], "hidden_size": 10**9}}
    (warning,) = validate({"tier": "disk", "directory": paths["folder"]}, **large).warnings
    assert "GB free" in warning and "estimated to write" in warning
    assert said(validate({"max_host_bytes": 10**20, "directory": paths["folder"]}, **large)) == FINE
    assert said(validate({}, **large)) == FINE
