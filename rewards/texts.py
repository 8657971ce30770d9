"""What several rewards and environments read in a completion."""

import re
import unicodedata

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
# What a keyboard lacks, as one types it; the last of these have no width, and go.
TYPED = str.maketrans("“”„‘’‚−⁄", "\"\"\"'''-/", "\xad\u200b\u200c\u200d\u2060\ufeff")
SCRIPTS = "²³¹⁰-ₜ"  # superscripts and subscripts stay: 5² is not 52
FRACTIONS = "¼-¾⅐-⅟"  # 2½ is 2 1/2, not 21/2


def drop_thoughts(completion):
    """A completion without its thoughts; the last one may be unclosed."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def as_typed(text):
    """A string with plain blanks, quotes, digits and signs: in Unicode's form NFKC, except for what would change."""
    text = re.sub(f"(?=[{FRACTIONS}])", " ", text)
    text = re.sub(f"[^{SCRIPTS}]+", lambda part: unicodedata.normalize("NFKC", part[0]), text)
    return text.translate(TYPED)


def split_words(text):
    """The list of lower-case words, without punctuation."""
    lower = text.lower().replace("’", "'")
    return WORD.findall(lower)
