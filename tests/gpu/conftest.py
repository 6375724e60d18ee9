"""Tests that need a GPU. Where CuPy sees none they are skipped, with the reason."""

from pathlib import Path

import pytest

from zmpi.messages.device import find_cupy

CUPY, FAULT = find_cupy()


def pytest_collection_modifyitems(items):
    for item in items:
        if CUPY is None and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {FAULT}"))
