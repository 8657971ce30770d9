"""A request needs several function calls at once, and several agents share them out, in one turn.

Data and roles are those of BFCL v4 parallel (Patil et al., 2025) in the form of OpenMLRL's native set, with prompts of
our own; the reward and what differs from the published one are in rewards/bfcl.py.
"""

import json
import random
from functools import partial

from envs import Step, need_sample, one_of
from envs.data import clean, load_tasks, parse_rows
from envs.samples import find_split, pair_up, read_list
from rewards.bfcl import PARTS, parallel_reward

MOST_GOLD = 10  # gold calls of a task: calls are matched to subsets of them
FORM = '<tool_call>{"name": "...", "arguments": {"...": ...}}</tool_call>'
# name -> (request, what one call asks for, its two arguments, the values of the first one; the second is 10 to 99)
FUNCTIONS = {
    "set_lamp": ("Set {}.", "lamp {} to {}", ("lamp", "level"), [*range(1, 10)]),
    "order": ("Order {}.", "{1} {0}", ("item", "count"), read_list("pens, cups, maps, rings, boats, coats")),
    "play": ("Play {}.", "{} for {} minutes", ("genre", "minutes"), read_list("jazz, blues, rock, folk, soul, punk")),
}


class Parallel:
    """Agents write function calls, all in one turn, and only the calls of all together count.

    num_agents: 1 or more; one writes all calls
    num_turns: 1
    dataset: "sample", "hub" (OpenMLRL/BFCL-V4-Parallel-Native, train and eval), a hub id or a file, with the columns
        `user_prompt`, `function` and `ground_truth`; the last two may be objects, or JSON in strings
    roles: "self_select" (each agent knows its number, and that others write the rest) or "split_by_order" (it is also
        told to write its part of the calls, in the order of the request)

    The reward, 0 to 1, is for right arguments, for the exact set of calls, and for an even division of right calls.
    """

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed, roles="self_select"):
        one_of("roles", roles, "self_select", "split_by_order")
        self.num_agents, self.dataset, self.seed, self.roles = num_agents, dataset, seed, roles
        self.splits = load_tasks(
            dataset,
            seed,
            _make_sample_tasks,
            columns=["user_prompt"],
            hub="OpenMLRL/BFCL-V4-Parallel-Native",
            hub_splits={"train": "train", "test": "eval"},
            judge=partial(parse_rows, parse=_make_task),
        )

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        n = self.num_agents
        prompts = []
        for i in range(1, n + 1):
            which = "all calls that it needs"
            others = ""
            if n > 1:
                which = "some of the calls that it needs"
                others = f" You are agent {i} of {n}; the others write the rest."
                if self.roles == "split_by_order":
                    which = f"part {i} of {n} of the calls that it needs, in its order, divided evenly"
            request = f"{task['user_prompt']}\n\nFunctions: {task['function']}\n\n"
            prompts.append(f"{request}Write {which}, each as {FORM}.{others}")
        return prompts

    def step(self, branches):
        scores = [parallel_reward(actions, task["gold"]) for task, _, actions in branches]
        return [Step(*score, done=True) for score in scores]

    def demonstrations(self):
        """What agents could write for sample training tasks: list of dict(prompt, completion).

        One agent leaves out a call or gets a number wrong in half of its answers. Of several agents each writes any
        one part, or (in one of ten answers) all, or its part with a wrong number, whatever its role: who writes what
        is to be learned. Raises ValueError for other datasets.
        """
        need_sample(self.dataset, "its calls are not shared out to imitate")
        rng = random.Random(f"calls {self.seed}")
        pairs = []
        for task in self.tasks("train"):
            prompts = self.observe(task, [])
            calls = [self._some_calls(task, rng) for _ in prompts]
            pairs += pair_up(prompts, ["\n".join(map(write_call, own)) or "None." for own in calls])
        return pairs

    def _some_calls(self, task, rng):
        """One agent's part of the gold calls, or what it takes for that."""
        calls = [make_gold_call(call) for call in task["gold"]]
        part = rng.randrange(self.num_agents)
        start = len(calls) * part // self.num_agents
        end = len(calls) * (part + 1) // self.num_agents
        fault = rng.random()
        if self.num_agents > 1 and fault > 0.1:
            calls = calls[start:end]
        elif self.num_agents == 1 and fault < 0.25:
            calls.pop(rng.randrange(len(calls)))
        if calls and fault > (0.75 if self.num_agents == 1 else 0.85):
            arguments = rng.choice(calls)["arguments"]
            last = list(arguments)[-1]
            arguments[last] = rng.randint(10, 99)
        return calls


def make_gold_call(wanted):
    """A call that the gold one accepts, with all arguments for which gold lists a value."""
    ((name, accepted),) = wanted.items()
    return {"name": name, "arguments": _take_first_values(accepted)}


def _take_first_values(accepted):
    arguments = {}
    for key, values in accepted.items():
        values = [value for value in values if value != ""]  # "" says that it may be left out
        if values:
            arguments[key] = _take_first_values(values[0]) if isinstance(values[0], dict) else values[0]
    return arguments


def write_call(call):
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _make_sample_tasks(split, count, seed):
    """Requests of two or three calls of one function."""
    rng = random.Random(f"bfcl {split} {seed}")
    tasks = []
    while len(tasks) < count:
        name = rng.choice(list(FUNCTIONS))
        request, wording, keys, firsts = FUNCTIONS[name]
        places = rng.sample(range(len(firsts)), rng.choice([2, 2, 3]))
        values = [(firsts[place], rng.randint(10, 99)) for place in places]  # of the two arguments of each call
        if find_split(*places, *(number for _, number in values)) != split:
            continue
        *some, last = (wording.format(*pair) for pair in values)
        types = "integer" if name == "set_lamp" else "string", "integer"
        properties = {key: {"type": kind} for key, kind in zip(keys, types)}
        function = {"name": name, "parameters": {"type": "dict", "properties": properties, "required": keys}}
        task = {
            "user_prompt": request.format(f"{', '.join(some)} and {last}"),
            "function": json.dumps([function]),
            "gold": [{name: {key: [value] for key, value in zip(keys, pair)}} for pair in values],
        }
        tasks.append(task)
    return tasks


def _make_task(row):
    """The task of a row. Raises what a malformed one raises."""
    gold = row["ground_truth"]
    if isinstance(gold, str):
        gold = clean(json.loads(gold))
    if not 0 < len(gold) <= MOST_GOLD:
        raise ValueError(f"ground_truth has to hold 1 to {MOST_GOLD} calls")
    for call in gold:
        make_gold_call(call)
        (accepted,) = call.values()
        if not all(accepted.values()):
            raise ValueError("ground_truth lists no value for an argument")
    function = row.get("function")
    if not isinstance(function, str):
        function = json.dumps(function, sort_keys=True)  # in a .parquet file all objects have one order
    return {"user_prompt": row["user_prompt"], "function": function, "gold": gold}
