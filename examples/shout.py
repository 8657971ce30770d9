from collections import namedtuple

# reward: a number, or a list with one per agent; parts: numbers for the log; done: ends the episode early
Step = namedtuple("Step", "reward parts done feedback", defaults=[None])


class Shout:
    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents = num_agents

    def tasks(self, split):
        return [{"word": word} for word in (["tea", "sun", "sea"] if split == "train" else ["hat", "bed"])]

    def observe(self, task, history):  # a prompt per agent, None: silent; history: pairs (actions, step)
        return [f"You are agent {i}. Write about {task['word']} with many e." for i in range(self.num_agents)]

    def step(self, branches):  # all (task, history, actions) of a turn
        shares = [sum(text.count("e") / (len(text) + 1) for text in actions) for _, _, actions in branches]
        return [Step(share, {"e": share}, done=False) for share in shares]
