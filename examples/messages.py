"""Do the agents of a team use what they tell each other? The first of two turns as partners read it, changed.

    python magrpo.py --num-iterations 0 --env examples.messages:Changed --num-agents 3 \\
        --env-kwargs base reference messages removed --model RUN/agent_0 RUN/agent_1 RUN/agent_2 --max-new-tokens 16

A team that does earns less than with `messages kept`. With `exchanged` an answer is not worth the same alone and among
others, so that it is for evaluations only.
"""

import envs


class Changed:
    """An environment of two turns, whose agents read other messages than those of the first turn.

    A message is a text and what the environment answers to it, such as a tool's output.

    base: the environment
    messages: "kept"; "removed": as if all texts were empty; "exchanged": those of the next task of the batch
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
        played = [(task, as_read(history), actions) for task, history, actions in branches]
        steps = self.env.step(played)
        messages = [(actions, step.feedback) for (_, _, actions), step in zip(branches, steps)]
        if self.messages == "removed":
            texts = [""] * self.num_agents
            answers = self.env.step([(task, history, texts) for task, history, _ in played])
            messages = [(texts, step.feedback) for step in answers]
        if self.messages == "exchanged":
            # several branches may answer one task
            tasks = [task for task, _, _ in branches]
            shift = tasks.count(tasks[0])
            messages = messages[shift:] + messages[:shift]
        return [step._replace(feedback=message) for step, message in zip(steps, messages)]


def as_read(history, agent=None):
    """The history with the messages that are read, which its Steps hold; an agent's own texts are as they were."""
    turns = []
    for actions, step in history:
        texts, answer = step.feedback
        if agent is not None:
            texts = [*texts[:agent], actions[agent], *texts[agent + 1 :]]
        turns.append((texts, step._replace(feedback=answer)))
    return turns
