"""What the native library holds of the system's memory."""

from __future__ import annotations

import gc
import sys

import numpy as np
import psutil
import pytest
from native_toys import SLOTS, needs_native, store, toy

from treeeagle_edge.kernels.native.reading import View

pytestmark = [
    needs_native,
    pytest.mark.skipif(sys.platform != "linux", reason="resident memory as Linux counts"),
]
MB = 1 << 20


def test_room_for_chunks_of_attention_is_replaced_and_not_added_to() -> None:
    """A conversation grows, and with it what chunks leave: to 4 MB here, and to 15 MB if every size were kept."""
    it, at, resident = toy("portable"), store(), psutil.Process().memory_info
    rows = np.arange(16)
    before = None
    for length in range(512, 32_768, 512):
        prefix = np.arange(length) % SLOTS
        it.model.forward(rows, rows, rows, View(prefix, rows), at, logit_rows=[0], logits=False, best=True)
        before = before or resident().rss
    assert resident().rss - before < 8 * MB


def test_a_model_gives_its_memory_back() -> None:
    resident = psutil.Process().memory_info
    gc.collect()
    it = toy("portable", vocabulary=60_000)  # an embedding of 6 MB, and buffers in the same chunk
    loaded = resident().rss
    del it
    gc.collect()
    assert loaded - resident().rss > 5 * MB
