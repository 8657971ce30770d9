"""benchmarks/gpu.py, shrunk and on the CPU: its formulas against what runs, its tables, and what it refuses."""

import importlib
import math
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import ROOT
from processes import printed_by
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import peers
import pretend

magrpo = importlib.import_module("magrpo")  # found by gpu.py, as it finds its script

MODELS = ("qwen2.5-0.5b", "qwen3-1.7b")
every_model = pytest.mark.parametrize("name", MODELS)


def prepare(name):
    """Workload, agent, prompts and completions of the model, shrunk."""
    workload = gpu.shrunk(peers.WORKLOADS[name], 16)
    # as few tokens as make the tests quick, and as many layers as tell a layer from the model
    workload = replace(workload, config=workload.config | {"vocab_size": 500, "num_hidden_layers": 3})
    torch.manual_seed(0)
    agent = gpu.make_agent(workload.config, "cpu")
    prompts = torch.randint(500, (workload.num_tasks, workload.prompt_tokens)).tolist()
    size = (workload.num_tasks, workload.num_generations, workload.completion_tokens)
    rows = [(p, ids, 1.0) for p, group in zip(prompts, torch.randint(500, size).tolist()) for ids in group]
    return workload, agent, prompts, rows


@pytest.mark.parametrize("name, parameters", [(MODELS[0], 494_032_768), (MODELS[1], 1_720_574_976)])
def test_the_configs_are_those_of_the_models(name, parameters):
    assert gpu.make_agent(peers.WORKLOADS[name].config, "meta").model.num_parameters() == parameters


@every_model
@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("in_pieces", (False, True))
def test_flops_are_those_that_run(name, checkpointing, in_pieces, monkeypatch):
    _, agent, _, rows = prepare(name)
    if in_pieces:  # of 100 tokens, as though the vocabulary were so large
        agent.model.config.vocab_size = 2**26 // 100
    agent.share = not checkpointing
    if checkpointing:
        agent.model.gradient_checkpointing_enable()
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query, key, value, attn_mask=None, is_causal=False, **kwargs):
        rows, heads, queries, size = query.shape
        shape = (rows, heads, queries, key.shape[2])
        # 0 is added to the scores of what is seen, -inf to the others
        seen = torch.ones(shape, dtype=torch.bool) if attn_mask is None else (attn_mask == 0).expand(shape)
        calls.append((4 * size * (seen.tril() if is_causal else seen).sum().item(), 4 * size * math.prod(shape)))
        return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    most = 512
    # the backend that consists of plain products, which the counter knows
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        gpu.training(magrpo, agent, rows, most)
    ran = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    batches = list(magrpo.micro_batches(agent, rows, most))
    flops = gpu.training_flops(agent.model, batches, checkpointing)
    assert len(batches) > 1 and (flops["trunk_again"] > 0) == checkpointing
    assert (flops["head_again"] > 0) == in_pieces
    # forward is a third of what is counted as needed; recomputed layers come to attention a second time
    forward = sum(seen for seen, _ in calls) / (2 if checkpointing else 1)
    assert flops["attention"] == 3 * forward
    # a product of the backend has hidden pairs too, and two in backward for each in forward
    rectangles = sum(full for _, full in calls) * (2 if checkpointing else 3)
    assert ran["aten.bmm"] == pytest.approx(rectangles, rel=0.02)  # rotary angles are a small product too
    again = forward if checkpointing else 0
    linear = sum(flops.values()) - flops["attention"] - again
    assert linear == ran["aten.mm"] + ran.get("aten.addmm", 0)


