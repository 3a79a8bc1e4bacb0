import pytest
import torch

from rlx.data.batch import Batch


@pytest.fixture
def make_batch():
    """A batch as the manager gets it: responses with their data source, ground truth and extra_info."""

    def make(responses, truths, sources="openai/gsm8k", extra_infos=None):
        count = len(responses)
        info = {
            "response_text": list(responses),
            "ground_truth": list(truths),
            "data_source": [sources] * count if isinstance(sources, str) else list(sources),
            "extra_info": list(extra_infos) if extra_infos else [{"index": 100 + i} for i in range(count)],
        }
        return Batch.of({"group_id": torch.arange(count)}, info)

    return make


@pytest.fixture
def write_module(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write
