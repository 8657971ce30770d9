"""Reads data sets. One row's fault never refuses the others: it is left out and named."""

import re

FORMS = {  # end of a file's name -> what `datasets` calls it
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
LIMIT = 1000  # rows of a split that are used: each is read, and some are run, at every start


def read_rows(dataset, columns, hub, hub_splits, hub_config=None, published=None, judge=None):
    """The tasks of each split of a dataset that is not "sample": dict(split -> list).

    dataset: "hub" for the environment's own set, another hub id (its splits train and test), or a file: .jsonl,
        .jsonl.gz, .json, .csv or .parquet. A column `split` is obeyed; without one, a file's last tenth is test.
    columns: those that must hold text; a prompt may be a list with one message of a user, as in chat data
    hub, hub_config, hub_splits: id and configuration of the own set, and the slice of it for each split
    published: (pattern of a task_id with its number, dict(split -> numbers)), which goes before: most rows are such
    judge: (rows) -> for each row its task, or a text that says why it cannot be used

    A row that cannot be used is left out and named. It is a ValueError if train or test is empty then.
    """
    rows, faults = [], {}  # triples (name, row, part of the dataset); name -> why it cannot be used
    loaded = _load(dataset, hub, hub_splits, hub_config)
    for part, found in loaded.items():
        for place, row in enumerate(found, 1):
            name = f"row {place}" + (f" of {part}" if len(loaded) > 1 else "")
            name += f" (task {row['task_id']})" if "task_id" in row else ""
            row, fault = _texts(row, columns)
            if fault:
                faults[name] = fault
            else:
                rows.append((name, row, part))

    splits = {"train": [], "test": []}
    for (name, row, _), split in zip(rows, _splits(rows, published)):
        if split is None:
            faults[name] = "it has no split, or a task_id of another form than most rows"
        elif split:
            splits.setdefault(split, []).append((name, row))
    used = [(split, *entry) for split, part in splits.items() for entry in (part[:LIMIT] if judge else part)]
    tasks = [row for _, _, row in used]
    usable = {split: [] for split in splits}
    for (split, name, _), task in zip(used, judge(tasks) if judge else tasks):
        if isinstance(task, str):
            faults[name] = task
        else:
            usable[split].append(task)

    counts = [f"{split} {len(usable[split])} of {len(part)} rows" for split, part in splits.items()]
    if judge and max(map(len, splits.values())) > LIMIT:
        counts.append(f"where no more than the first {LIMIT} of a split are tried and used")
    print(f"--dataset {dataset}: {', '.join(counts)}")
    named = [f"{name}: {fault}" for name, fault in faults.items()]
    named = "; ".join(named[:10] + ["..."] * (len(named) > 10))
    if faults:
        print(f"--dataset {dataset}: {len(faults)} rows are left out: {named}")
    for split in "train", "test":
        if not usable[split]:
            needed = f"it takes rows with texts in {', '.join(columns)}"
            raise ValueError(f"--dataset {dataset}: {split} has no row that can be used; {needed} ({named}).")
    return usable


def _splits(rows, published):
    """For each (name, row, part of the dataset) its split: "" for one that is not used, None if it is not known."""
    if any("split" in row for _, row, _ in rows):
        return [row.get("split") for _, row, _ in rows]
    pattern, ranges = published or ("(?!)", {})  # which matches nothing
    found = [re.fullmatch(pattern, str(row.get("task_id"))) for _, row, _ in rows]
    if 2 * sum(map(bool, found)) > len(rows):  # the benchmark's own tasks, perhaps a part of them
        of_number = {number: split for split, numbers in ranges.items() for number in numbers}
        return [of_number.get(int(match[1]), "") if match else None for match in found]
    cut = len(rows) - max(1, len(rows) // 10)
    splits = []
    for place, (_, _, part) in enumerate(rows):
        last = "train" if place < cut else "test"
        splits.append(last if part == "file" else part)
    return splits


def _load(dataset, hub, hub_splits, hub_config):
    """dict(split -> rows), with the only key "file" for a file."""
    from datasets import load_dataset  # here, since the import takes seconds and sample tasks do not need it

    form = next((form for end, form in FORMS.items() if dataset.endswith(end)), "")
    path, config, parts = (hub, hub_config, hub_splits) if dataset == "hub" else (dataset, None, None)
    try:
        if form:  # streamed: nothing is written to the cache, and a column may hold values of several types
            return {"file": list(load_dataset(form, data_files=dataset, split="train", streaming=True))}
        parts = parts or {"train": "train", "test": "test"}
        return {split: list(load_dataset(path, config, split=part)) for split, part in parts.items()}
    except Exception as error:  # network, hub and file formats raise many types
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        remedy = "mend the file" if form else "check its name, splits and network, or give sample or a .jsonl file"
        raise ValueError(f"--dataset {dataset}: it could not be loaded ({why}); {remedy}.") from None


def _texts(row, columns):
    """(the row, with a prompt of one message made a text; why it cannot be used, or "")."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and "prompt" in columns:
        if [isinstance(message, dict) and message.get("role") for message in prompt] != ["user"]:
            return row, "its prompt is a conversation; give a text, or one message of a user"
        row = {**row, "prompt": prompt[0].get("content")}
    for column in columns:
        text = row.get(column)
        blank = column != "completion" and not str(text).strip()  # a reference may be blank
        if blank or not isinstance(text, (str, int, float) if column == "task_id" else str):
            return row, f"no text in {column}"
    return row, ""
