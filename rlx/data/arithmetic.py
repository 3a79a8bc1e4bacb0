"""Generate problems in the form of GSM8K: a short story or a bare sum, its working line by line, the answer after `####`.

A hash of a problem's question decides whether it belongs to validation or training. The two therefore never overlap, whatever
their sizes and seeds are.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.config.schema import ArithmeticConfig
from rlx.data.files import DataError
from rlx.data.seeding import seed_for

ARITHMETIC_SOURCE = "rlx/arithmetic"

BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Dan", "Tim", "Jack", "Adam", "Omar", "Ravi", "Luis")
GIRLS = ("Ann", "Eva", "Mia", "Zoe", "Kim", "Lily", "Nina", "Sara", "Emma", "Rosa", "Aiko", "Ruth")
THINGS = (
    "apples", "pens", "books", "coins", "cards", "eggs", "pears", "plums", "cups", "shells", "stamps", "beads",
    "keys", "cakes", "balls", "nuts", "dolls", "rings", "seeds", "hats", "lamps", "kites", "boxes", "stones",
)  # fmt: skip
GAINS = (
    "{He} buys {n} more.",
    "{He} finds {n} more.",
    "{He} gets {n} more.",
    "{friend} gives {him} {n}.",
    "{He} wins {n} from {friend}.",
)
LOSS_SENTENCES = (
    "{He} loses {n}.",
    "{He} sells {n}.",
    "{He} gives {n} away.",
    "{He} gives {friend} {n}.",
    "{friend} takes {n}.",
)
QUESTIONS = (
    "How many {things} does {name} have?",
    "How many {things} does {he} have now?",
    "How many does {name} have now?",
)
QUESTIONS_AFTER_LOSS = ("How many {things} are left?", "How many does {he} have left?")
PAIRS = {
    "+": (
        "{name} has {a} {things}. {friend} has {b}. How many do they have together?",
        "{name} has {a} {things}. {friend} has {b} more. How many does {friend} have?",
        "There are {a} {things} at home and {b} at school. How many {things} are there?",
        "{name} has {a} red {things} and {b} blue ones. How many {things} does {he} have?",
    ),
    "-": (
        "{name} has {a} {things}. {friend} has {b} fewer. How many does {friend} have?",
        "{name} needs {a} {things} and has {b}. How many more does {he} need?",
        "{name} has {a} {things}. {b} are red. How many are not red?",
        "{name} and {friend} have {a} {things}. {b} are {friend}'s. How many are {name}'s?",
    ),
}
LARGEST = {1: 30, 2: 100, 3: 500, 4: 999}
"""The largest number in a problem, by difficulty."""
SMALLEST = 2
"""The smallest number, because the sentences are in the plural."""
VAL_SHARE = 8
"""One question in this many belongs to validation."""
MOST_REPEATS = 5000
"""If this many problems in a row are repeats, hardly any new one is left to find."""


class Problem(NamedTuple):
    """A question, the working ("3+4=7", one step each) and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """Return the working and, on a last line of its own, the answer after `####`."""
        return "\n".join((*self.steps, f"#### {self.answer}"))


def make_problems(config: ArithmeticConfig, split: str) -> list[dict[str, Any]]:
    """Return the problems of a split (train or val) as rows in verl's schema; the same configuration gives the same rows.

    Questions are distinct; extra_info holds index, split and the worked answer. Raises DataError if there are too few distinct
    problems.
    """
    size = {"train": config.train_size, "val": config.val_size}[split]
    rows: dict[str, dict[str, Any]] = {}
    repeats = 0
    for problem in _stream(config, split):
        if problem.question in rows:
            repeats += 1
            if repeats == MOST_REPEATS:
                raise DataError(
                    f"data.arithmetic: found {len(rows)} distinct {split} problems of difficulty {config.difficulty}, "
                    f"expected {split}_size={size}; lower {split}_size or raise difficulty"
                )
            continue
        repeats = 0
        rows[problem.question] = _row(problem, split, len(rows))
        if len(rows) == size:
            break
    return list(rows.values())


