"""Reads data sets, for --dataset, and files to learn from, for --data."""

import csv
import gzip
import json
import re
import warnings
from decimal import Decimal

from envs.samples import SAMPLE_COUNTS

csv.field_size_limit(2**31 - 1)  # letters; by default 131,072, and a conversation may have more
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
SPLITS = {"train": "train", "test": "test"}  # name -> slice of a set on the hub
LIMIT = 1000  # rows of a split that are used: each is read, and some are run, at every start
# how .csv, which has only strings, holds a list of messages
STORED_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


def read_file(path, flag):
    """The rows of a file with one of ENDINGS: list of dict. Raises ValueError with one sentence about `flag`.

    JSON is a list, or an object a line, whatever the ending. .csv holds strings, separated as its first line is, by
    commas, semicolons or tabs. Blank lines are no rows. A field that is null is left out.
    """
    try:
        rows = _parse_file(path)
    except Exception as error:  # file formats raise many types
        raise ValueError(
            f"{flag} {path}: it cannot be read ({error!s:.300}); mend it, and end its name in one of "
            f"{', '.join(ENDINGS)}."
        ) from None
    for number, row in enumerate(rows, 1):
        # .csv has cells without a column where a line is longer than the first one
        if not isinstance(row, dict) or None in row:
            raise ValueError(f"{flag} {path}: row {number} is no object with named columns; fix the file.")
    return clean(rows)


