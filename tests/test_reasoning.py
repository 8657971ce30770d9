"""Short answers, what a team is paid for them, and the roles of gsm8k and of generated problems."""

import re
import sys
from types import SimpleNamespace

import pytest
from toy import play, rows_of

import envs
from envs.debate import judge_answers
from rewards.boxed import is_right, read_answer, read_verdict, team_reward

# What a box may hold | the gold answer | whether it is right; THIN and NONE are a thin blank and one without width
FORMS = r"""
18 | 18 | right
18.0 | 18 | right
18. | 18 | right
+18 | 18 | right
\$18 | 18 | right
\$18.00 | 18 | right
$18$ | 18 | right
€18 | 18 | right
{18} | 18 | right
\textbf{18} | 18 | right
**18** | 18 | right
x = 18 | 18 | right
36/2 | 18 | right
18 eggs | 18 | right
18 square feet | 18 | right
18 \text{ dollars} | 18 | right
18\ \text{dollars} | 18 | right
18~\text{dollars} | 18 | right
18\text{dollars} | 18 | right
18\quad | 18 | right
18 km/h | 18 | right
18 \mathrm{~km} / \mathrm{h} | 18 | right
18\text{ cm}^2 | 18 | right
\$18/hour | 18 | right
29^\circ | 29 | right
29^{\circ}\text{C} | 29 | right
50\% | 50 | right
50 % | 50 | right
1,022 | 1022 | right
1022 | 1,022 | right
1{,}022 | 1022 | right
1\,022 | 1022 | right
1,\!022 | 1022 | right
-5 | -5 | right
−5 | -5 | right
- 5 | -5 | right
-\$5 | -5 | right
\$-5 | -5 | right
-\frac{10}{2} | -5 | right
3/8 | 0.375 | right
\dfrac{3}{8} | 0.375 | right
.375 | 3/8 | right
\frac52 | 2.5 | right
2\frac{1}{2} | 2.5 | right
2\frac12 | 2.5 | right
3\,\frac{1}{2} | 3.5 | right
-2\frac{1}{2} | -2.5 | right
2 1/2 \text{ cups} | 2.5 | right
Paris | paris | right
\text{Paris}. | Paris | right
18m | 18 | right
18 | 18 dollars | right
18 | 18m | right
3h | 3 hours | right
\left(1,2\right) | (1, 2) | right
x^{2} | x^2 | right
\sqrt{2} | \sqrt2 | right
２９ | 29 | right
½ | 0.5 | right
2½ | 2.5 | right
29€ | 29 | right
1THIN500 | 1500 | right
1THIN500THIN€ | 1500 | right
NONE18NONE | 18 | right
\left(29\right) | 29 | right
“Paris” | "Paris" | right
20+9=29 | 29 | right
5 \times 6 = 30 | 30 | right
\$5 + \$1,000 = \$1,005 | 1005 | right
Answer: 13 | 13 | right
\text{answer: }13 | 13 | right
17 | 18 | wrong
18.5 | 18 | wrong
17, 18 | 18 | wrong
17 18 | 18 | wrong
18 or 20 | 18 | wrong
18 or nineteen | 18 | wrong
18 minus two | 18 | wrong
18 and a half | 18 | wrong
18 below zero | 18 | wrong
18 dozen | 18 | wrong
18 hundred | 18 | wrong
3 million | 3 | wrong
3 million dollars | 3 | wrong
3\text{ million} | 3 | wrong
3 quarters | 3 | wrong
5x | 5 | wrong
5 x | 5 | wrong
5k | 5 | wrong
5\pi | 5 | wrong
5\sqrt{2} | 5 | wrong
5! | 5 | wrong
5^2 | 5 | wrong
5 \times 10^3 | 5 | wrong
5e0 | 5 | wrong
4+1 | 5 | wrong
> 5 | 5 | wrong
5:00 | 5 | wrong
2\frac{1}{2} | 10.5 | wrong
3\,\frac{1}{2} | 15.5 | wrong
\frac{1}{2}3 | 1/23 | wrong
\frac523 | 5/23 | wrong
17 36/2 | 35 | wrong
3/8 | 3 | wrong
0.3750001 | 3/8 | wrong
1,8 | 18 | wrong
0,018 | 18 | wrong
1,022 | 1 | wrong
1.022 | 1022 | wrong
18/0 | 18 | wrong
٥ | 5 | wrong
5² | 52 | wrong
10⁵ | 105 | wrong
5₂ | 52 | wrong
2½ | 10.5 | wrong
½½ | 0.25 | wrong
1 500 | 1500 | wrong
x=3, y=4 | 4 | wrong
17, 18=18 | 18 | wrong
17 or 18=18 | 18 | wrong
29=20+9 | 9 | wrong
10xy | 10 | wrong
12 | 1 2 | wrong
x^{2}3 | x^{23} | wrong
2 PM | 2 AM | wrong
18 | 18 (each) | wrong
18 (each) | 18 (each) | wrong
3 million | 3 million | wrong
answer | answer | wrong
9^{9^{9^{9}}} | 9 | wrong
1e999999999 | 1 | wrong
"""

