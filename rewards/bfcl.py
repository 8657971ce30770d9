"""What parallel function calls by several agents are worth, against gold calls as BFCL v4 lists them.

The reward that OpenMLRL published for this task pays half of its marks for right names with wrong arguments, and pays
an even division of wrong calls. Ours pays nothing but arguments, and a division of calls that are right.
"""

import math
import operator
import re
from collections import Counter

from rewards.tools import OPEN, read_call, split_message

MOST_CALLS = 16  # of one message


def read_calls(message):
    """(calls, number of malformed ones) of a message; what stands between the tags does not count."""
    calls, malformed, (_, rest) = [], 0, split_message(message)
    while OPEN in rest and len(calls) + malformed < MOST_CALLS:
        call, error, rest = read_call(rest[rest.index(OPEN) :])
        calls += [] if error else [call]
        malformed += bool(error)
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
    matched to at most one gold call, so that the sum of shares is the greatest possible. An optional argument that is
    left out, where gold lists "", is not right, as in the published reward (BFCL's own checker accepts it).
    Diagnostics: names (F1 of the names), written, malformed, all_passed (exact).
    """
    calls, malformed = [], 0  # calls: pairs (agent, call)
    for agent, message in enumerate(messages):
        own, bad = read_calls(message)
        calls += [(agent, call) for call in own]
        malformed += bad
    total, pairs = match([[share(call, wanted) for wanted in gold] for _, call in calls])
    right = [calls[place][0] for place, value in pairs if value == 1]  # the agents of the fully right calls

    count = max(len(gold), len(calls))
    even = math.ceil(len(gold) / len(messages))
    most = max(even, *map(right.count, range(len(messages))))
    evenness = (len(gold) - most) / (len(gold) - even) if even < len(gold) else 1.0
    exact = len(right) == count
    parts = {
        "arguments": 0.5 * total / count,
        "exact": 0.3 * exact,
        "division": 0.2 * len(right) / count * evenness,
    }
    reward = sum(parts.values())

    names = Counter(call["name"] for _, call in calls)
    wanted = Counter(name for call in gold for name in call)
    parts["names"] = 2 * (names & wanted).total() / (len(calls) + len(gold))
    parts |= {"written": len(calls), "malformed": malformed, "all_passed": exact}
    return reward, {name: float(value) for name, value in parts.items()}


def match(shares):
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


def share(call, wanted):
    """The share, 0 to 1, of right arguments among those wanted and those written."""
    ((name, accepted),) = wanted.items()
    given = call["arguments"]
    if call["name"] != name:
        return 0.0
    asked = {*accepted, *given}
    right = [key for key in asked if key in given and is_accepted(given[key], accepted.get(key, []))]
    return len(right) / len(asked) if asked else 1.0


def is_accepted(given, values):
    return any(is_same(given, value) for value in values if value != "")  # "" says that it may be left out


def is_same(given, gold):
    """Whether a value is the gold one: numbers by value, texts without case, blanks and ,./-_*^ as in BFCL."""
    if isinstance(gold, str) and isinstance(given, str):
        return plain(given) == plain(gold)
    if isinstance(gold, list) and isinstance(given, list):
        return len(gold) == len(given) and all(map(is_same, given, gold))
    if isinstance(gold, dict) and isinstance(given, dict):
        return gold.keys() == given.keys() and all(is_accepted(given[key], values) for key, values in gold.items())
    if bool in (type(given), type(gold)):  # which Python takes for 0 and 1
        return given is gold
    return given == gold


def plain(text):
    return re.sub(r"[\s,./_*^-]", "", text).casefold()
