"""Training a head from beginning to end: dialogues, corpus, training, and the finished folder. Every stage resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from treeeagle_edge import __version__
from treeeagle_edge.bench.prompts import builtin_prompts, read_prompts
from treeeagle_edge.errors import InputError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.tokenizer import Tokenizer
from treeeagle_edge.training.corpus import Corpus, draft_vocabulary, open_corpus
from treeeagle_edge.training.data_file import read_dialogues, scripts_from_file
from treeeagle_edge.training.export import write_head
from treeeagle_edge.training.initial import (
    from_head,
    from_last_layer,
    head_config,
    lm_head_rows,
    open_initial,
)
from treeeagle_edge.training.module import TrainableHead
from treeeagle_edge.training.objective import Teacher
from treeeagle_edge.training.overlap import Excluded
from treeeagle_edge.training.pieces import chat_pieces
from treeeagle_edge.training.plot import can_plot, draw_training
from treeeagle_edge.training.processes import Group, Place
from treeeagle_edge.training.source import TargetSource, find_target
from treeeagle_edge.training.starters import load_starters
from treeeagle_edge.training.trainer import Record, Trainer, TrainSettings
from treeeagle_edge.training.writing import Scripts, need_disk, scripts_by_target, shards_for, write_dialogues

_MOST_KV = 0.4  # of the free memory: what keys and values of the dialogues that are written together may take
_LONGER = 16  # rotary positions beyond the longest dialogue, for the unrolled steps

Say = Callable[[str], None]


@dataclass(frozen=True)
class DataSettings:
    """What a head learns from."""

    tokens: int = 1_000_000  # about so many are written
    dialogues: int = 128  # written side by side; a shard holds as many
    length: int = 512  # tokens of the longest dialogue
    seed: int = 0
    file: Path | None = None  # dialogues of the person's own
    regenerate: bool = False  # keep the questions of `file`, and let the target answer
    exclude: tuple[Path, ...] = ()  # questions that no training text may share eight words in a row with


@dataclass(frozen=True)
class TrainingRun:
    """Everything that was asked for."""

    target: RunSettings  # the model and how it will run; its head is not looked at
    out: Path
    data: DataSettings
    training: TrainSettings
    draft_vocab: int = 8192
    init: str | None = None  # a head to start from
    layout: str = "safeailab"
    save_every: float = 180.0  # seconds between checkpoints


@dataclass(frozen=True)
class Outcome:
    """What a finished run tells."""

    folder: Path
    config: HeadConfig
    record: Record
    summary: dict[str, Any]


def train(run: TrainingRun, place: Place, say: Say) -> Outcome:
    """Write dialogues, train on them and save the head in `run.out`; stages that are done are not done again.

    Raises InputError for files that cannot be read or belong to another run, CannotRunError where memory or disk do not
    suffice or the loss is not finite.
    """
    source = find_target(run.target, say)
    if run.init is not None:  # told before hours of writing; not kept, since it would take memory meanwhile
        open_initial(run.init, source.name, source.checkpoint.config)
    group = Group(place, cpu=source.device == "cpu")
    work = run.out / "work"
    shards = _write(run, source, work, place, say)
    group.wait()
    tokenizer = source.tokenizer()
    corpus = open_corpus(work / "features", shards, tokenizer.decode, _excluded(run.data.exclude))
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
        _write_json(run.out / "training.json", summary)
        if can_plot():
            draw_training(record, f"a head for {source.name}, {source.bits}-bit", run.out / "training.png")
    group.wait()
    return Outcome(run.out, head.config, record, summary)


def _write(run: TrainingRun, source: TargetSource, work: Path, place: Place, say: Say) -> int:
    """Write what is missing of the dialogues; the number of shards."""
    data = run.data
    tokenizer = source.tokenizer()
    pieces = chat_pieces(tokenizer)
    dialogues = _side_by_side(source, data)
    if data.file is None:
        scripts: Scripts = scripts_by_target(pieces, load_starters(tokenizer))
        shards = shards_for(data.tokens, dialogues)
    else:
        given = read_dialogues(data.file)
        scripts = scripts_from_file(given, tokenizer, pieces, dialogues, regenerate=data.regenerate)
        shards = -(-len(given) // dialogues)
    _same_run(run, source, dialogues, work, place)
    config = source.checkpoint.config
    need_disk(work / "features", shards, dialogues, config.hidden_size, len(config.default_taps), say)
    write_dialogues(
        lambda: source.load(context=data.length, max_rows=dialogues), config.default_taps, scripts, pieces,
        work / "features", shards=shards, dialogues=dialogues, length=data.length, seed=data.seed, place=place, say=say,
    )  # fmt: skip
    return shards


def _side_by_side(source: TargetSource, data: DataSettings) -> int:
    """How many dialogues are written together: as many as were asked for, or what keys and values have room for."""
    config = source.checkpoint.config
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * data.length
    count = data.dialogues
    while count > 1 and count * each > _MOST_KV * source.free_memory:
        count //= 2
    return count


def _same_run(run: TrainingRun, source: TargetSource, dialogues: int, work: Path, place: Place) -> None:
    """Refuse to mix features of different runs in one folder."""
    data = run.data
    identity = {
        "target": source.name, "bits": source.bits, "kernels": source.kernels, "dialogues": dialogues,
        "length": data.length, "seed": data.seed, "file": None if data.file is None else str(data.file.resolve()),
        "regenerate": data.regenerate,
    }  # fmt: skip
    path = work / "data.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        different = [key for key, value in identity.items() if before.get(key) != value]
        if different:
            key = different[0]
            raise InputError(
                f"{run.out} holds features of another run: its {key} is {before.get(key)}, not {identity[key]}",
                "give the same options again, or another --out",
            )
    elif place.first:
        _write_json(path, identity)


def _start(
    run: TrainingRun, source: TargetSource, tokenizer: Tokenizer, corpus: Corpus
) -> tuple[TrainableHead, Teacher]:
    """The head before its first step, and what it is taught by."""
    checkpoint, device = source.checkpoint, torch.device(source.device)
    target = checkpoint.config
    size = min(run.draft_vocab, target.vocab_size)
    ids = draft_vocabulary(corpus.counts, size, target.vocab_size, tokenizer.stop_ids)
    if run.init is None:
        config = head_config(target, size)
        tensors = from_last_layer(checkpoint, config, ids, run.training.seed)
    else:
        initial = open_initial(run.init, source.name, target)
        config = replace(initial.config, draft_vocab_size=size)
        tensors = from_head(initial, ids)
    dtype = torch.bfloat16 if source.fast_bf16 else torch.float32
    head = TrainableHead(
        config,
        {name: tensor.to(device) for name, tensor in tensors.items()},
        length=run.data.length + _LONGER,
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
    """The built-in prompts, by which every head is judged, and the questions of `files`."""
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
