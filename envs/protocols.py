"""When agents answer, and what they read of each other: the baselines of MAGRPO (Liu et al., 2025), which train too.

- simultaneous: all answer at once and read nothing; the environment itself
- sequential: one agent a turn, in order; it reads the answers before its own
- discussion: all answer, then all read all answers and answer again; only the second ones count
"""

import random
from itertools import pairwise

from envs import Step
from rewards.texts import drop_thoughts

PROTOCOLS = ["simultaneous", "sequential", "discussion"]
SHOWN = 2000  # characters of an answer that agents read


class Protocol:
    """An environment of one turn, played by a protocol: sequential or discussion, which sets the number of turns.

    env: asks the agents, and scores their latest answers after the last turn; earlier turns earn 0. An agent that it
        leaves silent has no turn
    name: what messages call it

    An agent reads its prompt in env, and below it the answers so far, without thoughts, and cut off after SHOWN
    characters. Raises ValueError with one sentence if env, or num_turns, has turns of its own.
    """

    def __init__(self, env, name, protocol, num_agents, num_turns):
        self.env = env
        self.protocol = protocol
        self.num_agents = num_agents
        self.num_turns = num_agents if protocol == "sequential" else 2
        if getattr(env, "num_turns", 1) > 1:
            raise ValueError(f"--env-kwargs protocol {protocol}: {name} has turns of its own; leave protocol out.")
        if num_turns not in (1, self.num_turns):  # a resumed run gives the number that it had
            raise ValueError(f"--num-turns {num_turns}: protocol {protocol} sets the turns; leave --num-turns out.")

    def tasks(self, split):
        return self.env.tasks(split)

    def observe(self, task, history):
        prompts = self.env.observe(task, [])
        turns = self._turns(prompts)
        answers = _find_latest(turns, [actions for actions, _ in history])
        speaking = turns[len(history)]
        return [self._prompt(prompt, i, answers) if i in speaking else None for i, prompt in enumerate(prompts)]

    def step(self, branches):
        """In the last turn the reward, parts and feedback of env; before it 0, and no parts."""
        steps = []
        finished = []  # branches for env
        for task, history, actions in branches:
            turns = self._turns(self.env.observe(task, []))
            rounds = [*(earlier for earlier, _ in history), actions]
            done = len(rounds) == len(turns)
            steps.append(Step(0.0, {}, done=done))
            if done:
                answers = _find_latest(turns, rounds)
                finished.append((task, [], [answers.get(i, "") for i in range(self.num_agents)]))
        results = iter(self.env.step(finished) if finished else [])
        return [next(results)._replace(done=True) if step.done else step for step in steps]

    def demonstrations(self):
        """Those of env, for every turn: list of dict(prompt, completion).

        By chance, half of the answers that are read in them are those to a similar task. So agents that imitate them
        still have to learn to go by what they read: a function by its helper, say.
        """
        rng = random.Random(0)
        pairs = self.env.demonstrations()
        groups = [pairs[k : k + self.num_agents] for k in range(0, len(pairs), self.num_agents)]  # one for each task
        # A group's similar one is its neighbour in the order of the prompts.
        order = sorted(range(len(groups)), key=lambda k: groups[k][0]["prompt"])
        similar = {k: groups[neighbour] for neighbour, k in pairwise([order[-1], *order])}
        examples = []
        for k, group in enumerate(groups):
            turns = self._turns([pair["prompt"] for pair in group])
            for t, speaking in enumerate(turns):
                for i in speaking:
                    answers = [rng.choice(choices)["completion"] for choices in zip(group, similar[k])]
                    prompt = self._prompt(group[i]["prompt"], i, _find_latest(turns, [answers] * t))
                    examples.append(group[i] | {"prompt": prompt})
        return examples

    def _turns(self, prompts):
        """The agents that answer in each turn."""
        speakers = [i for i, prompt in enumerate(prompts) if prompt is not None]
        return [[i] for i in speakers] if self.protocol == "sequential" else [speakers, speakers]

    def _prompt(self, prompt, agent, answers):
        for i, text in answers.items():
            shown = drop_thoughts(text).strip()
            if len(shown) > SHOWN:
                shown = f"{shown[:SHOWN]} [cut off]"
            header = "Your answer" if i == agent else f"Answer of agent {i + 1}"
            prompt += f"\n\n{header}:\n{shown}"
        if answers:
            prompt += f"\n\nNow give your answer{' again, better' if agent in answers else ''}."
        return prompt


def _find_latest(turns, rounds):
    """agent -> its latest answer.

    turns: list of list of the agents that speak in a turn
    rounds: list of the actions of a turn, of the turns so far
    """
    answers = {}
    for speaking, actions in zip(turns, rounds):
        for i in speaking:
            answers[i] = actions[i]
    return answers
