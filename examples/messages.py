"""Do the agents of a team use what they tell each other? Changes what partners read of the first of two turns.

    python magrpo.py --num-iterations 0 --env examples.messages:Changed --num-agents 3 \\
        --env-kwargs base reference messages removed --model RUN/agent_0 RUN/agent_1 RUN/agent_2 --max-new-tokens 16

A team that uses them then earns less than with `messages kept`. With `exchanged` a reward depends on the other tasks
of the batch: for evaluations only.
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
        envs.one_of("messages", messages, "kept", "removed", "exchanged")
        self.messages = messages
        self.num_turns = self.env.num_turns
        self.tasks = self.env.tasks

    def observe(self, task, history):
        return [self.env.observe(task, as_read(history, i))[i] for i in range(self.num_agents)]

    def step(self, branches):
        played = [(task, as_read(history), actions) for task, history, actions in branches]
        steps = self.env.step(played)
        read = [(actions, step.feedback) for (_, _, actions), step in zip(branches, steps)]
        if self.messages == "removed":
            texts = [""] * self.num_agents
            answers = self.env.step([(task, history, texts) for task, history, _ in played])
            read = [(texts, step.feedback) for step in answers]
        if self.messages == "exchanged":
            # each task has as many branches, one after another
            tasks = [task for task, _, _ in branches]
            shift = tasks.count(tasks[0])
            read = read[shift:] + read[:shift]
        return [step._replace(feedback=message) for step, message in zip(steps, read)]


def as_read(history, agent=None):
    """The history with the messages that its Steps hold in place of the texts, except those of `agent`."""
    turns = []
    for actions, step in history:
        texts, answer = step.feedback
        if agent is not None:
            texts = [*texts[:agent], actions[agent], *texts[agent + 1 :]]
        turns.append((texts, step._replace(feedback=answer)))
    return turns
