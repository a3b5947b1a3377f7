"""One direction of imports: a module may import its own layer and those below it, never one above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "treeeagle_edge"
FOLDERS = {PACKAGE: PACKAGE, "kernels": f"{PACKAGE}.kernels", "profiles": f"{PACKAGE}.profiles"}

# Lowest first. Names are relative to the package; a new module needs a place here before anything may import it.
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": ("", "errors", "heap", "markdown_table", "paths", "progress", "units"),
    "values": (
        "model_config",
        "head_config",
        "sampling_params",
        "tree",
        "rounds",
        "settings",
        "kv",
        "kv.store",
        "widths",
        "drafting",
        "drafting.growth_rule",
        "drafting.round_shapes",
        "limits",
        "engine",
        "engine.protocol",
    ),
    "kernels": ("kernels", "kernels.*", "profiles"),
    "files": (
        *(
            "json_file",
            "text_file",
            "gguf_file",
            "checkpoint.tensor_shapes",
            "config.architectures",
            "config",
            "config.*",
            "checkpoint",
            "checkpoint.*",
            "checkpoint.head",
            "checkpoint.head_files",
            "checkpoint.head_layouts",
        ),
        *(
            "tokenizer.chat_template",
            "tokenizer",
            "tokenizer.*",
            "config.generation_defaults",
            "model",
            "model.int8_rows",
            "model.linear",
            "model.rope",
        ),
    ),
    "model": (
        "model.target",
        "model.target_*",
        "model.head",
        "model.kernel_shapes",
        "model.native_*",
        "kv.pool",
        "kv.sequence",
        "sampling",
        "model.small_tensors",
        "model.pass_rows",
    ),
    "protocols": ("model.protocols",),
    "drafter": (
        *(
            "drafting.online_line",
            "drafting.acceptance",
            "drafting.costs",
            "drafting.growth",
            "drafting.drafter",
            "drafting.controller",
            "drafting.lookup",
            "drafting.lookup_acceptance",
            "drafting.lookup_branch",
            "drafting.shape_choice",
        ),
        *("device", "device.noise", "device.tree", "device.branch", "device.walk", "device.round"),
    ),
    "engine": (
        "engine.loop",
        "engine.passes",
        "engine.calibrate",
        "engine.refusals",
        "engine.host_rounds",
        "engine.device_start",
        "device.rounds",
        "device.cuda_graphs",
    ),
    "session": ("chat", "chat.*"),
    "beside": (
        *(
            "planning",
            "planning.backend",
            "planning.memory_plan",
            "planning.torch_bytes",
            "planning.graph_bytes",
            "planning.native_bytes",
            "planning.card_shares",
            "hardware",
            "hardware.*",
            "planning.known_models",
            "planning.memory_profile",
            "planning.alternatives",
            "planning.notes",
            "planning.run_plan",
            "planning.model_shapes",
            "planning.layer_split",
            "planning.speed_estimate",
        ),
        *(
            "sources",
            "sources.model_names",
            "sources.demo_model",
            "hub",
            "hub.*",
            "sources.pip_download",
            "sources.pull",
        ),
    ),
    "runtime": ("model_loading", "runtime"),
    "tools": (
        "bench",
        "bench.*",
        "gpu_check",
        "gpu_check.*",
        "head_report",
        "head_report.*",
        "profiling",
        "profiling.*",
    ),
    "training": ("training", "training.*"),
    "cli": ("cli", "cli.*", "__main__"),
}
BESIDE_MAY_IMPORT = (
    "errors",
    "values",
    "kernels",
    "files",
    "beside",
)  # not how a round works

# Modules that a start of the command line, or a plan, imports: none of them may pull in what takes seconds.
LIGHT = (
    *LAYERS["errors"],
    *(
        "model_config",
        "head_config",
        "sampling_params",
        "tree",
        "rounds",
        "settings",
        "config.generation_defaults",
        "widths",
        "drafting",
        "drafting.round_shapes",
    ),
    *(
        "planning.backend",
        "planning.memory_plan",
        "planning.torch_bytes",
        "planning.graph_bytes",
        "planning.native_bytes",
        "planning.card_shares",
        "planning.alternatives",
        "planning.notes",
        "planning.run_plan",
        "planning.model_shapes",
        "planning.layer_split",
        "planning.memory_profile",
        "planning.known_models",
        "hardware",
        "hardware.*",
        "sources.model_names",
        "sources.demo_model",
        "hub",
        "hub.*",
        "sources.pip_download",
        "sources.pull",
        "cli",
        "cli.*",
    ),
)
HEAVY = (
    "torch",
    "transformers",
    "bitsandbytes",
    "gguf",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "matplotlib",
)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found: dict[str, Path] = {}
    for folder, name in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = file
    return found


def relative(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def layers_of(module: str) -> list[str]:
    name = relative(module)
    return [
        layer for layer, patterns in LAYERS.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _nodes(tree: ast.AST, at_import_time: bool) -> Iterator[ast.AST]:
    """Every node, or only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_time and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _nodes(node, at_import_time)


