"""Text that exercises every distinction that the patterns make."""

import random

# Contractions in any case, ſ, digits of several scripts, blanks, line ends.
PIECES = ["'", "'s", "'S", "ſ", "l", "L", "r", "v", "e", "E", "t", "d", "a", "É", "ß", "ǅ", "ª"]
PIECES += ["1", "22", "٣", "Ⅷ", "½", " ", "  ", "\n", "\r", "\t", "\v", "\u00a0", "\u0085"]
PIECES += ["\u2028", "\u3000", "\u200b", "\ufeff", ".", "!?", "…", "_", "日", "🦊", "\u0301"]
PIECES += ["\0", "\U0010ffff"]
# Of what long runs are made whose pieces depend on where they start or how they end.
RUNNING = ["1", "٣", " ", "\u3000", "\n", "\r\n", "\n ", "'s", "a", "!"]


def adversarial_texts(count: int, seed: int, longest: int = 90) -> list[str]:
    """Documents of a few of these pieces, of any characters, or of runs of up to `longest`.

    The interpreter takes milliseconds for each character of a run.
    """
    chance = random.Random(seed)

    def pieces(most: int) -> str:
        return "".join(chance.choices(PIECES, k=chance.randrange(most)))

    def characters() -> str:
        points = [chance.choice((0x80, 0x800, 0x3000, 0x110000)) for _ in range(12)]
        drawn = (chance.randrange(point) for point in points[: chance.randrange(12)])
        return "".join(chr(point) for point in drawn if not 0xD800 <= point < 0xE000)

    def runs() -> str:
        return "".join(
            pieces(3) + chance.choice(RUNNING) * chance.randrange(1, longest) for _ in range(2)
        )

    makers = [lambda: pieces(13), lambda: pieces(13), lambda: pieces(40), characters, runs]
    return [makers[number % len(makers)]() for number in range(count)]
