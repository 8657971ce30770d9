"""Reads data sets, for --dataset, and files to learn from, for --data."""

import ast
import csv
import gzip
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass

csv.field_size_limit(2**31 - 1)  # letters; by default 131,072, and a conversation may have more
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
LIMIT = 1000  # rows of a split that are used: each is read, and some are run, at every start


def read_file(path, flag):
    """The rows of a file with one of ENDINGS: list of dict. Raises ValueError with one sentence about `flag`.

    JSON is a list, or an object a line, whatever the ending. .csv holds strings, separated as its first line is, by
    commas, semicolons or tabs. Blank lines are no rows.
    """
    if not path.endswith(ENDINGS):
        raise ValueError(f"{flag} {path}: a data file ends in one of {', '.join(ENDINGS)}; give such a file.")
    if not os.path.isfile(path):
        raise ValueError(f"{flag} {path}: there is no such file; check the path.")
    try:
        rows = _parse_file(path)
    except Exception as error:  # file formats raise many types
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ValueError(f"{flag} {path}: it cannot be read ({why}); fix the file.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{flag} {path}: a row has to be an object with named columns; fix the file.")
    if not rows:
        raise ValueError(f"{flag} {path}: it has no rows; give a file that has some.")
    return rows


def _parse_file(path):
    if path.endswith(".parquet"):
        from datasets import load_dataset  # here, since the import takes seconds

        # streamed: nothing is written to the cache
        return list(load_dataset("parquet", data_files=path, split="train", streaming=True))
    open_file = gzip.open if path.endswith(".gz") else open
    with open_file(path, "rt", encoding="utf-8-sig", newline="") as file:  # a byte-order mark is dropped
        lines = file.readlines()
    if path.endswith(".csv"):
        delimiter = max("\t,;", key=lines[0].count) if lines else ","
        return list(csv.DictReader(lines, delimiter=delimiter))
    text = "".join(lines)
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
    return rows


# ---------------------------------------------------------------- --data: what scripts learn from


def read_training_rows(path, answers):
    """The rows of a file of --data that are of split train, or of none: dict(number of the row -> row).

    answers: the columns that hold an agent's answers: ["chosen", "rejected"], or ["completion"]

    A line of a run's rollouts.jsonl comes as it is. Any other row comes as strings, prompt and answers. In the file
    the prompt may also be a list with one message of a user, and an answer a list with one message of an assistant,
    or with both: then the row needs no prompt. A column `messages` takes the place of `completion`. A list that was
    stored as a string counts as one, and a number as a string.

    Raises ValueError with one sentence that names --data, the row and the column.
    """
    rows = {}
    for number, row in enumerate(read_file(path, "--data"), 1):
        if row.get("split", "train") != "train":  # it would spoil the evaluation
            continue
        if "agents" not in row:
            row = _strings_of(row, answers, f"--data {path}: row {number}, column")
        rows[number] = row
    if not rows:
        raise ValueError(f"--data {path}: it has no row of split train, and others are not trained on.")
    return rows


def _strings_of(row, answers, place):
    """dict(column -> string): the prompt of a row and its answers."""
    forms = "a string, one message, or (for an answer) one message of a user and one of an assistant"
    prompt = _content(row.get("prompt"), ["user"])
    strings = {}
    for column in answers:
        source = "messages" if column == "completion" and "messages" in row else column
        answer = _messages(row.get(source))
        if _roles(answer) == ["user", "assistant"]:
            beginning = answer[0]["content"]
            if prompt is None:
                prompt = beginning
            if prompt != beginning:
                raise ValueError(f"{place} {source}: it begins with another message than the prompt; fix the row.")
            answer = answer[1:]
        strings[column] = _content(answer, ["assistant"])
        if not isinstance(strings[column], str):
            raise ValueError(f"{place} {source}: give {forms}.")
    if not isinstance(prompt, str):
        raise ValueError(f"{place} prompt: give {forms}.")
    return {"prompt": prompt, **strings}


def _roles(messages):
    """The roles of a list of messages that hold text; None for anything else."""
    if not isinstance(messages, list):
        return None
    if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        return None
    return [message.get("role") for message in messages]


