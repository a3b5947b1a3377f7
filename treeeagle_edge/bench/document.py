"""The result of a bench as one JSON document, the object of `-o json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from treeeagle_edge.bench.samples import PLAIN, TREE, BenchRun, Divergence, Sample
from treeeagle_edge.bench.stats import BenchRow, Figure, bench_row, repetition_speeds, scenario_rows
from treeeagle_edge.units import counted

SCHEMA = "treeeagle-bench/1"
_MARGIN_OF_A_TIE = 0.25  # logits: two steps of a bf16 number between 16 and 32, where the largest logits lie

Document = dict[str, Any]


def build_document(
    run: BenchRun,
    *,
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    memory: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Document:
    """The whole result in the form of `-o json`. docs/measurements.md explains its keys."""
    total = bench_row("all", run.samples, run.divergences)
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "settings": dict(settings),
        "scenarios": [_row_entry(row) for row in scenario_rows(run)],
        "memory": dict(memory),
        "summary": _row_entry(total),
        "notes": [*notes, *result_notes(run, total, settings)],
    }


def result_notes(run: BenchRun, total: BenchRow, settings: Mapping[str, Any]) -> list[str]:
    """Sentences about the result that a reader of the table must not miss."""
    notes: list[str] = []
    if run.interrupted:
        kept = f"{run.repetitions} complete" if run.repetitions else "part of the first"
        notes.append(f"interrupted: the figures hold {kept} of {run.limits.repetitions} repetitions")
    if run.arms == (PLAIN,):
        notes.append("only the plain arm ran, so there is no speedup and no parity to show")
    if total.speedup and total.speedup.mean < 1:
        notes.append(
            "the tree arm is slower than plain decoding here: --no-spec, or fewer --nodes, is faster"
        )
    if run.divergences:
        notes.append(divergence_note(run.divergences, settings))
    return notes + failure_notes(sum(sample.draft_failures for sample in run.samples))


def failure_notes(failures: int) -> list[str]:
    """What to say of rounds in which the head's scores were not finite; nothing where there were none."""
    if not failures:
        return []
    return [
        f"{counted(failures, 'round')} fell back to plain decoding because the head gave non-finite scores"
    ]


def divergence_note(divergences: Sequence[Divergence], settings: Mapping[str, Any]) -> str:
    """What a difference between the arms means at these settings."""
    count = counted(len(divergences), "answer") + (" differs" if len(divergences) == 1 else " differ")
    if settings.get("bits") == 32 or settings.get("exact"):
        return f"FAILURE: {count}, which must not happen at 32 bits or with --exact; please report it"
    margins = [item.margin for item in divergences if item.margin is not None]
    if len(margins) == len(divergences) and max(margins) <= _MARGIN_OF_A_TIE:
        return f"{count}: a tie within {max(margins):.3f} logits, which rounding decides; --bits 32 has none"
    return f"{count}: a margin near 0 is a tie that rounding decides, a large one is a defect; see --bits 32"


def _row_entry(row: BenchRow) -> dict[str, Any]:
    plain, tree = repetition_speeds(row.samples, PLAIN), repetition_speeds(row.samples, TREE)
    return {
        "name": row.name,
        "tokens": row.tokens,
        "plain_tps": _mean(row.plain_tps),
        "plain_tps_sd": _deviation(row.plain_tps),
        "tree_tps": _mean(row.tree_tps),
        "tree_tps_sd": _deviation(row.tree_tps),
        "speedup": _mean(row.speedup),
        "speedup_sd": _deviation(row.speedup),
        "tokens_per_round": row.tokens_per_round,
        "accepted_pct": row.accepted_pct,
        "acceptance_by_depth": list(row.acceptance_by_depth),
        "ttft_ms": _mean(row.ttft_ms),
        "ttft_ms_sd": _deviation(row.ttft_ms),
        "peak_bytes": row.peak_bytes,
        "parity": parity_text(row),
        "divergences": [asdict(item) for item in row.divergences],
        "repetitions": [
            {"plain_tps": plain.get(number), "tree_tps": tree.get(number)}
            for number in sorted({*plain, *tree})
        ],
        "samples": [_sample_entry(sample) for sample in row.samples],
    }


def _sample_entry(sample: Sample) -> dict[str, Any]:
    entry = asdict(sample)
    entry["token_ids"] = list(entry.pop("ids"))
    entry["offered"], entry["reached"] = list(sample.offered), list(sample.reached)
    entry["completion_tokens"] = len(sample.ids)
    entry["tps"] = sample.decoded / sample.decode_s if sample.decode_s > 0 and sample.decoded else None
    return entry


def _mean(figure: Figure | None) -> float | None:
    return figure.mean if figure else None


def _deviation(figure: Figure | None) -> float | None:
    return figure.deviation if figure else None


def parity_text(row: BenchRow) -> str | None:
    """Either "same", or the first difference with its margin and how many there are. None without a tree arm."""
    if not row.pairs:
        return None
    if not row.divergences:
        return "same"
    first = min(row.divergences, key=lambda item: item.token)
    margin = f" (margin {first.margin:.3f})" if first.margin is not None else ""
    rest = f", {len(row.divergences)} of {row.pairs} answers" if row.pairs > 1 else ""
    return f"differs @ token {first.token}{margin}{rest}"
