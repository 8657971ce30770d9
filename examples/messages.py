"""Do the agents of a team use what they tell each other? The first of two turns as partners read it, changed.

    python magrpo.py --num-iterations 0 --env examples.messages:Changed --num-agents 3 \\
        --env-kwargs base reference messages removed --model RUN/agent_0 RUN/agent_1 RUN/agent_2 --max-new-tokens 16

A team that does earns less than with `messages kept`. With `exchanged` an answer is not worth the same alone and among
others, so that it is for evaluations only.
"""

import envs


class Changed:
    """An environment of two turns whose messages, the texts of the first, are changed before other agents read them.

    base: the environment
    messages: "kept"; "removed": all are empty; "exchanged": those written for the next task of the batch
    options: the base's
    """

    def __init__(self, base, messages, num_agents, **options):
        self.env = envs.make(base, num_agents, **options)
        self.num_agents = num_agents
        self.messages = messages
        self.num_turns = self.env.num_turns
        self.tasks = self.env.tasks

    def observe(self, task, history):
        return [self.env.observe(task, as_read(history, i))[i] for i in range(self.num_agents)]

    def step(self, branches):
        steps = self.env.step([(task, as_read(history), actions) for task, history, actions in branches])
        tasks, _, texts = zip(*branches)
        if self.messages == "removed":
            texts = [[""] * len(actions) for actions in texts]
        if self.messages == "exchanged":
            # several branches may answer one task
            next_task = tasks.count(tasks[0])
            texts = texts[next_task:] + texts[:next_task]
        return [step._replace(feedback=read) for step, read in zip(steps, texts)]


def as_read(history, agent=None):
    """The history with the changed texts, which are the feedback of its Steps; an agent's own are as they were."""
    turns = []
    for actions, step in history:
        texts = list(step.feedback)
        if agent is not None:
            texts[agent] = actions[agent]
        turns.append((texts, step))
    return turns
