r"""Reads a short answer in a completion, compares it, and pays a team for it: no dependency, and nothing that a model
wrote is evaluated.

Only right answers are paid, and a verdict that is true. Form, agreement, length and copying are worth nothing.
"""

import re
from fractions import Fraction

from rewards.texts import as_typed, drop_thoughts, split_words

BOX = re.compile(r"\\boxed\s*\{")
PLACEHOLDER = "answer"  # what the prompts have in the box
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:!]|,\\!|[\xa0\u2009\u202f])(?=\d{3}(?!\d))")
ARGUMENT = r" ?(?:\{ ?([^{} ]+) ?\}|(\d))"  # of \frac: {10} or a single digit
# LaTeX, and what one would type for it; what is not here keeps its backslash, and so is no number.
LATEX = {
    r"\\([$%])": r"\1",
    r"\\(?:left|right)(?![a-z])": "",
    r"\\[,;:! ]|\\q?quad(?![a-z])|~": " ",
    r"\^ ?(?:\{ ?)?\\circ(?: ?\})?|\\degree|°": " degrees ",
    r"\\(?:text|math|mbox|boldsymbol)[a-z]*\{([^{}]*)\}": r" \1 ",
    rf"\\[cdt]?frac{ARGUMENT}{ARGUMENT}(?!\d)": r" \1\2/\3\4",  # the blank makes 2\frac{1}{2} a mixed number
    r"(?<=[A-Za-z^_])\{(\w)\}": r"\1",
    r"^\{([^{}]*)\}$": r"\1",
    r"^[ *]*(?i:(?:final )?answer) ?[:=][ *]*": "",
}

# A number is 1,022, 18, .5, 3/8 or 2 1/2, also after an equation, a sign or a currency, and before % or a unit
EQUATION = r"(?: ?[A-Za-z] ?|(?:[-+*/×·÷^().%$€£ \d]|,(?=\d{3})|\\(?:times|cdot|div)(?![a-z]))*)="  # up to its sign
DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
POWER = r"(?: ?\^ ?[23]|[²³])?"
UNIT = rf"(?:[A-Za-z]{{2,}}|[CFLghlms]){POWER}"  # a word of it: km or cm^2, but no variable
SHORT_UNIT = rf"(?:[cdkm]?m|[km]?g|[cm]?l|[Lhs]){POWER}"  # may follow without a blank
NUMBER = re.compile(
    rf"(?:{EQUATION})* ?([+-]?) ?[$€£]? ?(?:(\d+) (?=[1-9]\d?/))?"
    rf"({DIGITS})(?: ?/ ?(\d*[1-9]\d*))? ?[%$€£]?((?:{SHORT_UNIT})?(?:(?: | ?/ ?){UNIT})*)",
    re.ASCII,
)
# A number and a word, or one with an exponent: 18 (each), 1e-05
REMARK = re.compile(r"\d.*(?<![\\A-Za-z])[A-Za-z]{3}|\d[eE][+-]?\d", re.DOTALL)
# With these words it is another number, or several: 3 million, 18 minus two, 3 quarters
NO_UNITS = set(
    split_words("""
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens score
    gross grand lakh lakhs crore crores mil mln bn half halves third thirds quarter quarters fourth fourths fifth
    fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth
    thousandths plus minus times over divided multiplied by mod modulo squared cubed factorial root pi point
    remainder and or to not less more fewer below under above zero one two three four five six seven eight nine ten
    eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty
    seventy eighty ninety am pm""")
)
# A verdict is the first word of its line, unless the other one comes after it.
VERDICT_LINE = re.compile(
    r"^[ \t*#>_`-]*verdict[ \t*_`]*:[ \t*_`]*((?:right\b(?!.*\bwrong\b)|wrong\b(?!.*\bright\b))?)", re.MULTILINE
)
LONGEST = 64  # characters of an answer
VERDICT, SOLVER = 0.1, 0.1  # in addition to 1.0 for the team's answer
PARTS = {  # as in rewards/coding.py; those after all_passed: with roles check only
    "correct": (1, "the last answer is right"),
    "parsed": (0, "the last completion has an answer"),
    "all_passed": (0, "the last answer is right"),
    "verdict": (VERDICT, "the verdict on the solutions is true"),
    "solver_correct": (SOLVER, "share of the solutions that are right"),
    "agree": (0, "the verdict is right, be it true or not"),
    "answer_copied": (0, "share of the solutions that have the last agent's answer"),
    "fixed": (0, "share of the solutions that are wrong, where the last agent is right"),
    "broken": (0, "share of the solutions that are right, where the last agent is wrong"),
}


