"""Agents solve problems with a short answer: a solver and a checker, or several who each know a part of the problem.

The problems are those of GSM8K (Cobbe et al., 2021) or of envs/samples/reasoning.py; envs/generated.py has others.
The reward is in rewards/boxed.py.
"""

import random
import re
from functools import partial

from envs import UNPAID, Step, one_of
from envs.data import load_tasks
from envs.samples import pair_up
from envs.samples.reasoning import make_problems
from rewards.boxed import LONGEST, PARTS, is_right, read_answer, team_reward
from rewards.texts import drop_thoughts

GSM8K = {"columns": ["question", "answer"], "hub": "openai/gsm8k", "hub_config": "main"}
SHOWN = 400  # characters of a solution that others read: the last ones, where its answer is
WORDS = 16  # of a message
FLAWED = 0.4  # share of the demonstrated solutions
FALSE_VERDICTS = 0.3
VAGUE = 0.3  # share of the demonstrated messages, and of the answers after them that are wrong
ANNOTATION = re.compile(r"<<[^<>]*>>")  # a step of GSM8K's solutions once more, for a calculator
SENTENCE = re.compile(r"(?<=[.!?])(?<!\b[DJMS][rst]\.)(?<!\bMrs\.)(?<!\bProf\.)\s+")  # between two sentences
NUMBER = re.compile(
    r"\d|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy"
    r"|eighty|ninety|hundred|thousand|dozen|half|twice|thirds?|quarters?)\b",
    re.IGNORECASE,
)

SOLVE = "Solve this step by step. End with \\boxed{answer}."
REVISE = "Check your solution and solve this again. End with \\boxed{answer}."
CHECK = "Write VERDICT: right or VERDICT: wrong, then your own solution. End with \\boxed{answer}."
CHECK_ALL = (
    "Write VERDICT: right if all are right, else VERDICT: wrong, then your own solution. End with \\boxed{answer}."
)
TELL = f"Agent {{n}} has to answer. Tell it what you know in at most {WORDS} words."


def _write_solution(text):
    r"""An answer in GSM8K's form as an agent writes it: without annotations, and with \boxed{} for ####."""
    working, _, gold = ANNOTATION.sub("", text).rpartition("####")
    return f"{working}\\boxed{{{gold.strip()}}}"


def deal(problem, num_agents):
    """A problem in parts: the facts that each agent knows, and the question, the last sentence with a question mark.

    Sentences with a number are dealt first, in turn, so they go to as many agents as possible.
    """
    sentences = SENTENCE.split(problem.strip())
    last = max((k for k, sentence in enumerate(sentences) if sentence.endswith("?")), default=-1)
    question = sentences.pop(last)
    order = sorted(range(len(sentences)), key=lambda k: not NUMBER.search(sentences[k]))
    shares = [sorted(order[agent::num_agents]) for agent in range(num_agents)]
    return [" ".join(sentences[k] for k in share) for share in shares], question


def _cut_start(text):
    """A solution as others read it: without thoughts, and its end only."""
    return drop_thoughts(text).strip()[-SHOWN:]


def _blur(message, rng):
    """A message without its first number, or without any."""
    return re.sub(r"\d+", "some", message, count=rng.randrange(2))


