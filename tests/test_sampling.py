"""Sampled and trained log-probabilities are the model's, and prompts as shown; test_copies.py: so in all scripts."""

import functools
import json
import math
from unittest.mock import MagicMock

import pytest
import test_faults
import torch
import transformers as hf
from conftest import CHAT, END, START, STOP, load_policy, make_tokenizer, save_model, slow_distributions, slow_logprobs
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from toy import rows_of
from transformers.utils import import_utils

import magrpo
import nano
import sft

PROMPTS = [(5, 6, 7), (40,) * 31, (1, 0, 2, 9, 0), (200, 3, 200, 8) * 50, (7,)]  # up to 200 tokens
# A kind of layer | its class in transformers | changes of its configuration
KINDS = """
rotations and biases | Qwen2ForCausalLM | {}
rotations | LlamaForCausalLM | {"tie_word_embeddings": true}
learned positions | GPT2LMHeadModel | {}
learned positions with an offset | OPTForCausalLM | {"ffn_dim": 48, "word_embed_proj_dim": 32}
fused projections | Phi3ForCausalLM | {"pad_token_id": 0}
experts | Qwen3MoeForCausalLM | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, \
    "moe_intermediate_size": 16}
latent attention | DeepseekV3ForCausalLM | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, \
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, \
    "num_experts_per_tok": 2, "num_key_value_heads": 4}
scaled logits | CohereForCausalLM | {"logit_scale": 0.25}
scaled everything | GraniteForCausalLM | {"logits_scaling": 3.0, "attention_multiplier": 0.3, \
    "residual_multiplier": 0.5, "embedding_multiplier": 2.0}
a window | MistralForCausalLM | {"sliding_window": 9}
alternating windows and soft caps | Gemma2ForCausalLM | {"head_dim": 8, "query_pre_attn_scalar": 8, \
    "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 2.0, \
    "attn_logit_softcapping": 1.0}
alternating windows and two rotations | Gemma3ForCausalLM | {"head_dim": 8, "query_pre_attn_scalar": 8, \
    "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
chunks | Llama4ForCausalLM | {"attention_chunk_size": 9, "num_local_experts": 2, "head_dim": 8}
"""
REFUSED = """
attention of its own, with windows | GPTNeoForCausalLM | {"num_heads": 4, "num_layers": 2, \
    "attention_types": [[["global", "local"], 1]]}
attention of its own, with alibi | BloomForCausalLM | {}
attention of its own, with alibi in a mask | FalconForCausalLM | {"alibi": true}
mamba | Mamba2ForCausalLM | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
"""
each_kind = pytest.mark.parametrize("kind, name, changes", rows_of(KINDS))


def save_kind(folder, name, changes):
    """The path of a saved model of a row of these tables."""
    return save_model(folder / "m", model_class=getattr(hf, name), **json.loads(changes))


def load(path):
    return load_policy(magrpo, path)


def sample(policy, prompts, *options):
    """What the script samples after each prompt: lists of pairs (token ids, log-probabilities)."""
    groups = [magrpo.Group(policy, "", prompt_ids, 1.0) for prompt_ids in prompts]
    magrpo.sample(policy, groups, *options)
    return [list(zip(group.completion_ids, group.logprobs)) for group in groups]


@functools.lru_cache(2)
def plain_model(path):
    with open(f"{path}/config.json") as file:
        name = json.load(file)["model_type"]
    plain = None if name in ("falcon", "gemma2") else "eager"  # whose alibi, or caps, differ by it in transformers
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=plain).eval()


@torch.no_grad()
def exact_logprobs(path, prompt, completion, temperature=1.0):
    return slow_logprobs(plain_model(path), prompt, completion, temperature).tolist()


class Graph:
    """Counts replays."""

    replays = 0


def places(cache, inputs):
    """Where in memory what a decoding step reads and changes is: a graph would go on with these."""
    tensors = list(inputs.values())
    for layer in cache.layers:
        tensors += [layer.keys, layer.values, layer.cumulative_length]
    return [x.data_ptr() for x in tensors]


def capture(policy, *tensors):
    """Stands for a CUDA graph on a CPU: repeats the step, which has to find and leave its tensors where they were."""
    at_capture = places(*tensors)

    def replay(*now):
        Graph.replays += 1
        assert places(*now[1:]) == at_capture
        logits = magrpo.decode_step(*now)
        assert places(*now[1:]) == at_capture
        return logits

    return replay


