"""The generators of the package reasoning-gym, about a hundred, with the roles of envs/reasoning.py."""

import re

import yaml

from envs import need_sample
from envs.reasoning import Reasoning
from envs.samples import SAMPLE_COUNTS

# Some of the package's scorers evaluate an answer as Python. Of these signs nothing can be called, and without
# exponents no number grows out of bounds; other answers are wrong.
HARMLESS = re.compile(r"(?!.*\d[eE][+-]?\d)[A-Za-z0-9 .,:+/%-]*")


class Generated(Reasoning):
    """Problems of one generator, such as `--env reasoning --env-kwargs task chain_sum`.

    task: name of the generator; one with short answers, of letters, digits and few signs
    dataset: "sample"
    options: the generator's own, such as `max_terms 4`, in YAML

    Agents, roles and reward are those of Reasoning, but right is what the generator's score_answer gives full marks.
    There are no demonstrations.
    """

    def __init__(self, num_agents, num_turns, dataset, seed, roles="check", task="chain_sum", **options):
        self.generator = task
        self.options = options
        super().__init__(num_agents, num_turns, dataset, seed, roles)

    def load(self, dataset):
        need_sample(dataset, "reasoning makes its own problems")
        import reasoning_gym  # here, since the other environments do not need it

        options = {key: yaml.safe_load(str(value)) for key, value in self.options.items()}
        count = sum(SAMPLE_COUNTS.values())
        self.source = reasoning_gym.create_dataset(self.generator, size=count, seed=self.seed, **options)
        entries = {entry["question"]: entry for entry in self.source if isinstance(entry["answer"], str)}
        rows = [{"question": text, "answer": entry["answer"], "entry": entry} for text, entry in entries.items()]
        judged = [row for row in self.judge(rows) if isinstance(row, dict)]
        cut = len(judged) * SAMPLE_COUNTS["train"] // sum(SAMPLE_COUNTS.values())
        if not cut:
            raise ValueError(f"--env-kwargs task {self.generator}: no answer is short enough; use another generator.")
        return {"train": judged[:cut], "test": judged[cut:]}

    def right(self, task, attempt):
        if attempt is None or not HARMLESS.fullmatch(attempt):
            return False
        try:
            return self.source.score_answer(attempt, task["entry"]) >= 1
        except Exception:  # not every scorer expects every string
            return False

    def demonstrations(self):
        raise ValueError("--env reasoning: it has no solutions to imitate; use gsm8k.")