class Reasoning:
    r"""Problems with a short answer, which a completion gives as \boxed{answer}. The last one is the team's.

    name: "gsm8k"
    num_agents: 1 or more; split: 2 or more
    num_turns: 1 or 2. Several agents always take 2. A single one solves the problem, and in a second turn it reads
        its own solution and solves it again.
    dataset: "sample", "hub" (openai/gsm8k, its first 1000 rows of train and of test), a hub id or a file; columns
        `question` and `answer`, with the result after ####
    seed: int, seeds the sample tasks
    roles: "check": all agents except the last solve the problem; then the last one reads it and what they wrote, gives
        a verdict on it, and an answer of its own.
        "split": the sentences next to the question are dealt out in turn, first those with numbers; problems with
        numbers in only one of them are left out. All agents except the last write a message of which 16 words are
        read; then the last one answers.

    The reward, paid in the last turn: 1.0 for the right answer, and with roles check 0.1 for a true verdict and 0.1
    for right solutions; so at most 1.2 (one agent: 1.0, or 1.1 in two turns), or 1.0 with roles split. Nobody is ever
    shown a gold answer, nor whether an answer was right.

    Raises ValueError with one sentence for other arguments and for a dataset that cannot be used.
    """

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed, roles="check"):
        one_of("roles", roles, "check", "split")
        if roles == "split" and num_agents == 1:
            raise ValueError("--num-agents 1: roles split deals a problem out; use 2 or more, or roles check.")
        self.num_agents = num_agents
        self.num_solvers = max(1, num_agents - 1)  # with roles check
        self.num_turns = 2 if num_agents > 1 else num_turns
        self.roles = roles
        self.seed = seed
        self.splits = self.load(dataset)

    def load(self, dataset):
        return load_tasks(dataset, self.seed, make_problems, judge=self.judge, **GSM8K)

    def judge(self, rows):
        """For each row its task, or why it cannot be used."""
        judged = []
        for row in rows:
            shares, _ = deal(row["question"], 2)
            if not self.right(row, read_answer(_write_solution(row["answer"]))):
                row = f"its result after #### is no number without exponent and no string of 1 to {LONGEST} characters"
            elif self.roles == "split" and not all(map(NUMBER.search, shares)):
                row = "numbers in fewer than two sentences, too little for roles split to deal out"
            judged.append(row)
        return judged

    def right(self, task, attempt):
        return is_right(attempt, task["answer"].rpartition("####")[2])

    def tasks(self, split):
        return self.splits[split]

    def state(self, task, history):
        """The whole problem, for a critic: with roles split no agent reads it."""
        return task["question"]

    def observe(self, task, history):
        prompts = self._ask_in_parts if self.roles == "split" else self._ask_to_check
        written = None
        if history:
            written, _ = history[0]
        return prompts(task["question"], written)

    def _ask_to_check(self, problem, solutions):
        """Prompts of roles check; solutions: what was written in the first turn, None in that turn."""
        # one, silent in the first turn, unless the solver is alone
        checkers = [None] * (self.num_agents - self.num_solvers)
        if solutions is None:
            return [f"{problem}\n\n{SOLVE}"] * self.num_solvers + checkers
        if not checkers:
            return [f"{problem}\n\nYour solution:\n{_cut_start(solutions[0])}\n\n{REVISE}"]
        others = [f"Solution of agent {i}:\n{_cut_start(text)}" for i, text in enumerate(solutions[:-1], 1)]
        request = CHECK if self.num_solvers == 1 else CHECK_ALL
        return [None] * self.num_solvers + ["\n\n".join([problem, *others, request])]

    def _ask_in_parts(self, problem, messages):
        """Prompts of roles split; messages: of the first turn, None in that turn. Who knows nothing is silent."""
        (*shares, own), question = deal(problem, self.num_agents)
        if messages is None:
            request = f"Question: {question}\n\n{TELL.format(n=self.num_agents)}"
            return [f"You know: {facts}\n{request}" if facts else None for facts in shares] + [None]
        lines = [f"You know: {own}"] if own else []
        for i, facts in enumerate(shares):
            if facts:
                message = drop_thoughts(messages[i]).split()[:WORDS]
                lines.append(f"Agent {i + 1} says: {' '.join(message)}")
        lines.append(f"Question: {question}\n\n{SOLVE}")
        return [None] * len(shares) + ["\n".join(lines)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            if len(history) + 1 < self.num_turns:
                steps.append(UNPAID)
                continue
            solutions = []
            if history and self.roles == "check":
                first_actions, _ = history[0]
                solutions = first_actions[: self.num_solvers]
            reward, parts = team_reward(actions[-1], partial(self.right, task), solutions)
            steps.append(Step(reward, parts, done=True))
        return steps

    def demonstrations(self):
        """Texts to imitate for the train split: list of dict(prompt, completion), of roles check and of roles split.

        Those of the sample tasks are flawed by chance: wrong solutions, false verdicts, messages without a number.
        Those of a data set are its solutions; the ones that a checker reads are another problem's by chance.
        """
        rng = random.Random(f"demonstrations {self.seed}")
        pairs = []
        for task in self.splits["train"]:
            for prompts, completions in self._demonstrate_checks(task, rng) + self._demonstrate_parts(task, rng):
                pairs += pair_up(prompts, completions)
        return pairs

    def _draw(self, task, flawed, rng):
        """A solution of a task; `flawed` is the chance that it is wrong."""
        wrong = task.get("flawed") or rng.choice(self.splits["train"])["answer"]
        return _write_solution(wrong if rng.random() < flawed else task["answer"])

    def _demonstrate_checks(self, task, rng):
        """For each turn of roles check its prompts, and a completion for each."""
        problem = task["question"]
        sample = "flawed" in task
        solutions = [self._draw(task, FLAWED, rng) for _ in range(self.num_agents)]
        first = [self._draw(task, FLAWED * sample, rng) for _ in range(self.num_agents)]
        turns = [(self._ask_to_check(problem, None), first)]
        if self.num_turns == 2:
            verdict = ""
            if self.num_agents > 1:
                all_right = all(self.right(task, read_answer(text)) for text in solutions[:-1])
                false = rng.random() < FALSE_VERDICTS * sample
                verdict = "VERDICT: right\n" if all_right != false else "VERDICT: wrong\n"
            last = verdict + self._draw(task, FLAWED * sample, rng)
            turns.append((self._ask_to_check(problem, solutions), [last] * self.num_agents))
        return turns

    def _demonstrate_parts(self, task, rng):
        """For each turn of roles split its prompts, and a completion for each; none if nobody can tell anything."""
        problem = task["question"]
        sample = "flawed" in task
        shares, _ = deal(problem, self.num_agents)
        if not any(shares[:-1]):
            return []
        messages = [" ".join(facts.split()[:WORDS]) for facts in shares]
        messages = [_blur(text, rng) if rng.random() < VAGUE * sample else text for text in messages]
        last = self._draw(task, VAGUE * sample, rng)
        return [
            (self._ask_in_parts(problem, None), messages),
            (self._ask_in_parts(problem, messages), [last] * self.num_agents),
        ]