class Weights(TorchDispatchMode):
    """Adds up the bytes of weights that products read."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # `linear` comes whole in inference mode: hidden states, matrix, bias; else the bias is first, or there is none
        matrix_and_bias = {"linear": args[1:], "mm": args[1:], "addmm": args[::2]}
        self.bytes += sum(x.nbytes for x in matrix_and_bias.get(func.overloadpacket.__name__, ()) if x is not None)
        return func(*args, **(kwargs or {}))


@every_model
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bytes_are_those_that_are_read(name, dtype, monkeypatch):
    workload, agent, prompts, _ = prepare(name)
    if dtype is torch.bfloat16:  # as on CUDA
        monkeypatch.setattr(magrpo, "autocast", lambda model: torch.autocast("cpu", torch.bfloat16))
    attend, held, normed = magrpo.attention, [], []

    def spy(states, t, module, *args, **kwargs):
        out = attend(states, t, module, *args, **kwargs)
        if t is not None:  # keys and values of the prompts, and of the completions' own tokens
            prompts, (keys, values) = states[module]
            held.append(sum(x.nbytes for x in (*prompts, keys[..., : t + 1], values[:, :, : t + 1])))
        return out

    monkeypatch.setattr(magrpo, "attention", spy)
    for module in agent.model.base_model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(lambda module, *_: normed.append(module.weight.nbytes))
    most = 512  # three of the four rows in a batch
    with Weights() as read:
        gpu.sampling(magrpo, agent, prompts, workload, most)
    weights, cache = gpu.decode_bytes(agent.model, workload, most, dtype.itemsize)
    assert cache == sum(held) > 0
    assert weights == read.bytes + sum(normed)
    one_batch, same = gpu.decode_bytes(agent.model, workload, 2 * most, dtype.itemsize)
    assert (one_batch * 2, same) == (weights, cache)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_cache_held_is_that_of_sampling(dtype, monkeypatch):
    _, agent, prompts, _ = prepare(MODELS[1])
    if dtype is torch.bfloat16:  # as on CUDA
        monkeypatch.setattr(magrpo, "autocast", lambda model: torch.autocast("cpu", torch.bfloat16))
    assert gpu.cache_held(magrpo, agent, prompts[0]) == gpu.cache_bytes_per_token(agent.model, dtype.itemsize)


def test_disagreement_is_that_of_sampling_and_training(monkeypatch):
    workload, agent, _, _ = prepare(MODELS[1])
    assert gpu.disagreement(magrpo, agent, workload, 512) < 1e-5
    exact = magrpo.token_logprobs
    monkeypatch.setattr(magrpo, "token_logprobs", lambda *args: exact(*args) + 0.25)
    assert gpu.disagreement(magrpo, agent, workload, 512) == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("part, table", [("sampling", "sampling"), ("training", "training"), ("measure", "step")])
def test_memory_that_does_not_suffice_is_said(part, table, monkeypatch):
    def too_much(*_):
        raise torch.cuda.OutOfMemoryError

    args = gpu.Args(device="cpu", shrink=16, rounds=1, max_batch_tokens=[8192])
    assert gpu.measure(args, too_much) is None
    monkeypatch.setattr(gpu, part, too_much if part != "measure" else lambda *_, **__: None)
    tables = SimpleNamespace(step=[], sampling=[], training=[])
    gpu.measure_model(args, magrpo, SimpleNamespace(bandwidth=1.0, trunk=1.0, head=1.0), MODELS[0], tables)
    for row in vars(tables)[table]:
        assert "out of memory" in row and len(row) == len(gpu.COLUMNS[table].split(" | "))
    assert len(tables.step) == 1 and len(tables.training) == 2 * (part == "training")
    assert len(tables.sampling) == (part != "measure")


def test_decoding_that_cannot_be_recorded_does_not_end_the_measurement(monkeypatch):
    monkeypatch.setattr(gpu, "sampling", lambda *_: magrpo.fail("--cuda-graphs: cannot be recorded"))
    args, tables = gpu.Args(device="cpu", shrink=16, rounds=1), SimpleNamespace(step=[], sampling=[], training=[])
    gpu.measure_model(args, magrpo, SimpleNamespace(bandwidth=1.0, trunk=1.0, head=1.0), MODELS[0], tables)
    assert len(tables.sampling) == len(args.max_batch_tokens)
    for row in tables.sampling:
        assert "cannot be recorded" in row and len(row) == len(gpu.COLUMNS["sampling"].split(" | "))


def test_a_recording_that_fails_leaves_nothing_behind(monkeypatch):
    """As in torch 2.11: a recording that fails leaves the generator as it is inside of one, where it draws nothing."""
    generator = SimpleNamespace(recorded=False)
    generator.graphsafe_set_state = lambda _: setattr(generator, "recorded", False)
    draw, forward = torch.rand_like, Qwen2RotaryEmbedding.forward
    streams = []

    class Recording(pretend.Recording):
        inside = False

        def __enter__(self):
            generator.recorded = Recording.inside = True
            return super().__enter__()

        def __exit__(self, *exception):
            generator.recorded, Recording.inside = bool(exception[0]), False
            super().__exit__(*exception)

    def rand_like(x):
        assert Recording.inside or not generator.recorded, "Offset increment outside graph capture"
        return draw(x)

    def waiting(self, x, position_ids):  # as no model may that is recorded
        return forward(self, x, position_ids + 0 * position_ids.max().item())

    make_agent = gpu.make_agent
    with pretend.pretended_gpu():
        for name, value in {
            "graph": Recording,
            "default_generators": [generator],
            "current_device": lambda: 0,
            "default_stream": lambda: "the default stream",
            "set_stream": streams.append,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 1,
            "max_memory_allocated": lambda: 1,
            "synchronize": lambda *_: None,
            "Stream": lambda: pretend.STREAMS.append(SimpleNamespace(device=pretend.CUDA)) or pretend.STREAMS[-1],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "Generator", lambda device: None)
        monkeypatch.setattr(torch, "rand_like", rand_like)
        monkeypatch.setattr(Qwen2RotaryEmbedding, "forward", waiting)
        monkeypatch.setattr(gpu, "make_agent", lambda *given: on_gpu(make_agent(*given)))
        args, tables = gpu.Args(shrink=32, rounds=1), SimpleNamespace(step=[], sampling=[], training=[])
        gpu.measure_model(args, magrpo, SimpleNamespace(bandwidth=1.0, trunk=1.0, head=1.0), MODELS[0], tables)
    assert ["cannot be recorded" in row for row in tables.sampling] == [False, True, False, True]
    assert len(tables.training) == 4 and streams == ["the default stream"] * 2


def on_gpu(agent):
    agent.model.to("cuda")
    return agent


def test_the_peers_get_arguments_that_they_know(monkeypatch):
    commands, popen = [], subprocess.Popen
    said = ["it installs", "", "commit x", "", "| a |", "", "rows in /x, logs in /y"]

    def fake(command, **kwargs):
        commands.append(command)
        code = 3 if "--trl-rows" in command else 0
        return popen([sys.executable, "-c", f"print(*{said}, sep='\\n'); exit({code})"], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", fake)
    assert gpu.run_peers(gpu.Args(peers_args="--updates 2")) == (0, "commit x\n\n| a |")
    known = tyro.cli(peers.Args, args=commands[0][2:])
    output = str(Path("results") / "peers-gpu.csv")
    assert known == peers.Args(workloads=list(MODELS), device="cuda", updates=2, output=output)
    code, text = gpu.run_peers(gpu.Args(peers_args="--trl-rows 8"))
    assert code == 3 and "exit code 3" in text and "| a |" not in text


def test_the_tables_are_there(tmp_path):
    output = tmp_path / "results" / "gpu.md"
    flags = ("--device", "cpu", "--shrink", 32, "--rounds", 1, "--models", MODELS[1], "--no-peers")
    flags += ("--max-batch-tokens", 8192, "--output", output)
    printed = printed_by(ROOT / "benchmarks" / "gpu.py", *flags)
    text = output.read_text()
    assert text.strip() in printed
    for part in ("commit ", f"torch {version('torch')}", "seed=1", "divided by 32", "Not measured (--no-peers)."):
        assert part in text
    tables = {}
    for section in text.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
        tables[section.splitlines()[0]] = [dict(zip(lines[0], line)) for line in lines[2:]] if lines else []
        assert all(len(line) == len(lines[0]) for line in lines)
    assert {title: len(rows) for title, rows in tables.items()} == {
        "Machine": 3, "Sampling": 1, "Training": 2, "Optimizer step": 1, "Peers": 0,
    }  # fmt: skip
    zero = {"lm_head again, TFLOP", "else again, TFLOP"}  # nothing is computed again where all fits
    for row in (row for rows in tables.values() for row in rows):
        for column, cell in row.items():
            if column not in ("what", "model", "checkpointing", "--cuda-graphs"):
                value = float(cell.strip("*").split()[0])
                assert math.isfinite(value) and (value > 0 or (value == 0 and column in zero)), (column, cell)
    for title in ("Sampling", "Training"):
        for row in tables[title]:
            # tokens/s, seconds and ratio are of the same measurement: 4 * 8 completions of 8 tokens
            seconds = float(row["s (lowest to highest)"].split()[0])
            assert float(row["tokens/s"]) * seconds == pytest.approx(256, rel=0.02)
            assert float(row["s/floor"].strip("*")) == pytest.approx(seconds / float(row["floor, s"]), rel=0.02)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "no CUDA device, so nothing was measured"),
        ({"device": "cpu"}, "--shrink 16"),
        ({"device": "cpu", "shrink": 3}, "divided by its heads"),
        ({"device": "cpu", "shrink": 16, "models": ["gpt"]}, "use some of"),
        ({"device": "cpu", "shrink": 16, "rounds": 0}, "1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with a GPU too
    with pytest.raises(SystemExit) as refusal:
        gpu.main(gpu.Args(**changes, output=str(tmp_path / "gpu.md")))
    said = capsys.readouterr()
    assert refusal.value.code == 2 and sentence in said.err and said.err.count("\n") == 1
    assert said.out == "" and not list(tmp_path.iterdir())
