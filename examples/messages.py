"""Do the agents of a team use what they tell each other? The messages of a game of two turns, removed or exchanged.

    python magrpo.py --num-iterations 0 --env examples.messages:Changed --num-agents 3 \\
        --env-kwargs base reference messages removed --model RUN/agent_0 RUN/agent_1 RUN/agent_2 --max-new-tokens 16

A team that does earns less than with `messages kept`. With `exchanged` an answer is not worth the same alone and among
others, so that it is for evaluations only.
"""

import envs


class Changed:
    """An environment of two turns whose messages, the texts of the first, are changed before anybody reads them.

    base: the environment
    messages: "kept"; "removed": all are empty; "exchanged": those written for the next task of the batch
    options: the base's
    """

    def __init__(self, base, messages, **options):
        self.env = envs.make(base, **options)
        self.messages = messages
        self.num_turns = self.env.num_turns
        self.tasks = self.env.tasks

    def observe(self, task, history):
        return self.env.observe(task, as_read(history))

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


def as_read(history):
    """The history with the changed texts, which are the feedback of its Steps."""
    return [(step.feedback, step) for _, step in history]
