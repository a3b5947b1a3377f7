"""`treeeagle profile` as a person meets it: whole transcripts on described machines, and one run on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from textwrap import dedent

import pytest

from treeeagle_edge import profile_checks, profile_report
from treeeagle_edge.cli.app import main
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware import Hardware
from treeeagle_edge.hardware_cpu import Cpu, Ram
from treeeagle_edge.hardware_nvidia import Gpu
from treeeagle_edge.kernels.native import loader

GB = 10**9
CPU = Cpu("Ryzen 7 5800X", 8, 16, ("avx2", "fma"))
RAM = Ram(32 * GB, 28 * GB, limited=False)
BARE = Hardware("cpu", "cpu: no NVIDIA driver answered", CPU, RAM)
RTX_3080 = Gpu(
    0, "NVIDIA GeForce RTX 3080", 12_884_901_888, 12_348_030_976, (8, 6), "580.95.05", "GPU-1", usable=True
)
RTX_3070 = Gpu(
    0, "NVIDIA GeForce RTX 3070", 8_589_934_592, 8_053_063_680, (8, 6), "580.95.05", "GPU-1", usable=True
)


def with_card(card: Gpu) -> Hardware:
    why = f"cuda:0: {card.name}, as faked"
    return Hardware("cuda:0", why, CPU, RAM, (card,), cuda_version="12.8")


@pytest.fixture
def machine(monkeypatch):
    """Make `treeeagle profile` see a described machine; nothing is downloaded, 500 GB of disk are free."""

    def describe(here: Hardware) -> None:
        def detect(device=None):
            if device is not None and device.startswith("cuda") and not here.gpus:
                reason = "device cuda cannot be used: no NVIDIA driver answered"
                raise CannotRunError(reason, "use --device cpu")
            return here if device != "cpu" else BARE

        usage = namedtuple("usage", "total used free")(GB, 0, 500 * GB)
        versions = [profile_checks.Check("versions", "ok", "python 3.11.9, torch 2.13.0, triton 3.9.0")]
        monkeypatch.setattr(profile_report, "detect", detect)
        monkeypatch.setattr(loader, "problem", lambda: None)
        monkeypatch.setattr(profile_checks, "native_isa", lambda: "avx2")
        monkeypatch.setattr(profile_checks, "check_versions", lambda: iter(versions))
        monkeypatch.setattr(profile_checks.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(profile_checks, "download_folder", lambda _: profile_checks.Path("/cache"))

    monkeypatch.setattr("treeeagle_edge.run_plan._local_model", lambda name: None)
    return describe


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["profile", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_transcript_of_a_card_that_fits(machine, capsys):
    """Expectations row 45: memory need unknown before loading. The plan and the verdict come first."""
    machine(with_card(RTX_3080))
    code, out, err = run(capsys, "--fast")
    assert out == dedent(
        """\
        ok    python 3.11.9, torch 2.13.0, triton 3.9.0
        ok    cuda:0: NVIDIA GeForce RTX 3080, as faked
        ok    cuda:0 NVIDIA GeForce RTX 3080, compute capability 8.6, driver 580.95.05, FREE
        ok    Ryzen 7 5800X, 8 cores (16 threads), avx2, fma
        ok    28.0 GB of 32.0 GB of memory available
        ok    500.0 GB free in /cache; 17.2 GB still to be fetched
        plan  Qwen/Qwen3-8B, 4-bit, AngelSlim/Qwen3-8B_eagle3, on cuda:0 by profile gpu-12gb
              weights (NF4)         3.9 GB   36 layers
              embedding, lm_head    2.5 GB   151,936 tokens
              head (fp16)          0.80 GB   32,000 draft tokens
              KV, 8,473 slots       1.3 GB   context 8,192 and a tree of 24 nodes
              workspace            0.30 GB   chunks of 256 rows
              reserve              0.80 GB   desktop and driver
              total               9.6 of 12.3 GB, fits; the longest context that fits is 24,299
        speed ceiling 177 tok/s plain at 912 GB/s (data sheet); expect 85-125 plain, 89-210 with the tree
        verdict  fits. next: treeeagle pull && treeeagle chat (fetches 17.2 GB first)
        """
    ).replace("FREE", "torch for CUDA 12.8, 12.3 GB free of 12.9 GB")
    assert (code, err) == (0, "")


def test_transcript_of_an_8_gb_card(machine, capsys):
    machine(with_card(RTX_3070))
    code, out, _ = run(capsys, "--fast")
    lines = out.splitlines()
    assert "      total               9.6 of 8.1 GB, does not fit; no context fits" in lines
    assert lines[-1] == (
        "verdict  cannot run: NVIDIA GeForce RTX 3070 has 8.6 GB, and the smallest profile for a card, gpu-12gb, needs "
        "12.0 GB; what fits: --model openbmb/MiniCPM4-8B --bits 4; --model Qwen/Qwen3-4B --bits 4; --device cpu"
    )
    assert code == 3


@pytest.mark.parametrize("choice", ["--model Qwen/Qwen3-4B --bits 4", "--device cpu"])
def test_what_is_said_to_fit_does(machine, capsys, choice):
    machine(with_card(RTX_3070))
    code, out, _ = run(capsys, "--fast", *choice.split())
    assert code == 0 and "verdict  fits" in out


def test_says_which_device_and_why(machine, capsys):
    """Expectations row 46: it runs on the CPU and nobody says why. A line of the report says which device and why."""
    machine(BARE)
    code, out, _ = run(capsys, "--fast")
    assert "ok    cpu: no NVIDIA driver answered" in out.splitlines() and code == 0
    card = Gpu(0, "NVIDIA GeForce RTX 3080", 12 * GB, 11 * GB, (8, 6), "580.95.05")
    why, hint = (
        "cpu: torch is a CPU build, so NVIDIA GeForce RTX 3080 stays unused",
        "install the CUDA build of torch",
    )
    machine(Hardware("cpu", why, CPU, RAM, (card,), hint))
    _, out, _ = run(capsys, "--fast")
    assert f"warn  {why}\n      hint: {hint}\n" in out
    assert "ok    unused NVIDIA GeForce RTX 3080" in out


def test_a_card_that_is_not_here_can_be_planned_for(machine, capsys):
    machine(BARE)
    code, out, _ = run(capsys, "--fast", "--gpu-memory", "12", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert (
        "warn  planning for a card with 12.0 GB, whether or not it is here\n      hint: run this without"
        in out
    )
    assert "speed ceiling 72 tok/s plain at 360 GB/s (data sheet of an RTX 3060)" in out
    assert "speed ceiling 183 tok/s plain at 912 GB/s (data sheet of an RTX 3080 with 12 GB)" in out
    assert out.splitlines()[-1] == (
        "verdict  fits. next on the machine with the card: treeeagle pull meta-llama/Llama-3.1-8B-Instruct --head && "
        "treeeagle chat --model meta-llama/Llama-3.1-8B-Instruct (fetches 16.9 GB first)"
    )
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            "--model Qwen/Qwen3-8B",
            "treeeagle pull Qwen/Qwen3-8B --head && treeeagle chat --model Qwen/Qwen3-8B",
        ),
        (
            "--model Qwen/Qwen2-7B-Instruct --context 4096",
            "treeeagle pull Qwen/Qwen2-7B-Instruct && treeeagle chat --model Qwen/Qwen2-7B-Instruct --context 4096",
        ),
        (
            "--model Qwen/Qwen3-8B --head-bits 8 --lm-head-bits 8",
            "treeeagle pull Qwen/Qwen3-8B --head && "
            "treeeagle chat --model Qwen/Qwen3-8B --head-bits 8 --lm-head-bits 8",
        ),
        ("--device cuda:0", "treeeagle pull Qwen/Qwen3-8B --head && treeeagle chat --device cuda:0"),
        (
            "--model meta-llama/Llama-3.1-8B-Instruct --head yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
            "treeeagle pull meta-llama/Llama-3.1-8B-Instruct && "
            "treeeagle pull yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B && treeeagle chat "
            "--model meta-llama/Llama-3.1-8B-Instruct --head yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        ),
    ],
)
def test_what_to_type_next_fetches_what_is_missing(machine, capsys, arguments, command):
    machine(with_card(RTX_3080))
    data = json.loads(run(capsys, "--fast", "--json", *arguments.split())[1])
    assert data["verdict"]["next_command"] == command
    narrow = 8 if "--head-bits" in arguments else 16
    assert data["plan"]["widths"] == {"layers": 4, "lm_head": narrow, "head": narrow}


def test_transcript_of_a_cpu_with_native_kernels(machine, capsys, tmp_path):
    machine(BARE)
    profile = tmp_path / "small.yaml"
    profile.write_text(
        "{name: small, device: cpu, memory_gb: 2, model: smollm2-135m, bits: 4, context: 4096, "
        "tree: {depth: 5, branching: 4, nodes: 15}, reserve_gb: 0.8}"
    )
    code, out, err = run(capsys, "--fast", "--profile", str(profile))
    assert out == dedent(
        """\
        ok    python 3.11.9, torch 2.13.0, triton 3.9.0
        ok    cpu: no NVIDIA driver answered
        ok    Ryzen 7 5800X, 8 cores (16 threads), avx2, fma
        ok    28.0 GB of 32.0 GB of memory available
        ok    native kernels are there and use avx2
        ok    500.0 GB free in /cache; 0.19 GB still to be fetched
        plan  smollm2-135m, 4-bit, smollm2-135m-eagle3, on cpu by profile small
              weights (4-bit blocks)   0.07 GB   30 layers
              embedding, lm_head       0.03 GB   49,152 tokens
              head (8-bit blocks)      0.01 GB   10,240 draft tokens
              KV, 4,240 slots          0.10 GB   context 4,096 and a tree of 15 nodes
              workspace                0.03 GB   chunks of 256 rows
              reserve                  0.80 GB   the program and the desktop
              total                   1.0 of 28.0 GB, fits; the longest context that fits is 8,192, all the model has
        speed ceiling 414 tok/s plain at 40 GB/s (assumed, not measured); expect 231-361 plain, 143-369 with the tree
        verdict  fits. next: treeeagle chat --profile FILE (fetches 0.19 GB first)
        """
    ).replace("FILE", str(profile))
    assert (code, err) == (0, "")


def test_a_cpu_without_a_compiler_plans_8_bits_and_a_small_tree_and_says_why(machine, capsys, monkeypatch):
    machine(BARE)
    found = loader.Problem("no C++ compiler is installed", "install g++ or clang++")
    monkeypatch.setattr(loader, "problem", lambda: found)
    code, out, _ = run(capsys, "--fast")
    assert (
        "warn  runs on PyTorch's kernels, which are slower, with 8 bits and a small tree in place of profile cpu's "
        "4 bits: no C++ compiler is installed\n      hint: install g++ or clang++\n"
    ) in out
    assert "plan  smollm2-135m, 8-bit" in out and "a tree of 3 nodes" in out and code == 0
    code, out, _ = run(capsys, "--fast", "--kernels", "native")
    assert out.splitlines()[-1] == (
        "verdict  cannot run: native kernels cannot run this: no C++ compiler is installed; what fits: --kernels torch"
    )
    assert code == 3
    code, out, _ = run(capsys, "--fast", "--kernels", "torch")
    assert (
        out.splitlines()[-1].startswith("verdict  fits. next: treeeagle chat --kernels torch") and code == 0
    )


def test_too_long_a_context_names_what_fits(machine, capsys):
    machine(BARE)
    model = "meta-llama/Llama-3.1-8B-Instruct"
    code, out, _ = run(
        capsys, "--fast", "--gpu-memory", "12", "--model", model, "--bits", "8", "--context", "32768"
    )
    assert (
        "warn  8-bit weights on CUDA (LLM.int8) buy room, not speed\n      hint: use --bits 4 for speed"
        in out
    )
    verdict = out.splitlines()[-1]
    assert verdict.startswith("verdict  does not fit, 4.1 GB too much; what fits: --context ") and code == 3
    for option in verdict.partition("what fits: ")[2].split("; ")[:2]:
        given = {"--bits": "8", "--context": "32768"}
        words = option.split()
        given.update(zip(words[::2], words[1::2], strict=True))
        arguments = [word for pair in given.items() for word in pair]
        assert run(capsys, "--fast", "--gpu-memory", "12", "--model", model, *arguments)[0] == 0, option


def test_a_missing_cuda_is_no_crash(machine, capsys):
    machine(BARE)
    code, out, _ = run(capsys, "--fast", "--device", "cuda")
    assert (
        "fail  device cuda cannot be used: no NVIDIA driver answered\n      hint: use --device cpu\n" in out
    )
    assert out.splitlines()[-1] == (
        "verdict  cannot run: device cuda cannot be used: no NVIDIA driver answered; what fits: --device cpu"
    )
    assert code == 3


def test_native_windows_is_no_crash(machine, capsys, monkeypatch):
    def detect(device=None):
        raise CannotRunError("native Windows is not supported", "install WSL2")

    machine(BARE)
    monkeypatch.setattr(profile_report, "detect", detect)
    code, out, _ = run(capsys, "--fast")
    assert out.splitlines()[-3:] == [
        "fail  native Windows is not supported",
        "      hint: install WSL2",
        "verdict  cannot run: native Windows is not supported",
    ]
    assert code == 3
    assert json.loads(run(capsys, "--fast", "--json")[1])["plan"] is None


def test_json_and_save_carry_the_same_report(machine, capsys, tmp_path):
    machine(with_card(RTX_3080))
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, "--fast", "--json", "--save", str(file))
    data = json.loads(out)
    assert json.loads(file.read_text()) == data and code == 0
    assert set(data) == {"schema", "checks", "hardware", "plan", "speed", "verdict"}
    assert data["hardware"]["device"] == "cuda:0" and data["hardware"]["gpus"][0]["total"] == RTX_3080.total
    plan = data["plan"]
    assert plan["total"] == sum(line["nbytes"] for line in plan["lines"]) <= plan["budget"] == RTX_3080.free
    assert plan["fits"] and plan["context"] == 8192 and plan["tree"]["nodes"] == 24
    assert data["speed"][0]["source"] == "data sheet" and data["speed"][0]["bandwidth"] == 912
    assert data["verdict"] == {
        "can_run": True,
        "text": "fits. next: treeeagle pull && treeeagle chat (fetches 17.2 GB first)",
        "next_command": "treeeagle pull && treeeagle chat",
        "alternatives": [],
    }


def test_a_report_that_cannot_be_saved(machine, capsys, tmp_path):
    machine(BARE)
    code, _, err = run(capsys, "--fast", "--save", str(tmp_path / "no" / "such.json"))
    assert code == 1 and "cannot be written" in err and "no such file" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bits", "3"], 2, "error: --bits is 3"),
        (
            ["--kernels", "triton"],
            2,
            "error: there are no kernels named 'triton'\n hint: use native or torch",
        ),
        (["--device", "tpu"], 2, "error: device 'tpu' is unknown"),
        (
            ["--context", "9000"],
            2,
            "error: context is 9,000, which is out of range for this model\n hint: use 1 to 8,192",
        ),
        (["--gpu-memory", "0"], 2, "error: gpu-memory is 0, which is out of range"),
        (["--gpu-memory", "12", "--device", "cpu"], 2, "error: --gpu-memory plans for a card"),
        (["--profile", "gpu-12bg"], 1, "error: profile 'gpu-12bg' is unknown\n hint: did you mean gpu-12gb?"),
        (["--model", "Qwen/Qwen3-8"], 1, "did you mean Qwen/Qwen3-8B?"),
        (["--model", "qwen3-8b"], 1, "did you mean Qwen/Qwen3-8B?"),
        (["--head", __file__], 1, "is not a head\n hint: "),
        (["--contxt", "1"], 2, "error: there is no option --contxt"),
    ],
)
def test_wrong_input_is_one_sentence_and_a_hint(capsys, arguments, code, message):
    got, out, err = run(capsys, "--fast", *arguments)
    assert (got, out) == (code, "")
    assert message in err and "Traceback" not in err and err.count("\n") == 2


def test_slow_is_told_from_slower(machine, capsys):
    machine(BARE)
    out = run(capsys, "--fast", "--bits", "32", "--model", "Qwen/Qwen3-8B")[1]
    assert "speed ceiling 1.3 tok/s plain" in out


def test_a_profile_for_another_device_is_warned_about(machine, capsys):
    machine(BARE)
    _, out, _ = run(capsys, "--fast", "--profile", "gpu-12gb")
    assert "warn  profile gpu-12gb is made for cuda, and this runs on cpu\n" in out


def test_a_busy_or_old_card_is_warned_about(machine, capsys):
    old = Gpu(0, "NVIDIA GeForce RTX 2080 Ti", 13 * GB, 9 * GB, (7, 5), "580.95.05", "GPU-1", usable=True)
    machine(with_card(old))
    _, out, _ = run(capsys, "--fast")
    assert "hint: cards before compute capability 8.0 have no bf16" in out
    assert "warn  4.0 GB of NVIDIA GeForce RTX 2080 Ti is taken by other programs\n" in out


def test_a_full_disk_stops_a_download_before_it_starts(machine, capsys, monkeypatch):
    machine(BARE)
    usage = namedtuple("usage", "total used free")(GB, 0, GB)
    monkeypatch.setattr(profile_checks.shutil, "disk_usage", lambda _: usage)
    code, out, _ = run(capsys, "--fast", "--model", "Qwen/Qwen3-1.7B")
    assert "fail  1.0 GB free in /cache, and Qwen/Qwen3-1.7B needs 3.7 GB\n      hint: free some space" in out
    assert code == 3 and out.splitlines()[-1].startswith("verdict  cannot run: 1.0 GB free")


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.14.0", ">=3.11,<3.14", False),
        ("3.13.5", ">=3.11,<3.14", True),
        ("5.0.0rc1", ">=5.0", True),
        ("1.2", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, wanted, fits):
    assert profile_checks.in_range(version, wanted) is fits


def test_versions_out_of_range_or_missing_are_named(monkeypatch):
    found = {"torch": "2.1.0", "transformers": None, "bitsandbytes": "0.45", "triton": "3.9"}
    ranges = {"python": ">=3.99", "torch": ">=2.11", "bitsandbytes": ">=0.50"}
    monkeypatch.setattr(profile_checks, "_version", found.get)
    monkeypatch.setattr(profile_checks, "_declared_ranges", lambda: ranges)
    checks = {check.name: check for check in profile_checks.check_versions()}
    assert checks["python"].status == "fail" and "outside >=3.99" in checks["python"].text
    assert checks["torch"].status == "fail" and checks["torch"].text == "torch 2.1.0 is outside >=2.11"
    assert checks["transformers"].status == "fail" and "is not installed" in checks["transformers"].text
    assert (
        checks["bitsandbytes"].status == "warn"
        and "pip install 'bitsandbytes>=0.50'" in checks["bitsandbytes"].hint
    )
    assert "triton" not in checks


def test_our_own_ranges_are_found():
    ranges = profile_checks._declared_ranges()
    assert ">=3.11" in ranges["python"] and ranges["torch"].startswith(">=2.")
    assert "matplotlib" not in ranges, "an extra is not asked for"


def test_fast_json_imports_no_torch_and_loads_nothing():
    code = (
        "import sys; from treeeagle_edge.cli.app import main;"
        "code = main(['profile', '--fast', '--json', '--device', 'cpu']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'bitsandbytes')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["plan"]["model"] == "smollm2-135m" and data["verdict"]["can_run"]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_everything_runs_on_this_machine(capsys, monkeypatch, kernels):
    """The live checks, shortened: both layers near fp32, backends agree, bandwidth measured and used."""
    if kernels == "native" and loader.problem() is not None:
        pytest.skip("native kernels need a C++ compiler")
    from treeeagle_edge import profile_live

    monkeypatch.setattr(profile_live, "_BANDWIDTH_BYTES", 8 * 2**20)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_SECONDS", 0.01)
    monkeypatch.setattr(profile_live, "_VERIFY_BYTES", 2**20)
    monkeypatch.setattr(profile_live, "_NATIVE_VERIFY_BYTES", 2**20)
    code, out, err = run(capsys, "--json", "--device", "cpu", "--kernels", kernels)
    assert code == 0 and "measuring memory bandwidth" in err
    data = json.loads(out)
    checks = {check["name"]: check for check in data["checks"]}
    for name in ("4-bit layer", "8-bit layer", "kernels", "bandwidth"):
        assert checks[name]["status"] == "ok", checks[name]
    named = "reference, exact, native agree" if kernels == "native" else "reference, exact agree"
    assert named in checks["kernels"]["text"]
    assert ("a native 4-bit layer" in checks["4-bit layer"]["text"]) is (kernels == "native")
    (speed,) = data["speed"]
    assert speed["source"] == "measured" and speed["bandwidth"] > 0 and 1 <= speed["verify_cost"] <= 64
    assert speed["ceiling"] == pytest.approx(speed["bandwidth"] * 1e9 / speed["step_bytes"])


@pytest.mark.parametrize(("copy", "read"), [(50.0, 40.0), (40.0, 50.0)])
def test_the_faster_of_copying_and_reading_is_the_bandwidth(machine, capsys, monkeypatch, copy, read):
    from treeeagle_edge import profile_live

    machine(BARE)
    monkeypatch.setattr(profile_live, "check_layers", lambda *_, **__: iter(()))
    monkeypatch.setattr(profile_live, "check_kernels", lambda *_, **__: iter(()))
    monkeypatch.setattr(profile_live, "measure_verify_cost", lambda *_: 1.2)
    monkeypatch.setattr(profile_live, "measure_bandwidth", lambda _: profile_live.Bandwidth(copy, read))
    (speed,) = json.loads(run(capsys, "--json")[1])["speed"]
    assert (speed["source"], speed["bandwidth"]) == ("measured", 50.0)
    assert profile_live.describe_bandwidth(profile_live.Bandwidth(copy, read), 90.0, "cuda:0").status == "ok"


def test_a_layer_that_does_not_run_fails_its_own_width_only(machine, capsys, monkeypatch):
    from treeeagle_edge import profile_live

    def broken(weight, bias, *, bits, device, dtype):
        if bits == 4:
            raise CannotRunError("bitsandbytes cannot be imported", "install it again")
        return lambda x: x.float() @ (weight.T * (1.0 if bits == 8 else 2.0))

    machine(BARE)
    monkeypatch.setattr(profile_live, "make_linear", broken)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_SECONDS", 0.001)
    monkeypatch.setattr(profile_live, "measure_verify_cost", lambda plan, device: 1.5)
    code, out, _ = run(capsys, "--bits", "8", "--kernels", "torch")
    assert (
        "fail  a 4-bit layer does not run on cpu: bitsandbytes cannot be imported\n      hint: install it again"
        in out
    )
    assert "ok    an 8-bit layer runs on cpu" in out and code == 0
    code, out, _ = run(capsys, "--bits", "4", "--kernels", "torch")
    assert code == 3 and "verdict  cannot run: a 4-bit layer does not run on cpu" in out


def test_a_wrong_kernel_is_caught(monkeypatch):
    import torch

    from treeeagle_edge import profile_live
    from treeeagle_edge.kernels import dispatch

    def wrong(query, keys, values, view):
        return torch.zeros_like(query)

    monkeypatch.setitem(dispatch._dispatcher.kernels["attention"], "wrong", wrong)
    first, last = list(profile_live.check_kernels(torch.device("cpu"), native=False))
    assert first.status == "fail" and "attention backend wrong is 1.0e+00 from the reference" in first.text
    assert last.text.endswith("reference, exact agree") and last.status == "ok"
    assert dispatch.current_backend() == "reference"


@pytest.mark.skipif(loader.problem() is not None, reason="native kernels need a C++ compiler")
def test_wrong_native_kernels_are_caught(monkeypatch):
    import torch

    from treeeagle_edge import profile_live, profile_native

    monkeypatch.setattr(profile_native, "native_attention", lambda query, *rest: query * 0)
    monkeypatch.setattr(profile_native, "native_layer", lambda weight, x, bits: x @ weight.T * (bits / 8))
    first, last = list(profile_live.check_kernels(torch.device("cpu"), native=True))
    assert first.status == "fail" and "attention backend native is 1.0e+00 from the reference" in first.text
    assert last.text.endswith("reference, exact agree")
    four, eight = list(profile_live.check_layers(torch.device("cpu"), native=True))
    assert four.status == "fail" and "a native 4-bit layer runs on cpu, 50.0 % from fp32" in four.text
    assert eight.status == "ok"
