"""The road of one step over real processes: what one process and two must agree on."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlx.cluster.group import WorkerGroup
from rlx.cluster.placement import Placement
from rlx.data.batch import Batch
from rlx.export import export
from rlx.rollout.protocol import Request, Sampling
from rlx.workers.worker import Worker

ROLES = ["actor", "rollout", "ref", "critic"]
CALLS = ("actor.log_probs", "ref.log_probs", "critic.values", "critic.update", "actor.update")
SEQUENCE = ("input_ids", "attention_mask", "response_mask")

pytestmark = pytest.mark.usefixtures("ray_session")


def start(config, processes: int, roles=ROLES) -> WorkerGroup:
    return WorkerGroup(Placement.reserve(1, [processes], "cpu"), Worker).build(config, roles)


@pytest.fixture(scope="module")
def workers(ray_session, config):
    with start(config, 2) as group:
        group.call("rollout", "sync", 0)
        yield group


def columns(batch: Batch, answer: Batch) -> Batch:
    return batch.with_(**answer.tensors)


def one_step(group: WorkerGroup, prompts: Batch) -> tuple[Batch, dict[str, float]]:
    """Generates, asks every role, updates actor and critic, and gives the sampler the new weights."""
    batch = group.split("rollout", "generate", prompts, "train")
    for role, method in (("actor", "log_probs"), ("ref", "log_probs"), ("critic", "values")):
        batch = columns(batch, group.split(role, method, batch.select(*SEQUENCE)))
    advantages = torch.linspace(-1, 1, len(batch))[:, None].expand(-1, batch.response_length)
    batch = batch.with_(advantages=advantages.contiguous(), returns=advantages.contiguous())
    critic = batch.select(*SEQUENCE, "values", "returns")
    actor = batch.select(*SEQUENCE, "old_log_probs", "advantages", "ref_log_probs")
    metrics = group.call("critic", "update", batch=critic)[0] | group.call("actor", "update", batch=actor)[0]
    group.call("rollout", "sync", 1)
    return batch, metrics


@pytest.fixture(scope="module")
def stepped(workers, prompts, tmp_path_factory):
    """One step on two processes, a checkpoint after it, and what the process took."""
    workers.call("process", "usage")
    batch, metrics = one_step(workers, prompts)
    usage = workers.call("process", "usage")
    folder = tmp_path_factory.mktemp("checkpoint")
    for role in ("actor", "critic"):
        workers.call(role, "begin_save", str(folder / role))
    for role in ("actor", "critic"):
        workers.call(role, "finish_save")
    return batch, metrics, usage, folder


def test_a_step_fills_every_column(stepped, prompts):
    batch, metrics, _, _ = stepped
    assert len(batch) == len(prompts)
    mask = batch["response_mask"]
    assert torch.equal(batch["seed"], prompts["seed"]), "rows come back in their order"
    # Reference and actor are one model before the first update, and so are trainer and sampler, but for rounding.
    assert torch.equal(batch["ref_log_probs"], batch["old_log_probs"])
    torch.testing.assert_close(batch["rollout_log_probs"][mask], batch["old_log_probs"][mask], atol=1e-4, rtol=0)
    assert (batch["policy_versions"] == 0).all() and (batch["entropy"][mask] > 0).all()
    for name in ("actor/grad_norm", "critic/grad_norm"):
        assert metrics[name] > 0
    assert metrics["actor/skipped"] == 0 and metrics["actor/kl_loss"] == 0


def test_readings_show_when_the_sampler_worked(stepped):
    batch, _, usage, _ = stepped
    readings = [each["readings"] for each in usage]
    for each in readings:
        assert {len(values) for values in each.values()} == {len(each["age"])}
        assert each["age"] == sorted(each["age"], reverse=True) and each["age"][-1] == 0
        assert set(each) == {"age", "engine 1 running", "engine 1 waiting", "tokens", "CPU busy"}
        running = each["engine 1 running"]
        assert running[0] == running[-1] == 0 and max(each["CPU busy"]) <= 1 and sum(each["CPU busy"]) > 0
    assert sum(max(each["engine 1 running"]) for each in readings) == len(batch)
    assert sum(each["tokens"][-1] for each in readings) == batch["response_mask"].sum()


def test_the_sampler_has_the_updated_weights(workers, stepped, prompts):
    before = stepped[0]
    batch = workers.split("rollout", "generate", prompts, "train")
    assert torch.equal(batch["policy_versions"], batch["response_mask"].int())
    log_probs = workers.split("actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"]
    mask = batch["response_mask"]
    torch.testing.assert_close(batch["rollout_log_probs"][mask], log_probs[mask], atol=1e-4, rtol=0)
    again = workers.split("actor", "log_probs", before.select(*SEQUENCE))["old_log_probs"]
    assert not torch.allclose(again, before["old_log_probs"], atol=1e-3), "the update changed the policy"
    reference = workers.split("ref", "log_probs", before.select(*SEQUENCE))["ref_log_probs"]
    assert torch.equal(reference, before["ref_log_probs"]), "and left the reference alone"


def test_the_start_of_each_role_is_timed(workers):
    for started in workers.call("process", "start_s"):
        assert [*started] == ["device", "actor", "ref", "critic", "rollout"]
        assert all(0 < seconds < 60 for seconds in started.values())


def test_usage_counts_offloaded_bytes_of_the_step(stepped):
    for usage in stepped[2]:
        assert (
            usage["actor/offloaded_bytes"] > 0 and usage["actor/held_bytes"] == 0 and usage["actor/recomputed_ms"] > 0
        )
        roles = {name.split("/")[0] for name in usage if "/" in name}
        assert roles == {"actor", "load", "memory"}, "the critic here does not offload, and a reference has no backward"
        assert 0 < usage["load/running_mean"] <= usage["load/running_max"]
        assert 0.05 < usage["peak_memory_gb"] < 50
        for call in (*CALLS, "rollout.generate", "rollout.sync"):
            assert 0.05 < usage[f"memory/{call}_before_gb"] < 50 and 0.05 < usage[f"memory/{call}_after_gb"] < 50
        assert usage["memory/host_reserved_gb"] > 0 and "memory/host_activations_gb" not in usage


@pytest.mark.slow
def test_one_process_computes_what_two_do_and_goes_on_from_their_checkpoint(config, stepped, prompts):
    batch, metrics, _, folder = stepped
    with start(config, 1) as single:
        single.call("rollout", "sync", 0)
        same_batch, same_metrics = one_step(single, prompts)
        for name in ("input_ids", "response_mask"):
            assert torch.equal(same_batch[name], batch[name])
        for name in ("old_log_probs", "values"):
            torch.testing.assert_close(same_batch[name], batch[name], atol=1e-5, rtol=0)
        sampled = ("actor/update_length", "critic/update_length")  # of other elements on another number of processes
        same_metrics, metrics = ({n: m[n] for n in m if n not in sampled} for m in (same_metrics, metrics))
        assert same_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-6)
        own = single.split("actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"]
        single.call("actor", "load", str(folder / "actor"))
        single.call("critic", "load", str(folder / "critic"))
        loaded = single.split("actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"]
        torch.testing.assert_close(loaded, own, atol=1e-3, rtol=0)
    export(folder / "actor", folder / "exported")
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(folder / "actor" / "hf_model").state_dict()
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_does_not_exist_is_named(environment, config):
    with pytest.raises(ValueError, match=r"trainer\.device: got cuda, but torch"):
        Worker(replace(config, trainer=replace(config.trainer, device="cuda")), ["actor"])


def test_a_sampler_of_any_name_sleeps_while_another_role_works(environment, config):
    worker = Worker(config, ["actor", "rollout"])
    with worker.at_work("rollout", "sync") as sync:
        sync(0)
    worker.roles["rollout"].sampler.add_request(Request((1, 2), 0, Sampling(3)))
    with pytest.raises(ValueError, match="sleep: got 1 requests in flight"):
        worker.at_work("actor", "log_probs").__enter__()
