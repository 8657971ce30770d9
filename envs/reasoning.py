"""Agents solve problems with a short answer: a solver and a checker, or several who each know a part of the problem.

The problems are those of GSM8K (Cobbe et al., 2021) or of envs/problems.py; envs/generated.py has others. The reward
is in rewards/reasoning.py.
"""

import random
import re

from envs import Step
from envs.data import read_rows
from envs.problems import problems
from rewards.reasoning import answer, is_right, spoken, team_reward

SAMPLE_COUNTS = {"train": 1000, "test": 200}
SHOWN = 400  # characters of a solution that others read: the last ones, where its answer is
WORDS = 16  # of a message
FLAWED, FALSE_VERDICTS, VAGUE = 0.4, 0.3, 0.3  # shares of the demonstrations
ANNOTATION = re.compile(r"<<[^<>]*>>")  # a step of GSM8K's solutions once more, for a calculator
SENTENCE = re.compile(r"(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)(?<=[.!?])\s+")  # between two sentences

SOLVE = "Solve this step by step. End with \\boxed{answer}."
REVISE = "Check your solution and solve this again. End with \\boxed{answer}."
CHECK = "Write VERDICT: right or VERDICT: wrong, then your own solution. End with \\boxed{answer}."
CHECK_ALL = (
    "Write VERDICT: right if all are right, else VERDICT: wrong, then your own solution. End with \\boxed{answer}."
)
TELL = f"Agent {{n}} has to answer. Tell it what you know in at most {WORDS} words."


def solution(text):
    r"""An answer in GSM8K's form as an agent writes it: without annotations, and with \boxed{} for ####."""
    working, _, gold = ANNOTATION.sub("", text).rpartition("####")
    return f"{working}\\boxed{{{gold.strip()}}}"


def dealt(question, num_agents):
    """A problem in parts: the facts that each agent is given, sentence by sentence, and the question itself."""
    sentences = SENTENCE.split(question.strip())
    asked = max((k for k, sentence in enumerate(sentences) if sentence.endswith("?")), default=len(sentences) - 1)
    asked = sentences.pop(asked)
    return [" ".join(sentences[i::num_agents]) for i in range(num_agents)], asked


def vague(message, rng):
    """A message without its first number, or without any."""
    return re.sub(r"\d+", "some", message, count=rng.randrange(2))


