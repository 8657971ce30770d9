"""Two (or N) agents write one Python program: helper functions `aux`, and the function that the task asks for.

The tasks are those of HumanEval (Chen et al., 2021), MBPP sanitized (Austin et al., 2021) and CoopHumanEval
(OpenMLRL), whose tasks 0 to 15 are functions of HumanEval; the roles and the reward follow MAGRPO (Liu et al., 2025),
with prompts of our own. The reward and what differs from the published code are in rewards/coding.py.

No correct answer passes all tests of CoopHumanEval's tasks 2, 12, 44, 50 and 54: they contradict their prompts (tasks
with odd numbers were not checked). They are kept, to compare with published figures: the set has no references.
"""

import ast
import re
from functools import partial

from envs import Step, need_sample, one_of
from envs.chat import Chat, put_in_fence
from envs.data import load_tasks
from envs.samples import PROGRAM_COUNTS
from envs.samples import coding as samples
from envs.vetting import TRIVIAL, read_examples, read_limits, show_assert, vet
from rewards.coding import PARTS, Answer, coding_rewards, remark_on_syntax
from rewards.programs import IMPORTS
from rewards.texts import drop_thoughts

# The hub sets, and their fixed splits by task number. HumanEval's and CoopHumanEval's are the slices of the paper's
# code, train [33:133] and so on; a task's number is its index in the whole set, so a file with only a part of the set
# is split the same way: HumanEval/140 is always in test. MBPP's splits are those of its own paper.
HUMANEVAL = {"train": range(33, 133), "validation": range(32), "test": range(133, 164)}
COOPHUMANEVAL = {"train": range(50), "validation": range(50, 66), "test": range(66, 82)}
MBPP = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}
FORM = {"hub_splits": {"all": "test"}, "columns": ["prompt", "task_id", "entry_point", "test"]}
BENCHMARKS = {
    "humaneval": {"hub": "openai/openai_humaneval", "published": (r"HumanEval/(\d{1,9})", HUMANEVAL), **FORM},
    "coophumaneval": {
        "hub": "OpenMLRL/CoopHumanEval",
        "published": (r"CoopHumanEval/(\d{1,9})", COOPHUMANEVAL),
        **FORM,
    },
    "mbpp": {
        "hub": "google-research-datasets/mbpp",
        "hub_config": "sanitized",
        "hub_splits": {"all": "train+test+validation+prompt"},
        "columns": ["prompt", "task_id", "code"],
        "published": (r"(?:Mbpp/)?(\d{1,9})(?:\.0)?", MBPP),
    },
}
FEEDBACK = ("none", "plain", "code", "passed", "level", "group", "model")
SUGGEST = (
    "{count} writers of one Python program each wrote one answer to the same task, and will each revise it.\n\n"
    "{material}\n\n"
    "Say in at most five sentences what is wrong and how to mend it. Name the function that you mean. Write no code."
)
SHOWN = 1000  # characters of a suggestion that agents read


