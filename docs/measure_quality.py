"""Measures what fewer bits cost: perplexity, divergence and agreement of every width against fp32.

python docs/measure_quality.py [--tokens 128] [--per-scenario 4] [--threads 2] [-o quality.json]

The fp32 model (PyTorch) answers every prompt twice, greedily and at temperature 0.8. Each width then reads prompt and
answer at once, and is compared with fp32 at every answer token: exp of the mean difference in log-probability of the
token that was written (the ratio of perplexities), the mean Kullback-Leibler divergence KL(fp32 || width), and how
often both find the same token likeliest. "±" is the standard error over answers. fp32 holds the values of the model's
file, so 4-bit blocks that load as stored show the cost of 8-bit activations alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

import torch
from measuring.passes import log_probs
from measuring.runs import Report, add_prompts, as_ids, load, parser, questions, run, say
from measuring.timing import decode
from torch import Tensor

from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.sampling_params import SamplingParams

ARMS = {  # name -> bits and kernels
    "8-bit native": (8, "native"),
    "4-bit native": (4, "native"),
    "bf16": (16, "torch"),
    "int8 PyTorch": (8, "torch"),
}
CONTEXT = 2048  # tokens
BAR = "8-bit native"  # within 1 % of fp32's perplexity
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that fp32 wrote."""

    ids: tuple[int, ...]
    start: int  # answer tokens are ids[start:]
    temperature: float


@dataclass(frozen=True)
class Loss:
    """Sums over the answer tokens of one text."""

    tokens: int
    nats: float  # of fp32: minus the log-probability of the text
    extra: float  # of the width, beyond those
    divergence: float  # KL(fp32 || width)
    same: int  # tokens with the same likeliest candidate


def loss(exact: Tensor, other: Tensor, written: Tensor) -> Loss:
    """`exact`, `other` [T, V] log-probabilities, `written` [T] int64 the tokens that followed."""
    rows = torch.arange(len(written))
    mine, theirs = exact[rows, written].double(), other[rows, written].double()
    divergence = (exact.exp() * (exact - other)).sum(-1).double()
    same = exact.argmax(-1) == other.argmax(-1)
    return Loss(
        len(written),
        -float(mine.sum()),
        float((mine - theirs).sum()),
        float(divergence.sum()),
        int(same.sum()),
    )


@dataclass(frozen=True)
class Cost:
    """One width over all texts."""

    ratio: float  # of perplexities
    error: float  # standard error of the ratio, over texts
    divergence: float  # nats a token
    same: float  # share

    @classmethod
    def of(cls, losses: Sequence[Loss]) -> Cost:
        """Pooled over tokens."""
        tokens = sum(item.tokens for item in losses)
        mean = sum(item.extra for item in losses) / tokens
        size = tokens / len(losses)
        residuals = [(item.extra - mean * item.tokens) / size for item in losses]
        error = stdev(residuals) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        divergence = sum(item.divergence for item in losses) / tokens
        return cls(
            math.exp(mean), error * math.exp(mean), divergence, sum(item.same for item in losses) / tokens
        )


def table(losses: dict[str, list[Loss]], texts: Sequence[Text]) -> str:
    """One row for each width: over all texts, and the ratio of each temperature alone."""
    header = (
        "weights",
        "perplexity / fp32's",
        *(f"at T = {heat:g}" for heat in TEMPERATURES),
        "KL, nats",
        "same likeliest",
    )
    rows = []
    for name, found in losses.items():
        whole = Cost.of(found)
        alone = [
            Cost.of([item for item, text in zip(found, texts, strict=True) if text.temperature == heat])
            for heat in TEMPERATURES
        ]
        rows.append(
            (name, f"{whole.ratio:.4f} ± {whole.error:.4f}", *(f"{item.ratio:.4f}" for item in alone),
             f"{whole.divergence:.4f}", f"{whole.same:.1%}".replace("%", " %"))
        )  # fmt: skip
    return aligned_table(header, rows, left=(0,))


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    made.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    return made.parse_args()


@torch.inference_mode()
def main() -> int:
    """Write the texts, score them, print the table; exit code 1 where 8-bit native is not within 1 %."""
    chosen = arguments()
    report = Report("quality", chosen)
    reference = load(chosen, 32, context=CONTEXT, speculate=False)
    stops = reference.generation.stop_ids | reference.tokenizer.stop_ids
    texts = []
    cases = as_ids(reference, questions(chosen))
    for number, case in enumerate(cases):
        say(f"writing {number + 1}/{len(cases)}: {case.name}")
        for heat in TEMPERATURES:
            params = SamplingParams(temperature=heat, seed=number, max_tokens=chosen.tokens, stop_ids=stops)
            answer = decode(reference.engine, case.ids, params).ids
            texts.append(Text((*case.ids, *answer), len(case.ids), heat))
    targets: dict[str, TargetModel] = {}
    for name, (bits, kernels) in ARMS.items():
        runtime = load(chosen, bits, context=CONTEXT, speculate=False, kernels=kernels)
        targets[name] = runtime.engine.target
    losses: dict[str, list[Loss]] = {name: [] for name in targets}
    for number, text in enumerate(texts):
        say(f"scoring {number + 1}/{len(texts)}")
        read, written = text.ids[:-1], torch.tensor(text.ids[text.start :])
        exact = log_probs(reference.engine.target, read, text.start - 1)
        for name, target in targets.items():
            losses[name].append(loss(exact, log_probs(target, read, text.start - 1), written))
    report.environment(reference)
    first = losses[BAR]
    tokens = sum(item.tokens for item in first)
    perplexity = math.exp(sum(item.nats for item in first) / tokens)
    note = f"{len(texts)} answers, {tokens:,} answer tokens, perplexity of fp32 on them {perplexity:.2f}"
    data = {name: [vars(item) for item in found] for name, found in losses.items()}
    report.section("What the bits cost", table(losses, texts), note, data=data)
    report.verdict(f"perplexity of {BAR} by fp32's", Cost.of(first).ratio, 1.01, at_least=False)
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
