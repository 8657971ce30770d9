"""Two (or N) agents write one Python program: helper functions `aux`, and the function that the task asks for.

The tasks are those of HumanEval (Chen et al., 2021), MBPP sanitized (Austin et al., 2021) and CoopHumanEval
(OpenMLRL), whose tasks 0 to 15 are functions of HumanEval; the roles and the reward follow MAGRPO (Liu et al., 2025),
with prompts of our own. The reward and what differs from the published code are in rewards/coding.py.

No correct answer passes all tests of CoopHumanEval's tasks 2, 12, 44, 50 and 54: they contradict their prompts (tasks
with odd numbers were not checked). They are kept, so that figures can be compared with published ones.
"""

import ast
import doctest
import random
import re
import symtable
import sys
import warnings

from envs import Step, read_rows, samples, warn_of_shared_rows
from rewards.coding import Answer, coding_rewards
from rewards.sandbox import require_protection

SAMPLE_COUNTS = {"train": 512, "validation": 64, "test": 64}
TRIED = 100  # reference solutions of an own dataset that are run at the start; docs/sandbox.md has the time

# The hub sets, and their fixed splits by task number. HumanEval's and CoopHumanEval's are the slices of the paper's
# code, train [33:133] and so on; a task's number is its index in the whole set, so a file with only a part of the set
# is split the same way: HumanEval/140 is always in test. MBPP's splits are those of its own paper.
HUMANEVAL_COLUMNS = ["task_id", "prompt", "entry_point", "test"]
MBPP_COLUMNS = ["task_id", "prompt", "code", "test_imports", "test_list"]
BENCHMARKS = {
    "humaneval": {
        "hub": "openai/openai_humaneval",
        "hub_config": None,
        "hub_splits": {"all": "test"},
        "columns": HUMANEVAL_COLUMNS,
        "number": r"HumanEval/(\d{1,9})",
        "splits": {"train": range(33, 133), "validation": range(32), "test": range(133, 164)},
    },
    "coophumaneval": {
        "hub": "OpenMLRL/CoopHumanEval",
        "hub_config": None,
        "hub_splits": {"all": "test"},
        "columns": HUMANEVAL_COLUMNS,
        "number": r"CoopHumanEval/(\d{1,9})",
        "splits": {"train": range(50), "validation": range(50, 66), "test": range(66, 82)},
    },
    "mbpp": {
        "hub": "google-research-datasets/mbpp",
        "hub_config": "sanitized",
        "hub_splits": {"all": "train+test+validation+prompt"},
        "columns": MBPP_COLUMNS,
        "number": r"(?:Mbpp/)?(\d{1,9})",
        "splits": {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)},
    },
}


