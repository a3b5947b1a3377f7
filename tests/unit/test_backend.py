"""Which kernels run a model: native ones where they can serve, PyTorch's elsewhere, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.planning.backend import Backend, choose_backend, must_compile
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.notes import kernels_note

DEMO = KNOWN_MODELS["smollm2-135m"]
NO_COMPILER = loader.Problem("no C++ compiler is installed", "install g++ or clang++")


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """The native library is there, until a test takes it away."""
    monkeypatch.setattr(loader, "problem", lambda: None)
    monkeypatch.setattr(loader, "not_kept", lambda: None)

    def take_away() -> None:
        monkeypatch.setattr(loader, "problem", lambda: NO_COMPILER)

    return take_away


def choose(wanted=None, *, bits=4, device="cpu", config=DEMO.config, head=DEMO.head) -> Backend:
    return choose_backend(wanted, bits=bits, device=device, config=config, head=head)


@pytest.mark.parametrize("wanted", [None, "native"])
@pytest.mark.parametrize("bits", [4, 8])
def test_four_and_eight_bits_on_a_cpu_are_native(wanted, bits):
    assert choose(wanted, bits=bits) == Backend(native=True)


@pytest.mark.parametrize(("bits", "device"), [(16, "cpu"), (32, "cpu"), (4, "cuda:0"), (8, "cuda")])
def test_what_was_never_native_needs_no_excuse(bits, device, compiler):
    assert choose(bits=bits, device=device) == Backend(native=False)
    compiler()
    assert choose(bits=bits, device=device) == Backend(native=False)


def test_torch_is_used_where_it_was_asked_for(compiler):
    assert choose("torch") == Backend(native=False)
    compiler()
    assert choose("torch") == Backend(native=False)


def test_without_a_compiler_torch_takes_over_and_the_reason_is_kept(compiler):
    compiler()
    assert choose() == Backend(False, NO_COMPILER.reason, NO_COMPILER.hint)


@pytest.mark.parametrize(
    ("wanted", "bits", "device", "compiles"),
    [
        (None, None, "cpu", True),
        ("native", 4, "cpu", True),
        ("torch", 4, "cpu", False),
        (None, 16, "cpu", False),
        (None, 4, "cuda:0", False),
    ],
)
def test_a_first_start_is_known_beforehand(monkeypatch, wanted, bits, device, compiles):
    monkeypatch.setattr(loader, "must_compile", lambda: True)
    assert must_compile(wanted, bits=bits, device=device) == compiles
    monkeypatch.setattr(loader, "must_compile", lambda: False)
    assert not must_compile(wanted, bits=bits, device=device)


def test_native_kernels_that_are_compiled_at_every_start_say_why(monkeypatch):
    monkeypatch.setattr(loader, "not_kept", lambda: loader.Problem("they cannot be kept", "set it"))
    found = choose()
    assert found == Backend(True, "they cannot be kept; they were compiled for this run alone", "set it")
    assert kernels_note(found, 4, None) is None  # nothing runs slower


@pytest.mark.parametrize("part", ["config", "head"])
@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "head_dim"])
def test_a_width_that_is_no_multiple_of_32_falls_back(part, name):
    """Of the target or of its head: both run on the same kernels."""
    shapes = {"config": DEMO.config, "head": DEMO.head}
    shapes[part] = replace(shapes[part], **{name: 80})
    found = choose(**shapes)
    assert not found.native
    assert (found.reason, found.hint) == ("a width of 80 is no multiple of 32", None)


def test_a_model_without_a_head_is_judged_alone():
    assert choose(head=None) == Backend(native=True)


@pytest.mark.parametrize(
    ("choices", "reason", "hint"),
    [
        ({"bits": 16}, "they hold 4 or 8 bits, not 16", "use --bits 4 or --bits 8"),
        ({"device": "cuda:0"}, "they are for the CPU, and the device is cuda:0", "use --device cpu"),
        ({"config": replace(DEMO.config, head_dim=16)}, "a width of 16 is no", "use --kernels torch"),
    ],
)
def test_native_kernels_that_cannot_serve_are_refused(choices, reason, hint):
    with pytest.raises(CannotRunError) as error:
        choose("native", **choices)
    assert error.value.message.startswith(f"native kernels cannot run this: {reason}")
    assert error.value.hint == hint and error.value.exit_code == 3


def test_native_kernels_without_a_compiler_are_refused(compiler):
    compiler()
    with pytest.raises(CannotRunError, match="no C\\+\\+ compiler is installed") as error:
        choose("native")
    assert error.value.hint == NO_COMPILER.hint


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_an_unknown_name_is_refused_with_the_choices(device):
    with pytest.raises(UsageError, match="there are no kernels named triton") as error:
        choose("triton", device=device)
    assert error.value.hint == "use native or torch"
