"""A reference game: speakers know which of four people is meant, a listener has to find out from one word of each.

After Lewis's signalling games. Nothing but success is paid, so what a word means is for the agents to agree on.
"""

import random

from envs import Step
from rewards.reasoning import answer, is_right
from rewards.texts import drop_thoughts, words

SAMPLE_COUNTS = {"train": 1000, "test": 200}
MOODS = ["angry", "tired", "lonely", "guilty", "hurt", "nervous"]  # words that models/tiny knows
ROLES = ["sister", "brother", "boss", "friend", "neighbor", "cousin"]
WORDS = {*MOODS, *ROLES}  # all that a message can say: no positions, no joined words
NEW = {f"{mood} {role}" for mood, role in zip(MOODS, ROLES)}  # whom only test tasks show
FALSE, ASTRAY = 0.25, 0.25  # shares of demonstrated messages and answers that are any word and anybody of the picture

# What is known comes first, so that the list is read in its light.
SPEAKER = "{what}: {known}.\nPeople: {people}.\nTell a listener with one word, a mood or a role, who it is."
LISTENER = "Message: {message}.\nPeople: {people}.\nWho is it? Write mood and role in \\boxed{{}}."


def sample_tasks(split, seed):
    """Four of the nine people with three moods and three roles, so that most words are true of several of them.

    Test tasks show at least two people that no training task shows: new combinations of known words.
    """
    rng, tasks = random.Random(f"reference {split} {seed}"), []
    while len(tasks) < SAMPLE_COUNTS[split]:
        moods, roles = rng.sample(MOODS, 3), rng.sample(ROLES, 3)
        people = rng.sample([f"{mood} {role}" for mood in moods for role in roles], 4)
        new = len(NEW.intersection(people))
        if new >= 2 if split == "test" else new == 0:
            tasks.append({"people": people, "shown": rng.sample(people, 4), "target": rng.choice(people)})
    return tasks


def message(text):
    """What the listener reads of a speaker's text: its first word for a mood or a role, "" without one."""
    return next((word for word in words(drop_thoughts(text)) if word in WORDS), "")


def true_people(people, said):
    """Those of the people that all words of a message are true of."""
    return [each for each in people if said <= set(each.split())]


def game_reward(task, messages, text):
    """1 if the listener's text names the target, else 0. Returns (reward, parts); what is not paid is a diagnostic.

    success, all_passed: the reward. true_message: something was said, and it is true of the target. informative: and
    of nobody else. literal: what a listener would earn who picks at random among the people that the message is
    true of. consistent: the listener names one of these.
    """
    said, given = set(messages) - {""}, answer(text)
    meant = true_people(task["people"], said)
    is_true = task["target"] in meant
    success = float(is_right(given, task["target"]))
    parts = {
        "success": success,
        "true_message": float(bool(said) and is_true),
        "informative": float(bool(said) and meant == [task["target"]]),
        "literal": is_true / max(1, len(meant)),
        "consistent": float(any(is_right(given, each) for each in meant)),
        "all_passed": success,
    }
    return success, parts


class Reference:
    """Turn 1: the speakers, who see four people and what they know of the target. Turn 2: the listener, who sees the
    people in another order, and one word of each speaker.

    num_agents: 2: the speaker sees the target, and chooses between its mood and its role. 3: agent 1 knows only its
        mood and agent 2 its role. The listener is the last one.
    num_turns: 2, whatever smaller number is given
    dataset: "sample": 1000 training and 200 test tasks
    seed: int, seeds the tasks

    Chance is 0.25. Two agents who take words literally, where the speaker says the word that is true of the fewest
    people, earn about 0.82. Agents who agree on a word for each of the four earn 1: there are always four
    different words that are true of one each. Three agents who say what they know earn 1.

    Raises ValueError with one sentence for other arguments.
    """

    def __init__(self, name="reference", num_agents=2, num_turns=1, dataset="sample", seed=1):
        if num_agents not in (2, 3):
            raise ValueError(f"--num-agents {num_agents}: {name} has one or two speakers and a listener; use 2 or 3.")
        if num_turns > 2:
            raise ValueError(f"--num-turns {num_turns}: {name} has two turns; use --num-turns 2.")
        if dataset != "sample":
            raise ValueError(f"--dataset {dataset}: {name} has only sample tasks; use --dataset sample.")
        self.num_agents, self.num_turns, self.seed = num_agents, 2, seed
        self.splits = {split: sample_tasks(split, seed) for split in SAMPLE_COUNTS}

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        if history:
            heard = ", ".join(message(text) or "nothing" for text in history[0].actions[:-1])
            silent = [None] * (self.num_agents - 1)
            return [*silent, LISTENER.format(message=heard, people=", ".join(task["people"]))]
        known = [("Target", task["target"])]
        if self.num_agents == 3:
            known = zip(("Mood of the target", "Role of the target"), task["target"].split())
        people = ", ".join(task["shown"])
        return [SPEAKER.format(what=what, known=fact, people=people) for what, fact in known] + [None]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            if history:
                reward, parts = game_reward(task, map(message, history[0].actions[:-1]), actions[-1])
                steps.append(Step(actions, reward, parts, done=True))
            else:
                steps.append(Step(actions, 0.0, {}, done=False))
        return steps

    def demonstrations(self):
        """Moves to imitate for the train split: list of dict(prompt, completion).

        Speakers say a true word, but which of the target's two is left to chance, or any word of the picture (FALSE).
        Listeners pick one of the people that the message is true of, or any (ASTRAY).
        """
        rng, pairs = random.Random(f"moves {self.seed}"), []
        for task in self.splits["train"]:
            people, known = task["people"], [task["target"].split()]
            if self.num_agents == 3:
                known = [[word] for word in known[0]]
            every = " ".join(people).split()
            moves = [rng.choice(every if rng.random() < FALSE else own) for own in known]
            meant = true_people(people, set(moves))
            moves.append(f"\\boxed{{{rng.choice(people if rng.random() < ASTRAY else meant or people)}}}")
            history = self.step([(task, [], [*moves[:-1], ""])])
            for prompts in self.observe(task, []), self.observe(task, history):
                pairs += [{"prompt": p, "completion": move} for p, move in zip(prompts, moves) if p]
        return pairs
