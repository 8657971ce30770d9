"""The benchmarks run at a small size, and count what they say they count."""

import importlib
import importlib.util
import re
import sys

import pytest
import torch
import tyro
from conftest import ROOT
from processes import printed_by


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_products_are_recorded_with_their_backward_passes_and_nothing_else_is(monkeypatch):
    throughput = load("throughput", monkeypatch)
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with throughput.Products() as products:
        (x @ weight).relu().sum().backward()  # one product forward, two backward
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        with torch.inference_mode():  # as sampling is
            torch.nn.functional.linear(x, weight.mT)
            q @ k.mT
    names = {func.overloadpacket.__name__: 0 for func, _ in products.calls}
    for (func, _), count in products.calls.items():
        names[func.overloadpacket.__name__] += count
    assert names.pop("mm") == 3 and names.pop("linear") == names.pop("matmul") == 1
    assert sum(names.values()) == 2 and "attention" in "".join(names)
    called = []
    for key in [key for key in products.calls if key[0].overloadpacket.__name__ != "mm"]:
        del products.calls[key]
    products.calls = type(products.calls)(
        {((lambda *a, f=func: called.append([tuple(x.shape) for x in a]) or f(*a)), shapes): count
         for (func, shapes), count in products.calls.items()}
    )  # fmt: skip
    assert products.seconds() > 0
    assert {tuple(map(tuple, shapes)) for shapes in called} == {((5, 8), (8, 3)), ((8, 5), (5, 3)), ((5, 3), (3, 8))}