@pytest.fixture(params=["plain", "captured"])
def load_each(request, monkeypatch):
    """Loads a policy, once to decode as on a CPU and once as on a GPU."""
    Graph.replays = 0
    monkeypatch.setattr(magrpo, "capture", capture)

    def load_each(path):
        policy = load(path)
        if request.param == "captured":
            monkeypatch.setattr(magrpo, "ON_GPU", True)
            monkeypatch.setattr(magrpo, "CHECK_EVERY", 16)
            policy.cuda_graphs = True
        return policy

    return load_each


@each_kind
def test_sampled_and_trained_logprobs_are_the_models(kind, name, changes, load_each, tmp_path):
    """Fails if a position, mask, window, cache, scale or row is wrong, or a stop token is left out or passed by."""
    path = save_kind(tmp_path, name, changes)
    policy, temperature = load_each(path), 0.7
    torch.manual_seed(0)
    groups = sample(policy, PROMPTS, 4, temperature, 40)
    prompts = []
    pairs = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len({tuple(ids) for ids, _ in group}) > 1
        prompts += [prompt] * 4
        pairs += group
    completions = [ids for ids, _ in pairs]
    examples = [magrpo.Example(prompt, ids, 1.0) for prompt, ids in zip(prompts, completions)]
    cache = magrpo.DynamicCache()
    real = magrpo.prefill(policy.model, cache, prompts)
    trained = magrpo.token_logprobs(policy, cache, real, examples, temperature)
    for prompt, (ids, sampled), logprobs in zip(prompts, pairs, trained, strict=True):
        exact = exact_logprobs(path, prompt, ids, temperature)
        assert sampled == pytest.approx(exact, abs=1e-4)
        assert logprobs[: len(ids)].tolist() == pytest.approx(exact, abs=1e-4)
        assert not logprobs[len(ids) :].any()
        assert set(ids[:-1]).isdisjoint(policy.stop_ids)
        assert ids[-1] in policy.stop_ids or len(ids) == 40
    assert len(set(map(len, completions))) > 6
    # from the second step after a capture on
    assert bool(Graph.replays) == magrpo.ON_GPU