def _stream(config: ArithmeticConfig, split: str) -> Iterator[Problem]:
    rng = random.Random(seed_for(ARITHMETIC_SOURCE, config.seed, config.difficulty, split))
    while True:
        problem = _problem(rng, config.difficulty)
        held_out = seed_for(ARITHMETIC_SOURCE, problem.question) % VAL_SHARE == 0
        if held_out == (split == "val"):
            yield problem


def _row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": ARITHMETIC_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "split": split, "answer": problem.solution},
    }


def _problem(rng: random.Random, difficulty: int) -> Problem:
    words = _words(rng)
    largest = LARGEST[difficulty]
    if difficulty == 4 or (difficulty == 1 and rng.random() < 0.5):
        return _pair(rng, words, largest, is_story=difficulty == 1)
    if difficulty == 3:
        sentences, steps, total = _boxes(rng, words)
    else:
        total = rng.randint(SMALLEST, largest - SMALLEST)
        sentences, steps = ["{name} has " + f"{total} " + "{things}."], []
    events = rng.randint(1, 2) if difficulty == 3 else difficulty
    loss = False
    for _ in range(events):
        sentence, step, total, loss = _event(rng, total, largest)
        sentences.append(sentence)
        steps.append(step)
    questions = (*QUESTIONS, *QUESTIONS_AFTER_LOSS) if loss else QUESTIONS
    text = " ".join((*sentences, rng.choice(questions)))
    return Problem(text.format(**words), tuple(steps), total)


def _words(rng: random.Random) -> dict[str, str]:
    is_boy = rng.random() < 0.5
    name = rng.choice(BOYS if is_boy else GIRLS)
    friend = rng.choice([other for other in BOYS + GIRLS if other != name])
    he, him = ("he", "him") if is_boy else ("she", "her")
    return {"name": name, "friend": friend, "he": he, "him": him, "He": he.capitalize(), "things": rng.choice(THINGS)}


def _pair(rng: random.Random, words: dict[str, str], largest: int, is_story: bool) -> Problem:
    sign, high, low, answer = _calculation(rng, largest)
    text = rng.choice(PAIRS[sign]) if is_story else f"What is {{a}}{sign}{{b}}?"
    return Problem(text.format(a=high, b=low, **words), (f"{high}{sign}{low}={answer}",), answer)


def _calculation(rng: random.Random, largest: int) -> tuple[str, int, int, int]:
    """Return a sign, two numbers, and their sum or difference. All numbers are at most `largest`."""
    sign, total = rng.choice("+-"), rng.randint(2 * SMALLEST, largest)
    part = rng.randint(SMALLEST, total - SMALLEST)
    return (sign, total - part, part, total) if sign == "+" else (sign, total, part, total - part)


def _boxes(rng: random.Random, words: dict[str, str]) -> tuple[list[str], list[str], int]:
    """Return an opening with a product: some bags of some things each."""
    bags, each = rng.randint(2, 12), rng.randint(2, 12)
    holder = rng.choice(("bags", "bins", "jars", "trays"))
    sentence = "{name} has " + f"{bags} {holder} of {each} " + "{things}."
    return [sentence], [f"{bags}*{each}={bags * each}"], bags * each


def _event(rng: random.Random, total: int, largest: int) -> tuple[str, str, int, bool]:
    """Return one more sentence and its effect on `total`: (sentence, step, new total, whether it is a loss)."""
    may_lose, may_gain = total >= 2 * SMALLEST, total + SMALLEST <= largest
    loss = may_lose and (not may_gain or rng.random() < 0.5)
    n = rng.randint(SMALLEST, total - SMALLEST if loss else largest - total)
    after = total - n if loss else total + n
    sentence = rng.choice(LOSS_SENTENCES if loss else GAINS).replace("{n}", str(n))
    return sentence, f"{total}{'-' if loss else '+'}{n}={after}", after, loss