class Coding:
    """Agents 1..N-1 each write a helper function, agent N the function that the task asks for.

    num_turns: in a later turn each agent reads its own answers and what became of them
    dataset: "sample", "hub", a hub id or a file with the same columns; tasks with benchmark numbers get its splits
    feedback: what an agent reads in a later turn. "none": its first prompt again; all others add its own answers and a
        request to revise, "plain" no more than that, and
        "code": the other agents' answers
        "passed": how many tests passed
        "level": also what was found of its own part, and the first example of the prompt that fails. The examples are
            the prompt's own; many in HumanEval and CoopHumanEval are also scored, as in the benchmarks
        "group": what "level" tells each agent, for all of them
        "model": what another model suggests, which reads the task and all answers, but no tests
    url, model: of that model, see envs/chat.py
    timeout: processor seconds that the tests of one answer may take
    allow_unsafe_code: "yes" or "no", run model-written code even if the system offers no protection from it
    """

    PARTS = PARTS

    def __init__(
        self,
        name,
        num_agents,
        num_turns,
        dataset,
        seed,
        feedback="level",
        timeout=10,
        allow_unsafe_code="no",
        url="",
        model="",
    ):
        one_of("feedback", feedback, *FEEDBACK)
        self.chat = Chat(url, model) if feedback == "model" else None
        self.limits = read_limits(timeout, allow_unsafe_code)
        self.num_agents = num_agents
        self.num_turns = num_turns
        self.dataset = dataset
        self.seed = seed
        self.feedback = feedback
        self.helpers = ["aux"] if num_agents == 2 else [f"aux{i}" for i in range(1, num_agents)]
        sample = partial(_make_sample_tasks, name=name)
        judge = partial(vet, parse=_make_task, answer=make_answer, score=coding_rewards, limits=self.limits)
        self.splits = load_tasks(dataset, seed, sample, PROGRAM_COUNTS, judge=judge, **BENCHMARKS[name])

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        """The prompt of each agent: helpers first, the asked function's agent last.

        After the first turn it also holds what the agent reads of the earlier ones; see `feedback` above.
        """
        problem = task["problem"].strip()
        names = [*self.helpers, task["entry_point"]]
        prompts = [f"{problem}\n\nWrite a helper function {name} for this." for name in self.helpers]
        known = ", ".join(f"{helper}(...)" for helper in self.helpers)
        note = ""
        if len(self.helpers) == 1:
            note = f" A helper {known} exists: you may call it, do not redefine it."
        elif self.helpers:
            note = f" Helpers {known} exist: you may call them, do not redefine them."
        prompts.append(f"{problem}\n\nWrite {task['entry_point']}.{note}")
        prompts = [f"{prompt} Function code only." for prompt in prompts]
        for actions, step in history if self.feedback != "none" else []:
            for i, name in enumerate(names):
                paragraphs = [f"Your answer:\n{drop_thoughts(actions[i]).strip()}"]
                paragraphs += self._tell(i, names, actions, step.feedback)
                paragraphs.append(f"Write {name} again, better. Function code only.")
                prompts[i] = "\n\n".join([prompts[i], *paragraphs])
        return prompts

    def step(self, branches):
        """Runs the answers of all branches at once; see rewards/coding.py for reward and parts, and make_step."""
        answers = [make_answer(task, actions, self.helpers) for task, _, actions in branches]
        scores = coding_rewards(answers, *self.limits)
        steps = [make_step(score, history, self.num_turns) for (_, history, _), score in zip(branches, scores)]
        if self.chat:
            self._add_suggestions(branches, steps)
        return steps

    def _add_suggestions(self, branches, steps):
        """Puts a suggestion into the feedback of each Step after which the branch goes on."""
        open_steps = []
        prompts = []
        for (task, history, actions), step in zip(branches, steps):
            if not step.done and len(history) + 1 < self.num_turns:
                open_steps.append(step)
                prompts.append(SUGGEST.format(count=len(actions), material=put_in_fence(task["problem"], actions)))
        for step, text in zip(open_steps, self.chat.ask(prompts)):
            step.feedback["suggestion"] = text[:SHOWN]

    def _tell(self, agent, names, actions, findings):
        """What agent number `agent` reads after its own answer, by `feedback`: a list of paragraphs."""
        everyone = range(len(names))
        if self.feedback == "code":
            return [f"The answer for {names[k]}:\n{drop_thoughts(actions[k]).strip()}" for k in everyone if k != agent]
        if self.feedback == "passed":
            return [f"{findings['passed']} of {findings['total']} tests passed."]
        if self.feedback == "level":
            return [" ".join(_remark(agent, names, findings))]
        if self.feedback == "group":
            return [f"Who writes {names[k]} reads: {' '.join(_remark(k, names, findings))}" for k in everyone]
        if self.feedback == "model":
            return [f"Suggestion:\n{findings['suggestion']}"]
        # plain
        return []

    def demonstrations(self):
        """Prompts and good completions of every role for the sample training tasks: list of dict(prompt, completion).

        Of several helpers only the first is used. With two turns or more there are also prompts of a second turn,
        after a first one that failed. Raises ValueError for other datasets, which hold no helpers.
        """
        need_sample(self.dataset, "it holds no answers for each role")
        reads_code = self.feedback == "code"
        answers = samples.make_coding_answers(self.tasks("train"), self.helpers, reads_code, self.seed)
        return samples.demonstrate(self, *answers)


def make_step(score, history, num_turns):
    """The Step of an answer. An answer that passes every test ends the task and is also paid for the turns it saves.

    Without this pay, failing first and earning again would be worth more than passing at once, and agents would learn
    to fail. (It still is, where only the second answer uses its helper.) Saved turns are not
    discounted: with --gamma below 1, a pass in the first turn earns more than passing in every turn would.
    """
    done = bool(score.parts["all_passed"])
    reward = score.reward * (num_turns - len(history) if done else 1)
    repaired = {"repaired": float(done and len(history) > 0)} if num_turns > 1 else {}
    return Step(reward, score.parts | repaired, done, feedback=score.findings)


def make_answer(task, texts, helpers):
    """The Answer that a task's tests are run on."""
    keys = ["entry_point", "tests", "names", "setup", "prelude", "examples"]
    return Answer(texts=texts, helpers=helpers, **{key: task[key] for key in keys})


