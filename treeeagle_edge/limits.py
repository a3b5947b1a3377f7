"""Sizes that the memory plan and the code that runs have to agree on."""

from __future__ import annotations

SHORTEST_CONTEXT = 2  # tokens: one of a prompt, one of an answer
PREFILL_CHUNK = 256  # rows of a prompt in one target pass: bounds the workspace, however long the prompt is
# features that wait on the device for their head rows: those of plain rounds, and of one round with a tree
FEATURES_KEPT = 128
CAPTURED_KINDS = 2  # ways to choose tokens whose graphs are kept: greedy, and the sampling that is asked for
# rows of the head's KV for drafted nodes, never committed: bounds (depth - 1) * branching
MAX_EXPANSIONS = 512
# scores that plain attention computes at a time; more where a single row has more
ATTENTION_SCORES = 8 * 2**20
MOST_THREADS = 256  # of the native kernels; thousands would end the program without a word
MOST_UNROLLED = 16  # drafting steps that a head is trained through, all beyond the last token of a dialogue
ROTARY_MARGIN = 64  # rotary positions beyond the context: the deepest draft tree at its very end needs fewer
