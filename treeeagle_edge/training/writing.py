"""The first stage of training a head: the target writes dialogues, shard by shard.

A shard depends only on the seed and on its number, so that any shard may be missing and several processes may write.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.progress import Progress
from treeeagle_edge.training.dialogues import Script, self_written
from treeeagle_edge.training.generate import DialogueWriter
from treeeagle_edge.training.pieces import ChatPieces
from treeeagle_edge.training.processes import Place
from treeeagle_edge.training.shards import bytes_per_token, shard_path, write_shard
from treeeagle_edge.training.starters import Starter
from treeeagle_edge.units import format_gb

TOKENS_PER_DIALOGUE = 310  # as measured; from it follows how many dialogues a number of tokens takes
DISK_SLACK = 1.2  # dialogues may turn out longer than usual

Scripts = Callable[[int, Sequence[np.random.Generator]], list[Script]]


def shards_for(tokens: int, dialogues: int) -> int:
    """How many shards of `dialogues` hold about `tokens`."""
    return max(1, -(-tokens // (dialogues * TOKENS_PER_DIALOGUE)))


def scripts_by_target(pieces: ChatPieces, starters: Sequence[Starter]) -> Scripts:
    """Scripts in which the target writes both parts of the dialogue."""
    return lambda shard, rngs: [self_written(pieces, starters, rng) for rng in rngs]


def need_disk(folder: Path, shards: int, dialogues: int, hidden_size: int, taps: int, say: Progress) -> None:
    """Say how much disk the missing shards will take. Raises CannotRunError where less is free."""
    missing = sum(not shard_path(folder, index).exists() for index in range(shards))
    need = int(missing * dialogues * TOKENS_PER_DIALOGUE * bytes_per_token(hidden_size, taps) * DISK_SLACK)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise CannotRunError(
            f"the features need about {format_gb(need)} in {folder}, and {format_gb(free)} are free",
            "make room, or train on fewer tokens: --tokens",
        )
    if missing:
        say(f"the features will take about {format_gb(need)} in {folder}, of {format_gb(free)} free")


def write_dialogues(
    target: Callable[[], TargetModel],
    taps: Sequence[int],
    scripts: Scripts,
    pieces: ChatPieces,
    folder: Path,
    *,
    shards: int,
    dialogues: int,
    length: int,
    seed: int,
    place: Place,
    say: Progress,
) -> None:
    """Write this process's share of the missing shards: `dialogues` dialogues of up to `length` tokens in each.

    `target` loads the model; it is called only where a shard is missing.
    """
    mine = [i for i in range(place.index, shards, place.count) if not shard_path(folder, i).exists()]
    if not mine:
        return
    writer = DialogueWriter(target(), taps, dialogues, length)
    written, started = 0, time.monotonic()
    for done, index in enumerate(mine, start=1):
        rngs = [np.random.default_rng((seed, index, number)) for number in range(dialogues)]
        parts = scripts(index, rngs)  # the last shard of a file may hold fewer
        shard = writer.write(parts, rngs[: len(parts)], pieces.stop_ids)
        write_shard(shard_path(folder, index), shard)
        written += sum(map(len, shard))
        seconds = time.monotonic() - started
        left = (len(mine) - done) * seconds / done / 60
        say(
            f"dialogues: shard {done} of {len(mine)}, {written:,} tokens, {written / seconds:,.0f} a second,"
            f" {left:.0f} min left"
        )
