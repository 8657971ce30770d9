"""Reads a short answer out of a text, compares it, and pays a team for it: no dependency, and nothing that a model
wrote is evaluated.

Only right answers are paid, and a verdict that is true. Form, agreement, length and copying are worth nothing.
"""

import re
from fractions import Fraction

# 1,022, 18, .5 or 3/8; as an answer also behind a sign or $, and before % or the name of a unit
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"([+-]?)\s?\$?\s?({DIGITS})(?:\s?/\s?(\d*[1-9]\d*))?\s?(?:%|[A-Za-z ]*)", re.ASCII)
LONGEST = 64  # characters of an answer
VERDICT, SOLVER = 0.1, 0.1  # beside 1.0 for the team's answer


def spoken(text):
    """A text without its thoughts; the last one may be unclosed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def answer(text):
    r"""The one answer that a text gives, or None: what its \boxed{...} hold, or else what stands behind its ####.

    Thoughts do not count. Two different answers are none, so listing candidates earns nothing; nor does a number that
    merely occurs in the text.
    """
    text = spoken(text)
    found = [_braced(rest) for rest in text.split("\\boxed{")[1:]]
    found = found or [rest.partition("\n")[0] for rest in text.split("####")[1:]]
    found = [plain for plain in map(_plain, found) if plain]
    one = len(set(map(_value, found))) == 1
    return found[-1] if one and len(found[-1]) <= LONGEST else None


def is_right(given, gold):
    """Whether an answer, or None, equals the gold one: as numbers if gold is one, else as texts in any case."""
    if given is None:
        return False
    given, gold = _plain(given), _plain(gold)
    value = None if gold[-1:].isalpha() else number(gold)
    return given.casefold() == gold.casefold() if value is None else number(given) == value


def number(text):
    """The Fraction that a text is, with or without a unit, or None. Exponents are refused: 1e999999999 would hang."""
    match = NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if not match:
        return None
    sign, digits, below = match.groups()
    return Fraction(f"{sign}{digits}".replace(",", "")) / int(below or 1)


def verdict(text):
    """True if a text has a line VERDICT: right, False for VERDICT: wrong, None for neither, both or any other word."""
    found = set()
    for line in spoken(text).splitlines():
        head, _, rest = line.partition(":")
        if head.strip(" \t*#>").casefold() == "verdict":
            found.add(rest.strip(" \t*.").casefold())
    return {"right": True, "wrong": False}.get(found.pop()) if len(found) == 1 else None


def team_reward(text, right, solutions=()):
    """Score a team by the answer in its last text; `solutions` are the texts that were written before it, if any.

    text: str, the last text; with solutions it may judge them by a verdict: right means that all of them are
    right: (answer or None) -> bool

    Returns (reward, parts). The reward is the sum of correct (0 or 1), verdict (0.1 if there is one and it is true)
    and solver_correct (0.1 x the share of solutions that are right). Diagnostics: parsed (the last text has an
    answer), all_passed, and with solutions agree (the verdict is right, true or not), answer_copied (the share of
    solutions with the last text's answer), fixed (the share that is wrong, where the team is right) and broken (the
    share that is right, where the team is wrong).
    """
    final, judged = answer(text), verdict(text)
    correct = float(right(final))
    parts = {"correct": correct, "parsed": float(final is not None), "all_passed": correct}
    if not solutions:
        return correct, parts
    given = list(map(answer, solutions))
    marks = list(map(right, given))
    share = sum(marks) / len(marks)
    copied = [final is not None and each is not None and _value(each) == _value(final) for each in given]
    parts["verdict"] = VERDICT * (judged is not None and judged == all(marks))
    parts["solver_correct"] = SOLVER * share
    parts |= {"agree": float(judged is True), "answer_copied": sum(copied) / len(copied)}
    parts |= {"fixed": correct * (1 - share), "broken": (1 - correct) * share}
    return correct + parts["verdict"] + parts["solver_correct"], parts


def _value(text):
    """What two answers have in common if they are the same: a number, or a text in any case."""
    value = number(text)
    return text.casefold() if value is None else value


def _braced(text):
    """The start of a text up to the brace that closes it, "" if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:place]
    return ""


def _plain(text):
    r"""LaTeX as one would type it: 1{,}022, 1\,022, \frac{3}{8}, 18 \text{ dollars}, \$5, 50\%, a hyphen for minus."""
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("−", "-").strip().strip("$")
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:text|math)[a-z]*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,!;]", "", text)  # thin spaces
    return " ".join(text.split()).rstrip(".")
