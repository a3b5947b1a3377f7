"""The first stage of a training run: the dialogues and features that its settings ask for."""

from __future__ import annotations

import json
from pathlib import Path

from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import write_json
from treeeagle_edge.progress import Progress
from treeeagle_edge.training.data_file import read_dialogues, scripts_from_file
from treeeagle_edge.training.pieces import chat_pieces
from treeeagle_edge.training.processes import Place
from treeeagle_edge.training.run_settings import DataSettings, TrainingRun
from treeeagle_edge.training.source import TargetSource
from treeeagle_edge.training.starters import load_starters
from treeeagle_edge.training.writing import Scripts, need_disk, scripts_by_target, shards_for, write_dialogues

_MOST_KV = 0.4  # share of the free memory for keys and values of the dialogues that are written together


def write_features(run: TrainingRun, source: TargetSource, work: Path, place: Place, say: Progress) -> int:
    """Write the dialogues that `work` lacks. Returns the number of shards.

    Raises InputError for a file of dialogues that cannot be read, or where `work` belongs to another run;
    CannotRunError where memory or disk are too small.
    """
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
    """How many dialogues are written together: what was asked for, or less where memory for the KV cache is short."""
    config = source.checkpoint.config
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * data.length
    count = data.dialogues
    while count > 1 and count * each > _MOST_KV * source.free_memory:
        count //= 2
    return count


def _same_run(run: TrainingRun, source: TargetSource, dialogues: int, work: Path, place: Place) -> None:
    """Raise InputError where the folder holds features that other settings made."""
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
        write_json(path, identity)
