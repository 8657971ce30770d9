"""What parallel function calls by several agents are worth, against gold calls as BFCL v4 lists them.

The reward that OpenMLRL published for this task pays half of its marks for right names with wrong arguments, pays an
even division of wrong calls, and wants optional arguments too. Ours pays for arguments, and for a division of right
calls; what a call may leave out is what BFCL's own checker lets it leave out.
"""

import math
import operator
import re
from collections import Counter

from rewards.tools import OPEN, read_call, split_message

MOST_CALLS = 16  # of one message
PARTS = {  # as in rewards/coding.py
    "arguments": (0.5, "share of the arguments that are right"),
    "exact": (0.3, "exactly the gold calls were written"),
    "division": (0.2, "the right calls are divided evenly among the agents"),
    "names": (0, "functions in common with the gold calls (F1)"),
    "written": (0, "number of calls"),
    "malformed": (0, "number of calls that cannot be read"),
    "all_passed": (0, "exactly the gold calls were written"),
}


def _read_calls(message):
    """(calls, number of malformed ones) of a message; what is between the tags does not count."""
    calls = []
    malformed = 0
    _, rest = split_message(message)
    while OPEN in rest and len(calls) + malformed < MOST_CALLS:
        call, error, rest = read_call(rest[rest.index(OPEN) :])
        if error:
            malformed += 1
        else:
            calls.append(call)
    return calls, malformed


def parallel_reward(messages, gold):
    """(reward, parts) of the messages of N agents, which together should make the calls in `gold`.

    gold: list of {name: {argument: list of accepted values}}

    The reward, 0 to 1, is the sum of
    arguments: 0.5 x the sum, over gold calls, of the share of arguments that are right in the call matched to it,
        divided by the number of gold or of written calls, whichever is more; a wrong name is a share of 0
    exact: 0.3 if all gold calls were written, each once, and no other
    division: 0.2 x the number of gold calls written fully right, divided as above, x (K - most) / (K - even), where
        `most` is the largest number of them by one agent, `even` the least possible one, K / N rounded up; K gold
        calls. One agent is even by itself
    So writing a call twice, or by two agents, lowers all parts, and one agent that does all earns 0.8. Every call is
    matched to at most one gold call, in the way that makes the sum of shares the greatest.
    """
    calls = []  # pairs (agent, call)
    malformed = 0
    for agent, message in enumerate(messages):
        own_calls, own_malformed = _read_calls(message)
        calls += [(agent, call) for call in own_calls]
        malformed += own_malformed
    total, pairs = _match_calls([[_find_share(call, wanted) for wanted in gold] for _, call in calls])
    writers = [calls[place][0] for place, value in pairs if value == 1]  # the agents of the fully right calls

    count = max(len(gold), len(calls))
    even = math.ceil(len(gold) / len(messages))
    most = max(even, *map(writers.count, range(len(messages))))
    evenness = (len(gold) - most) / (len(gold) - even) if even < len(gold) else 1.0
    exact = len(writers) == count
    parts = {
        "arguments": 0.5 * total / count,
        "exact": 0.3 * exact,
        "division": 0.2 * len(writers) / count * evenness,
    }
    reward = sum(parts.values())

    names = Counter(call["name"] for _, call in calls)
    wanted = Counter(name for call in gold for name in call)
    parts["names"] = 2 * (names & wanted).total() / (len(calls) + len(gold))
    parts |= {"written": len(calls), "malformed": malformed, "all_passed": exact}
    return reward, {name: float(value) for name, value in parts.items()}


def _match_calls(shares):
    """(greatest sum of shares, the pairs (call, share) that make it), from a row of shares for each call."""
    best = {frozenset(): (0.0, ())}  # gold calls that are taken -> the best of the calls so far with just these
    for place, row in enumerate(shares):
        for taken, (total, pairs) in list(best.items()):
            for number, value in enumerate(row):
                if number in taken or not value:
                    continue
                both = taken | {number}
                if total + value > best.get(both, (0.0, ()))[0]:
                    best[both] = total + value, (*pairs, (place, value))
    return max(best.values(), key=operator.itemgetter(0))


def _find_share(call, wanted):
    """The share, 0 to 1, of right arguments among those required and those written."""
    ((name, accepted),) = wanted.items()
    if call["name"] != name:
        return 0.0
    arguments = call["arguments"]
    counted = {*arguments, *_list_required(accepted)}
    right = [key for key in counted if _is_right(key, arguments, accepted)]
    return len(right) / len(counted) if counted else 1.0


def _list_required(accepted):
    """The keys that may not be left out: those for which gold does not list ""."""
    return [key for key, values in accepted.items() if "" not in values]


def _is_right(key, arguments, accepted):
    return key in arguments and key in accepted and _is_accepted(arguments[key], accepted[key])


def _is_accepted(value, accepted_values):
    return any(_is_same(value, gold) for gold in accepted_values if gold != "")  # "" says that it may be left out


def _is_same(value, gold):
    """Whether a value is the gold one: numbers by value, strings without case, blanks and ,./-_*^ as in BFCL."""
    if isinstance(gold, str) and isinstance(value, str):
        return _simplify(value) == _simplify(gold)
    if isinstance(gold, list) and isinstance(value, list):
        return len(gold) == len(value) and all(map(_is_same, value, gold))
    if isinstance(gold, dict) and isinstance(value, dict):
        return all(_is_right(key, value, gold) for key in {*value, *_list_required(gold)})
    if bool in (type(value), type(gold)):  # which Python takes for 0 and 1
        return value is gold
    return value == gold


def _simplify(string):
    return re.sub(r"[\s,./_*^-]", "", string).casefold()