def _messages(value):
    """The list of messages that was stored as a string, None if it cannot be read; any other value as it is."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:", value):
        return value
    # to_csv of pandas and of datasets writes a list in Python, and an array of several messages without commas
    array = re.sub(r"\}\s+(?=\{'(role|content)':)", "}, ", value)
    for parse, text in (json.loads, value), (ast.literal_eval, array):
        with suppress(ValueError, SyntaxError):
            return parse(text)
    return None


def _content(value, roles):
    """The text of a number, or of a list with one message of this role; any other value as it is."""
    value = _messages(value)
    if type(value) in (int, float) and math.isfinite(value):
        return str(value)
    return value[0]["content"] if _roles(value) == roles else value


# ---------------------------------------------------------------- --dataset: what environments ask


@dataclass
class Row:
    """A row of a data set, until it is a task."""

    name: str  # for messages: "row 3 (task HumanEval/2)"
    part: str  # "file", or the split of the hub that it is in
    columns: dict
    split: str | None = None  # "" if it is not used, None if it is not known
    fault: str = ""  # why it cannot be used


def read_rows(dataset, columns, hub, hub_splits, hub_config=None, published=None, judge=None):
    """The tasks of each split of a dataset that is not "sample": dict(split -> list).

    dataset: "hub" for the environment's own set, another hub id (its splits train and test), or a file with one of
        ENDINGS. A column `split` is obeyed; without one, a file's last tenth is test.
    columns: those that must hold text; a prompt may be a list with one message of a user, as in chat data
    hub, hub_config, hub_splits: id and configuration of the own set, and the slice of it for each split
    published: (pattern of a task_id with its number, dict(split -> numbers)), which goes before: most rows are such
    judge: (rows) -> for each row its task, or a string that says why it cannot be used

    A row that cannot be used is left out and named. It is a ValueError if train or test is empty then.
    """
    rows = _load(dataset, hub, hub_splits, hub_config)
    for row in rows:
        _check_columns(row, columns)
    sound = [row for row in rows if not row.fault]
    _set_splits(sound, published)
    splits = {"train": [], "test": []}  # split -> its rows
    for row in sound:
        if row.split is None:
            row.fault = "it has no split, or a task_id of another form than most rows"
        elif row.split:
            splits.setdefault(row.split, []).append(row)

    if judge:
        used = {split: part[:LIMIT] for split, part in splits.items()}
        tried = [row for part in used.values() for row in part]
        for row, task in zip(tried, judge([row.columns for row in tried])):
            if isinstance(task, str):
                row.fault = task
            else:
                row.columns = task
    else:
        used = splits
    tasks = {split: [row.columns for row in part if not row.fault] for split, part in used.items()}

    counts = [f"{split} {len(tasks[split])} of {len(part)} rows" for split, part in splits.items()]
    if used != splits:
        counts.append(f"where no more than the first {LIMIT} of a split are tried and used")
    print(f"--dataset {dataset}: {', '.join(counts)}")
    faults = describe_faults(rows)
    if faults:
        print(f"--dataset {dataset}: {faults}")
    for split in "train", "test":
        if not tasks[split]:
            needed = f"it takes rows with text in {', '.join(columns)}"
            raise ValueError(f"--dataset {dataset}: {split} has no row that can be used; {needed} ({faults}).")
    return tasks


def describe_faults(rows):
    """The first ten rows that are left out, and why, in a line; "" if there are none."""
    faults = [f"{row.name}: {row.fault}" for row in rows if row.fault]
    if not faults:
        return ""
    more = "; ..." if len(faults) > 10 else ""
    return f"{len(faults)} rows are left out: {'; '.join(faults[:10])}{more}"


def _load(dataset, hub, hub_splits, hub_config):
    """list of Row, whose columns are not checked yet."""
    ending = os.path.splitext(dataset)[1]
    if os.path.isfile(dataset) or ending[1:2].isalpha():  # a hub id may end in a number, as in -1.5
        parts = {"file": read_file(dataset, "--dataset")}
    else:
        if dataset == "hub":
            source = hub, hub_config, hub_splits
        else:
            source = dataset, None, {"train": "train", "test": "test"}
        parts = _load_from_hub(dataset, *source)
    rows = []
    for part, records in parts.items():
        for number, columns in enumerate(records, 1):
            name = f"row {number}"
            if len(parts) > 1:
                name += f" of {part}"
            if "task_id" in columns:
                name += f" (task {columns['task_id']})"
            rows.append(Row(name, part, columns))
    return rows


def _load_from_hub(dataset, path, config, slices):
    from datasets import load_dataset  # here, since the import takes seconds and sample tasks do not need it

    try:
        return {split: list(load_dataset(path, config, split=part)) for split, part in slices.items()}
    except Exception as error:  # network and hub raise many types
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        remedy = "check its name, splits and network, or give sample or a .jsonl file"
        raise ValueError(f"--dataset {dataset}: it could not be loaded ({why}); {remedy}.") from None


def _check_columns(row, columns):
    """Sets the fault of a row without the text that it needs, and makes one message, or a number, a string."""
    for column in columns:
        value = row.columns.get(column)
        if column != "task_id":
            value = _content(value, ["user"] if column == "prompt" else ["assistant"])
            row.columns = {**row.columns, column: value}
        kinds = (str, int, float) if column == "task_id" else str
        may_be_blank = column == "completion"  # it is a reference
        if not isinstance(value, kinds) or not (may_be_blank or str(value).strip()):
            row.fault = row.fault or f"no text in {column}"


def _set_splits(rows, published):
    """Sets the split of each row."""
    if any("split" in row.columns for row in rows):
        for row in rows:
            row.split = row.columns.get("split") or None
        return
    pattern, ranges = published or ("(?!)", {})  # which matches nothing
    matches = [re.fullmatch(pattern, str(row.columns.get("task_id"))) for row in rows]
    if 2 * sum(map(bool, matches)) > len(rows):  # the benchmark's own tasks, perhaps a part of them
        split_of = {number: split for split, numbers in ranges.items() for number in numbers}
        for row, match in zip(rows, matches):
            row.split = split_of.get(int(match[1]), "") if match else None
        return
    cut = len(rows) - max(1, len(rows) // 10)
    for place, row in enumerate(rows):
        row.split = row.part
        if row.part == "file":
            row.split = "train" if place < cut else "test"