# A completion | the answer that it gives
COMPLETIONS = r"""
so\n#### 18 eggs.\nx | 18 eggs
#### **18** | 18
#### **Answer:** 18 | 18
so $\boxed {18}$ | 18
\boxed{18} or \boxed{18.0} | 18.0
End with \boxed{answer} or \boxed{...}. \boxed{18} | 18
<think>\boxed{17}</think> \boxed{18} | 18
\boxed{18}<think>\boxed{17} | 18
18 | None
The answer is $18. | None
\boxed{} | None
\boxed{answer} | None
\boxed{...} | None
\boxed{18 | None
<think>\boxed{18} | None
\boxed{17} \boxed{18} | None
"""
# These are read in one pass.
LONG = ["9" * 10**6, " " * 10**6, "\\boxed{" * 30_000, "\\frac{" * 200_000, "= " * 32]
VERDICTS = r"""
VERDICT: right | True
x\n**Verdict: Right.** \ny | True
- VERDICT: right | True
`VERDICT: right` | True
VERDICT: **right** because 2 + 2 = 4 | True
VERDICT:wrong | False
> VERDICT: wrong, it is 5 | False
right | None
My VERDICT: right | None
VERDICT: not right | None
VERDICT: right or wrong | None
VERDICT: right or VERDICT: wrong | None
VERDICT: right\nVERDICT: wrong | None
VERDICT: right\nVERDICT: maybe | None
<think>\nVERDICT: right\n | None
"""


def test_usual_forms_are_read_and_none_as_another_number():
    """Fails if a form that models write is refused, or pays for a number that it is not."""
    for form, gold, judgement in rows_of(FORMS.replace("THIN", "\u202f").replace("NONE", "\u200b")):
        attempt = read_answer(f"so \\boxed{{{form}}}.")
        assert is_right(attempt, gold) == (judgement == "right"), (form, gold)


def test_only_one_answer_in_its_place_is_right():
    """Fails if candidates, a number in passing, a thought or the box of a prompt counts, or if a long one hangs."""
    for completion, attempt in rows_of(COMPLETIONS):
        assert str(read_answer(completion.replace("\\n", "\n"))) == attempt, completion
    for text in LONG:
        assert not is_right(read_answer(f"\\boxed{{{text}}}"), "18"), text[:30]


def test_a_verdict_is_the_first_word_of_its_line():
    """Fails if a missing or garbled verdict, or one of each kind, counts as one, or many lines hang."""
    for completion, value in rows_of(VERDICTS):
        assert str(read_verdict(completion.replace("\\n", "\n"))) == value, completion
    assert read_verdict("\n" * 10**6) is None


# The checker's verdict | its box | the solvers' boxes | the reward | diagnostics; the gold answer is 18
TEAMS = """
right | 18 | 18 | 1.2 | agree 1, answer_copied 1, fixed 0
wrong | 18 | 17 | 1.1 | fixed 1, answer_copied 0
wrong | 17 | 18 | 0.1 | broken 1, all_passed 0
right | 18 | 18 17 | 1.05 | fixed 0.5, answer_copied 0.5
none | 18 |  | 1 | verdict 0, fixed 1
right | 7 | 7 | 0 | agree 1, answer_copied 1
right | answer | 17 | 0 | parsed 0, agree 1
"""


def test_only_right_answers_and_true_verdicts_are_paid():
    """Fails if agreement, copying or form earns, or if a missing verdict is taken for right, as Dr. MAS does."""
    for judgement, box, boxes, reward, diagnostics in rows_of(TEAMS):
        completion = f"VERDICT: {judgement}\n\\boxed{{{box}}}"
        solutions = [f"\\boxed{{{text}}}" for text in boxes.split(" ")]
        total, parts = team_reward(completion, lambda attempt: is_right(attempt, "18"), solutions)
        assert total == pytest.approx(float(reward)) == parts["correct"] + parts["verdict"] + parts["solver_correct"]
        found = {f"{name} {part:g}" for name, part in parts.items()}
        assert found.issuperset(diagnostics.split(", ")), completion


# A gold answer | whether a completion can give it
GOLDS = """
18 dollars | True
18m | True
(1, 2) | True
x | True
0.00001 | True
18 (each) | False
3 million | False
99999999999999999999999999999999999999999999999999999999999999999 | False
 | False
1e-05 | False
1E+16 | False
"""


