"""Two games of words.

A reference game, after Lewis's signalling games: speakers know which of four people is meant, a listener has to find
out from one word of each. Nothing but success is paid, so what a word means is for the agents to agree on. And a
prisoner's dilemma.
"""

import random

from envs import UNPAID, Step, need_sample, one_of
from envs.samples import SAMPLE_COUNTS, pair_up, read_list
from rewards.boxed import is_right, read_answer
from rewards.texts import drop_thoughts, split_words

MOODS = read_list("angry, tired, lonely, guilty, hurt, nervous")  # words that models/tiny knows
ROLES = read_list("sister, brother, boss, friend, neighbor, cousin")
WORDS = {*MOODS, *ROLES}  # all that a message can say: no positions, no joined words
NEW = {f"{mood} {role}" for mood, role in zip(MOODS, ROLES)}  # whom only test tasks show
FALSE = 0.25  # share of demonstrated messages that are any word of the picture
ASTRAY = 0.25  # share of demonstrated answers that are anybody of the picture

# The fact comes first: a model reads the list in its light.
SPEAKER = "{what}: {fact}.\nPeople: {people}.\nTell a listener with one word, a mood or a role, who it is."
LISTENER = "Message: {message}.\nPeople: {people}.\nWho is it? Write mood and role in \\boxed{{}}."
# in the form of SPEAKER, with words that models/tiny knows
SUSPECT = "Target: guilty friend.\nTell a judge with one word, guilty or friend, who it is."

# What two suspects earn for what they say of each other; for any other word both earn 0.
PAYOFFS = {
    ("friend", "friend"): (3.0, 3.0),
    ("friend", "guilty"): (0.0, 5.0),
    ("guilty", "friend"): (5.0, 0.0),
    ("guilty", "guilty"): (1.0, 1.0),
}

SAID = {  # parts of the dilemma, in which what is paid depends on both
    "friend": (0, "share of the agents that say friend"),
    "guilty": (0, "share of the agents that say guilty"),
}
PARTS = {  # as in rewards/coding.py, of the reference game
    "success": (1, "the listener names the right person"),
    "true_message": (0, "something was said, and it is true of the right person"),
    "informative": (0, "it is true of nobody else"),
    "literal": (0, "what a listener earns who picks at random among those of whom the message is true"),
    "consistent": (0, "the listener names one of whom the message is true"),
    "all_passed": (0, "the listener names the right person"),
}


def _make_sample_tasks(split, seed):
    """Four of the nine people with three moods and three roles, so that most words are true of several of them.

    Test tasks show at least two people that no training task shows: new combinations of known words.
    """
    rng = random.Random(f"reference {split} {seed}")
    tasks = []
    while len(tasks) < SAMPLE_COUNTS[split]:
        moods = rng.sample(MOODS, 3)
        roles = rng.sample(ROLES, 3)
        people = rng.sample([f"{mood} {role}" for mood in moods for role in roles], 4)
        new = len(NEW.intersection(people))
        if new >= 2 if split == "test" else new == 0:
            tasks.append({"people": people, "shown": rng.sample(people, 4), "target": rng.choice(people)})
    return tasks


def _read_message(text, known=WORDS):
    """What others read of a speaker's text: its first known word, for a mood or a role, "" without one."""
    found = [word for word in split_words(drop_thoughts(text)) if word in known]
    return [*found, ""][0]


def _find_true_people(people, message):
    """Those of the people that all words of a message, a set, are true of."""
    return [each for each in people if message <= set(each.split())]


def _score_choice(task, messages, text):
    """(reward, parts) of the listener's text."""
    target = task["target"]
    message = set(messages) - {""}
    choice = read_answer(text)
    people = _find_true_people(task["people"], message)
    is_true = target in people
    success = is_right(choice, target)
    parts = {
        "success": success,
        "true_message": bool(message) and is_true,
        "informative": bool(message) and people == [target],
        "literal": is_true / max(1, len(people)),
        "consistent": any(is_right(choice, each) for each in people),
        "all_passed": success,
    }
    return float(success), {name: float(part) for name, part in parts.items()}


class Reference:
    """Speakers tell a listener with a word each which of four people is meant; it is learnt with three agents.

    Turn 1: the speakers, who see the people and what they know of the target. Turn 2: the listener, who sees the
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

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed):
        need_sample(dataset, "it has no others")
        self.num_agents = num_agents
        self.num_turns = 2
        self.seed = seed
        self.splits = {split: _make_sample_tasks(split, seed) for split in SAMPLE_COUNTS}

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        if history:
            (*spoken, _), _ = history[0]
            messages = ", ".join(_read_message(text) or "nothing" for text in spoken)
            silent = [None] * (self.num_agents - 1)
            return [*silent, LISTENER.format(message=messages, people=", ".join(task["people"]))]
        facts = {"Target": task["target"]}
        if self.num_agents == 3:
            mood, role = task["target"].split()
            facts = {"Mood of the target": mood, "Role of the target": role}
        people = ", ".join(task["shown"])
        return [SPEAKER.format(what=what, fact=fact, people=people) for what, fact in facts.items()] + [None]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            if history:
                (*spoken, _), _ = history[0]
                reward, parts = _score_choice(task, map(_read_message, spoken), actions[-1])
                steps.append(Step(reward, parts, done=True))
            else:
                steps.append(UNPAID)
        return steps

    def demonstrations(self):
        """Moves to imitate for the train split: list of dict(prompt, completion).

        Speakers say a true word, but which of the target's two is left to chance, or any word of the picture (FALSE).
        Listeners pick one of the people that the message is true of, or any (ASTRAY).
        """
        rng = random.Random(f"moves {self.seed}")
        pairs = []
        for task in self.splits["train"]:
            people = task["people"]
            vocabulary = " ".join(people).split()
            facts = [task["target"].split()]  # what each speaker may say of the target
            if self.num_agents == 3:
                facts = [[word] for word in facts[0]]
            messages = [rng.choice(vocabulary if rng.random() < FALSE else own) for own in facts]
            candidates = _find_true_people(people, set(messages))
            choice = rng.choice(people if rng.random() < ASTRAY else candidates or people)
            actions = [*messages, f"\\boxed{{{choice}}}"]
            for history in [], [(actions, UNPAID)]:
                pairs += pair_up(self.observe(task, history), actions)
        return pairs


class Dilemma:
    """A prisoner's dilemma: with one word two suspects each tell a judge whether the other is guilty or a friend.

    num_agents: 2
    num_turns: 1
    dataset: "sample": one task, again and again
    seed: has no effect
    rewards: "shared": both earn the mean of the two payoffs. "own": each its own; whichever of the two words the other
        says, guilty then earns more than friend, though two friends earn 3 each, and two who say guilty 1.

    Raises ValueError with one sentence for other arguments.
    """

    PARTS = SAID

    def __init__(self, num_agents, num_turns, dataset, seed, rewards="shared"):
        need_sample(dataset, "it has no others")
        one_of("rewards", rewards, "shared", "own")
        self.shared = rewards == "shared"

    def tasks(self, split):
        return [{"prompt": SUSPECT}] * SAMPLE_COUNTS[split]

    def observe(self, task, history):
        return [task["prompt"]] * 2

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            said = tuple(_read_message(text, SAID) for text in actions)
            payoffs = PAYOFFS.get(said, (0.0, 0.0))
            parts = {word: said.count(word) / 2 for word in SAID}
            steps.append(Step(sum(payoffs) / 2 if self.shared else list(payoffs), parts, done=True))
        return steps
