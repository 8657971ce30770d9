"""The environments: what each agent is asked, and what the joint answer is worth.

An environment is any class with these members; a user's own class needs only `Step` from this package.

    tasks(split) -> list[dict]                    "train" or "test"
    observe(task, history) -> list[str | None]    the prompt of each agent; None: it is silent in this turn (at least
                                                  one speaks); history: the earlier Steps of this branch
    step(branches) -> list[Step]                  branches: list of (task, history, actions), scored as one batch

An environment keeps no mutable state, so a rollout can branch: one task and history may continue in many ways.

Optional, for sft.py:

    demonstrations() -> list[dict]                prompt and completion; prompts as observe() gives for train tasks
"""

import importlib
import inspect
import json
import os
import re
from typing import Any, NamedTuple

import numpy as np


class Step(NamedTuple):
    """One joint action and what came of it."""

    actions: list[str]  # one text per agent, "" for a silent one
    reward: float | list[float]  # shared by all agents, or one for each
    parts: dict[str, float]  # the reward's components and diagnostics, for the log
    done: bool  # ends the branch, even before num_turns
    feedback: Any = None  # for the environment's own use in the next observe()


# name -> class; one line adds an environment.
ENVIRONMENTS = {
    "tldr": "envs.writing:Writing",
    "arxiv": "envs.writing:Writing",
    "mbpp": "envs.coding:Coding",
    "humaneval": "envs.coding:Coding",
    "coophumaneval": "envs.coding:Coding",
    "classeval": "envs.classeval:ClassEval",
}

# Columns that need not hold text, but may hold a number or lists of texts.
NO_TEXT = {"task_id", "test_imports", "test_list"}
# Columns that become the agents' prompts and so may not be blank; a reference may.
ASKED = {"prompt", "abstract_text", "skeleton"}


def make(name, num_agents=2, num_turns=1, dataset="sample", seed=1, **options):
    """An environment by name.

    name: str, a key of ENVIRONMENTS, "module:Class" from the user's own code, or several of these joined by "+"
    num_agents, num_turns: int, at least 1
    dataset: "sample" (made offline), "hub" (the environment's public set), another hub id, or a path to a .jsonl,
        .json or .parquet file with the same columns
    seed: int, seeds the sample tasks
    options: further arguments of the environment, as texts, e.g. reward="grounded" or feedback="plain"

    A user's class is called with num_agents=, num_turns=, dataset=, seed= and the options; ours with name= as well.
    Raises ValueError with one sentence that names the command-line argument to change, ModuleNotFoundError for an
    unknown module.
    """
    for argument, value in (("--num-agents", num_agents), ("--num-turns", num_turns)):
        if value < 1:
            raise ValueError(f"{argument} {value}: it must be at least 1.")
    arguments = {"num_agents": num_agents, "num_turns": num_turns, "dataset": dataset, "seed": seed}
    names = name.split("+")
    makers = {each: _maker(each) for each in names}
    known = {each: list(inspect.signature(maker).parameters) for each, maker in makers.items()}
    if unknown := options.keys() - set().union(*known.values()):
        own = sorted(set().union(*known.values()) - arguments.keys() - {"name"})
        raise ValueError(f"--env-kwargs {min(unknown)}: {name} does not know it; it knows {', '.join(own) or 'none'}.")
    made = {}
    for each, maker in makers.items():
        given = arguments | ({"name": each} if each in ENVIRONMENTS else {})
        made[each] = maker(**given, **{key: value for key, value in options.items() if key in known[each]})
    return made[name] if len(names) == 1 else Mixture(made)


def _maker(name):
    module, _, class_name = ENVIRONMENTS.get(name, name).partition(":")
    if not class_name:
        raise ValueError(f"unknown environment {name}; use {', '.join(ENVIRONMENTS)}, or module:Class of your own.")
    found = vars(importlib.import_module(module)).get(class_name)
    if not found:
        raise ValueError(f"the module {module} has no class {class_name}; correct the name.")
    return found


class Mixture:
    """Several environments as one; each has an equal share of the tasks, and its metrics bear its name.

    environments: dict(name -> environment)
    """

    def __init__(self, environments):
        self.environments = environments

    def tasks(self, split):
        """Tasks of all environments in turn. Short train splits repeat; surplus test tasks are left out."""
        tasks = {name: list(env.tasks(split)) for name, env in self.environments.items()}
        count = (max if split == "train" else min)(map(len, tasks.values()))
        return [{"env": name, "task": rows[k % len(rows)]} for k in range(count) for name, rows in tasks.items()]

    def observe(self, task, history):
        return self.environments[task["env"]].observe(task["task"], history)

    def step(self, branches):
        steps = {}
        for name, env in self.environments.items():  # each scores its branches as one batch
            own = [(task["task"], history, actions) for task, history, actions in branches if task["env"] == name]
            steps[name] = iter(env.step(own) if own else ())
        return [self._named(task["env"], next(steps[task["env"]])) for task, _, _ in branches]

    def _named(self, name, step):
        """The Step with its parts called name/part, but for all_passed, from which pass@k is estimated."""
        parts = {key if key == "all_passed" else f"{name}/{key}": value for key, value in step.parts.items()}
        return step._replace(parts=parts | {f"{name}/reward": float(np.mean(step.reward))})

    def demonstrations(self):
        return [pair for env in self.environments.values() for pair in env.demonstrations()]


