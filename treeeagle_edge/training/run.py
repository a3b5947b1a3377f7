"""Training a head from beginning to end: dialogues, corpus, training, and the finished folder.

Every stage can be interrupted: the same command goes on where the run stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from treeeagle_edge import __version__
from treeeagle_edge.bench.prompts import builtin_prompts, read_prompts
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.json_file import write_json
from treeeagle_edge.limits import MOST_UNROLLED
from treeeagle_edge.planning.known_models import usual_head
from treeeagle_edge.progress import Progress
from treeeagle_edge.tokenizer.codec import Tokenizer
from treeeagle_edge.training.corpus import Corpus, draft_vocabulary, open_corpus
from treeeagle_edge.training.export import write_head
from treeeagle_edge.training.features import write_features
from treeeagle_edge.training.initial import (
    from_head,
    from_last_layer,
    lm_head_rows,
    open_initial,
)
from treeeagle_edge.training.module import TrainableHead
from treeeagle_edge.training.objective import Teacher
from treeeagle_edge.training.overlap import Excluded
from treeeagle_edge.training.plot import can_plot, draw_training
from treeeagle_edge.training.processes import Group, Place
from treeeagle_edge.training.run_settings import TrainingRun
from treeeagle_edge.training.source import TargetSource, find_target
from treeeagle_edge.training.trainer import Record, Trainer


@dataclass(frozen=True)
class Outcome:
    """Results of a finished run."""

    folder: Path
    config: HeadConfig
    record: Record
    summary: dict[str, Any]


def train(run: TrainingRun, place: Place, say: Progress) -> Outcome:
    """Write dialogues, train on them and save the head in `run.out`. Finished stages are not done again.

    Raises UsageError for dialogues longer than the target reads, InputError for files that cannot be read or that
    belong to another run, CannotRunError where memory or disk are too small or the loss is not finite.
    """
    source = find_target(run.target, say)
    longest = source.checkpoint.config.max_position
    if run.data.length > longest:
        raise UsageError(
            f"--length is {run.data.length:,}, and {source.name} reads {longest:,} tokens at most",
            f"use {longest} or less",
        )
    if run.init is not None:
        # only to report a wrong file before hours of writing; it is opened again later, to take no memory meanwhile
        open_initial(run.init, source.name, source.checkpoint.config)
    excluded = _excluded(run.data.exclude)  # for the same reason
    with Group(place, cpu=source.device == "cpu") as group:
        return _train_in(group, run, source, excluded, say)


def _train_in(
    group: Group, run: TrainingRun, source: TargetSource, excluded: Excluded, say: Progress
) -> Outcome:
    place, work = group.place, run.out / "work"
    shards = write_features(run, source, work, place, say)
    group.wait()
    tokenizer = source.tokenizer()
    corpus = open_corpus(work / "features", shards, tokenizer.decode, excluded)
    say(
        f"{len(corpus.train):,} dialogues to learn from, {corpus.answer_tokens:,} tokens of answers; kept aside:"
        f" {len(corpus.held_out)}; left out: {corpus.repeated} said before, {corpus.excluded} near a judged question"
    )
    if not corpus.train or not corpus.held_out:
        raise InputError("there are too few dialogues to learn from", "write more of them: --tokens")
    head, teacher = _start(run, source, tokenizer, corpus)
    trainer = Trainer(
        head,
        teacher,
        corpus,
        run.training,
        work / "training.ckpt",
        group=group,
        say=say,
        save_every=run.save_every,
    )
    record = trainer.run()
    summary = _summary(run, source, corpus, record, place.count)
    if place.first:
        write_head(
            run.out,
            head.config,
            {name: tensor.cpu() for name, tensor in head.tensors().items()},
            teacher.target_ids.cpu(),
            layout=run.layout,
            target_name=source.name,
            default_taps=source.checkpoint.config.default_taps,
        )
        write_json(run.out / "training.json", summary)
        if can_plot():
            draw_training(record, f"a head for {source.name}, {source.bits}-bit", run.out / "training.png")
    group.wait()
    return Outcome(run.out, head.config, record, summary)


def _start(
    run: TrainingRun, source: TargetSource, tokenizer: Tokenizer, corpus: Corpus
) -> tuple[TrainableHead, Teacher]:
    """The head before its first step, and the target's tables that it learns from."""
    checkpoint, device = source.checkpoint, torch.device(source.device)
    target = checkpoint.config
    size = min(run.draft_vocab, target.vocab_size)
    ids = draft_vocabulary(corpus.counts, size, target.vocab_size, tokenizer.stop_ids)
    if run.init is None:
        config = usual_head(target, draft_vocab=size, theta=target.rope.theta)
        tensors = from_last_layer(checkpoint, config, ids, run.training.seed)
    else:
        initial = open_initial(run.init, source.name, target)
        config = replace(initial.config, draft_vocab_size=size)
        tensors = from_head(initial, ids)
    dtype = torch.bfloat16 if source.fast_bf16 else torch.float32
    head = TrainableHead(
        config,
        {name: tensor.to(device) for name, tensor in tensors.items()},
        length=run.data.length + MOST_UNROLLED,  # the last steps lie beyond the longest dialogue
        dtype=dtype,
    )
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool)
    drafted[ids] = True
    teacher = Teacher(
        checkpoint.tensor("model.embed_tokens.weight").to(device, dtype),
        (lm_head_rows(checkpoint, ids) * target.logit_scale).to(device),
        ids.to(device),
        drafted.to(device),
    )
    return head, teacher


def _excluded(files: Sequence[Path]) -> Excluded:
    """Texts that training may not repeat: the built-in prompts, which judge every head, and those of `files`."""
    prompts = list(builtin_prompts())
    for file in files:
        prompts += read_prompts(file, turns="all")
    return Excluded(turn for prompt in prompts for turn in prompt.turns)


def _summary(
    run: TrainingRun, source: TargetSource, corpus: Corpus, record: Record, processes: int
) -> dict[str, Any]:
    """What the model card and the documentation say about this run."""
    data = asdict(run.data)
    data["exclude"] = [path.name for path in run.data.exclude]
    data["file"] = None if run.data.file is None else run.data.file.name
    return {
        "version": __version__,
        "target": source.name,
        "bits": source.bits,
        "kernels": source.kernels,
        "draft_vocab": run.draft_vocab,
        "init": run.init,
        "processes": processes,
        "data": {
            **data,
            "train_dialogues": len(corpus.train),
            "train_tokens": corpus.tokens,
            "answer_tokens": corpus.answer_tokens,
            "held_out_dialogues": len(corpus.held_out),
            "left_out_repeated": corpus.repeated,
            "left_out_excluded": corpus.excluded,
        },
        "training": asdict(run.training),
        "minutes": record.seconds / 60,
        "answer_tokens_seen": record.tokens,
        "loss": record.loss,
        "held_out": record.held_out,
    }