class Coding:
    """Agents 1..N-1 each write a helper function, agent N the function that the task asks for.

    name: "humaneval", "mbpp" or "coophumaneval"
    num_agents: 1 or more; a single agent writes the asked function
    num_turns: 1 or more; a later turn shows each agent its own answers and what became of them
    dataset: "sample", "hub", a hub id or a file with the same columns; tasks with benchmark numbers get its splits.
        Tasks whose tests an answer could make true without solving them are left out and reported; of an own dataset,
        so are reference solutions that fail, but these tasks stay in.
    seed: int, seeds the sample tasks
    feedback: "plain" (revise) or "level" (what was found, how many tests passed, the first prompt example that fails).
        The examples are the prompt's own; many in HumanEval and CoopHumanEval are also scored, as in the benchmarks
    timeout: seconds that the tests of one answer may take
    allow_unsafe_code: "yes" or "no", run model-written code even if the system offers no protection from it

    Raises ValueError with one sentence for other arguments, for a system that offers no protection, and for a dataset
    that cannot be used.
    """

    def __init__(
        self,
        name,
        num_agents=2,
        num_turns=1,
        dataset="sample",
        seed=1,
        feedback="level",
        timeout=10.0,
        allow_unsafe_code="no",
    ):
        if name not in BENCHMARKS:
            raise ValueError(f"--env {name}: the coding tasks are {', '.join(BENCHMARKS)}; use one of them.")
        if feedback not in ("plain", "level"):
            raise ValueError(f"--env-kwargs feedback {feedback}: it is plain or level; use one of them.")
        self.timeout, self.allow_unsafe_code = float(timeout), allow_unsafe_code == "yes"
        require_protection(self.allow_unsafe_code)
        self.num_agents, self.num_turns, self.dataset, self.feedback = num_agents, num_turns, dataset, feedback
        self.seed = seed
        self.helpers = ["aux"] if num_agents == 2 else [f"aux{i}" for i in range(1, num_agents)]
        if dataset == "sample":
            rows = {split: samples.coding_tasks(split, count, seed) for split, count in SAMPLE_COUNTS.items()}
        else:
            rows = benchmark_rows(dataset, **BENCHMARKS[name])
        self.splits = {split: [_task(row, dataset) for row in part] for split, part in rows.items()}
        if dataset not in ("sample", "hub"):  # the published tasks are known
            self._try_references([row for part in rows.values() for row in part])
        if void := [task for part in self.splits.values() for task in part if _compares_own(task)]:
            why = "their tests compare values of the answer's own functions or classes, which it could make all equal"
            print(f"--dataset {dataset}: left out, as {why}: {', '.join(str(task['task_id']) for task in void)}")
            self.splits = {split: [task for task in part if task not in void] for split, part in self.splits.items()}
        if lost := [task["task_id"] for part in self.splits.values() for task in part if _hands_over_lambda(task)]:
            why = "a lambda cannot be sent into the sandbox, so every answer fails tests that pass one"
            print(f"--dataset {dataset}: {why}, as those of task {', '.join(map(str, lost))}")

    def tasks(self, split):
        """The tasks of "train", "validation" or "test"."""
        if split not in self.splits:
            raise ValueError(f"--dataset {self.dataset}: it has no split {split}; use {', '.join(self.splits)}.")
        return self.splits[split]

    def observe(self, task, history):
        """The prompt of each agent: helpers first, the asked function's agent last.

        After the first turn it also holds the agent's own answers and, with feedback "level", what became of them.
        """
        prompts = [_helper_prompt(task, name) for name in self.helpers] + [_main_prompt(task, self.helpers)]
        names = [*self.helpers, task["entry_point"]]
        for step in history:
            for i, (name, text) in enumerate(zip(names, step.actions)):
                prompts[i] += f"\n\nYour answer:\n{text.strip()}\n\n"
                if self.feedback == "level":
                    prompts[i] += " ".join(_remarks(i, names, step.feedback)) + "\n\n"
                prompts[i] += f"Write {name} again, better. Function code only."
        return prompts

    def step(self, branches):
        """Runs the answers of all branches at once; see rewards/coding.py for reward and parts, and scored_step."""
        answers = [_answer(task, actions, self.helpers) for task, _, actions in branches]
        scores = coding_rewards(answers, self.timeout, self.allow_unsafe_code)
        return [
            scored_step(actions, score, self.num_turns - len(history))
            for (_, history, actions), score in zip(branches, scores)
        ]

    def demonstrations(self):
        """Prompts and good completions of every role for the sample training tasks: list of dict(prompt, completion).

        A single agent writes helper and asked function together; of several helpers only the first is used. With two
        turns or more there are also prompts of a second turn, after a first turn in which one agent answered for
        another task; in half of the cases that task asks for the same function, and at most the split between helper
        and function differs. These first turns are run in the sandbox; those that pass anyway yield no prompt. Raises
        ValueError for other datasets, which hold no helpers.
        """
        if self.dataset != "sample":
            raise ValueError(f"--dataset {self.dataset}: it holds no answers for each role; use sample.")
        tasks = self.tasks("train")
        answers = [self._sample_answer(task) for task in tasks]
        return demonstrated(self, tasks, answers, self._flawed_answers(tasks))

    def _try_references(self, rows):
        """Names tasks whose reference solution, where the row has one, fails: perhaps every answer does."""
        tried, failed = [], []
        for task, row in zip((task for part in self.splits.values() for task in part), rows):
            written = row["code"] if "test_list" in row else row.get("canonical_solution")
            if isinstance(written, str) and len(tried) < TRIED:  # HumanEval's continue the prompt
                tried.append((task, written if "test_list" in row else row["prompt"] + written))
        answers = [_answer(task, [code], []) for task, code in tried]
        for (task, _), score in zip(tried, coding_rewards(answers, self.timeout, self.allow_unsafe_code)):
            if not score.parts["all_passed"]:
                failed.append(f"{task['task_id']} ({score.findings['reason'].splitlines()[0]})")
        if failed:
            why = f"in the sandbox (docs/sandbox.md says what it lacks), of the first {len(tried)} tried"
            print(f"--dataset {self.dataset}: the reference solutions of these tasks fail {why}: {', '.join(failed)}")

    def _sample_answer(self, task):
        if not self.helpers:
            return [task["helper"].rstrip() + "\n\n\n" + task["main"]]
        codes = [re.sub(r"\baux\b", name, task["helper"]) for name in self.helpers]
        return [*codes, re.sub(r"\baux\b", self.helpers[0], task["main"])]

    def _flawed_answers(self, tasks):
        """For each task its sample answer, except that one agent's text is taken from another task."""
        rng = random.Random(f"flawed answers {self.seed}")
        same = {task["entry_point"]: [t for t in tasks if t["entry_point"] == task["entry_point"]] for task in tasks}
        for task in tasks:
            answer = self._sample_answer(task)
            other = rng.choice(same[task["entry_point"]] if rng.random() < 0.5 else tasks)
            place = rng.choice([len(answer) - 1, 0])  # the asked function, or the helper that it uses
            text = self._sample_answer(other)[place]
            answer[place] = re.sub(rf"\b{other['entry_point']}\b", task["entry_point"], text)
            yield answer


