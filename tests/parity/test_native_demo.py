"""The demo model on the native kernels: near fp32, and the same bits with and without a tree, at 8 and at 4 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from target_passes import in_pieces

from treeeagle_edge.bench.prompts import builtin_prompts
from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.kernels.native.library import library
from treeeagle_edge.kernels.native.loader import problem
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.runtime import Runtime, load_runtime
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.model_names import BUNDLED_HEADS

pytestmark = pytest.mark.skipif(problem() is not None, reason=f"no native kernels: {problem()}")


@pytest.fixture(scope="module", params=[8, 4], ids=["8-bit", "4-bit"])
def runtime(request: pytest.FixtureRequest, demo_gguf: Path) -> Runtime:
    return load_runtime(
        RunSettings(model="smollm2-135m", bits=request.param, device="cpu", context=1024, nodes=15)
    )


@pytest.fixture(scope="module")
def fp32(demo_gguf: Path) -> Target:
    return load_target(open_checkpoint(demo_gguf), bits=32, context=1024, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(runtime: Runtime) -> list[list[int]]:
    cases = builtin_prompts(per_scenario=2)
    codec = runtime.tokenizer
    return [codec.encode(codec.render([{"role": "user", "content": case.turns[0]}])) for case in cases]


def answer(runtime: Runtime, prompt: list[int], params: SamplingParams, **options) -> list[int]:
    rounds = runtime.engine.generate(prompt, params, **options)
    return [token for item in rounds for token in item.ids]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=3),
        SamplingParams(max_tokens=40, repetition_penalty=1.2, presence_penalty=0.5),
    ],
    ids=["greedy", "sampling", "penalties"],
)
def test_any_tree_gives_exactly_the_text_of_plain_decoding(
    runtime: Runtime, prompts: list[list[int]], params: SamplingParams
) -> None:
    """Expectations row 28: bit-exact where we own the kernel. No tolerance, no fixed number of rows."""
    for number, prompt in enumerate(prompts):
        plain = answer(runtime, prompt, params, speculate=False, reuse_prefix=False)
        shape = (TreeShape(5, 4, 15), TreeShape(2, 2, 3), TreeShape(8, 3, 11))[number % 3]
        assert answer(runtime, prompt, params, tree=shape, reuse_prefix=False) == plain
        assert answer(runtime, prompt, params, tree=shape) == plain  # and with the prompt's KV reused


def test_a_greedy_answer_asks_for_no_logits(
    runtime: Runtime, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = runtime.engine.target.model, []
    run = model.run
    monkeypatch.setattr(model, "run", lambda *job: (given.append(job[2].output.logits), run(*job))[1])
    texts = []
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, logit_bias={0: 0.0})):
        given.clear()
        texts.append([answer(runtime, prompt, params, reuse_prefix=False) for prompt in prompts[:3]])
        assert {logits is None for logits in given} == {not params.logit_bias}
    assert texts[0] == texts[1]


def test_a_round_crosses_into_native_code_once_to_draft_and_once_to_verify(
    runtime: Runtime, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watch(name: str) -> None:
        own = getattr(library(), name)
        monkeypatch.setattr(library(), name, lambda *given: (calls.append(name), own(*given))[1])

    for name in ("te_forward", "te_draft", "te_draft_tree", "te_draw"):
        watch(name)
    rounds = runtime.engine.generate(prompts[0], SamplingParams(max_tokens=40), tree=TreeShape(5, 4, 12))
    assert next(rounds).kind == "prefill"
    trees = 0
    calls.clear()
    for item in rounds:
        if item.kind == "tree":
            assert calls == ["te_draft_tree", "te_forward"]
            trees += 1
        calls.clear()
    assert trees > 3


def test_a_prompt_gives_the_same_bits_in_pieces_of_any_size(
    runtime: Runtime, prompts: list[list[int]]
) -> None:
    ids = torch.tensor(prompts[0][:40])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    whole = in_pieces(runtime.engine.target, ids, 40)[0].clone()
    for piece in (1, 7, 16):
        assert torch.equal(in_pieces(runtime.engine.target, ids, piece, order)[0], whole)


def test_pytorch_has_one_thread_beside_ours(runtime: Runtime) -> None:
    """More of them would wait for work on the cores that a pass needs, whenever an answer is sampled."""
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_an_8k_prompt_with_a_head_of_2048_positions(demo_gguf: Path) -> None:
    """Expectations row 18: the bundled head's config says 2,048 positions; it drafts after 8,000 tokens too."""
    declared = json.loads((BUNDLED_HEADS / "smollm2-135m-eagle3" / "config.json").read_text())
    assert declared["max_position_embeddings"] == 2048
    runtime = load_runtime(RunSettings(model="smollm2-135m", bits=8, device="cpu", context=8192, nodes=8))
    text = runtime.tokenizer.encode(
        "The river ran past the mill and the mill past the river, year after year. " * 600
    )
    prompt = text[:8000]
    params = SamplingParams(max_tokens=48)
    rounds = list(runtime.engine.generate(prompt, params))
    assert sum(item.accepted for item in rounds) > 0
    assert [token for item in rounds for token in item.ids] == answer(
        runtime, prompt, params, speculate=False
    )


def test_quality_against_fp32(runtime: Runtime, fp32: Target, prompts: list[list[int]]) -> None:
    """KL divergence and argmax agreement over the built-in prompts' tokens stay where they were measured."""
    divergence, same, count = 0.0, 0, 0
    for prompt in prompts[:6]:
        ids = torch.tensor(prompt)
        exact = in_pieces(fp32, ids, 64)[0].log_softmax(-1)
        native = in_pieces(runtime.engine.target, ids, len(ids))[0].log_softmax(-1)
        divergence += float((exact.exp() * (exact - native)).sum())
        same += int((exact.argmax(-1) == native.argmax(-1)).sum())
        count += len(prompt)
    assert divergence / count < 0.02
    assert same / count > 0.94