class Operators(TorchDispatchMode):
    """Notes the names of all operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@each_kind
def test_a_decoding_step_can_be_captured(kind, name, changes, tmp_path, monkeypatch):
    """Fails if a decoding step looks at a value, for which a GPU has to wait, or copies one to the GPU."""
    policy = load(save_kind(tmp_path, name, changes))
    policy.cuda_graphs = True
    monkeypatch.setattr(magrpo, "ON_GPU", True)  # no row leaves
    captured = []
    monkeypatch.setattr(magrpo, "capture", lambda *now: captured.append(now) or magrpo.decode_step)
    sample(policy, PROMPTS, 2, 1.0, 3)
    ((_, *tensors),) = captured
    # transformers is told that a CUDA stream is being captured
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with Operators() as mode, torch.inference_mode():
        magrpo.decode_step(policy.model, *tensors)
    assert {"_local_scalar_dense", "nonzero", "lift_fresh"}.isdisjoint(mode.names)


def test_bfloat16(model_dir):
    """Fails if keys or the mask have another dtype than attention, or logits have bfloat16's steps of hundredths."""
    policy = load(model_dir)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (group,) = sample(policy, [(5, 6, 7)], 8, 1.0, 20)
        cache = magrpo.Cache([magrpo.FixedLayer(32) for _ in range(2)])
        magrpo.prefill(policy.model, cache, [(5, 6)])
        logits = policy.model(torch.tensor([[5]])).logits
    assert (cache.layers[0].keys.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    for ids, logprobs in group:
        assert logprobs == pytest.approx(exact_logprobs(model_dir, [5, 6, 7], ids), abs=0.1)


def test_a_step_that_cannot_be_captured_is_run(model_dir, monkeypatch):
    """Fails if a failed capture, as of rotations that look at the length, ends the run or is tried at each batch."""
    policy = load(model_dir)
    policy.cuda_graphs = True
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(magrpo, "decode_step", MagicMock(side_effect=RuntimeError))
    assert magrpo.capture(policy, None, None) is magrpo.decode_step
    assert not policy.cuda_graphs


@pytest.mark.parametrize("kind, name, changes", rows_of(REFUSED))
def test_layers_that_are_not_known_to_work_are_refused(kind, name, changes, tmp_path):
    """Fails if a model would sample or train, nats off and in silence."""
    path = save_kind(tmp_path, name, changes)
    with pytest.raises(SystemExit, match="error: --model"):
        load(path)


def test_greedy_is_the_most_likely_token(model_dir):
    """Fails if a temperature of 0 divides by zero, or still draws."""
    policy = load(model_dir)
    for prompt, group in zip(PROMPTS, sample(policy, PROMPTS, 2, 0, 16)):
        for ids, _ in group:
            assert slow_distributions(policy.model, prompt, ids).argmax(-1).tolist() == list(ids)


def check_counts(counts, expected):
    """Pearson's chi-squared test, with all rare tokens as one."""
    often = expected > 5
    differences = counts - expected
    square = (differences[often] ** 2 / expected[often]).sum()
    square += differences[~often].sum() ** 2 / 5
    freedom = often.sum().item()
    assert freedom > 100
    assert square < freedom + 4 * math.sqrt(2 * freedom)


def test_the_draw_is_the_whole_distribution(tmp_path):
    """Fails if there is a top-k, top-p, penalty or temperature of the model's own, or another row's columns."""
    path = save_model(tmp_path / "m", initializer_range=0.3, stops=[11])
    leaky = {"do_sample": True, "top_k": 2, "top_p": 0.3, "temperature": 0.1}
    leaky |= {"repetition_penalty": 1.3, "suppress_tokens": [50, 60]}
    hf.GenerationConfig(eos_token_id=11, **leaky).save_pretrained(path)
    # a penalty concerns the tokens of the prompt
    policy, prompt, G, V = load(path), tuple(range(3, 131)), 4000, 259
    torch.manual_seed(0)
    (group,) = sample(policy, [prompt], G, 1.5, 2)
    first = torch.tensor([ids[0] for ids, _ in group])
    second = torch.tensor([ids[1] for ids, _ in group if len(ids) > 1])
    with torch.no_grad():
        logits = plain_model(path)(torch.tensor([[*prompt, k] for k in range(V)])).logits[:, -2:]
    chances = (logits.double() / 1.5).softmax(-1)  # (V, 2, V)
    counts = first.bincount(minlength=V).double()
    check_counts(counts, G * chances[0, 0])
    counts[policy.stop_ids] = 0  # no second token follows these
    check_counts(second.bincount(minlength=V), counts @ chances[:, 1])


DRAWS = [  # a uniform random number, and the token that it draws of chances 0, 1, 1e-9, 1e-9, 0
    (0.0, 1),
    (1 - 1.5e-9, 2),
    (1 - 0.5e-9, 3),
]


@pytest.mark.parametrize("number, token", DRAWS)
def test_draw_by_hand(number, token, monkeypatch):
    """Fails if a token without weight is drawn, or a sum in float32 swallows rare tokens."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, number))
    tokens, _ = magrpo.draw(torch.tensor([[0.0, 1.0, 1e-9, 1e-9, 0.0]]).log(), 1.0)
    assert tokens.tolist() == [token]


NO_END = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
STOPS = [  # the model's own, the tokenizer's, the chat template, and what stops a completion
    ([10], None, test_faults.GEMMA, {10, 260}),  # a token that is not special
    ([10, 11], "<|endoftext|>", None, {END, 10, 11}),
    ([10], "<|endoftext|>", CHAT, {END, 10, STOP}),  # as base models, whose own list lacks the end of a turn
    (None, None, CHAT, {STOP}),
    (None, "<|endoftext|>", CHAT, {END, STOP}),
    ([10], "<|endoftext|>", NO_END, {END, 10}),  # no token of the start of a turn
]


@pytest.mark.parametrize("stops, eos, template, expected", STOPS)
def test_what_stops_a_completion(stops, eos, template, expected, tmp_path):
    """Fails if an end of a turn or one of several stop ids is missed, or a start is taken for an end."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_tokens(["<start_of_turn>", "<end_of_turn>"])
    tokenizer.eos_token = eos
    path = save_model(tmp_path / "m", tokenizer=tokenizer)
    hf.GenerationConfig(eos_token_id=stops).save_pretrained(path)
    assert set(load(path).stop_ids) == expected
    if template == CHAT:  # nano.py needs a template
        config = nano.load_policy(nano.Args(model=path)).model.generation_config
        assert set(config.eos_token_id) == expected


@pytest.mark.parametrize("template", [None, "<|im_start|>{{ messages[0].content }}"])
def test_a_tokenizers_own_first_token_comes_once(template, model_dir):
    """Fails if there are two first tokens with a template that writes one, or none without a template."""
    policy = load(model_dir)
    policy.tokenizer = make_tokenizer(chat_template=template)
    first = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", START)])
    policy.tokenizer.backend_tokenizer.post_processor = first
    assert magrpo.encode(policy, "hi").count(START) == 1


def test_thoughts_are_turned_off_where_the_template_can(model_dir):
    """Fails if a model of two modes thinks through all of its tokens."""
    policy = load(model_dir)
    policy.tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}, briefly{% endif %}"
    assert policy.tokenizer.decode(magrpo.encode(policy, "hi")) == "hi, briefly"


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
THREES = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), BYTES])
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
SPLITTINGS = {  # name -> (class of the model, normalizer, pre-tokenizer); with the class of a published tokenizer
    "LlamaTokenizer": (hf.LlamaForCausalLM, None, THREES),
    "Qwen2Tokenizer": (hf.Qwen2ForCausalLM, None, THREES),
    "GPT2Tokenizer": (hf.GPT2LMHeadModel, None, DIGITS),
    "GPTNeoXTokenizer": (hf.GPTNeoXForCausalLM, normalizers.NFC(), DIGITS),
    "GemmaTokenizer": (hf.Gemma2ForCausalLM, normalizers.Lowercase(), THREES),
}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_prompts_are_split_as_the_models_own_file_says(name, tmp_path):
    """Fails if agents read other ids than the model was trained on, or those who load a saved agent do."""
    model_class, normalizer, pre_tokenizer = SPLITTINGS[name]
    path = save_model(tmp_path / "m", model_class=model_class, vocab_size=261)
    file = Tokenizer.from_file(f"{path}/tokenizer.json")
    vocab = file.get_vocab() | {"12": 259, "120": 260}
    file.model = models.BPE(vocab=vocab, merges=[("1", "2"), ("12", "0")])
    file.normalizer = normalizer
    file.pre_tokenizer = pre_tokenizer
    file.save(f"{path}/tokenizer.json")
    settings = {"tokenizer_class": name, "eos_token": "<|im_end|>"}
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(settings))
    prompt = "In 1201 it was 120231; E\u0301t\u00e9  12"
    ids = file.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
    policy = load(path)
    tokenizer = nano.load_policy(nano.Args(model=path)).tokenizer
    assert magrpo.encode(policy, prompt) == nano.encode(tokenizer, prompt) == tuple(ids)
    assert sft.encode_pair(tokenizer, [STOP], [], prompt, "12") == (ids, [*file.encode("12").ids, STOP])
    policy.model.save_pretrained(tmp_path / "saved")
    policy.tokenizer.save_pretrained(tmp_path / "saved")
    saved = hf.AutoTokenizer.from_pretrained(tmp_path / "saved")
    # transformers reads those of qwen2 models in one way only
    assert (saved(prompt).input_ids == file.encode(prompt).ids) == (name != "Qwen2Tokenizer")