def _answer(task, texts, helpers):
    return Answer(texts, helpers, **{key: task[key] for key in Answer._fields[2:]})


def _helper_prompt(task, name):
    return f"{task['problem'].strip()}\n\nWrite a helper function {name} for this. Function code only."


def _main_prompt(task, helpers):
    ask = f"{task['problem'].strip()}\n\nWrite {task['entry_point']}."
    if len(helpers) == 1:
        ask += f" A helper {helpers[0]}(...) exists: you may call it, do not redefine it."
    elif helpers:
        ask += f" Helpers {', '.join(f'{h}(...)' for h in helpers)} exist: you may call them, do not redefine them."
    return ask + " Function code only."


def _remarks(agent, names, findings):
    """What agent number `agent` is told. Of the scored tests, that is only how many passed.

    An example of the prompt that a benchmark's tests repeat is still shown: agents can read it in the prompt.
    """
    name, (*helpers, main) = names[agent], names
    remarks = [f"{name} was found." if findings["defined"][agent] else f"No {name} that returns something was found."]
    if not findings["defined"][-1] and name != main:
        remarks.append(f"{main} was not found.")
    if not findings["syntax"]:
        return remarks + syntax_remarks(agent, findings)
    remarks.append(f"{findings['passed']} of {findings['total']} tests passed.")
    if findings["examples"]:
        source, what = findings["examples"][0]
        remarks.append(f"{source} fails: {what}.")
    for helper, *held in zip(helpers, findings["uses"], findings["ignored"], findings["called"]):
        if name in (helper, main):
            states = zip(held, ("uses", "calls but ignores", "calls but does not need"))
            state = next((state for holds, state in states if holds), "does not use")
            remarks.append(f"{main} {state} {helper}.")
    if findings["wrapper"]:
        remarks.append(f"{main} only hands on what the helper returns.")
    return remarks


def syntax_remarks(agent, findings):
    """Agent number `agent` is told its own syntax error, but only whether another agent made one."""
    if findings["errors"][agent]:
        return [f"Your answer is not Python: {findings['errors'][agent]}."]
    if any(findings["errors"]):
        return ["The answer of another agent is not Python."]
    return [f"The program does not compile: {findings['error']}."] if findings["error"] else []


def scored_step(actions, score, turns_left):
    """The Step of an answer. An answer that passes every test ends the task and is also paid for the turns it saves.

    Otherwise an answer that fails a test, and earns again in the next turn, would be worth more than one that passes,
    and agents would learn to fail. (It still is, if only the second answer uses its helper.) Saved turns are not
    discounted: with --gamma below 1, a pass in the first turn earns more than passing in every turn would.
    """
    if not score.parts["all_passed"]:
        return Step(actions, score.reward, score.parts, done=False, feedback=score.findings)
    return Step(actions, score.reward * turns_left, score.parts, done=True, feedback=score.findings)