@pytest.mark.parametrize(
    ("name", "flags"),
    [("throughput", "--rounds 0"), ("throughput", "--script sft"), ("throughput", "--hidden-size -16"),
     ("compare", "--jobs 0"), ("compare", "--scripts magrpo tutti"), ("peers", "--updates -1"),
     ("gpu", "--max-batch-tokens 4096 0"), ("sandbox", "--rounds x"), ("scaling", "--rounds 0")],
)  # fmt: skip
def test_arguments_that_cannot_be_measured_are_refused(monkeypatch, capsys, name, flags):
    load("throughput", monkeypatch)
    load("peers", monkeypatch)
    benchmark = load(name, monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(benchmark.Args, args=flags.split())
    assert stopped.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def test_sandbox_times_answers():
    printed = printed_by(ROOT / "benchmarks" / "sandbox.py", "--rounds", 1, "--timeout", 0.5)
    rows = dict(re.findall(r"^\| (.*) \| ([\d.]+) \|$", printed, re.M))
    assert {"one answer", "100 answers", "64 answers, 1 core(s)"} <= rows.keys()
    # endless loops last as long as they may: if the answers did not run, they would not
    endless = [float(time) for name, time in rows.items() if "endless" in name]
    assert len(endless) >= 2 and min(endless) >= 0.5


def test_the_card_has_a_cell_for_each_evaluation():
    flags = ("--envs", "humaneval", "--eval-tasks", 2, "--most-agents", 1)
    printed = printed_by(ROOT / "benchmarks" / "card.py", *flags)
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| humaneval")]
    assert len(rows) == 3
    for _, *cells in rows:
        assert len(cells) == 1 and all(re.fullmatch(r"-?\d\.\d\d|nan", cell.strip(" |")) for cell in cells)
    assert all(0 <= float(cell.strip(" |")) <= 1 for cell in rows[0][1:])  # a share of answers


@pytest.mark.parametrize("model", [[], ["--hidden-size", "64"]])
def test_throughput_compares_at_a_small_size(model):
    flags = ("--rounds", 1, "--prompt-tokens", 12, "--num-tasks", 2, "--completion-tokens", 6, "--num-generations", 3)
    printed = printed_by(ROOT / "benchmarks" / "throughput.py", *flags, *model)
    tables = [line for line in printed.splitlines() if line.startswith(("| sampling", "| training", "| whole"))]
    assert len(tables) == 6 and "of a gradient" in printed
    profiles = re.findall(r"by operator, of the time in all of them: (.*)", printed)
    assert len(profiles) == 2
    for shares in profiles:
        shares = [int(share) for share in re.findall(r" (\d+)%", shares)]
        # each is rounded; how large they are is the machine's matter
        assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 105
    gaps = [float(gap) for gap in re.findall(r": (\d\.\de-\d+)", printed.splitlines()[-1])]
    assert len(gaps) == 2 and max(gaps) < 1e-4


def test_ablation_leaves_out_one_thing_at_a_time(monkeypatch):
    throughput = load("throughput", monkeypatch)
    ablation = load("ablation", monkeypatch)
    args = throughput.Args(prompt_tokens=9, completion_tokens=4, num_generations=2, num_tasks=2)
    script, agent, prompts = throughput.prepare(args)
    own, seen = dict(vars(script)), []
    for name in ("decode", "grouped", "draw"):
        monkeypatch.setattr(script, name, lambda *a, name=name: seen.append(name) or own[name](*a))
    monkeypatch.setattr(ablation, "multinomial", lambda w: seen.append("multinomial") or torch.multinomial(w, 1))
    before, rows = dict(vars(script)), ablation.ablations(args, script, agent, prompts)
    calls = []
    for with_it, without_it in list(rows.values())[:3]:
        for run in (with_it, without_it):
            seen.clear()
            run()
            calls.append(set(seen))
            assert vars(script) == before  # put back
    usual = {"decode", "grouped", "draw"}
    assert calls == [usual, {"decode", "draw"}, usual, {"decode", "grouped", "multinomial"}, {"draw"}, {"multinomial"}]
    copies, key_heads = [], agent.model.config.num_key_value_heads
    fused = torch.nn.functional.scaled_dot_product_attention
    watched = lambda q, key, *a, **options: copies.append(key.shape[1] > key_heads) or fused(q, key, *a, **options)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for name in ("a prompt once for its completions", "no copy of keys for each query head"):
        gradients = []
        for run in rows[f"training: {name}"]:
            copies.clear()
            run()
            gradients.append(torch.cat([p.grad.flatten() for p in agent.model.parameters()]))
            agent.model.zero_grad()
            assert vars(script) == before
        one, other = gradients
        assert (one - other).abs().max() < 1e-4 * one.abs().max()
    assert any(copies)  # of the last


def test_scaling_counts_the_tokens_of_every_turn(monkeypatch):
    load("throughput", monkeypatch)
    scaling = load("scaling", monkeypatch)
    point = scaling.Point(prompt_tokens=7, completion_tokens=3, num_generations=2, num_tasks=2)
    *_, tokens, gflop, _ = scaling.measure(point, num_agents=3, num_turns=2, rounds=1)
    first, second = 2 * (7 + 2 * 3), 4 * (7 + 3 + 2 * 3)  # prompts once, two completions of each
    assert tokens == 3 * (first + second)

    def forward(P):  # of models/tiny: 4 layers of width 128, 4 heads for queries and 2 for keys; 1,536 tokens
        fed, pairs = P + 2 * (3 - 1), P * (P + 1) / 2 + 2 * ((P + 1) + (P + 2))
        layer = 2 * fed * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384) + 2 * 2 * pairs * 128
        return 4 * layer + 2 * (2 * 3) * 1536 * 128

    # four forward passes: one to sample, one to train, two as large for its gradient
    assert gflop == pytest.approx(3 * 4 * (2 * forward(7) + 4 * forward(10)) / 1e9)


def test_what_autograd_keeps_is_counted_once_and_without_weights(monkeypatch):
    activations = load("activations", monkeypatch)
    x, weight = torch.randn(10, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    def twice():
        y = x @ weight  # keeps x and the weight
        return (y * y).sum() + y.exp().sum()  # keeps y, y again, and its exponential

    assert activations.kept(twice, [weight]) == 4 * (10 * 6 + 10 * 4 + 10 * 4)

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return x @ weight  # keeps x and the weight in bfloat16

    assert activations.kept(under_autocast, [weight]) == 2 * 10 * 6


def test_a_checkpoint_keeps_the_input_of_each_layer(monkeypatch):
    activations = load("activations", monkeypatch)
    args = activations.Args(prompt_tokens=7, completion_tokens=5, num_generations=3)
    monkeypatch.syspath_prepend(str(ROOT))
    script, config = importlib.import_module("magrpo"), activations.WORKLOADS["a"].config
    (two, tokens), (three, _) = (activations.count(args, script, config, n, checkpointing=True) for n in (2, 3))
    assert tokens == 3 * (7 + 5) and three - two == 4 * config["hidden_size"] * tokens
