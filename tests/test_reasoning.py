"""Short answers, what a team is paid for them, and the roles of gsm8k and of generated problems."""

import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import envs
from envs import Step
from envs.problems import NAMES, problems
from envs.reasoning import dealt
from rewards.reasoning import answer, is_right, team_reward, verdict

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k.jsonl"


def gold(task):
    return task["answer"].rpartition("#### ")[2]


RIGHT = {  # gold -> what boxes may hold, between ;
    "18": r"18; 18.0; \$18; 18 \text{ dollars}; 36/2; +18; 18 eggs} or \boxed{18",
    "1022": r"1,022; 1{,}022; 1\,022; \textbf{1022}; $1022$",
    "-5": r"-5; −5; - 5; -\$5; \$-5; -\frac{10}{2}",
    "0.375": r"3/8; \dfrac{3}{8}; .375",
    "50": r"50\%; 50%",
    "paris": r"Paris; \text{Paris}.",
}
WRONG = {
    "18": f"17, 18; 18 or 19; 17 18; 18.5; 1,8; 9+9; ١٨; 18/0; 9^{{9^{{9^{{9}}}}}}; 1e999999999; {'9' * 10**6}",
    "3/8": "3; 0.3750001",
    "1,022": "1; 22; 1.022",
}
RIGHT_TEXTS = "so\n#### 18 eggs.\nx", "<think>\\boxed{17}</think> \\boxed{18}", "\\boxed{18}<think>\\boxed{17}"
WRONG_TEXTS = [
    "18",
    "\\boxed{}",
    "\\boxed{18",
    "<think>\\boxed{18}",
    "\\boxed{17} \\boxed{18}",
    "\\boxed{" * 30_000,  # these are read in one pass
    "\\boxed{" + "\\frac{" * 200_000 + "}",
    "\\boxed{" + " " * 10**6 + "x}",
]


@pytest.mark.parametrize("right", [True, False])
def test_only_one_answer_in_its_place_is_right(right):
    """A list of candidates, a number in passing or in a thought that is paid; 1 of 1,022; a number that hangs."""
    for gold, boxes in (RIGHT if right else WRONG).items():
        for box in boxes.split("; "):
            assert is_right(answer(f"so \\boxed{{{box}}}."), gold) is right, box[:30]
    for text in RIGHT_TEXTS if right else WRONG_TEXTS:
        assert is_right(answer(text), "18") is right, text[:30]


def test_a_verdict_is_a_line_of_its_own():
    """A missing or garbled verdict, or one of each kind, that counts as one."""
    lines = {True: ["VERDICT: right", "x\n**Verdict: Right.** \ny"], False: ["VERDICT:wrong"]}
    lines[None] = ["right", "My VERDICT: right", "VERDICT: not right", "VERDICT: right or VERDICT: wrong"]
    lines[None] += ["VERDICT: right\nVERDICT: wrong", "<think>\nVERDICT: right\n", "\n" * 10**6]
    for value, texts in lines.items():
        assert all(verdict(text) is value for text in texts), value


@pytest.mark.parametrize(
    "text, solutions, reward, parts",
    [
        ("VERDICT: right\n\\boxed{18}", ["\\boxed{18}"], 1.2, {"agree": 1, "answer_copied": 1, "fixed": 0}),
        ("VERDICT: wrong\n\\boxed{18}", ["\\boxed{17}"], 1.1, {"fixed": 1, "broken": 0, "answer_copied": 0}),
        ("VERDICT: wrong\n\\boxed{17}", ["\\boxed{18}"], 0.1, {"fixed": 0, "broken": 1, "all_passed": 0}),
        ("VERDICT: right\n\\boxed{18}", ["\\boxed{18}", "\\boxed{17}"], 1.05, {"fixed": 0.5, "answer_copied": 0.5}),
        ("\\boxed{18}", ["18"], 1, {"verdict": 0, "fixed": 1}),
        ("VERDICT: right\n\\boxed{7}", ["\\boxed{7}"], 0, {"agree": 1, "answer_copied": 1}),  # one constant for all
    ],
)
def test_only_right_answers_and_true_verdicts_are_paid(text, solutions, reward, parts):
    """Agreement, copying or form that earns; a missing verdict taken for right, as Dr. MAS does."""
    got, found = team_reward(text, lambda given: is_right(given, "18"), solutions)
    assert got == pytest.approx(reward) and parts.items() <= found.items()
    assert got == pytest.approx(sum(found.get(name, 0) for name in ("correct", "verdict", "solver_correct")))


VERBS = {"buys": "+", "finds": "+", "gives": "-", "loses": "-", "keeps": "/", "times": "*"}


def solved(facts):
    """The result of a problem from its sentences, read once more."""
    value, *numbers = (re.search(r"\d+", fact)[0] for fact in facts)
    for fact, n in zip(facts[1:], numbers):
        value = eval(f"{value} {next(sign for verb, sign in VERBS.items() if verb in fact)} {n}")
    return value


