"""Checks draft trees against the reference implementation (SafeAILab/EAGLE): both draft the same trees.

python docs/check_reference.py CHECKOUT [--head FOLDER] [--model NAME] [--rounds 10]

CHECKOUT is a clone of SafeAILab/EAGLE, whose `eagle/model/cnets.py` is imported. The head is exported in the layout
`safeailab`, which both read. In every round of a greedy answer both get the same features of the target, in fp32, and
their trees are compared as sets of paths. Exit code 1 where two trees differ, unless only nodes with equal scores do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.checkpoint.opening import Checkpoint, open_checkpoint
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.sources.model_names import BUNDLED_HEADS, resolve_model
from treeeagle_edge.tokenizer.codec import load_tokenizer
from treeeagle_edge.training.export import write_head

PROMPTS = (
    "Why is the sky blue?",
    "Write a function in Python that returns the sum of two numbers.",
    "Tell a short story about a lighthouse keeper.",
)
CONTEXT, SLOTS = 512, 640
CPU = torch.device("cpu")
TIE = 1e-4  # where scores differ by less, either node may be the last that the tree takes
Paths = frozenset[tuple[int, ...]]


def export(head: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """The head in SafeAILab's layout."""
    opened = open_head(head, checkpoint.config)
    tensors = dict(opened.tensors)
    if opened.embedding is not None:
        tensors["embed_tokens.weight"] = opened.embedding
    write_head(
        folder, opened.config, tensors, opened.target_ids, layout="safeailab", target_name=checkpoint.config.family,
        dtype=torch.float32, default_taps=checkpoint.config.default_taps, extra={"bos_token_id": 1, "pad_token_id": 0},
    )  # fmt: skip


def reference_head(checkout: Path, folder: Path, embedding: Tensor, shape: TreeShape) -> Any:
    """The reference's own draft model with the exported weights, and the target's embedding as it takes it."""
    sys.path.insert(0, str(checkout / "eagle" / "model"))
    from cnets import Model

    declared = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # the reference's config class needs an older transformers; of what that class adds, the model reads these two
    config = SimpleNamespace(**{"pretraining_tp": 1, "rope_scaling": None, **declared})
    model = Model(config, total_tokens=shape.nodes + 1, depth=shape.depth - 1, top_k=shape.branching)
    model.embed_tokens.weight.data = embedding
    left = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    whole = declared["draft_vocab_size"] == declared["vocab_size"]  # then the file has no offsets
    absent = {"embed_tokens.weight", *(("d2t", "t2d") if whole else ())}
    missing = [name for name in left.missing_keys if name not in absent]
    if missing or left.unexpected_keys:
        sys.exit(f"the reference misses {missing} and does not know {left.unexpected_keys}")
    model.init_tree()
    return model.eval()


def features_of(target: Target, ids: Sequence[int]) -> Tensor:
    """[T, taps * Ht] of a whole text, in one pass."""
    rows = torch.arange(len(ids))
    config = target.config
    store = KVStore.allocate(
        config.num_layers, len(ids), config.num_kv_heads, config.head_dim, target.kv_dtype, CPU
    )
    view = AttentionView(rows[:0], rows, torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
    return target.forward(torch.tensor(ids), rows, rows, view, store, config.default_taps).features


def reference_paths(model: Any, features: Tensor, ids: Sequence[int]) -> Paths:
    """Token paths, from the root, of the tree that the reference drafts after the last of `ids`."""
    model.reset_kv()
    tokens, _, mask, _ = model.topK_genrate(features[None], torch.tensor([list(ids)]), None, None)
    return frozenset(
        tuple(int(tokens[0, node]) for node in torch.nonzero(row).flatten().tolist()) for row in mask[0, 0]
    )


def our_paths(tokens: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Token path -> row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    return {path: row for row, path in enumerate(paths)}


def compare(engine: Engine, target: Target, model: Any, ids: list[int], rounds: int) -> tuple[int, int]:
    """(rounds compared, rounds that differ) of one answer."""
    text, compared, different = list(ids), 0, 0
    for item in engine.generate(ids, SamplingParams(max_tokens=CONTEXT - len(ids)), reuse_prefix=False):
        if item.tree is not None:
            ours = our_paths(item.tree.tokens, item.tree.parents)
            theirs = reference_paths(model, features_of(target, text[:-1]), text)
            cut = min(item.tree.log_probs)
            other = [path for path in ours.keys() - theirs if item.tree.log_probs[ours[path]] - cut >= TIE]
            compared += 1
            different += bool(other) or len(ours) != len(theirs)
        if compared == rounds:
            break
        text += item.ids
    return compared, different


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of SafeAILab/EAGLE")
    parser.add_argument("--head", type=Path, default=BUNDLED_HEADS / "smollm2-135m-eagle3")
    parser.add_argument("--model", default="smollm2-135m", help="its target: name, directory or .gguf file")
    parser.add_argument("--rounds", type=int, default=10, help="a prompt")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    """Compare, and print how many trees there were."""
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    path = resolve_model(chosen.model)
    checkpoint, tokenizer, shape = open_checkpoint(path), load_tokenizer(path), TreeShape()
    target = load_target(checkpoint, bits=32, context=CONTEXT, device=CPU)
    compared = different = 0
    with tempfile.TemporaryDirectory() as name:
        export(chosen.head, checkpoint, Path(name))
        embedding = target.embed(torch.arange(checkpoint.config.vocab_size)).clone()
        model = reference_head(chosen.checkout, Path(name), embedding, shape)
        head = Head(
            open_head(Path(name), checkpoint.config, target.embed),
            target.embed,
            slots=SLOTS + MAX_EXPANSIONS,
            context=CONTEXT,
            dtype=torch.float32,
            device=CPU,
        )
        engine = Engine(target, head, context=CONTEXT, slots=SLOTS, tree=shape)
        for prompt in PROMPTS:
            ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": prompt}]))
            of_prompt = compare(engine, target, model, ids, chosen.rounds)
            compared, different = compared + of_prompt[0], different + of_prompt[1]
    print(f"{compared} trees ({shape.label}), {different} differ from the reference's")
    return 1 if different or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
