"""mappo.py: what its critic reads, and what that is worth. All else is ippo.py's, and compared in test_copies.py."""

import runpy
from types import SimpleNamespace

import pytest
import torch
import toy
from conftest import ROOT, metrics_of

SCRIPT = ROOT / "mappo.py"
SMALL = ("--num-generations", 4, "--num-tasks", 2, "--max-new-tokens", 12, "--eval-tasks", 1)


@pytest.mark.parametrize("turns", [1, 2])
def test_one_agent_is_ippo_with_a_separate_critic(run, turns, model_dir, tmp_path):
    """A critic that reads something else where nobody else speaks, or another random stream."""
    flags = ("--env", "toy:Letters", "--model", model_dir, "--num-agents", 1, "--num-turns", turns, *SMALL)
    flags = (*flags, "--num-iterations", 2, "--learning-rate", 0.001, "--critic-learning-rate", 0.01)
    ours = run(SCRIPT, *flags)
    theirs = run(ROOT / "ippo.py", *flags, "--use-separate-critic")
    assert metrics_of(ours["run_dir"]) == metrics_of(theirs["run_dir"])
    for a, b in zip(ours["policies"], theirs["policies"]):
        assert all(torch.equal(a.trained[key], b.trained[key]) for key in b.trained)


@pytest.fixture
def made(model_dir):
    """The functions of the script, arguments and an agent."""
    script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    args = script.Args(learning_rate=0.1, critic_learning_rate=0.1, max_new_tokens=8)
    return script, args, script.load_agent(args=args, name=model_dir, device=torch.device("cpu"), shared={})


class Told:
    """Agent 1 is told what the answer is worth, agent 0 is not; with `state`, the critics are told too."""

    def __init__(self, num_agents, num_turns, dataset, seed, hidden="no"):
        if hidden == "yes":
            self.state = lambda task, history: "+-"[task["worth"]] * 20
        self.hidden = hidden == "yes"

    def tasks(self, split):
        return [{"worth": worth} for worth in (0, 1)]

    def observe(self, task, history):
        return ["write", None if history else "read" if self.hidden else "+-"[task["worth"]] * 20]

    def step(self, branches):
        return [toy.Step(actions, float(task["worth"]), {}, False) for task, _, actions in branches]


def test_the_critic_reads_what_others_read_and_the_actor_does_not(made):
    """A section that is lost, a silent agent's, or the own prompt not at the end, where the completion follows."""
    script, args, agent = made
    prompts = {0: "ask", 1: None, 2: "own", 3: "see"}
    envs = (object(), Told(4, 1, "", 1, "yes"))
    ids = [script.joint_ids(args, env, agent, 2, {"worth": 1}, [], prompts) for env in envs]
    read = agent.tokenizer.batch_decode(ids)
    assert "Agent 0 reads:\nask\n\nAgent 3 reads:\nsee\n\nown" in read[0] and "Agent 1" not in read[0]
    assert "-\n\nown" in read[1] and "Agent" not in read[1]


def test_values_change_with_others_prompts_and_log_probabilities_do_not(made):
    """A critic that reads the own prompt only, or an actor that reads the others'."""
    script, args, agent = made
    script.add_critic(args, agent, separate=True)
    torch.nn.init.normal_(agent.value_head.weight)
    evaluate = lambda joint: script.evaluate_tokens(args, agent, [40, 41], joint, [[50, 51, 52]])[[0, 2]]  # (2, C)
    (logprobs, values), (other_logprobs, other_values) = evaluate([40, 41]), evaluate([60, 40, 41])
    assert torch.equal(logprobs, other_logprobs) and (values - other_values).abs().min() > 1e-4


@pytest.mark.parametrize("hidden", ["no", "yes"])
def test_it_explains_returns_that_depend_on_what_another_agent_reads(hidden, run, model_dir):
    """A centralised critic that learns no more than the agent's own."""
    flags = ("--env", "test_mappo:Told", "--env-kwargs", "hidden", hidden, "--model", model_dir, "--max-new-tokens", 4)
    flags = (*flags, "--num-tasks", 2, "--num-generations", 2, "--eval-tasks", 1, "--num-iterations", 4)
    flags = (*flags, "--update-epochs", 8, "--num-minibatches", 1, "--vf-coef", 1, "--no-clip-vloss", "--no-anneal-lr")
    flags = (*flags, "--learning-rate", 1e-5, "--critic-learning-rate", 0.01, "--max-grad-norm", 1e9)
    explained = {}
    for name, more in (("mappo", ()), ("ippo", ("--use-separate-critic",))):
        lines = metrics_of(run(ROOT / f"{name}.py", *flags, *more)["run_dir"])
        explained[name] = lines[-1]["agent_0/explained_variance"]
    assert explained["mappo"] > 0.8 and explained["ippo"] < 0.5