def names_in(source: str, known: dict[str, Path], at_import_time: bool = False) -> set[str]:
    """Dotted names that a source imports: modules of the package by their full name, others as written."""
    names: set[str] = set()
    for node in _nodes(ast.parse(source), at_import_time):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in known else str(node.module))
    return names


@cache
def imports(module: str, at_import_time: bool = False) -> frozenset[str]:
    source = modules()[module].read_text(encoding="utf-8")
    return frozenset(names_in(source, modules(), at_import_time))


def arrow_back(importer: str, imported: str) -> str | None:
    """A sentence for an import that the layers forbid, None for one they allow."""
    order = list(LAYERS)
    (high,), (low,) = layers_of(importer), layers_of(imported)
    if order.index(low) > order.index(high) or (high == "beside" and low not in BESIDE_MAY_IMPORT):
        return f"{relative(importer)} ({high}) imports {relative(imported)} ({low})"
    return None


def test_every_module_has_one_place() -> None:
    places = {relative(module): layers_of(module) for module in modules()}
    assert {name: place for name, place in places.items() if len(place) != 1} == {}


def test_every_name_in_the_layers_is_a_module() -> None:
    names = [relative(module) for module in modules()]
    patterns = [pattern for group in LAYERS.values() for pattern in group]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)] == []


def test_no_arrow_points_back() -> None:
    arrows = [(module, name) for module in modules() for name in imports(module) if name in modules()]
    assert len(arrows) > 50
    assert [sentence for arrow in arrows if (sentence := arrow_back(*arrow))] == []


def test_an_arrow_back_would_be_seen() -> None:
    known = modules()
    source = "def late():\n    from treeeagle_edge.engine import loop as engine\n    import treeeagle_edge.cli.app\n"
    names = names_in(source, known)
    assert names == {f"{PACKAGE}.engine.loop", f"{PACKAGE}.cli.app"}
    assert names_in(source, known, at_import_time=True) == set()
    assert all(arrow_back(f"{PACKAGE}.tree", name) for name in names)
    assert arrow_back(f"{PACKAGE}.planning.memory_plan", f"{PACKAGE}.engine.loop")
    assert arrow_back(f"{PACKAGE}.engine.loop", f"{PACKAGE}.planning.memory_plan")
    assert arrow_back(f"{PACKAGE}.engine.loop", f"{PACKAGE}.tree") is None


def test_no_circle_at_import_time() -> None:
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join(map(relative, (*path, module)))
        if module in state:
            return
        state[module] = "open"
        for name in sorted(imports(module, at_import_time=True)):
            if name in modules() and name != module:
                visit(name, (*path, module))
        state[module] = "done"

    for module in modules():
        visit(module, ())
    assert set(state.values()) == {"done"}


@pytest.mark.parametrize(
    "module",
    [m for m in modules() if any(fnmatchcase(relative(m), pattern) for pattern in LIGHT)],
    ids=relative,
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    paths = {module: (module,)}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for name in imports(current, at_import_time=True):
            assert name.partition(".")[0] not in HEAVY, " -> ".join(map(relative, (*paths[current], name)))
            if name in modules() and name not in paths:
                paths[name] = (*paths[current], name)
                waiting.append(name)


def test_kernels_and_profiles_are_imported_through_the_package() -> None:
    bare = [
        (relative(module), name)
        for module in modules()
        for name in imports(module)
        if name.partition(".")[0] in ("kernels", "profiles")
    ]
    assert bare == []