class Reasoning:
    r"""Problems with a short answer, which a text gives as \boxed{answer}. The last agent's last text is the team's.

    name: "gsm8k"
    num_agents: 1 or more; split: 2 or more
    num_turns: 1 or 2. Several agents always take 2. A single one solves the problem, and in a second turn it reads
        its own solution and solves it again.
    dataset: "sample", "hub" (openai/gsm8k, its first 1000 rows of train and of test), a hub id or a file; columns
        `question` and `answer`, with the result behind ####
    seed: int, seeds the sample tasks
    roles: "check": all agents but the last solve the problem; then the last one reads it and what they wrote, gives a
        verdict on it, and an answer of its own.
        "split": the sentences before the question are dealt out in turn. All agents but the last, to whom nobody
        would listen after its answer, write a message of which 16 words are read; then the last one answers.

    The reward, paid in the last turn: 1.0 for the right answer, and with roles check 0.1 for a true verdict and 0.1
    for right solutions; so at most 1.2 (one agent: 1.0, or 1.1 in two turns), or 1.0 with roles split. Nobody is ever
    shown a gold answer, nor whether an answer was right.

    Raises ValueError with one sentence for other arguments and for a dataset that cannot be used.
    """

    def __init__(self, name="gsm8k", num_agents=2, num_turns=1, dataset="sample", seed=1, roles="check"):
        if roles not in ("check", "split"):
            raise ValueError(f"--env-kwargs roles {roles}: {name} knows check and split; use one of them.")
        if roles == "split" and num_agents == 1:
            raise ValueError("--num-agents 1: roles split deals a problem out; use 2 or more, or roles check.")
        if num_turns > 2:
            raise ValueError(f"--num-turns {num_turns}: {name} has at most two turns; use --num-turns 2.")
        self.num_agents, self.num_turns = num_agents, 2 if num_agents > 1 else num_turns
        self.roles, self.seed = roles, seed
        self.splits = self.load(dataset)

    def load(self, dataset):
        if dataset == "sample":
            return {split: problems(split, count, self.seed) for split, count in SAMPLE_COUNTS.items()}
        parts = {"train": "train", "test": "test"}
        return read_rows(dataset, ["question", "answer"], "openai/gsm8k", parts, "main", judge=self.judge)

    def judge(self, rows):
        """For each row its task, or why it cannot be used."""
        judged = []
        for row in rows:
            boxed = answer(solution(row["answer"]))
            if not self.right(row, boxed):
                row = "no short result behind ####"
            elif self.roles == "split" and not any(dealt(row["question"], self.num_agents)[0]):
                row = "no sentence beside the question, which roles split could deal out"
            judged.append(row)
        return judged

    def right(self, task, given):
        return is_right(given, task["answer"].rpartition("####")[2])

    def tasks(self, split):
        """The rows of "train" or "test"."""
        return self.splits[split]

    def state(self, task, history):
        """The whole problem, for a critic: with roles split no agent reads it."""
        return task["question"]

    def observe(self, task, history):
        prompts = self.split_prompts if self.roles == "split" else self.check_prompts
        return prompts(task["question"], history[0].actions if history else None)

    def check_prompts(self, problem, said):
        """Prompts of roles check; `said`: what was written in the first turn, None in that turn."""
        silent = [None] * (self.num_agents - 1)
        if said is None:
            return [f"{problem}\n\n{SOLVE}"] * max(1, len(silent)) + [None] * (len(silent) > 0)
        said = [spoken(text).strip()[-SHOWN:] for text in said]
        if not silent:
            return [f"{problem}\n\nYour solution:\n{said[0]}\n\n{REVISE}"]
        told = "\n\n".join(f"Solution of agent {i}:\n{text}" for i, text in enumerate(said[:-1], 1))
        return [*silent, f"{problem}\n\n{told}\n\n{CHECK if len(silent) == 1 else CHECK_ALL}"]

    def split_prompts(self, problem, said):
        """Prompts of roles split. Who was dealt nothing is silent."""
        (*facts, own), asked = dealt(problem, self.num_agents)
        if said is None:
            tell = TELL.format(n=self.num_agents)
            return [f"You know: {known}\nQuestion: {asked}\n\n{tell}" if known else None for known in facts] + [None]
        texts = [" ".join(spoken(text).split()[:WORDS]) for text in said[:-1]]
        told = [f"Agent {i} says: {text}" for i, (known, text) in enumerate(zip(facts, texts), 1) if known]
        lines = [f"You know: {own}"] * bool(own) + [*told, f"Question: {asked}"]
        return [None] * len(facts) + ["\n".join(lines) + f"\n\n{SOLVE}"]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            if len(history) + 1 < self.num_turns:
                steps.append(Step(actions, 0.0, {}, done=False))
                continue
            solutions = []
            if history and self.roles == "check":
                solutions = history[0].actions[: max(1, self.num_agents - 1)]
            reward, parts = team_reward(actions[-1], lambda given, task=task: self.right(task, given), solutions)
            steps.append(Step(actions, reward, parts, done=True))
        return steps

    def demonstrations(self):
        """Texts to imitate for the train split: list of dict(prompt, completion), of roles check and of roles split.

        Those of the sample tasks are flawed by chance: wrong solutions, false verdicts, messages without a number.
        Those of a data set are its solutions; the ones that a checker reads are another problem's by chance.
        """
        rng, rows, pairs = random.Random(f"demonstrations {self.seed}"), self.splits["train"], []

        def draw(task, flawed):
            wrong = task["flawed"] if "flawed" in task else rng.choice(rows)["answer"]
            return solution(wrong if rng.random() < flawed else task["answer"])

        for task in rows:
            problem, sample = task["question"], "flawed" in task
            said = [draw(task, FLAWED) for _ in range(self.num_agents)]
            turns = [(self.check_prompts(problem, None), [draw(task, FLAWED * sample) for _ in said])]
            if self.num_turns == 2:
                head = ""
                if self.num_agents > 1:
                    true = all(self.right(task, answer(text)) for text in said[:-1])
                    told = true != (rng.random() < FALSE_VERDICTS * sample)
                    head = f"VERDICT: {'right' if told else 'wrong'}\n"
                turns.append((self.check_prompts(problem, said), [head + draw(task, FLAWED * sample)] * len(said)))
            facts, _ = dealt(problem, self.num_agents)
            if any(facts[:-1]):
                said = [" ".join(known.split()[:WORDS]) for known in facts]
                if sample:
                    said = [vague(text, rng) if rng.random() < VAGUE else text for text in said]
                turns.append((self.split_prompts(problem, None), said))
                turns.append((self.split_prompts(problem, said), [draw(task, VAGUE * sample)] * len(said)))
            for prompts, texts in turns:
                pairs += [{"prompt": p, "completion": c} for p, c in zip(prompts, texts) if p is not None]
        return pairs