def demonstrated(env, tasks, answers, flawed):
    """The demonstrations() of an environment, given an answer to each task.

    flawed: for each task a first-turn answer, used with two turns or more: if it fails, a second turn corrects it
    """
    histories = [[[]] for _ in tasks]
    if env.num_turns > 1:
        steps = env.step([(task, [], answer) for task, answer in zip(tasks, flawed)])
        histories = [[[]] if step.done else [[], [step]] for step in steps]
    return [
        {"prompt": prompt, "completion": code}
        for task, answer, turns in zip(tasks, answers, histories)
        for history in turns
        for prompt, code in zip(env.observe(task, history), answer)
    ]


def benchmark_rows(dataset, hub, hub_config, hub_splits, columns, number, splits):
    """The rows of each split. If all tasks have the benchmark's numbers, its splits replace those of the file."""
    said = []
    found = read_rows(dataset, columns, hub, hub_splits, hub_config, said.append)
    numbered = {split: [] for split in splits}
    for row in (row for rows in found.values() for row in rows):
        match = re.fullmatch(number, str(row["task_id"]).strip().removesuffix(".0"))  # pandas makes 601 a 601.0
        if not match or "split" in row:
            if dataset == "hub":
                raise ValueError(f"--dataset hub: {hub} has changed (task_id {row['task_id']}); use a local file.")
            if "split" not in row:
                said.append(f"--dataset {dataset}: task {row['task_id']} is not numbered as the benchmark's are")
            for line in said:
                print(line)
            return found
        for split, numbers in splits.items():
            if int(match[1]) in numbers:
                numbered[split].append(row)
    warn_of_shared_rows(dataset, numbered, columns, print)
    others = sum(map(len, found.values())) - sum(map(len, numbered.values()))
    counts = ", ".join(f"{split} {len(rows)} (of {splits[split]})" for split, rows in numbered.items())
    left_out = f"; {others} with other numbers are left out" if others else ""
    print(f"--dataset {dataset}: split by task number, as published: {counts}{left_out}")
    for split in "train", "test":
        if not numbered[split]:
            raise ValueError(
                f"--dataset {dataset}: no task has a number of the benchmark's split {split}; use the whole set, or "
                "give your own tasks a column split, or ids of another form."
            )
    return numbered


def _task(row, dataset):
    """Brings rows with HumanEval's or MBPP's columns into one form.

    Keys: task_id, problem (what all agents read), entry_point, names (defined by the answer and used by the tests),
    tests, examples (asserts that may be shown), prelude (source before the answer), setup (source before the tests);
    for sample tasks also helper and main. The rows are trusted, so they are parsed here; model-written text never is.
    """

    def parse(row):
        task = _mbpp_task(row) if "test_list" in row else _humaneval_task(row)
        if re.fullmatch(r"check|aux\d*", task["entry_point"]):
            raise ValueError(f"its function is called {task['entry_point']}, a name that its tests or helpers need")
        return task

    return parsed(parse, row, dataset, "the benchmark's")


