"""CUDA's autocast, and a decoding step that can be recorded, by torch's fake tensors.

They have a device, a type and a shape, but no data, so no GPU is needed. A build of torch with CUDA is: one for CPUs
knows no such device. Values, kernels, waits inside of a kernel and the backward pass cannot be seen so.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pretend import WAITS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import magrpo

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
U, S, P, C = 3, 2, 10, 5  # prompts, completions of each, tokens of a prompt, of a completion
SIZES = {
    "vocab_size": 999, "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Every operation's name, its first tensor's type and shape, and the type of what it gives."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor) and isinstance(out, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, args[0].dtype, tuple(args[0].shape), out.dtype))
        return out

    def weight_casts(self, model):
        shapes = [tuple(p.shape) for p in model.parameters()]
        return sum(op == "_to_copy" and shape in shapes for op, _, shape, _ in self.made)

    def types(self, *names):
        return {gives for op, _, _, gives in self.made if op in names}


@pytest.fixture(params=["qwen2", "qwen3", "llama", "phi3"])
def model(request, monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield AutoModelForCausalLM.from_config(
            AutoConfig.for_model(request.param, **SIZES), dtype=torch.float32
        ).eval()


def test_sampling_casts_each_weight_once(model):
    held, calls = {}, [Calls() for _ in range(3)]
    ids, mask = torch.zeros(2, U, P, dtype=torch.long)
    with torch.no_grad(), magrpo.autocast(model):
        with calls[0]:
            attend = partial(magrpo.attention, held, None)
            hidden = magrpo.trunk(model, ids, mask, mask, None, attend)[:, -1].repeat_interleave(S, 0)
        for module, (keys, values) in held.items():
            assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
            (K, _, E, _), rows = keys.shape, U * S
            held[module] = [keys, values], [keys.new_zeros(K, rows, E, C), values.new_zeros(K, rows, C, E)]
        attend = partial(magrpo.attention, held, torch.zeros(1, dtype=torch.long))
        for call in calls[1:]:
            with call:
                probs = magrpo.head(model, hidden, 0.7).softmax(-1)
                token = magrpo.draw(probs)
                seen = torch.zeros(U, 1, 1, P + 2)
                hidden = magrpo.trunk(model, token, seen, torch.zeros_like(token), None, attend)[:, 0]
            assert (probs.device.type, probs.dtype, hidden.shape) == (
                "cuda",
                torch.float32,
                (U * S, SIZES["hidden_size"]),
            )
            assert call.types("_softmax") == {torch.float32}  # of scores and of the vocabulary
            assert call.types("bmm") == {torch.float32, torch.bfloat16}  # scores, and what values are summed to
            assert call.types("addmm", "mm") == {torch.bfloat16, torch.float32}  # layers, and the head
    matrices = sum(p.dim() > 1 for p in model.base_model.parameters()) - 1  # but the embedding, which is not cast
    assert calls[0].weight_casts(model) >= matrices
    assert [call.weight_casts(model) for call in calls[1:]] == [0, 0]


def test_training_casts_each_weight_once_and_its_logits_are_float32(model):
    with Calls() as first, magrpo.autocast(model):
        cache = DynamicCache(config=model.config)
        ids, mask = torch.zeros(2, U, P, dtype=torch.long)
        magrpo.trunk(model, ids, mask, mask, cache)
        with Calls() as second:
            cache.reorder_cache(torch.zeros(U * S, dtype=torch.long))
            ids, seen = torch.zeros(U * S, C, dtype=torch.long), torch.ones(U * S, P + C, dtype=torch.long)
            hidden = magrpo.trunk(model, ids, seen, (seen.cumsum(-1) - 1)[:, P:], cache)
    assert first.weight_casts(model) and second.weight_casts(model) == 0
    with Calls() as calls:
        logits = magrpo.head(model, hidden, 0.7)
        logprobs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    assert {logits.dtype, logprobs.dtype} == calls.types("mm") == {torch.float32}


class Decoding(TorchDispatchMode):
    """Makes up what the CPU reads while completions decode, and notes what a step that may be recorded asks of it."""

    def __init__(self, stopping):
        super().__init__()
        self.stopping, self.in_step, self.asked, self.steps = stopping, False, set(), 0

    def repeat(self, step, times, record):
        for _ in range(times):
            self.in_step, self.steps = True, self.steps + 1
            step()
            self.in_step = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        places = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if self.in_step and (name in WAITS or "cpu" in places):
            self.asked.add((name, *places))
        if name == "nonzero":  # the prompts whose completions have not all stopped
            return args[0].new_zeros(len(args[0]) - self.stopping, 1, dtype=torch.long)
        if name == "_local_scalar_dense":  # whether enough have stopped, and how many completions are left
            return self.stopping if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stopping", [False, True])
def test_a_recorded_step_needs_nothing_of_the_cpu(stopping, model, monkeypatch):
    agent = SimpleNamespace(model=model, stop_ids=torch.tensor([1]), graph_stream="a stream")
    mode = Decoding(stopping)
    monkeypatch.setattr(magrpo, "repeat", mode.repeat)
    with torch.no_grad(), magrpo.autocast(model), mode:
        tokens, logprobs = magrpo.decode(agent, [[1, 2, 3], [4, 5]], S, 0.7, C)
    assert mode.steps == C - 1 and mode.asked == set()
    assert (tokens.device.type, tokens.dtype, logprobs.dtype) == ("cuda", torch.long, torch.float32)
