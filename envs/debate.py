r"""Debates about questions whose answers can be checked.

In rounds, after Du et al. (arXiv 2305.14325): each agent answers alone, reads what others wrote, and answers again.
With a judge: one argues for a claim, another against it, and a third decides. Prompts, tasks and rewards are our own.
Only the answer in \boxed{} is compared with the right one (rewards/debate.py): no text is judged by its style.
"""

import random

from envs import UNPAID, Step, need_sample, one_of
from envs.data import load_tasks
from envs.reasoning import GSM8K
from envs.samples import debate as samples
from envs.samples import pair_up
from rewards.boxed import LONGEST, is_right, read_answer
from rewards.debate import PARTS, debate_reward, verdict_reward
from rewards.texts import drop_thoughts

DEMONSTRATED = 3000  # questions; there are fewer claims
SHOWN = 400  # characters of a text that others read: the last ones, where the answer is

ALONE = "Show your work briefly. End with \\boxed{answer}."
AGAIN = "Check what was said, then answer again. End with \\boxed{answer}."
ARGUE = "Show briefly why this is {side}."
JUDGE = "Who is right? End with \\boxed{true} or \\boxed{false}."


def judge_answers(rows):
    """For each row of a dataset its task, or why it cannot be used."""
    tasks = []
    for row in rows:
        *working, gold = row["answer"].split("####")
        gold = gold.strip()
        usable = len(working) < 2 and is_right(read_answer(f"#### {gold}"), gold)
        fault = f"its answer, alone or after a single ####, is no number and no string of 1 to {LONGEST} characters"
        tasks.append({**row, "answer": gold} if usable else fault)
    return tasks


def _cut_text(text):
    """A text as others read it: without thoughts, cut, and in one line, or else it could pose as several agents."""
    words = drop_thoughts(text).split()
    return " ".join(words)[-SHOWN:] or "(nothing)"


class Debate:
    r"""Agents answer a question, read each other's answers, and answer again.

    num_agents: 1 or more; a single one revises its own answer
    num_turns: the number of rounds, at least 2: fewer become 2
    dataset: "sample", "hub" (openai/gsm8k, main), a hub id or a file, with columns `question` and `answer`: the right
        answer comes after its only ####, or is all of it
    seed: int, seeds the sample tasks
    form: "rounds": at first each agent sees the question only; later also its own last text and those of the others,
        the last 400 characters of each, as Agent 1, Agent 2 and so on, never who is right. Reward 0 to 1.3, paid in
        the last round: see debate_reward().
        "judge": the question is a claim, sample tasks only. Agent 1 argues that it is true, agent 2 that it is false,
        both at once; in turn 2 agent 3 alone reads both and boxes true or false. It takes 3 agents and 2 turns.
        Reward 0 or 1 for all three, paid in turn 2: the judge is right. So the sides do well to help the judge.
    topic: "number", or "choice": four options A to D, sample tasks only; guessing is right in a quarter of the cases

    Raises ValueError with one sentence for other arguments and for a dataset that cannot be used.
    """

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed, form="rounds", topic="number"):
        one_of("form", form, "rounds", "judge")
        one_of("topic", topic, "number", "choice")
        if (form, topic) != ("rounds", "number"):
            need_sample(dataset, "it has no claims or options, as --env-kwargs form and topic ask for")
        if form == "judge" and (num_agents != 3 or num_turns > 2):
            raise ValueError(
                f"--num-agents {num_agents}, --num-turns {num_turns}: with a judge there are 3 agents and 2 turns; "
                "use --num-agents 3 --num-turns 2."
            )
        self.num_agents = num_agents
        self.num_turns = max(2, num_turns)
        self.dataset = dataset
        self.seed = seed
        self.judged = form == "judge"
        self.choice = topic == "choice"
        self.splits = load_tasks(dataset, seed, self._sample, judge=judge_answers, **GSM8K)

    def _sample(self, split, count, seed):
        rng = random.Random(f"debate {split} {seed}")
        if self.judged:
            return samples.make_claims(split, count, rng)
        return samples.make_questions(split, count, rng, self.choice)

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        question = task["question"]
        texts = []
        if history:
            latest, _ = history[-1]
            texts = [_cut_text(text) for text in latest]
        if self.judged and history:
            return [None, None, f"Claim: {question}\n\nFor: {texts[0]}\nAgainst: {texts[1]}\n\n{JUDGE}"]
        if self.judged:
            sides = [f"Claim: {question}\n\n{ARGUE.format(side=side)}" for side in ("true", "false")]
            return [*sides, None]
        if not history:
            return [f"{question}\n\n{ALONE}"] * self.num_agents
        prompts = []
        for own in range(self.num_agents):
            others = [f"Agent {i}: {text}" for i, text in enumerate(texts, 1) if i != own + 1]
            debate = "\n".join([f"You: {texts[own]}", *others])
            prompts.append(f"{question}\n\n{debate}\n\n{AGAIN}")
        return prompts

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            reward, parts = 0.0, {}
            done = len(history) + 1 == self.num_turns
            if done and self.judged:
                reward, parts = verdict_reward(actions[2], task["answer"])
            elif done:
                rounds = [earlier for earlier, _ in history] + [actions]
                reward, parts = debate_reward(rounds, task["answer"])
            steps.append(Step(reward, parts, done))
        return steps

    def demonstrations(self):
        """Texts to imitate for sample tasks of the train split: list of dict(prompt, completion), for every turn.

        Half of the first answers are wrong, and agents keep, take over or change answers by chance; sides lie, and the
        judge believes either. When to do what is left to reinforcement learning.
        """
        need_sample(self.dataset, "it holds no debates to imitate")
        rng = random.Random(f"demonstrated debates {self.seed}")
        pairs = []
        for task in self._sample("train", DEMONSTRATED, self.seed):
            history = []
            stances = []
            for _ in range(self.num_turns):
                if not self.judged:
                    stances, actions = samples.draw_answers(task, stances, self.num_agents, rng)
                elif not history:
                    actions = [*samples.draw_speeches(task, rng), ""]
                else:
                    actions = ["", "", samples.draw_verdict(task, actions[:2], rng)]
                pairs += pair_up(self.observe(task, history), actions)
                history.append((actions, UNPAID))
        return pairs