def read_rows(dataset, columns, hub, hub_splits, hub_config=None, say=print):
    """The rows of each split of a dataset that is not "sample".

    dataset: "hub" for the environment's own set, another hub id (its whole train and test splits), or a local file. A
        file with a column `split` is split by it; of any other file, the last tenth (at least one row) is test and the
        rest train. Nothing is shuffled.
    columns: the columns that every row must have, as text except for those in NO_TEXT
    hub, hub_config: id and configuration of the environment's own set
    hub_splits: dict, the slice of that set for each split, e.g. {"train": "train[:1000]", "test": "test[:1000]"}
    say: called with a line on how a file was split, and one on rows that train and test share

    Returns dict(split -> list of dicts). Raises ValueError with one sentence for a missing or malformed file, a hub
    that does not answer, a missing column, a value that is not text, and an empty split.
    """
    if not dataset:
        raise ValueError("--dataset is empty; give sample, hub, a hub id or a file.")
    named = os.path.isfile(dataset) or dataset.endswith((".csv", ".tsv", ".txt", ".gz", ".zip"))
    if dataset != "hub" and named and not dataset.endswith((".jsonl", ".json", ".parquet")):
        raise ValueError(f"--dataset {dataset}: a file of unknown form; make it a .jsonl, .json or .parquet file.")
    if dataset.endswith((".jsonl", ".json", ".parquet")):
        splits = _split_rows(dataset, _file_rows(dataset), say)
    else:
        names = hub_splits if dataset == "hub" else {"train": "train", "test": "test"}
        path, config = (hub, hub_config) if dataset == "hub" else (dataset, None)
        splits = {split: _datasets_rows(dataset, path, config, split=part) for split, part in names.items()}
    for split, rows in splits.items():
        if not rows:
            remedy = f"call some rows {split} in its column split, or leave that column out"
            raise ValueError(f"--dataset {dataset}: the split {split} is empty; {remedy}.")
        for number, row in enumerate(rows, 1):
            if missing := [column for column in columns if column not in row]:
                raise ValueError(
                    f"--dataset {dataset}: missing column {', '.join(missing)} in row {number} of the split {split} "
                    f"(found {', '.join(row) or 'none'}); rename the columns to {', '.join(columns)}."
                )
            texts = {c: str(row[c]) if c in NO_TEXT and row[c] is not None else row[c] for c in columns}
            if odd := [column for column, text in texts.items() if not _is_text(text, column in ASKED)]:
                raise ValueError(
                    f"--dataset {dataset}: row {number} of the split {split} has no text, or none in UTF-8, "
                    f"in {', '.join(odd)}; fix the column, or leave the row out."
                )
    warn_of_shared_rows(dataset, splits, columns, say)
    return splits


def warn_of_shared_rows(dataset, splits, columns, say):
    """Reports how many test rows agents are also trained on."""
    for asked in ASKED.intersection(columns):
        known = {row[asked] for row in splits.get("train", [])}
        if both := [row for row in splits.get("test", []) if row[asked] in known]:
            say(f"--dataset {dataset}: {len(both)} rows of test have the {asked} of a row of train; they stay in")


def _is_text(value, needed):
    fit = isinstance(value, str) and not re.search("[\ud800-\udfff]", value)  # no tokenizer takes a lone surrogate
    return fit and bool(value.strip() or not needed)


def _file_rows(path):
    if not os.path.isfile(path):
        raise ValueError(f"--dataset {path}: there is no such file; check the path.")
    if path.endswith(".parquet"):
        return _datasets_rows(path, "parquet", data_files=path, split="train")
    rows = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            if path.endswith(".json"):
                rows = json.load(file)
            else:
                for line in filter(str.strip, file):
                    rows.append(json.loads(line))
    except OSError as error:
        raise ValueError(f"--dataset {path}: it cannot be read ({error.strerror}); check the file.") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        kind, where = path.rsplit(".")[-1], f" after row {len(rows)}" if rows else ""
        remedy = "fix the file, or call it .jsonl if each line is a row" if kind == "json" else "fix the file"
        raise ValueError(f"--dataset {path}: not valid {kind}{where} ({error}); {remedy}.") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"--dataset {path}: the file must hold one JSON object per row; fix the file.")
    return rows


def _split_rows(dataset, rows, say):
    if named := [row for row in rows if "split" in row]:
        if len(named) < len(rows):
            raise ValueError(
                f"--dataset {dataset}: only {len(named)} of {len(rows)} rows have a split; give it to all."
            )
        splits = {split: [row for row in rows if row["split"] == split] for split in ("train", "test")}
        others = len(rows) - sum(map(len, splits.values()))
        left_out = f", {others} rows of other splits are left out" if others else ""
        say(f"--dataset {dataset}: train and test as the column split says{left_out}")
        return splits
    if len(rows) < 2:
        raise ValueError(f"--dataset {dataset}: {len(rows)} rows cannot be split into train and test; use at least 2.")
    cut = len(rows) - max(1, len(rows) // 10)
    say(f"--dataset {dataset}: rows 1 to {cut} are train, rows {cut + 1} to {len(rows)} are test")
    return {"train": rows[:cut], "test": rows[cut:]}


def _datasets_rows(dataset, *args, **kwargs):
    from datasets import load_dataset  # here, since the import takes seconds and sample tasks do not need it

    try:
        return load_dataset(*args, **kwargs).to_list()
    except Exception as error:  # network, hub and file formats raise many types; all are reported
        remedy = "check the name, its splits and the network, or use sample"
        if "data_files" in kwargs:  # for a file, the actual error may be the cause of a generic one
            remedy, error = "fix the file", error.__cause__ or error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"--dataset {dataset}: it could not be loaded ({reason}); {remedy}.") from None