def clean(value):
    """Rows, or a value in one, without null fields, and with U+FFFD for half an emoji.

    Arrow gives each object the fields of all rows. JSON can hold one of the two codes of an emoji without the other,
    which no tokenizer reads and no file can hold.
    """
    if isinstance(value, dict):
        return {clean(key): clean(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [clean(element) for element in value]
    if isinstance(value, str):
        return re.sub(r"[\ud800-\udfff]", "\ufffd", value)
    return value


def parse_rows(rows, parse):
    """For each row what parse(row) returns, or, if that raises, why: list."""
    results = []
    for row in rows:
        try:
            with warnings.catch_warnings(action="ignore"):  # some regular expressions in the benchmarks are not raw
                results.append(parse(row))
        except Exception as error:  # including the parser's MemoryError and RecursionError
            results.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return results


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
    if not text.lstrip().startswith("["):
        # an object a line
        text = f"[{','.join(filter(str.strip, lines))}]"
    return json.loads(text)


# ---------------------------------------------------------------- --data: what scripts learn from


def read_training_rows(path, answers):
    """The rows of a file of --data that are of split train, or of none: dict(number of the row -> row).

    answers: the columns that hold an agent's answers: ["chosen", "rejected"], or ["completion"]

    A line of a run's rollouts.jsonl comes as it is. Any other row comes as strings, prompt and answers. In the file
    the prompt may also be a list with one message of a user, and an answer a list with one message of an assistant,
    or with both: then the row needs no prompt. A column `messages` takes the place of `completion`, and a number is
    written out.

    Raises ValueError with one sentence that names --data, the row and the column.
    """
    rows = {}
    num_equal = 0
    for number, row in enumerate(read_file(path, "--data"), 1):
        if row.get("split", "train") != "train":  # it would spoil the evaluation
            continue
        if "agents" not in row:
            row = _read_strings(row, answers, f"--data {path}: row {number}, column")
            # neither of two equal answers is the better one
            if len({row[column] for column in answers}) < len(answers):
                num_equal += 1
                continue
        rows[number] = row
    if not rows:
        raise ValueError(
            f"--data {path}: it has no row of split train to learn from ({num_equal} have equal answers)."
        )
    if num_equal:
        print(f"--data {path}: {num_equal} rows are left out, as chosen and rejected are equal")
    return rows


def _read_strings(row, answers, place):
    """dict(column -> string): the prompt of a row and its answers."""
    prompt = _read_content(row.get("prompt"), ["user"])
    texts = {}
    for column in answers:
        source = "messages" if column == "completion" and "messages" in row else column
        answer = row.get(source)
        if _read_roles(answer) == ["user", "assistant"]:
            beginning = answer[0]["content"]
            if prompt not in (None, beginning):
                raise ValueError(f"{place} {source}: it begins with another message than the prompt; fix the row.")
            prompt = beginning
            answer = answer[1:]
        texts[source] = _read_content(answer, ["assistant"])
    texts["prompt"] = prompt
    forms = "a string, one message, or (for an answer) one message of a user and one of an assistant"
    for column, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{place} {column}: give {forms}; lists belong in .jsonl or .parquet.")
    return dict(zip([*answers, "prompt"], texts.values()))


def _read_roles(messages):
    """The roles of a list of messages that hold text; None for anything else."""
    if not isinstance(messages, list):
        return None
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return None
    return [message.get("role") for message in messages]


def _read_content(value, roles):
    """The text of a number, or of a list with one message of this role; any other value as it is.

    None for a list of messages that was stored as a string: its brackets and roles would be learned.
    """
    if isinstance(value, str) and STORED_MESSAGES.match(value):
        return None
    if type(value) in (int, float, Decimal):
        number = Decimal(str(value))
        # written out, since 1e-05 is not read as a number in an answer
        return format(number, "f") if number.is_finite() else value
    return value[0]["content"] if _read_roles(value) == roles else value


# ---------------------------------------------------------------- --dataset: what environments ask


def load_tasks(dataset, seed, sample, counts=SAMPLE_COUNTS, **source):
    """The tasks of each split: what `sample`, (split, count, seed) -> tasks, makes, or what read_rows reads."""
    if dataset == "sample":
        return {split: sample(split, count, seed) for split, count in counts.items()}
    return read_rows(dataset, **source)


def read_rows(dataset, columns, hub=None, hub_splits=SPLITS, hub_config=None, published=None, judge=list):
    """The tasks of each split of a dataset that is not "sample": dict(split -> list).

    dataset: "hub" for the environment's own set, another hub id (its splits train and test), or a file with one of
        ENDINGS. A column `split` is obeyed; without one, a file's last tenth is test.
    columns: those that must hold text, first the one that agents are asked; a prompt may be a list with one message
        of a user, as in chat data
    hub, hub_config, hub_splits: id and configuration of the own set, and the slice of it for each split
    published: (pattern of a task_id with its number, dict(split -> numbers)), which goes before: most rows are such
    judge: (rows) -> for each row its task, or a string that says why it cannot be used

    A row that cannot be used is left out and named. It is a ValueError if train or test is empty then.
    """
    rows = _load(dataset, hub, hub_splits, hub_config)
    read = {name: _read_texts(row, columns) for name, row in rows.items()}
    sound = {name: row for name, row in read.items() if isinstance(row, dict)}
    split_of = _find_splits(sound, published)
    faults = dict.fromkeys(sound.keys() - split_of.keys(), "its column split, or else its task_id, is in no split")

    parts = {"train": [], "test": []}  # split -> names of its rows
    for name, split in split_of.items():
        parts.setdefault(split, []).append(name)
    limit = None if judge is list else LIMIT
    used = [name for part in parts.values() for name in part[:limit]]
    judged = judge([sound[name] for name in used])
    results = read | faults | dict(zip(used, judged))  # name -> task, or why it cannot be used
    usable = {}
    for split, part in parts.items():
        usable[split] = [name for name in part[:limit] if not isinstance(results[name], str)]

    report = ", ".join(f"{split} {len(usable[split])} of {len(part)} rows" for split, part in parts.items())
    if len(used) < len(split_of):
        report += f", where no more than the first {LIMIT} of a split are tried and used"
    asked = {name: " ".join(row[columns[0]].split()) for name, row in sound.items()}
    trained = {asked[name] for name in usable["train"]}
    repeated = sum(asked[name] in trained for name in usable["test"])
    if repeated:
        report += f"; {repeated} test rows are also in train"
    reasons = [f"{name}: {result}" for name, result in results.items() if isinstance(result, str)]
    if reasons:
        report += f"; {len(reasons)} rows are left out (at most ten are shown): {'; '.join(reasons[:10])}"
    for split in "train", "test":
        if not usable[split]:
            needed = (
                f"it takes rows with text, not with lists stored as strings, in {', '.join(columns)}; a column split "
                "says train or test, and of a file without it the last tenth is test"
            )
            raise ValueError(f"--dataset {dataset}: {split} has no row that can be used ({report}); {needed}.")
    print(f"--dataset {dataset}: {report}")
    return {split: [results[name] for name in part] for split, part in usable.items()}


def _load(dataset, hub, hub_splits, hub_config):
    """dict(name -> row), where a name is "row 3 (task HumanEval/2)"; if the hub has splits, rows hold theirs."""
    if dataset.endswith(ENDINGS):
        parts = {"all": read_file(dataset, "--dataset")}
    elif dataset == "hub":
        parts = _load_from_hub(dataset, hub, hub_config, hub_splits)
    else:
        parts = _load_from_hub(dataset, dataset, None, SPLITS)
    rows = {}
    for split, part in parts.items():
        for number, row in enumerate(part, 1):
            name = f"row {number}"
            if len(parts) > 1:
                name += f" of {split}"
                row = {"split": split, **row}
            if "task_id" in row:
                name += f" (task {row['task_id']})"
            rows[name] = row
    return rows


def _load_from_hub(dataset, path, config, slices):
    from datasets import load_dataset  # here, since the import takes seconds and sample tasks do not need it

    try:
        parts = {split: list(load_dataset(path, config, split=part)) for split, part in slices.items()}
    except Exception as error:  # network and hub raise many types
        remedy = f"check its name, splits and network, or give sample or a file in {', '.join(ENDINGS)}"
        raise ValueError(f"--dataset {dataset}: it could not be loaded ({error!s:.300}); {remedy}.") from None
    return clean(parts)


def _read_texts(row, columns):
    """The row with one message, or a number, as a string; or, if a column has no text, why it cannot be used."""
    texts = {}
    for column in columns:
        text = _read_content(row.get(column), ["user"] if column == "prompt" else ["assistant"])
        may_be_blank = column == "completion"  # it is a reference
        if not isinstance(text, str) or not (may_be_blank or text.strip()):
            return f"no text in {column}"
        texts[column] = text
    return row | texts


def _find_splits(rows, published):
    """dict(name -> split), without the rows that are in none."""
    if any("split" in row for row in rows.values()):
        return {name: str(row["split"]) for name, row in rows.items() if row.get("split")}
    if published:
        pattern, ranges = published
        numbers = {}
        for name, row in rows.items():
            match = re.fullmatch(pattern, str(row.get("task_id")))
            if match:
                numbers[name] = int(match[1])
        if 2 * len(numbers) > len(rows):  # the benchmark's own tasks, perhaps a part of them
            parts = ranges.items()
            return {name: split for name, number in numbers.items() for split, part in parts if number in part}
    cut = len(rows) - max(1, len(rows) // 10)
    return {name: "train" if place < cut else "test" for place, name in enumerate(rows)}
