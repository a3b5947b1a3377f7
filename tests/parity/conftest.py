"""What takes long to load, and several files compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def transformers_demo(demo_gguf: Path) -> Any:
    """The demo model in fp32, as `transformers` reads its GGUF file: half a gigabyte, to be read and not changed."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
    )
