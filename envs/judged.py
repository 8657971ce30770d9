"""Agents write the parts of one answer to any task, and another model judges it by a rubric.

    python magrpo.py --env judged --dataset tasks.jsonl --env-kwargs url http://localhost:8000/v1 model NAME \
        rubric "Is it true, complete and short?"

Agents learn what the judge likes, which need not be what the rubric means: see docs/environments.md.
"""

import re

from envs import Step
from envs.chat import Chat, put_in_fence
from envs.data import read_rows
from rewards.texts import drop_thoughts, split_words

# SCORE and a number at the start of a line. The group is the number, or empty where it has a sign or another mark that
# changes it, or where more than "/10" or "out of 10" follows.
SCORE = re.compile(
    r"^[\W_]{0,20}(?:\d+[.)] [\W_]*)?SCORE(?:(?![\W_]*[-‐‑−–—])[\W_]*(?<![.,])(10(?:\.0+)?|[0-9](?:\.[0-9]+)?)"
    r"(?:[\W_]{0,9}(?:/|out of)[\W_]{0,9}10)?(?![\W_]*%)[\W_]*$|[\W_]*\d)",
    re.IGNORECASE | re.MULTILINE,
)

ALONE = "Answer this."
PART = "{n} writers answer this together. Write part {i} of {n}, and nothing else."
JUDGE = (
    "Judge an answer to a task by this rubric: {rubric}\n"
    "If it has several parts, they were written by as many writers. Judge what they make together.\n\n"
    "{material}\n\n"
    "Say in at most three sentences how well it meets the rubric. Then end with one line of the form "
    "SCORE: n, where n is a whole number from 0 (worst) to 10 (best)."
)
PARTS = {  # as in rewards/coding.py; what the judge may be gamed by: length, and a score of the agents' own
    "unparsed": (0, "none of three verdicts has a score, which is worth 0"),
    "words": (0, "number of words; if it rises with the return, the judge may pay for length"),
    "says_score": (0, "the answer has the word score"),
}


class Judged:
    """Agent i of N writes part i of the answer; the reward is the judge's score, from 0 to 1.

    num_turns: 1
    dataset: a file or a hub id with a column `prompt`, and perhaps `split`
    rubric: what the judge goes by
    url, model, timeout: of the judge, see envs/chat.py

    Raises ValueError with one sentence for arguments that cannot be used.
    """

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed, *, rubric, url, model, timeout=300):
        if dataset in ("sample", "hub"):
            raise ValueError(f"--dataset {dataset}: judged has no tasks; give a file or hub id with a column prompt.")
        self.chat = Chat(url, model, timeout)
        self.rubric = rubric
        self.roles = [PART.format(i=i, n=num_agents) for i in range(1, num_agents + 1)] if num_agents > 1 else [ALONE]
        self.splits = read_rows(dataset, ["prompt"])

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        return [f"{task['prompt'].strip()}\n\n{role}" for role in self.roles]

    def step(self, branches):
        """Asks the judge about all branches at once.

        A verdict without a score is asked for again, as it may only lack its form. An answer for which the judge still
        names none is worth 0, and counted.
        """
        prompts = []
        for task, _, actions in branches:
            prompts.append(JUDGE.format(rubric=self.rubric, material=put_in_fence(task["prompt"], actions)))
        steps = []
        for (_, _, actions), verdict in zip(branches, self.chat.ask(prompts, _parse_score)):
            score = _parse_score(verdict)
            answer = split_words(" ".join(map(drop_thoughts, actions)))
            parts = {
                "unparsed": float(score is None),
                "words": float(len(answer)),
                "says_score": float("score" in answer),
            }
            steps.append(Step((score or 0) / 10, parts, done=True, feedback=verdict))
        return steps


def _parse_score(verdict):
    """The score of a verdict, from 0 to 10, or None.

    A line has to consist of the word SCORE, in any case, and a number, such as 8, 7.5 or 8/10, in whatever marks. (The
    number may be on the next line.) Other lines may follow. There is no score where two lines begin with SCORE and a
    number, or the number has a dash before it, or is not in 0 to 10.
    """
    scores = SCORE.findall(verdict)
    return float(scores[0]) if len(scores) == 1 and scores[0] else None
