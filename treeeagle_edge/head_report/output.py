"""The report on a head as one JSON object, and as Markdown tables that are made from it.

The object of `-o json` has the schema "treeeagle-eval-head/1". Shares and probabilities are from 0 to 1. A figure is
null where no round ran, or where the target judged no node.

- `schema`; `environment` (versions, device and time, as of `treeeagle bench`);
- `settings`: `model`, `head`, `bits`, `head_bits`, `lm_head_bits`, `kernels`, `context`, `threads`, `profile`, `depth`,
  `branching`, `budgets` (a list of numbers of nodes, rising), `max_tokens`, `temperature`, `seed`, `limit`;
- `rows`: a list, one object a prompt file or built-in scenario; `summary`: the same keys, over all questions:
  - `name`, `questions` (answered once with each budget);
  - `budgets`: a list in the order of `settings.budgets`, each with
    - `nodes`: the budget, root not counted;
    - `tokens`: of the answers, the prefill's included; `rounds`: verify passes, the prefill is none;
    - `accepted`: nodes accepted; `tokens_per_round`: the mean of (accepted + 1) over rounds;
    - `first_token_acceptance`: share of the rounds with a tree in which the head's likeliest token was the target's;
    - `acceptance_by_depth`: from depth 1, share of the rounds that accepted a node there; the sum is
      tokens_per_round - 1;
  - `calibration`, over the judged nodes of the largest trees: those whose parent was accepted, so that the target
    either accepted or refused them:
    - `nodes`: the budget; `judged`: how many nodes; `expected_calibration_error` (arXiv 1706.04599);
    - `bins`: ten, each with `from`, `to`, `nodes`, `predicted` (mean of the probabilities that the head gave the nodes,
      each given its parent) and `observed` (share of the nodes that were accepted);
- `notes`: a list of sentences.

Every figure pools its rounds or nodes: a long answer weighs more than a short one. In greedy decoding the target's
likeliest token is accepted, however likely it was. So even a head that predicted the target's own distribution would
lie above the diagonal where it is surest, and below it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeeagle_edge.bench.document import Document, failure_notes
from treeeagle_edge.bench.run import environment_of
from treeeagle_edge.head_report.evaluate import EvalOptions, HeadReport
from treeeagle_edge.head_report.tally import Tally, bin_edges, total
from treeeagle_edge.markdown_table import aligned_table, number

if TYPE_CHECKING:
    from treeeagle_edge.runtime import Runtime

SCHEMA = "treeeagle-eval-head/1"


def build_document(report: HeadReport, options: EvalOptions, runtime: Runtime) -> Document:
    """The whole result in the form of `-o json`."""
    budgets = [shape.nodes for shape in options.shapes]
    answered = {answer.prompt_set for answer in report.answers}
    rows = [_row(report, budgets, item.name) for item in options.prompts if item.name in answered]
    return {
        "schema": SCHEMA,
        "environment": environment_of(runtime),
        "settings": {
            "model": runtime.model_name,
            "head": runtime.head_name,
            "bits": runtime.bits,
            "head_bits": runtime.plan.widths.head,
            "lm_head_bits": runtime.plan.widths.lm_head,
            "kernels": runtime.kernels,
            "context": runtime.context,
            "threads": options.settings.threads,
            "profile": options.settings.profile,
            "depth": options.shapes[0].depth,
            "branching": options.shapes[0].branching,
            "budgets": budgets,
            "max_tokens": options.params.max_tokens,
            "temperature": options.params.temperature,
            "seed": options.params.seed,
            "limit": options.limit,
        },
        "rows": rows,
        "summary": _row(report, budgets, None),
        "notes": [*runtime.notes, *_result_notes(report)],
    }


def _row(report: HeadReport, budgets: Sequence[int], name: str | None) -> dict[str, Any]:
    """The figures of one set of prompts, or of all where `name` is None."""
    tallies = [report.tallies(nodes, name) for nodes in budgets]
    totals = [total(found) for found in tallies]
    return {
        "name": name or "all",
        "questions": len(tallies[0]),
        "budgets": [_budget_entry(nodes, found) for nodes, found in zip(budgets, totals, strict=True)],
        "calibration": _calibration_entry(budgets[-1], totals[-1]),
    }


def _budget_entry(nodes: int, found: Tally) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "tokens": found.tokens,
        "rounds": found.rounds,
        "accepted": found.accepted,
        "tokens_per_round": found.tokens_per_round,
        "first_token_acceptance": found.first_token_acceptance,
        "acceptance_by_depth": list(found.acceptance_by_depth),
    }


def _calibration_entry(nodes: int, found: Tally) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "judged": found.judged,
        "expected_calibration_error": found.calibration_error,
        "bins": [
            {
                "from": low,
                "to": high,
                "nodes": item.nodes,
                "predicted": item.predicted / item.nodes if item.nodes else None,
                "observed": item.accepted / item.nodes if item.nodes else None,
            }
            for (low, high), item in zip(bin_edges(), found.bins, strict=True)
        ],
    }


def _result_notes(report: HeadReport) -> list[str]:
    """Sentences about the result that a reader of the tables must not miss."""
    notes = []
    if report.interrupted:
        notes.append(f"interrupted: the figures hold {report.answered} of {report.asked} questions")
    return notes + failure_notes(sum(answer.tally.failures for answer in report.answers))


def render(document: Document, output: str) -> str:
    """The document as "md" or "json", without a newline at the end."""
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False)
    largest = document["settings"]["budgets"][-1]
    error = document["summary"]["calibration"]["expected_calibration_error"]
    parts = [
        _heading(document),
        "Tokens per round, by the nodes of the tree:",
        _tokens_table(document),
        f"Acceptance with {largest} nodes. First token: the share of trees whose likeliest first token the target took."
        " Depth: the share of rounds whose walk got there.",
        _acceptance_table("prompts", [(row["name"], row["budgets"][-1]) for row in _all_rows(document)]),
        "The same over all prompts, by the nodes of the tree:",
        _acceptance_table(
            "nodes", [(f"{entry['nodes']}", entry) for entry in document["summary"]["budgets"]]
        ),
        f"Calibration with {largest} nodes: of drafted nodes whose parent was accepted, the head's probability for"
        " them and the share accepted:",
        _calibration_table(document["summary"]["calibration"]["bins"]),
        f"Expected calibration error: {number(error, 3)}",
        "\n".join(f"- {note}" for note in document["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(document: Document) -> str:
    chosen = document["settings"]
    greedy = chosen["temperature"] == 0
    parts = (
        str(chosen["model"]),
        f"{chosen['bits']}-bit",
        f"head {chosen['head']}, {chosen['head_bits']}-bit",
        str(document["environment"]["device"]),
        f"depth {chosen['depth']}, branching {chosen['branching']}",
        "greedy" if greedy else f"temperature {chosen['temperature']:g}, seed {chosen['seed']}",
        f"answers of at most {chosen['max_tokens']} tokens",
    )
    return " · ".join(parts)


def _all_rows(document: Document) -> list[Mapping[str, Any]]:
    return [*document["rows"], document["summary"]]


def _tokens_table(document: Document) -> str:
    budgets = document["settings"]["budgets"]
    header = ("prompts", "questions", "tokens", *(f"{nodes} nodes" for nodes in budgets))
    rows = [
        (
            row["name"].replace("|", "\\|"),
            f"{row['questions']:,}",
            f"{row['budgets'][-1]['tokens']:,}",
            *(number(entry["tokens_per_round"], 2) for entry in row["budgets"]),
        )
        for row in _all_rows(document)
    ]
    return aligned_table(header, rows)


def _acceptance_table(what: str, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """One line for each (name, budget entry)."""
    depths = max(len(entry["acceptance_by_depth"]) for _, entry in entries)
    header = (what, "rounds", "first token", *(f"depth {level}" for level in range(1, depths + 1)))
    rows = []
    for name, entry in entries:
        shares = [*entry["acceptance_by_depth"], *[None] * depths][:depths]
        cells = (_percent(share) for share in (entry["first_token_acceptance"], *shares))
        rows.append((name.replace("|", "\\|"), f"{entry['rounds']:,}", *cells))
    return aligned_table(header, rows)


def _calibration_table(bins: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{item['from']:.1f} to {item['to']:.1f}",
            f"{item['nodes']:,}",
            number(item["predicted"], 3),
            number(item["observed"], 3),
        )
        for item in bins
    ]
    return aligned_table(("probability", "nodes", "predicted", "accepted"), rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