LOSSES = [  # chat template, the letters or words of a vocabulary, a prompt, and whether it can be written in them
    (CHAT, None, "Say h\u00e9 \U0001f600", True),
    (CHAT, None, "E\u0301t\u00e9 \ufb01 \u3000x", True),
    (test_faults.PARTS, None, "hello", False),
    (CHAT, "abcdefghijklmnopqrstuvwxyz\u0120\u010a", "say h\u00e9", False),
    (CHAT, ["user", "assistant", "say", "hi", "<unk>"], "say hi", True),
    (CHAT, ["user", "assistant", "say", "hi", "<unk>"], "say hello", False),
]


@pytest.mark.parametrize("template, tokens, prompt, is_read", LOSSES)
def test_a_prompt_that_loses_letters_is_refused(template, tokens, prompt, is_read, tmp_path):
    """Fails if an agent reads less than it is asked, as its template or vocabulary leaves it out, in silence."""
    save_model(tmp_path / "m", tokenizer=make_tokenizer(template))
    file = Tokenizer.from_file(f"{tmp_path}/m/tokenizer.json")
    file.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if tokens:
        vocab = {token: k for k, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *tokens])}
        file.model = models.BPE(vocab=vocab, merges=[])
    if isinstance(tokens, list):
        file.model = models.WordLevel(vocab, unk_token="<unk>")
        file.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file.save(f"{tmp_path}/m/tokenizer.json")
    policy = load(str(tmp_path / "m"))
    if is_read:
        assert sft.encode_pair(policy.tokenizer, [STOP], [], prompt, prompt)[0] == list(magrpo.encode(policy, prompt))
        return
    with pytest.raises(SystemExit, match="--model"):
        magrpo.encode(policy, prompt)
    with pytest.raises(SystemExit, match="--model"):
        sft.encode_pair(policy.tokenizer, [STOP], [], "say", prompt)