def test_sample_problems():
    """A wrong gold answer, and combinations of the test split that were trained on."""
    kinds = {"train": set(), "test": set()}
    for split, seed in ("train", 1), ("test", 2):
        rows = problems(split, 600, seed)
        assert rows == problems(split, 600, seed) != problems(split, 600, seed + 1)
        for row in rows:
            facts = dealt(row["question"], 3)[0]
            assert solved(facts) == int(gold(row)) != int(row["flawed"].rpartition(" ")[2]), row
            kinds[split].add(re.sub("|".join(NAMES) + r"|\d+| on day| at| o'clock| How.*", "", row["question"]))
    assert not kinds["test"] & kinds["train"]


def first(actions):
    return [Step(actions, 0.0, {}, False)]


@pytest.mark.parametrize("num_agents, num_turns", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_solvers_then_a_checker(num_agents, num_turns):
    """A checker that speaks too early or does not read a solution, or reads a thought; one agent with a checker."""
    env = envs.make("gsm8k", num_agents, num_turns)
    task, *_ = env.tasks("test")
    prompts, solvers = env.observe(task, []), max(1, num_agents - 1)
    assert env.num_turns == (num_turns if num_agents == 1 else 2)
    assert None not in prompts[:solvers] and prompts[solvers:] == [None] * (num_agents - solvers)
    texts = [f"<think>a thought</think>{'long ' * 200} and so \\boxed{{{i}}}" for i in range(101, 101 + num_agents)]
    *silent, prompt = env.observe(task, first(texts))
    assert silent == [None] * (num_agents - 1) and prompt.startswith(task["question"])
    assert [f"\\boxed{{{i}}}" in prompt for i in range(101, 102 + solvers)] == [True] * solvers + [False]
    assert "thought" not in prompt and prompt.count("long") <= 80 * solvers


@pytest.mark.parametrize("num_agents", [2, 3, 5])
def test_a_problem_is_dealt_out(num_agents):
    """A fact that two agents or none are dealt, a longer message than allowed, or one that nobody reads."""
    env = envs.make("gsm8k", num_agents, roles="split")
    task, *_ = env.tasks("test")
    *facts, asked = re.split(r"\. ", task["question"])
    *tellers, listener = env.observe(task, [])
    assert listener is None and tellers[3:] == [None] * (num_agents - 4)
    said = [" ".join(f"w{i}-{k}" for k in range(30)) for i in range(num_agents)]
    *_, prompt = env.observe(task, first(said))
    for agent, text in enumerate([*tellers, prompt]):
        known = [k for k, fact in enumerate(facts) if fact in (text or "")]
        assert known == list(range(3))[agent::num_agents]
        assert text is None or asked in text
        heard = 16 if agent < num_agents - 1 and known else 0
        assert set(re.findall(rf"w{agent}-\d+", prompt)) == {f"w{agent}-{k}" for k in range(heard)}
    assert env.state(task, []) == task["question"]


@pytest.mark.parametrize("roles, best", [("check", 1.1), ("split", 1.0)])
def test_only_the_last_text_is_the_answer(roles, best):
    """An answer that earns in both turns, or whoever gives it."""
    env = envs.make("gsm8k", 2, roles=roles)
    task, *_ = env.tasks("train")
    box = f"\\boxed{{{gold(task)}}}"
    branches = [(task, [], [box, ""]), (task, first([box, ""]), ["", box]), (task, first([box, box]), [box, "no"])]
    early, late, wrong = env.step(branches)
    assert (early.reward, early.done, late.done) == (0, False, True)
    assert late.reward == pytest.approx(best) and wrong.reward == pytest.approx(best - 1)


@pytest.mark.skipif(not GSM8K.exists(), reason="no ../shared/data/gsm8k.jsonl")
def test_the_reference_solutions_of_gsm8k_are_right():
    """A form of an answer that is not read, such as 1,022 or -3, and annotations in what is imitated."""
    env = envs.make("gsm8k", 2, dataset=str(GSM8K))  # leaves out what its own solution does not answer
    assert len(env.tasks("train") + env.tasks("test")) == 200
    assert not any("<<" in pair["completion"] for pair in env.demonstrations())


class Generator:
    """A stand-in for a data set of reasoning-gym. Its scorer evaluates answers, as some do, and pays for form."""

    def __init__(self, name, size, seed):
        self.entries = [{"question": f"A is {k}. What is A?", "answer": str(k)} for k in range(1, size)]
        self.entries += self.entries[:50]

    def __iter__(self):
        return iter(self.entries)

    def score_answer(self, answer, entry):
        return 1.0 if eval(answer) == eval(entry["answer"]) else 0.01


@pytest.mark.parametrize("roles", ["check", "split"])
def test_a_generator_of_reasoning_gym(roles, monkeypatch):
    """Model-written text that is evaluated, partial credit that counts as right, or trained tasks in the test."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Generator))
    env = envs.make("reasoning", 2, roles=roles, task="sums")
    train, test = ({task["question"] for task in env.tasks(split)} for split in ("train", "test"))
    assert not train & test
    task = next(task for task in env.tasks("train") if task["answer"] == "18")
    ran = []
    monkeypatch.setattr("builtins.ran", ran, raising=False)
    wrong = "17", "ran.append(1) or 18", "9**9**9**9", "18e0", ""
    texts = ["\\boxed{18}", *(f"\\boxed{{{text}}}" for text in wrong)]
    steps = env.step([(task, first(["", ""]), ["", text]) for text in texts])
    assert [step.reward for step in steps] == [1] + [0] * len(wrong) and not ran
