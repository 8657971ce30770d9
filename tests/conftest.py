"""What the tests share: small random models made on the spot, and a way to run a script inside this process."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # models this small are no faster on two threads, and far slower beside other work
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is ever downloaded; a hub id fails at once
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the same everywhere: much of it is exact on a CPU only

import json
import pathlib
import runpy
import sys
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import nano

cache = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = cache.name  # verdicts on data sets are found anew
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # some tests import from there
SCRIPTS = sorted(path for path in ROOT.glob("*.py") if "def save_checkpoint" in path.read_text())  # none can be missed
NANO = ROOT / "nano.py"
MAGRPO = ROOT / "magrpo.py"
CRITIC_FREE = [MAGRPO, ROOT / "marloo.py", ROOT / "maremax.py", ROOT / "mareinforce.py"]
# what the scripts share needs one with a critic and one without: the others differ by advantages only (test_copies.py)
two_scripts = pytest.mark.parametrize("script", [MAGRPO, ROOT / "ippo.py"], ids=lambda path: path.stem)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, START, STOP = 0, 1, 2  # ids of <|endoftext|> (the pad), <|im_start|> and <|im_end|>
STOP_IDS = {STOP, *range(10, 30)}  # of models made here: 21 of 259 tokens, so that completions stop early


def pytest_configure(config):
    config.addinivalue_line("markers", "optional(package): needs a package that is not in requirements.txt")


def pytest_runtest_setup(item):
    """Skips a test whose optional package is not installed."""
    for mark in item.iter_markers("optional"):
        (package,) = mark.args
        pytest.importorskip(package, reason=f"optional: pip install {package}")


def make_tokenizer(chat_template=CHAT, pad="<|endoftext|>"):
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: k for k, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(vocab)[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_model(path, seed=0, stops=STOP_IDS, tokenizer=None, model_class=Qwen2ForCausalLM, **config):
    """Saves a random model with its tokenizer."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 1024, "initializer_range": 0.2}
    config = model_class.config_class(**(sizes | config))
    model = model_class(config)
    model.generation_config.eos_token_id = list(stops)
    model.save_pretrained(path)
    (tokenizer or make_tokenizer()).save_pretrained(path)
    return str(path)


def lines_of(run_dir, name="rollouts.jsonl"):
    with open(os.path.join(run_dir, name)) as file:
        return [json.loads(line) for line in file]


def metrics_of(run_dir, without="time/"):
    """The lines of metrics.jsonl, without what depends on the clock."""
    lines = lines_of(run_dir, "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(without)} for line in lines]


def slow_distributions(model, prompt_ids, completion_ids, temperature=1.0):
    """The log-probabilities of all tokens before each token of one completion, by a plain forward pass: (C, V)."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def slow_logprobs(model, prompt_ids, completion_ids, temperature=1.0):
    """The log-probability of each token of one completion, with gradients: (C,)."""
    logprobs = slow_distributions(model, prompt_ids, completion_ids, temperature)
    return logprobs[range(len(completion_ids)), list(completion_ids)]


def load_policy(script, path):
    """The policy of a saved model, by the function of a script (its module, or a namespace of its names)."""
    return script.load_policy(script.Args(), path, {})


@dataclass
class Update:
    """What led to an optimizer step."""

    names: dict  # the script's global names, as they were
    agents: list  # those that the policy plays
    weights: dict  # name -> tensor, of all that is trained
    gradients: dict  # name -> tensor; a separate critic's own output head has none
    learning_rates: list  # of each group of parameters


@pytest.fixture
def updates(monkeypatch):
    """The Update of every optimizer step of a run, which is taken."""
    updates, original = [], torch.optim.AdamW.step

    def step(optimizer, closure=None):
        names = dict(vars(sys.modules["__main__"]))  # of the script that runs
        agents = [i for i, policy in enumerate(names["policies"]) if policy.optimizer is optimizer]
        parameters = names["policies"][agents[0]].model.named_parameters()
        trained = {name: p for name, p in parameters if p.requires_grad}
        weights = {name: p.detach().clone() for name, p in trained.items()}
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        rates = [group["lr"] for group in optimizer.param_groups]
        updates.append(Update(names, agents, weights, gradients, rates))
        return original(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return updates


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "random")


def run_main(monkeypatch):
    """Runs main() of nano.py, and returns names as the other scripts leave them behind."""
    names = SimpleNamespace()
    grow = nano.rollout

    def rollout(args, env, policies, tasks, group_sizes, joint_mode):
        turns = grow(args, env, policies, tasks, group_sizes, joint_mode)
        # not an evaluation
        if group_sizes[0] > 1:
            vars(names).update(args=args, policies=policies, turns=turns)
        return turns

    monkeypatch.setattr(nano, "rollout", rollout)
    monkeypatch.setitem(sys.modules, "__main__", names)
    nano.main()
    run_dir = max(pathlib.Path(names.args.output_dir).iterdir())
    return vars(names) | {"run_dir": run_dir, "metrics": metrics_of(run_dir)[-1]}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(script, "--flag", value, ...) runs it as the command line would, and returns its global names."""

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [str(script), "--output-dir", str(tmp_path / "runs"), *map(str, args)])
        monkeypatch.syspath_prepend(str(ROOT))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("atexit.register", lambda *args: None)  # its line would come at the end of all tests
        if pathlib.Path(script).name == "nano.py":
            return run_main(monkeypatch)
        return runpy.run_path(str(script), run_name="__main__")

    return run