def read_answer(completion):
    r"""The one answer that a completion gives, or None: what its \boxed{...} hold, or else what comes after its ####.

    Thoughts do not count. Two different answers are none, so listing candidates earns nothing; nor does a number that
    merely occurs in the text.
    """
    completion = drop_thoughts(completion)
    boxes = [_braced(rest) for rest in BOX.split(completion)[1:]]
    lines = [rest.partition("\n")[0] for rest in completion.split("####")[1:]]
    attempts = [_plain(attempt) for attempt in boxes or lines]
    attempts = [attempt for attempt in attempts if attempt and attempt.casefold() != PLACEHOLDER]
    values = {_value(attempt) for attempt in attempts}
    if len(values) != 1 or len(attempts[-1]) > LONGEST:
        return None
    return attempts[-1]


def is_right(attempt, gold):
    """Whether an answer, or None, equals the gold one: as numbers if gold is one, else as strings in any case.

    Nothing equals a gold answer that is neither: an empty or a long one, or a number in a form that is not read, such
    as 18 (each) or 1e-05.
    """
    gold = _plain(gold)
    usable = _read_number(gold) is not None or (0 < len(gold) <= LONGEST and not REMARK.search(gold))
    return usable and is_same(attempt, gold)


def is_same(one, other):
    """Whether two answers are the same number, or the same string in any case; None is no answer."""
    return None not in (one, other) and _value(_plain(one)) == _value(_plain(other))


def _read_number(text):
    """The Fraction that a string is, with or without a unit, or None: also for what might be another number.

    Exponents are refused: 1e999999999 would hang.
    """
    text = " ".join(re.sub(r"^\((.*)\)$|[{}]", r" \1 ", text).split())
    match = NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if not match:
        return None
    sign, whole, top, bottom, unit = match.groups()
    value = Fraction(top.replace(",", "")) / int(bottom or 1)
    improper = whole and value >= 1  # 17 18/2 is no mixed number
    if improper or NO_UNITS.intersection(split_words(unit)):
        return None
    value += int(whole or 0)
    return -value if sign == "-" else value


def read_verdict(completion):
    """True for a line VERDICT: right, False for VERDICT: wrong, None for neither, both or any other word."""
    verdicts = set(VERDICT_LINE.findall(drop_thoughts(completion).lower()))
    only = verdicts.pop() if len(verdicts) == 1 else ""
    return {"right": True, "wrong": False}.get(only)


def team_reward(completion, right, solutions=()):
    """Score a team by the answer in its last completion.

    completion: str, the last one
    right: function, (answer or None) -> bool
    solutions: the completions that were written before it, if any; VERDICT: right claims that all of them are right

    Returns (reward, parts), the reward being correct + verdict + solver_correct.
    """
    final = read_answer(completion)
    correct = float(right(final))
    parts = {"correct": correct, "parsed": float(final is not None), "all_passed": correct}
    if not solutions:
        return correct, parts
    attempts = [read_answer(solution) for solution in solutions]
    marks = [right(attempt) for attempt in attempts]
    copies = [is_same(attempt, final) for attempt in attempts]
    judged = read_verdict(completion)
    share = sum(marks) / len(marks)
    parts["verdict"] = VERDICT * (judged == all(marks))  # None equals neither
    parts["solver_correct"] = SOLVER * share
    parts["agree"] = float(judged is True)
    parts["answer_copied"] = sum(copies) / len(copies)
    parts["fixed"] = correct * (1 - share)
    parts["broken"] = (1 - correct) * share
    return correct + parts["verdict"] + parts["solver_correct"], parts


def _value(text):
    """What two answers have in common if they are the same: a number, or a string without case and needless blanks."""
    value = _read_number(text)
    return re.sub(r"(?<!\d) | (?!\d)", "", text).casefold() if value is None else value


def _braced(text):
    """The start of a string up to the brace that closes it, "" if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:place]
    return ""


def _plain(text):
    r"""A string as one would type it: 18 dollars for 18~\text{dollars}, 3/8 for \frac{3}{8}, 18 for **18**."""
    text = " ".join(as_typed(THOUSANDS.sub(",", text)).split())
    for pattern, typed in LATEX.items():
        text = re.sub(pattern, typed, text)
    return " ".join(text.split()).strip(" *$`").rstrip(".").strip(" *$`")