def parsed(parse, row, dataset, benchmark):
    """parse(row); whatever a malformed row makes it raise becomes a ValueError that names the task in one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some regular expressions in the benchmarks are not raw strings
            return parse(row)
    except Exception as error:  # including the parser's MemoryError and RecursionError
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        why = "a function or class that it names is missing" if isinstance(error, StopIteration) else why
        raise ValueError(
            f"--dataset {dataset}: task {row['task_id']} is not in {benchmark} form ({why}); fix it."
        ) from error


def _humaneval_task(row):
    entry_point = row["entry_point"]
    # The prompt's other definitions: imports, and in a few tasks functions that the tests call.
    body = ast.parse(row["prompt"]).body
    asked = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == entry_point)
    prelude = ast.unparse(ast.Module(body=[n for n in body if n is not asked], type_ignores=[]))
    test = ast.parse(row["test"])
    _check_imports(body + test.body)
    _check_tests(row["test"], {entry_point})
    checks = [n.args for n in test.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if not checks or len(checks[-1].args) - len(checks[-1].defaults) > 1:
        raise ValueError("test has no function check of one argument")
    # The tests must use the candidate's own versions of the prompt's classes: no other objects cross to it.
    said = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    classes = [n.name for n in body if isinstance(n, ast.ClassDef) and n.name in said]
    return {
        "task_id": row["task_id"],
        "problem": row["prompt"],
        "entry_point": entry_point,
        "names": [entry_point, *classes],
        "tests": f"{row['test']}\n\ncheck({entry_point})\n",
        "examples": example_asserts(ast.get_docstring(asked) or ""),
        "prelude": prelude,
        "setup": prelude,
        **{key: row[key] for key in ("helper", "main") if key in row},
    }


def _mbpp_task(row):
    """MBPP's text does not name the function, so one assert is shown with it, and is not scored."""
    if not isinstance(row["test_list"], list) or not all(isinstance(source, str) for source in row["test_list"]):
        raise ValueError("test_list is not a list of texts")
    if not isinstance(row["test_imports"], list):  # a text would be joined letter by letter
        raise ValueError("test_imports is not a list, such as []")
    tests = list(dict.fromkeys(row["test_list"]))  # an equal one would be both shown and scored
    trees = [ast.parse(source) for source in tests]
    if not all(tree.body and isinstance(tree.body[0], ast.Assert) for tree in trees):
        raise ValueError("test_list has an item that is not an assert")
    if len(trees) < 2:
        raise ValueError("it has fewer than two different tests: one is shown, so none is left to score")
    shown = _shown([tree.body[0].test for tree in trees])
    example, scored = tests[shown], tests[:shown] + tests[shown + 1 :]
    solution = ast.parse(row["code"]).body
    functions = {n.name for n in solution if isinstance(n, ast.FunctionDef)}
    defined = functions | {n.name for n in solution if isinstance(n, ast.ClassDef)}
    calls = [n.func for n in ast.walk(trees[shown]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    imports = "\n".join(row["test_imports"])
    imported = ast.parse(imports).body
    if any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Name) for n in imported):
        raise ValueError("test_imports has a name in place of an import")
    _check_tests("\n".join(scored), defined)
    # One task's tests use a module that only the solution imports.
    setup = [n for n in solution if isinstance(n, (ast.Import, ast.ImportFrom))]
    _check_imports(imported + setup)
    return {
        "task_id": row["task_id"],
        "problem": f"{row['prompt'].strip()}\nExample: {example.strip()}",
        "entry_point": next(call.id for call in calls if call.id in functions),
        "names": sorted({n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)} & defined),
        "tests": "\n".join(scored),
        "examples": [example],
        "prelude": imports,
        "setup": imports + "\n" + ast.unparse(ast.Module(body=setup, type_ignores=[])),
    }


def _check_tests(source, names):
    """Raises ValueError for tests that would not test an answer, which is to define `names`."""
    # HumanEval+ has its asserts beside check, not in it; in a class, the sandbox does not count them
    outside = [s for s in ast.parse(source).body if not isinstance(s, ast.ClassDef)]
    asserted = [n.test for statement in outside for n in ast.walk(statement) if isinstance(n, ast.Assert)]
    if all(isinstance(test, ast.Constant) for test in asserted):
        raise ValueError("its tests have no assert outside of classes, or only of constants")
    if any(isinstance(test, ast.Tuple) for test in asserted):
        raise ValueError("an assert of a tuple is always true")
    symbols = symtable.symtable(source, "tests", "exec").get_symbols()
    if own := names & {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}:
        raise ValueError(f"its tests define {min(own)} themselves")


def _hands_over_lambda(task):
    if "lambda" not in task["tests"]:  # cheap: parsing ten thousand tasks takes long
        return False
    tree = ast.parse(task["tests"])
    names = {*task["names"], *(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg))}  # also check's parameter
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) in names]
    given = [value for call in calls for value in [*call.args, *(keyword.value for keyword in call.keywords)]]
    return any(isinstance(value, ast.Lambda) for value in given)


