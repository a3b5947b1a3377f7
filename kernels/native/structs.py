"""The C structures of `src/te.h` and its numbers for formats and tensors."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

FORMATS = {"q8": 0, "q4_0": 1, "q4_1": 2}
FORMAT_OF_BITS = {8: "q8", 4: "q4_1"}  # what floats are quantised to
MATRICES = {
    "q": 0,
    "k": 1,
    "v": 2,
    "o": 3,
    "gate": 4,
    "up": 5,
    "down": 6,
    "embedding": 16,
    "lm_head": 17,
    "fc": 18,
}
VECTORS = {
    "attention_norm": 32, "mlp_norm": 33, "q_bias": 34, "k_bias": 35, "v_bias": 36, "o_bias": 37,
    "q_norm": 38, "k_norm": 39, "final_norm": 48, "hidden_norm": 49,
}  # fmt: skip


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelConfig(Structure):
    """`te_model_config`: shapes of a target; max_rows bounds the rows of one pass."""

    _fields_ = [
        *_fields(
            c_int64, "layers hidden intermediate heads kv_heads head_dim vocabulary max_positions max_rows"
        ),
        *_fields(c_float, "eps embedding_scale residual_scale logit_scale"),
    ]


class HeadConfig(Structure):
    """`te_head_config`: shapes of an EAGLE-3 head; `vocabulary` is the draft's."""

    _fields_ = [
        *_fields(c_int64, "hidden feature_width intermediate heads kv_heads head_dim vocabulary"),
        *_fields(c_int64, "max_positions max_rows max_scored max_expanded"),
        ("eps", c_float),
        *_fields(c_int32, "norm_before_residual norm_output"),
    ]


class Pass(Structure):
    """`te_pass`: the rows of one pass and the slots they read, in reading order."""

    _fields_ = [
        ("rows", c_int64),
        *_fields(c_void_p, "ids positions slots prefix"),
        ("prefix_count", c_int64),
        ("tree", c_void_p),
        ("tree_count", c_int64),
        *_fields(c_void_p, "visible parents own own_counts"),
        ("own_stride", c_int64),
    ]


class KV(Structure):
    """`te_kv`: bf16 keys and values [layers, slots, kv_heads, head_dim]."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("slots", c_int64)]


class Wanted(Structure):
    """`te_wanted`: what a target pass hands back."""

    _fields_ = [
        ("logit_rows", c_void_p),
        ("logit_count", c_int64),
        *_fields(c_void_p, "logits best peaks hidden taps"),
        ("tap_count", c_int64),
        ("features", c_void_p),
    ]


class HeadInput(Structure):
    """`te_head_input`: true features, or states of an earlier call and which of them the rows read."""

    _fields_ = [*_fields(c_void_p, "features hidden hidden_rows"), ("hidden_count", c_int64)]


class HeadWanted(Structure):
    """`te_head_wanted`: what a draft pass hands back."""

    _fields_ = [
        *_fields(c_void_p, "hidden scored_rows"),
        *_fields(c_int64, "scored_count top"),
        *_fields(c_void_p, "log_probs ids"),
    ]


class TreeInput(Structure):
    """`te_tree_input`: the rows with true features that a draft tree begins with, and slots for its own."""

    _fields_ = [
        ("rows", c_int64),
        *_fields(c_void_p, "ids table"),
        *_fields(c_int64, "prefix_count position"),
        *_fields(c_void_p, "features feature_rows"),
        *_fields(c_int64, "feature_count scratch scratch_count"),
    ]


class Growth(Structure):
    """`te_growth`: how a draft tree grows, to a fixed shape or, with `verify`, as long as it pays."""

    _fields_ = [
        *_fields(c_int64, "depth branching nodes"),
        ("stop_ids", c_void_p),
        ("stop_count", c_int64),
        *_fields(c_void_p, "verify draft continues calibration"),
        ("least", c_double),
    ]


class Tree(Structure):
    """`te_tree`: where a draft tree goes."""

    _fields_ = [
        *_fields(c_void_p, "tokens parents depths log_probs"),
        *_fields(c_int64, "capacity rows levels"),
    ]


class Sampling(Structure):
    """`te_sampling`: how a token is drawn from a row of scores."""

    _fields_ = [
        ("temperature", c_double),
        ("top_k", c_int64),
        *_fields(c_double, "top_p min_p"),
        ("seed", c_uint64),
    ]
