"""benchmarks/agreement.py, without peers: it finds that an equal loss is equal, and that another one is not."""

import json
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin

sys.path.insert(0, str(ROOT / "benchmarks"))
import agreement
import agreement_child
from peers_child import PAD, reward


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A job, and what one update of ours was."""
    folder = tmp_path_factory.mktemp("agreement")
    args = agreement.Args(num_tasks=2, num_generations=4, completion_tokens=40)
    agreement.write_prompts(folder / "prompts.jsonl", args.num_tasks)
    job = agreement.job_of(args, 1, "magrpo", ("--joint-mode", "align"), 2, str(folder))
    return job, agreement.child(sys.executable, job | {"task": "ours"}, str(folder), "ours")


def trainer(job, clock, slip):
    """A peer of two agents: it generates for one prompt at a time, and trains pads and leaves out what `slip` says."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    models = [AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    texts = [json.loads(line)["text"] for line in open(job["prompts"])][:-1]
    for text in texts:
        prompt = tokenizer(text, return_tensors="pt")
        P, G = prompt.input_ids.shape[1], job["num_generations"]
        rows = [model.generate(**prompt, num_return_sequences=G) for model in models]
        said = [tokenizer.batch_decode(drawn[:, P:], skip_special_tokens=True) for drawn in rows]
        rewards = torch.tensor([reward(texts) for texts in zip(*said)])
        for model, drawn in zip(models, rows):
            logprobs = model(drawn).logits[:, P - 1 : -1].log_softmax(-1).gather(-1, drawn[:, P:, None])[..., 0]
            mask = torch.ones_like(logprobs) if slip else drawn[:, P:] != PAD
            mask = mask * (torch.arange(mask.shape[1]) < mask.shape[1] - slip)
            (-((rewards - rewards.mean()) * (logprobs * mask).sum(1)).mean() / len(texts)).backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("slip", [0, 1])
def test_it_tells_an_equal_loss_from_another(ours, monkeypatch, slip):
    job, mine = ours
    assert len({len(ids) for group in mine["samples"][0].values() for ids in group}) > 1  # so there are pads
    monkeypatch.setattr(GenerationMixin, "generate", None)  # what is put in its place ends with the test
    monkeypatch.setitem(agreement_child.TRAINERS, "plain", lambda job, clock: trainer(job, clock, slip))
    theirs = agreement_child.theirs(job | {"task": "plain", "ours": mine["path"]})
    assert theirs["left"] == 0
    for i in range(2):
        factor, rest = agreement.difference(theirs["gradients"][i], mine["gradients"][i])
        rest_with_slips = agreement.difference(theirs["gradients"][i], mine["slips"][i][1])[1]
        if slip:
            assert rest_with_slips < 1e-4 < 1e-2 < rest
        else:
            assert rest < 1e-4 < 1e-2 < rest_with_slips and factor == pytest.approx(job["completion_tokens"], rel=1e-4)
    assert not torch.equal(*theirs["gradients"])  # each agent has its own


def test_the_rest_is_what_no_factor_explains():
    ours = torch.tensor([3.0, 4.0, 0.0])
    assert agreement.difference(2 * ours, ours) == pytest.approx((2, 0))
    assert agreement.difference(2 * ours + torch.tensor([0.0, 0.0, 10.0]), ours) == pytest.approx((2, 0.5**0.5))