def _compares_own(task):
    """Whether the tests compare what another function or class of the answer's than the asked one has made.

    An answer could define these so that all values are equal. What the asked function is called with does not count.
    """
    asked, own = {task["entry_point"]}, {*task["names"]} - {task["entry_point"]}
    if not own:
        return False
    tree = ast.parse(task["tests"])
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

    def sources(node):  # names that a value comes from; without recursion, as a test may be nested deeply
        names, waiting = set(), [node]
        while waiting:
            part = waiting.pop()
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif not (isinstance(part, ast.Call) and getattr(part.func, "id", None) in asked):
                waiting += ast.iter_child_nodes(part)
        return names

    def unpacked(target, value):  # pairs (what is bound, to what)
        both = getattr(target, "elts", []), getattr(value, "elts", [])
        return zip(*both) if len(both[0]) == len(both[1]) > 0 else [(target, value)]

    pairs = []
    for n in ast.walk(tree):
        if isinstance(n, ast.Assign):
            pairs += [pair for target in n.targets for pair in unpacked(target, n.value)]
        elif isinstance(n, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and n.value:
            pairs.append((n.target, n.value))
        elif isinstance(n, (ast.For, ast.comprehension)):
            rows = n.iter.elts if isinstance(n.iter, (ast.List, ast.Tuple)) else [n.iter]
            pairs += [pair for row in rows for pair in unpacked(n.target, row)]
        elif isinstance(n, ast.FunctionDef):
            pairs += [(ast.Name(n.name), statement) for statement in n.body]
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):  # as in wanted.append(P(4))
            pairs += [(n.func.value, argument) for argument in n.args]
        elif isinstance(n, ast.Call) and getattr(n.func, "id", None) in functions:
            parameters = functions[n.func.id].args.args
            pairs += [(ast.Name(parameter.arg), argument) for parameter, argument in zip(parameters, n.args)]
    before = None
    while before != (before := (len(asked), len(own))):
        for target, value in pairs:
            bound = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            if isinstance(value, ast.Name) and value.id in asked:
                asked |= bound
            elif sources(value) & own:
                own |= bound
    return any(sources(n) & own for n in ast.walk(tree) if isinstance(n, ast.Compare))


def _shown(tests):
    """The index of the test to show: the first for which the others cannot all be passed by a trivial function.

    Trivial functions return a constant or an argument; if one kind cannot be excluded, it is the latter.
    """
    # the expected value, or the kind of test, as in `assert f(1)` and `assert not f(2)`
    values = [ast.dump(test.comparators[-1]) if isinstance(test, ast.Compare) else type(test) for test in tests]
    arguments = [list(map(ast.dump, getattr(getattr(test, "left", None), "args", []))) for test in tests]

    def passed_by(shown):
        left = [k for k in range(len(tests)) if k != shown]
        argument = tuple(values[k] for k in left) in zip(*(arguments[k] for k in left))
        constant = len({values[k] for k in left}) == 1
        return constant, argument

    return min(range(len(tests)), key=passed_by)


def _check_imports(statements):
    """Raises ValueError for modules that the sandbox lacks, such as HumanEval+'s numpy: every answer would fail."""
    guarded = {n for s in statements for block in ast.walk(s) if isinstance(block, ast.Try) for n in ast.walk(block)}
    nodes = [node for statement in statements for node in ast.walk(statement) if node not in guarded]
    names = [part.name for node in nodes if isinstance(node, ast.Import) for part in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    if absent := {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
        raise ValueError(f"it imports {', '.join(sorted(absent))}; the sandbox has the standard library only")


def example_asserts(docstring, after_all=False):
    """The >>> examples of a docstring that show a value, as asserts; [] if doctest cannot parse the docstring.

    Each assert comes after the earlier examples that show no value, such as `x = [1, 2]`; with `after_all`, after all
    earlier examples. Examples whose output is not a Python value, such as a traceback or prose, are left out.
    """
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # a line with no blank after >>>, or with another indentation
        return []
    asserts, before = [], []
    for example in examples:
        source, want = example.source.strip(), example.want.strip()
        try:
            if want:
                asserts.append("\n".join([*before, _example_assert(source, want)]))
            if ast.parse(source).body and (after_all or not want):
                before.append(source)
        except (SyntaxError, ValueError):
            continue
    return asserts


def _example_assert(source, want):
    """The assert that the source of an example has the value it shows. Raises as ast does if either is not a value."""
    ast.literal_eval(want)
    # without a trailing comment, which would hide the comparison
    value, worth = (ast.parse(text, mode="eval").body for text in (source, want))
    source, want = ast.get_source_segment(source, value), ast.get_source_segment(want, worth)
    return f"assert {source if isinstance(value, ast.Call) else f'({source})'} == {want}"
