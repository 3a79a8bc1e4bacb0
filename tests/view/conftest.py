"""Runs to look at, with transcripts as the trainer writes them."""

import json
import random

import pytest

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "<!--", "&lt;b&gt;", "\u202egnp.exe", "\x00\x1b[31m", "\ud800", "日本語 🎲", "]]>", "<|assistant|>", "\n\n",
)  # fmt: skip


def sample(step, group, number, tokens=24, seed=0):
    """A sample of a prompt and two turns with the answer of a tool between them."""
    draw = random.Random(f"{seed} {step} {group} {number}")
    mask = [0] * 4 + [1] * (tokens // 2 - 4) + [0] * 4 + [1] * (tokens - tokens // 2 - 4)
    advantage = round(draw.uniform(-2, 2), 3)
    pieces = [draw.choice([*HOSTILE, *(f" word{k}" for k in range(30))]) for _ in mask]
    call = {"name": draw.choice(["calculator", HOSTILE[0]]), "error": draw.random() < 0.3, "seconds": 0.25}
    first, answer = tokens // 2, tokens // 2 + 4
    turns = [
        {"start": 4, "end": first, "role": "assistant", "text": "".join(pieces[4:first]), "seconds": 0.5, "reward": 0.1,
         "calls": [call], "finish_reason": "stop"},
        {"start": first + 1, "end": answer, "role": "tool", "text": "42", "seconds": None, "reward": None, "calls": [],
         "finish_reason": None},
        {"start": answer, "end": tokens, "role": "assistant", "text": "".join(pieces[answer:]), "seconds": 0.0,
         "reward": 1.0, "calls": [], "finish_reason": "length"},
    ]  # fmt: skip
    reason = draw.choice(["done", "turns", "timeout: calculator took more than 5 s"])
    trace = f'Traceback:\n  File "{HOSTILE[0]}", line 3, in step\n' if reason.startswith("timeout") else ""
    return {
        "step": step,
        "group": group,
        "sample": number,
        "data_source": "calculator",
        "reward": round(draw.random(), 3),
        "numbers": {"rule": 1.0, HOSTILE[0]: None},
        "token_ids": [draw.randrange(300) for _ in mask],
        "tokens": pieces,
        "loss_mask": mask,
        "advantages": [advantage if own else None for own in mask],
        "log_prob_gap": [round(draw.gauss(0, 0.05), 5) if own else None for own in mask],
        "turns": turns,
        "reason": reason,
        **({"traceback": trace} if trace else {}),
    }


def timeline(step, seconds=10.0):
    """A step of timeline.json: of ten seconds eight are rollout, two of them a tail; two engines of one process."""
    of_engines = {
        "at": [0.0, 1.0, 6.0, 8.0],
        "engine 1 running": [0, 8, 1, 0],
        "engine 1 waiting": [0, 4, 0, 0],
        "engine 2 running": [0, 8, 2, 0],
        "engine 2 waiting": [0, 0, 0, 0],
        "tokens": [100, 100, 400, 500],
        "GPU busy": [0.0, 0.5, 0.25, 1.0],
    }
    return {
        "step": step,
        "seconds": seconds,
        "pace": seconds,
        "phases": [["rollout", 0.0, 8.0], ["<b>", 8.0, 8.5], ["update_actor", 8.5, 10.0]],
        "processes": [of_engines],
        "copies": {"actor": {"offloaded_bytes": 2e6, "copied_bytes": 5e6, "disk_bytes": 0.0, "stall_ms": 500.0}},
    }


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """Folder of a run with so many steps, groups, samples of a group and tokens of a sample."""

    def make(steps=3, groups=4, samples=4, tokens=24):
        folder = tmp_path_factory.mktemp("run") / "seven<b>"
        (folder / "transcripts").mkdir(parents=True)
        for step in range(1, steps + 1):
            with (folder / "transcripts" / f"step_{step:06d}.jsonl").open("w") as out:
                for group in range(groups):
                    out.writelines(json.dumps(sample(step, group, n, tokens)) + "\n" for n in range(samples))
        with (folder / "metrics.jsonl").open("w") as out:
            out.writelines(
                json.dumps({"step": s, "reward/mean": s / 10, "actor/grad_norm": 2.0**-s}) + "\n"
                for s in range(steps + 1)
            )
        kept = {"last": timeline(steps), "slowest": timeline(1, seconds=20.0)}
        (folder / "timeline.json").write_text(json.dumps(kept))
        return folder

    return make
