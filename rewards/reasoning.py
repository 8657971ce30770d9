"""Reads the answer out of a text and compares it: no dependency, and nothing that a model wrote is evaluated."""

import re
from fractions import Fraction

# 1,022, 18, .5 or 3/8; as an answer also behind a sign or $, and before % or the name of a unit
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"([+-]?)\s?\$?\s?({DIGITS})(?:\s?/\s?(\d*[1-9]\d*))?\s?(?:%|[A-Za-z ]*)", re.ASCII)
LONGEST = 64  # characters of an answer


def answer(text):
    r"""The one answer that a text gives, or None: what its \boxed{...} hold, or else what stands behind its ####.

    Thoughts do not count. Two different answers are none, so listing candidates earns nothing; nor does a number that
    merely occurs in the text.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    found = [_braced(rest) for rest in text.split("\\boxed{")[1:]]
    found = found or [rest.partition("\n")[0] for rest in text.split("####")[1:]]
    found = [plain for plain in map(_plain, found) if plain]
    same_number = found and all(is_right(other, found[0]) for other in found)
    return found[-1] if same_number and len(found[-1]) <= LONGEST else None


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


def _braced(text):
    """The start of a text up to the brace that closes it, "" if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:place]
    return ""


def _plain(text):
    r"""LaTeX as people would type it: 1{,}022, \frac{3}{8}, 18 \text{ dollars}, \$5, 50\%."""
    text = text.strip().strip("$").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    return " ".join(text.split()).rstrip(".")
