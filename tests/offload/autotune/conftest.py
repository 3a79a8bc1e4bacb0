"""What the controller of `save="auto"` decides."""

import pytest


@pytest.fixture
def decided():
    """`decided(handle, kind)`: a list that grows by the decisions of this kind, one for each layer call from now on."""

    def watch(handle, kind=object):
        decide, seen = handle.runner.decide, []

        def note(*call):
            decision = decide(*call)
            seen.extend([decision] if isinstance(decision, kind) else [])
            return decision

        handle.runner.decide = note
        return seen

    return watch
