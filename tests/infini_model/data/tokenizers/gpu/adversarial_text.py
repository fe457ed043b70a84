"""Text that exercises every distinction that the patterns make."""

from hypothesis import strategies as st

# Contractions in any case, ſ, digits of several scripts, blanks, line ends.
PIECES = ["'", "'s", "'S", "ſ", "l", "L", "r", "v", "e", "E", "t", "d", "a", "É", "ß", "ǅ", "ª"]
PIECES += ["1", "22", "٣", "Ⅷ", "½", " ", "  ", "\n", "\r", "\t", "\v", "\u00a0", "\u0085"]
PIECES += ["\u2028", "\u3000", "\u200b", "\ufeff", ".", "!?", "…", "_", "日", "🦊", "\u0301"]
PIECES += ["\0", "\U0010ffff"]
adversarial = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=12)
