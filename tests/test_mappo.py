"""mappo.py: what its critic reads, and what that is worth. All else is ippo.py's, and compared in test_copies.py."""

from types import SimpleNamespace

from conftest import ROOT, load_policy, metrics_of
from toy import Step

import mappo

SCRIPT = ROOT / "mappo.py"


def test_one_agent_is_ippo_with_a_separate_critic(run, model_dir):
    """Fails if a critic reads something else where nobody else speaks, or draws other random numbers."""
    flags = """
    --env toy:Letters --num-agents 1 --num-generations 3 --num-tasks 2 --max-new-tokens 12 --eval-tasks 1 --num-turns 2
    --num-iterations 2 --learning-rate 0.001 --critic-learning-rate 0.01 --num-minibatches 4 --model
    """
    ours = run(SCRIPT, *flags.split(), model_dir)["run_dir"]
    expected = run(ROOT / "ippo.py", *flags.split(), model_dir, "--use-separate-critic")["run_dir"]
    assert metrics_of(ours) == metrics_of(expected)


class Told:
    """Agent 1 of three reads what the answer is worth, 2 is silent."""

    def __init__(self, num_agents, num_turns, dataset, seed):
        pass

    def tasks(self, split):
        return [{"worth": 0}, {"worth": 1}]

    def observe(self, task, history):
        return ["write", "+-"[task["worth"]] * 20, None]

    def step(self, branches):
        return [Step(float(task["worth"]), {}, False) for task, _, _ in branches]


def test_the_critic_reads_what_others_read(model_dir):
    """Fails if a section is lost, or a silent agent's is there, or the completion would not follow the own prompt.

    Or if an environment that tells critics the state is not asked for it.
    """
    policy = load_policy(mappo, model_dir)
    prompts = {0: "ask", 2: "own", 3: "see"}
    groups = {k: SimpleNamespace(prompt=prompt, policy=policy) for k, prompt in prompts.items()}
    node = mappo.Node([0], {"worth": 1}, 1.0, groups=groups)
    env = SimpleNamespace()
    critics_prompt = policy.tokenizer.decode(mappo.joint_ids(env, 2, node))
    assert "user\nAgent 0 reads:\nask\n\nAgent 3 reads:\nsee\n\nown" in critics_prompt
    env.state = lambda task, history: f"worth {task['worth']} after {history}"
    assert "user\nworth 1 after []\n\nown" in policy.tokenizer.decode(mappo.joint_ids(env, 2, node))


def test_it_explains_returns_that_depend_on_what_another_agent_reads(run, model_dir):
    """Fails if the critic reads its agent's prompt alone, which is the same in all tasks, or an actor reads more."""
    flags = """
    --env test_mappo:Told --num-agents 3 --max-new-tokens 4 --num-tasks 2 --num-generations 2 --eval-tasks 1
    --num-iterations 4 --update-epochs 8 --num-minibatches 1 --vf-coef 1 --no-clip-vloss
    --no-anneal-lr --learning-rate 1e-5 --critic-learning-rate 0.01 --max-grad-norm 1e9 --model
    """
    metrics = run(SCRIPT, *flags.split(), model_dir)["metrics"]
    assert metrics["agent_0/explained_variance"] > 0.8
    assert metrics["agent_0/approx_kl"] < 0.01