def test_gold_answers_that_nothing_can_equal_are_left_out():
    """Fails if a row whose answer no completion gives is trained on, or one with a unit is left out."""
    golds, usable = zip(*rows_of(GOLDS))
    assert [str(is_right(gold, gold)) for gold in golds] == [*usable]
    rows = [{"question": "How many?", "answer": f"#### {gold}"} for gold in golds]
    for judge in envs.make("gsm8k").judge, judge_answers:
        assert [str(isinstance(row, dict)) for row in judge(rows)] == [*usable]


# Agents | who speaks in each turn | the solutions that the last one reads
SPEAKERS = """
1 | 0 0  | 100
2 | 0 1  | 100
3 | 01 2 | 100 101
"""


def test_solvers_then_a_checker():
    """Fails if a checker speaks too early, does not read a solution or reads a thought, or if one agent has one.

    Or if an answer earns in the first turn.
    """
    solution = f"{'long ' * 200}<think>so 100;</think> so "
    for num_agents, speakers, solutions in rows_of(SPEAKERS):
        env = envs.make("gsm8k", int(num_agents), 2)
        task = env.tasks("test")[0] | {"answer": "#### 10"}
        turns, steps = play(env, task, lambda turn, i, prompt: f"{solution}10{i}; \\boxed{{10}}")
        assert steps[0].reward == 0
        for prompts, speaking in zip(turns, speakers.split(), strict=True):
            assert [str(i) for i, prompt in enumerate(prompts) if prompt] == [*speaking]
        assert re.findall("so (10.);", turns[1][-1]) == solutions.split()
        assert turns[1][-1].count("long") <= 160


# A problem | agents | what each of them knows; the last one answers | the messages that it reads | whether it is used
DEALT = """
A is 1. B is 2. C is 3. How many? | 2 | A is 1. C is 3. / B is 2. | 1 | True
A is 1. B is 2. C is 3. How many? | 3 | A is 1. / B is 2. / C is 3. | 2 | True
A is 1. B is 2. C is 3. How many? | 5 | A is 1. / B is 2. / C is 3. / nothing / nothing | 3 | True
Prof. Lee has 5. All are red. Each costs $2. How much? | 2 | Prof. Lee has 5. All are red. / Each costs $2. | 1 | True
It is 10. It is blue. How many? | 2 | It is 10. / It is blue. | 1 | False
"""


def test_a_problem_is_dealt_out():
    """Fails if two agents or none know a fact, the answerer all numbers, or a title ends a sentence.

    Or if a message is longer than allowed, read by nobody, or taken for the answer.
    """
    for question, num_agents, known, messages, used in rows_of(DEALT):
        env = envs.make("gsm8k", int(num_agents), roles="split")
        task = {"question": question, "answer": "#### 10"}
        (tellers, listener), steps = play(env, task, lambda turn, *_: "told " * 30 + ["\\boxed{10}", ""][turn])
        assert [step.reward for step in steps] == [0, 0]
        prompts = [*tellers[:-1], listener[-1]]
        facts = ["".join(re.findall("You know: (.*)", prompt or "")) or "nothing" for prompt in prompts]
        assert " / ".join(facts) == known
        assert listener[-1].count("told") == 16 * int(messages)
        assert env.state(task, []) == question
        assert str(env.judge([task]) == [task]) == used


class Generator:
    """A stand-in for a data set of reasoning-gym. Its scorer evaluates answers, as some do, and pays for form."""

    def __init__(self, name, size, seed, first=1):
        self.numbers = range(first, size)

    def __iter__(self):
        for k in [*self.numbers, *self.numbers[:49]]:
            yield {"question": f"A is {k}. B is 0. What is A?", "answer": str(k)}

    def score_answer(self, answer, entry):
        return 1.0 if eval(answer) == eval(entry["answer"]) else 0.01


def test_a_generator_of_reasoning_gym(monkeypatch):
    """Fails if model-written text is evaluated, partial credit counts as right, or trained tasks are in the test.

    Or if an option stays a string, or goes to another environment of a mixture.
    """
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Generator))
    mixture = envs.make("gsm8k+reasoning", 1, task="sums", first="10")
    env = mixture.environments["reasoning"]
    train = [task["question"] for task in env.tasks("train")]
    assert not any(task["question"] in train for task in env.tasks("test"))
    task = env.tasks("train")[8]
    monkeypatch.setattr("builtins.evaluate", pytest.fail, raising=False)
    boxes = ["18", "17", "evaluate(1) or 18", "9**9**9**9", "18e0", ""]
    steps = env.step([(task, [], [f"\\boxed{{{box}}}"]) for box in boxes])
    assert [step.reward for step in steps] == [1, 0, 0, 0, 0, 0]