def _remark(agent, names, findings):
    """What agent number `agent` reads of the findings. Of the scored tests, that is only how many passed.

    An example of the prompt that a benchmark's tests repeat is still shown: agents can read it in the prompt.
    """
    name = names[agent]
    *helpers, main = names
    remarks = [f"{name} was found." if findings["defined"][agent] else f"No {name} that returns something was found."]
    if not findings["defined"][-1] and name != main:
        remarks.append(f"{main} was not found.")
    if not findings["syntax"]:
        return remarks + remark_on_syntax(agent, findings)
    remarks.append(f"{findings['passed']} of {findings['total']} tests passed.")
    if findings["examples"]:
        source, what = findings["examples"][0]
        remarks.append(f"{source} fails: {what}.")
    for k, helper in enumerate(helpers):
        if name in (helper, main):
            verb = "does not use"
            if findings["uses"][k]:
                verb = "uses"
            elif findings["ignored"][k]:
                verb = "calls but ignores"
            elif findings["called"][k]:
                verb = "calls but does not need"
            remarks.append(f"{main} {verb} {helper}.")
    if findings["wrapper"]:
        remarks.append(f"{main} only hands on what the helper returns.")
    return remarks


def _make_sample_tasks(split, count, seed, name):
    # right by construction
    return [show_assert(_make_task(row)) for row in samples.make_coding_tasks(split, count, seed, name)]


def _make_task(row):
    """Brings rows with HumanEval's or MBPP's columns into one form.

    Keys: task_id, problem (what all agents read), entry_point, names (defined by the answer and used by the tests),
    tests, examples (asserts that may be shown), prelude (source before the answer), setup (source before the tests),
    reference; of MBPP also asserts and trivial, see envs/vetting.py; of sample tasks also helper and main. The rows
    are trusted, so they are parsed here; what models write never is.
    """
    task = _make_mbpp_task(row) if "test_list" in row else _make_humaneval_task(row)
    if re.fullmatch(r"aux\d*", task["entry_point"]):
        raise ValueError(f"its function is called {task['entry_point']}, as a helper")
    return {**task, "task_id": row["task_id"], **{key: row[key] for key in ("helper", "main") if key in row}}


def _make_humaneval_task(row):
    entry_point = row["entry_point"]
    # The prompt's other definitions: imports, and in a few tasks functions that the tests call.
    body = ast.parse(row["prompt"]).body
    function = find_definition(entry_point, ast.FunctionDef, body)
    prelude = ast.unparse(ast.Module([n for n in body if n is not function], []))
    # The tests must use the candidate's own versions of the prompt's classes: no other objects cross to it.
    used = {n.id for n in ast.walk(ast.parse(row["test"])) if isinstance(n, ast.Name)}
    classes = [n.name for n in body if isinstance(n, ast.ClassDef) and n.name in used]
    tests = f"{row['test']}\n\ncheck({entry_point})\n"
    solution = row.get("canonical_solution")
    return {
        "problem": row["prompt"],
        "entry_point": entry_point,
        "names": [entry_point, *classes],
        "tests": tests,
        "examples": read_examples(ast.get_docstring(function) or ""),
        "prelude": prelude,
        "setup": prelude,
        "reference": None if solution is None else row["prompt"] + solution,
    }


def _make_mbpp_task(row):
    """MBPP's text does not name the function, so envs/vetting.py chooses an assert that is shown with it."""
    tests = list(dict.fromkeys(row["test_list"]))  # an equal one would be both shown and scored
    trees = [ast.parse(source).body for source in tests]
    if len(tests) < 2 or not all(isinstance(tree[0], ast.Assert) for tree in trees):
        raise ValueError("test_list does not hold two or more asserts, of which one can be shown")
    solution = ast.parse(row["code"]).body
    own = {n.name: n for n in solution if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = [n.id for tree in trees for n in ast.walk(ast.Module(tree, [])) if isinstance(n, ast.Name) and n.id in own]
    functions = [name for name in used if isinstance(own[name], ast.FunctionDef)]
    compared = [tree[0].test.comparators[-1] for tree in trees if isinstance(tree[0].test, ast.Compare)]
    imports = "\n".join(row["test_imports"])
    # One task's tests use a module that only the solution imports.
    needed = [n for n in solution if isinstance(n, IMPORTS)]
    return {
        "problem": row["prompt"].strip(),
        "entry_point": functions[0],
        "names": sorted({*used}),
        "tests": "\n".join(tests),
        "asserts": tests,
        "examples": [],
        "prelude": imports,
        "setup": imports + "\n" + ast.unparse(ast.Module(needed, [])),
        "reference": row["code"],
        "trivial": TRIVIAL + list(map(ast.unparse, compared)),  # a constant that passes one assert may pass others
    }


def find_definition(name, kind, body):
    """The definition of a name among statements."""
    for node in body:
        if isinstance(node, kind) and node.name == name:
            return node
    raise ValueError(f"it does not define {name}")
