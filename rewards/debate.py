r"""The rewards of debates. Only what is in a box is read, and only whether it is right is paid for.

Agreement, style, length and a change of mind earn nothing. A bonus for "was wrong, is right", as others pay it, would
be earned most easily by a wrong answer on purpose at first. So it is the other way round: an answer that was right
from the start is worth a little more.
"""

import re
from itertools import pairwise

from rewards.boxed import is_right, is_same, read_answer

ALL_RIGHT = 0.2
STEADY = 0.1
PARTS = {  # as in rewards/coding.py
    "correct": (1, "share of the agents that are right at the end"),
    "all_passed": (ALL_RIGHT, "all agents are right at the end; with form judge: the judge is right, which pays 1"),
    "steady": (STEADY, "share of the agents that are right at first and at the end"),
    "parsed": (0, "share of the agents, or with form judge the judge, whose last completion has an answer"),
    "round1_correct": (0, "share of the agents that are right at first"),
    "corrected": (0, "share of the agents that are wrong at first and right at the end"),
    "persuaded_wrongly": (0, "share of the agents that are right at first and wrong at the end"),
    "majority_correct": (0, "more than half of the agents are right at the end"),
    "agree": (0, "all give the same answer at the end, right or wrong"),
    "flips": (0, "share of the answers that differ from the agent's answer before"),
    "said_true": (0, "form judge: the judge says true; at a mean of 0 or 1 it does not read"),
}
CHOICE = re.compile(
    r"(?:(?:option|choice|answer):? )?\(?([A-D])(?:[).:]| ?$| -?\d)"  # A, (A), A) 9, A: 9, A. 9, A 9 or Option A
    r"(?!.*\b[A-D]\b)",  # and no other letter
    re.IGNORECASE,
)


def debate_reward(rounds, gold):
    """Score a debate after its last round.

    rounds: list of at least one round, a list with one completion for each of N agents
    gold: str, the right answer; where it is a letter from A to D, an answer is the letter that it begins with

    Returns (reward, parts), with reward = correct + 0.2 all_passed + 0.1 steady, 0 to 1.3. An agent is right in a
    round if the one answer that its completion gives (see rewards/boxed.py) equals gold.
    """
    read = read_choice if gold in {*"ABCD"} else read_answer
    answers = [[read(completion) for completion in completions] for completions in rounds]
    N = len(answers[0])
    first = [is_right(attempt, gold) for attempt in answers[0]]
    last = [is_right(attempt, gold) for attempt in answers[-1]]
    both = list(zip(first, last))
    leader = answers[-1][0]
    pairs = [pair for before, after in pairwise(answers) for pair in zip(before, after)]
    changes = [earlier is not later and not is_same(earlier, later) for earlier, later in pairs]  # two Nones are none
    parts = {
        "correct": sum(last) / N,
        "all_passed": float(all(last)),
        "steady": both.count((True, True)) / N,
        "parsed": 1 - answers[-1].count(None) / N,
        "round1_correct": sum(first) / N,
        "corrected": both.count((False, True)) / N,
        "persuaded_wrongly": both.count((True, False)) / N,
        "majority_correct": float(sum(last) > N / 2),
        "agree": float(all(is_same(leader, attempt) for attempt in answers[-1])),
        "flips": sum(changes) / max(1, len(changes)),
    }
    bonus = ALL_RIGHT * parts["all_passed"] + STEADY * parts["steady"]
    return parts["correct"] + bonus, parts


def read_choice(completion):
    """The letter that a completion's one answer begins with, or None: also where another letter is in it."""
    match = CHOICE.match(read_answer(completion) or "")
    return match and match[1]


def verdict_reward(completion, truth):
    """Score a judge on a claim: (1.0 if its answer is `truth`, "true" or "false", else 0.0, parts)."""
    attempt = read_answer(completion)
    right = float(is_right(attempt, truth))
    said_true = float(is_right(attempt, "true"))
    return right, {"all_passed": right, "parsed": float(attempt is not None), "said_true": said_true}
