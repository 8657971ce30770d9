"""What several rewards and environments read in a completion."""

import re

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def drop_thoughts(completion):
    """A completion without its thoughts; the last one may be unclosed."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def words(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    lower = text.lower().replace("’", "'")
    return WORD.findall(lower)
