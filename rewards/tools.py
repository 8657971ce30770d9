"""Tools without a process (a calculator, a search), how a call of them is read, and what the answer is worth.

Everything that is read here was written by a model: nothing raises, and nothing takes long. A call is

    <tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>
"""

import ast
import json
import math
import operator
import re
from collections import Counter, defaultdict
from fractions import Fraction

from rewards.boxed import is_right
from rewards.texts import drop_thoughts, split_words

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
LONGEST_CALL = 2000  # characters of a call's JSON
LONGEST_EXPRESSION = 200  # text that nests deeper can crash the parser, and with it the trainer
DEEPEST = 50
LARGEST = 10**30
PARTS = {  # as in rewards/coding.py
    "all_passed": (1, "the answer is right; each superfluous call costs 0.05, all together at most half"),
    "calls": (0, "number of calls"),
    "malformed": (0, "number of calls that cannot be read"),
    "tool_errors": (0, "number of well-formed calls whose output is an error"),
    "repeated_calls": (0, "number of calls that were made before"),
    "answer_in_output": (0, "the right answer is in the output of a call"),
    "needed_tools_used": (0, "share of the needed calls whose tool was called without an error"),
}


def split_message(completion):
    """(what comes before the first call, the rest from its opening tag on, or ""). Thoughts do not count."""
    before, tag, rest = drop_thoughts(completion).partition(OPEN)
    return before, tag + rest


def read_call(text):
    """(call, error, rest) of a text that begins with an opening tag; rest is what comes after the closing one.

    call: dict of name and arguments, or None if there is an error. A tag in a string of its JSON is only text.
    """
    text = text.removeprefix(OPEN).lstrip()
    try:
        call, end = json.JSONDecoder(strict=False).raw_decode(text[:LONGEST_CALL])  # strings may hold line breaks
    except (ValueError, RecursionError) as error:
        return None, f"no JSON in {LONGEST_CALL} characters after {OPEN}: {error}", text.partition(CLOSE)[2]
    between, tag, rest = text[end:].partition(CLOSE)
    if between.strip() or not tag:
        return None, f"{CLOSE} is missing after the JSON", rest
    match call:
        case {"name": str(), "arguments": dict(), **others} if not others:
            return call, "", rest
    return None, "a call has a name and arguments, and nothing else", rest


def calculator(expression):
    """The value of an arithmetic expression as a string, exact or with ten decimals; or "error: ..."."""
    if len(expression) > LONGEST_EXPRESSION:
        return f"error: the expression has more than {LONGEST_EXPRESSION} characters"
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body, DEEPEST)
    except (SyntaxError, MemoryError, RecursionError):
        return "error: this is not an expression"
    except (ArithmeticError, TypeError, ValueError) as error:
        return f"error: {error}"
    return str(value) if value.denominator == 1 else f"{float(value):.10f}".rstrip("0").rstrip(".")


def _evaluate(node, depth):
    """The Fraction that a syntax tree stands for. Every step is bounded, so a tower of powers ends early."""
    if depth == 0:
        raise ValueError("the expression nests too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))  # 0.1 is a tenth
    elif isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        sign = SIGNS[type(node.op)]
        value = sign(_evaluate(node.operand, depth - 1))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _evaluate(node.left, depth - 1)
        right = _evaluate(node.right, depth - 1)
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS and not node.keywords:
        arguments = [_evaluate(argument, depth - 1) for argument in node.args]
        value = FUNCTIONS[node.func.id](*arguments)
    else:
        raise ValueError(f"only numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)} are known")
    value = Fraction(value)
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("a number is too large")
    return value


def _power(base, exponent):
    if exponent.denominator > 1 or abs(exponent) > 64:
        raise ValueError("exponents are whole numbers up to 64")
    return base ** int(exponent)


SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS = {"abs": abs, "min": min, "max": max}


class Search:
    """Okapi BM25 over a list of articles: search(query) is the start of the three that fit best, one a line."""

    def __init__(self, articles):
        k1, b = 1.2, 0.75
        self.articles = articles
        self.weights = defaultdict(dict)  # word -> {number of an article: its weight there}
        counts = [Counter(split_words(article)) for article in articles]
        mean = sum(map(Counter.total, counts)) / len(counts)
        containing = Counter(word for count in counts for word in count)
        for number, count in enumerate(counts):
            norm = k1 * (1 - b + b * count.total() / mean)
            for word, n in count.items():
                idf = math.log(1 + (len(articles) - containing[word] + 0.5) / (containing[word] + 0.5))
                self.weights[word][number] = idf * n * (k1 + 1) / (n + norm)

    def __call__(self, query):
        scores = Counter()
        for word in set(split_words(query)):
            scores.update(self.weights.get(word, {}))
        best = sorted(scores, key=lambda number: (-scores[number], number))[:3]
        return "\n".join(self.articles[number][:200] for number in best) or "nothing found"


def tools_reward(attempt, gold, calls, needed):
    """(reward, parts) of an answer after calls.

    attempt: the answer that a box holds, or None
    calls: list of dict(call, output) of this branch; call is None where it was malformed
    needed: names of the tools, one for each call that the task takes; empty if that is not known

    The reward, 0 to 1, is 1 for a right answer, times max(0.5, 1 - 0.05 a call) for calls (also malformed ones) beyond
    those needed. Nothing is paid for a call, for JSON or for the choice of a tool.
    """
    right = is_right(attempt, gold)
    surplus = max(0, len(calls) - len(needed)) if needed else 0
    formed = [call for call in calls if call["call"]]
    different = {json.dumps(call["call"], sort_keys=True) for call in formed}
    successes = Counter(call["call"]["name"] for call in formed if not call["output"].startswith("error:"))
    whole = re.compile(rf"(?<![\w-]){re.escape(gold)}(?!\w)", re.IGNORECASE)
    parts = {
        "calls": len(calls),
        "malformed": len(calls) - len(formed),
        "tool_errors": len(formed) - successes.total(),
        "repeated_calls": len(formed) - len(different),
        "answer_in_output": any(whole.search(call["output"]) for call in formed),
        "needed_tools_used": (successes & Counter(needed)).total() / max(1, len(needed)),
        "all_passed": right,
    }
    reward = right * max(0.5, 1 - 0.05 * surplus)
    return float(reward), {name: float(value) for name, value in parts.items()}
