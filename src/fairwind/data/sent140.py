"""Sentiment140: negative and positive tweets, one client per user.

Go, Bhayani, Huang: Twitter Sentiment Classification using Distant Supervision. 2009.
"""

import bz2
import csv
import gzip
import hashlib
import html
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from fairwind.data.federation import Federation
from fairwind.data.partition import by_key
from fairwind.data.source import (
    AGAIN,
    LEAF,
    PARQUET,
    Layout,
    Notes,
    Samples,
    Source,
    check_owner,
    distinct,
    leaf,
    parquet,
)
from fairwind.errors import InputError, damaged, in_range, shown, whole

PADDING, UNKNOWN = "<padding>", "<unknown>"  # words 0 and 1
VOCABULARY = 10_000  # words kept where no vectors are given
RULE = (
    "neutral tweets and repeated ones of a user left out; lower case, links and @names removed, n't and 's "
    "cut off, punctuation kept; first tokens of a tweet, padded with 0, unknown words 1; vocabulary: the "
    "tweets' words that have vectors, or the 10,000 most frequent; by user: those with at least so many "
    "tweets that their number comes nearest `clients`; by group: users dealt to clients by a hash of "
    "their names; 8:2 split by seed"
)
BY_HAND = ("testdata*", "test.csv")  # the 498 tweets labelled by hand, a set of their own
SENTIMENT = {0: 0, 2: None, 4: 1}  # of the original files; 2 is neutral
OPEN: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}

WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|m|re|ve|ll|d)\b|\w+|[^\w\s]")
DROPPED = re.compile(r"https?://\S+|www\.\S+|@\w+")


Tweet = tuple[str, Any, int | None, Any]  # position, text, label (None is neutral), user


def _reader(tweets: Callable[[Path], Iterator[Tweet]]) -> Callable[[list[Path]], Samples]:
    """A reader of all files, from a function that yields the tweets of one file."""

    def read(files: list[Path]) -> Samples:
        texts: list[str] = []
        labels: list[int] = []
        users: list[str] = []
        for file in files:
            for where, text, label, user in tweets(file):
                if not isinstance(text, str):
                    raise InputError(f"{where}: {shown(text)} is no text of a tweet")
                if label is not None:
                    texts.append(text)
                    labels.append(label)
                    users.append(check_owner(where, user))
        return Samples(texts, np.array(labels, dtype=np.int64), users)

    return read


def _parquet(file: Path) -> Iterator[Tweet]:
    for first, rows in parquet(file, ("text", "user", "sentiment")):
        each = zip(rows["text"], rows["user"], rows["sentiment"], strict=True)
        for row, (text, user, sentiment) in enumerate(each, first):
            where = f"{file}, row {row}"
            yield where, text, _label(where, sentiment), user


def _csv(file: Path) -> Iterator[Tweet]:
    where = f"{file}, line 1"
    with damaged(lambda: f"{where}, or soon after it, is damaged", AGAIN), _open(file) as lines:
        for row in (rows := csv.reader(lines)):
            where = f"{file}, line {rows.line_num}"
            if not row:
                continue
            if len(row) != 6:
                raise InputError(f"{where}: {len(row)} columns, not target, id, date, flag, user, text")
            sentiment = int(row[0]) if row[0].isdecimal() and len(row[0]) < 9 else row[0]
            yield where, row[5], _label(where, sentiment), row[4]


def _open(file: Path) -> TextIO:
    lines: TextIO = OPEN.get(file.suffix, open)(file, "rt", encoding="latin-1", newline="")
    return lines


def _leaf(file: Path) -> Iterator[Tweet]:
    for user, x, y in leaf(file):
        for i, (row, label) in enumerate(zip(x, y, strict=True)):
            where = f"{file}, user {user!r}, sample {i}"
            if not isinstance(row, list) or len(row) < 5:
                raise InputError(f"{where}: x is not id, date, query, user, text")
            if label not in (0, 1):
                raise InputError(f"{where}: label {shown(label)} is not 0 or 1")
            # LEAF marks the tweets labelled by hand, and calls the neutral ones among them negative.
            if row[5:6] != ["test"]:
                yield where, row[4], label, user


def _label(where: str, sentiment: Any) -> int | None:
    if isinstance(sentiment, list | dict) or sentiment not in SENTIMENT:
        found = f"sentiment {shown(sentiment)}"
        raise InputError(f"{where}: {found} is not 0 (negative), 2 (neutral) or 4 (positive)")
    return SENTIMENT[sentiment]


def sent140(
    samples: Samples,
    vectors: Path | None = None,
    *,
    clients: int = 697,
    by: Literal["user", "group"] = "user",
    tokens: int = 25,
    seed: int = 0,
) -> tuple[Federation, Notes]:
    """Sentiment140 by user, with a minimum of tweets that leaves about `clients`; or by groups of users.

    Go, Bhayani, Huang: Twitter Sentiment Classification using Distant Supervision. 2009.
    """
    assert isinstance(samples.inputs, list)
    keep = distinct(samples)
    repeated = len(samples.labels) - len(keep)
    notes = [f"{repeated:,} repeated tweets of a user left out"] if repeated else []
    users = [samples.owners[i] for i in keep]
    if by == "user":
        least, chosen = _least(Counter(users), clients)
        here = [k for k, user in enumerate(users) if user in chosen]
        keep, owners = keep[here], [users[k] for k in here]
        notes.append(f"{len(chosen):,} users have at least {least} tweets, which is nearest {clients:,}")
    else:
        if clients > len(set(users)):
            raise InputError(f"clients={clients}, but the data has {len(set(users))} users")
        owners = [_group(user, clients) for user in users]
        empty = clients - len(set(owners))
        notes.append(
            f"users dealt into {clients:,} groups by a hash of their names: not the paper's partition"
        )
        if empty:
            notes.append(f"{empty:,} of the groups came out empty and are left out")
    owner, names = by_key(owners)
    texts = [tokenize(samples.inputs[i]) for i in keep]
    words, table = _glove(vectors, {w for t in texts for w in t}) if vectors else (_frequent(texts), None)
    if table is None:
        notes.append("no word vectors given: random ones, trained with the model")
    else:
        notes.append(f"{len(words) - 2:,} words have vectors")
    index = {word: i for i, word in enumerate(words)}
    ids = np.zeros((len(texts), tokens), dtype=np.int32)
    for i, text in enumerate(texts):
        cut = text[:tokens]
        ids[i, : len(cut)] = [index.get(word, 1) for word in cut]
    federation = Federation.from_owners(
        ids,
        samples.labels[keep],
        owner,
        names=names,
        seed=seed,
        name=f"Sentiment140 by {by}",
        classes=2,
    )
    vectors_of = None if table is None else torch.from_numpy(table)
    meaning = ("negative", "positive")
    return replace(federation, words=tuple(words), embedding=vectors_of, class_names=meaning), notes


def tokenize(text: str) -> list[str]:
    """The tokens of a tweet, split as in GloVe's vocabulary."""
    return WORD.findall(DROPPED.sub(" ", html.unescape(text)).lower())


def _least(tweets: Counter[str], clients: int) -> tuple[int, set[str]]:
    """The minimum number of tweets, at least 2, for which the number of users is closest to `clients`."""
    counts = np.array(list(tweets.values()))
    if counts.max() < 2:
        raise InputError("no user has two tweets: take sent140:by=group, or the whole data set")
    candidates = range(2, int(counts.max()) + 1)
    least = min(candidates, key=lambda k: (abs(int((counts >= k).sum()) - clients), k))
    return least, {user for user, count in tweets.items() if count >= least}


def _group(user: str, groups: int) -> str:
    number = int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "big") % groups
    return f"group {number:0{len(str(groups - 1))}d}"


def _frequent(texts: list[list[str]]) -> list[str]:
    """The most frequent words; ties in alphabetical order."""
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [PADDING, UNKNOWN, *ranked[:VOCABULARY]]


def _glove(file: Path, wanted: set[str]) -> tuple[list[str], NDArray[np.float32]]:
    """The wanted words that have vectors, in the file's order, and these; padding and unknown are zeros."""
    words, rows, width = [PADDING, UNKNOWN], [], 0
    try:
        with open(file, encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                found, width = line.count(" "), width or line.count(" ")
                if found > width and not any(map(_is_number, line.split(" ")[1 : found - width + 1])):
                    continue  # a word with spaces in it, of which GloVe's 840B has some
                if found != width or not width:
                    raise InputError(f"{file}, line {number}: {found} numbers after the word, not {width}")
                word, _, values = line.rstrip("\n").partition(" ")
                if word in wanted:
                    wanted.discard(word)  # a repeated word keeps its first vector
                    words.append(word)
                    rows.append(_vector(f"{file}, line {number}", values))
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason}") from None
    if not rows:
        raise InputError(f"{file} has vectors for none of the tweets' words")
    return words, np.stack([np.zeros(width, np.float32)] * 2 + rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _vector(where: str, values: str) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):
            vector = np.array(values.split(" "), dtype=np.float32)
    except ValueError:
        raise InputError(f"{where}: not a word and numbers") from None
    if not np.isfinite(vector).all():
        raise InputError(f"{where}: the vector is not finite")
    return vector


def _check(clients: int, by: str, tokens: int, seed: int) -> None:
    whole(1, clients=clients, tokens=tokens)
    in_range(0, 2**32, seed=seed)


SOURCE = Source(
    folder="sent140",
    repository="stanfordnlp/sentiment140",
    revision="refs/convert/parquet",  # the hub's own conversion: the repository itself is a script
    files="**/train/*.parquet",
    layouts=(
        Layout("the hub's parquet files", PARQUET, _reader(_parquet)),
        *(Layout("LEAF's JSON files", patterns, _reader(_leaf)) for patterns in LEAF),
        Layout("the original CSV", ("**/*.csv", *(f"**/*.csv{end}" for end in OPEN)), _reader(_csv), BY_HAND),
    ),
    rule=RULE,
    federate=sent140,
    check=_check,
    published=1_600_000,
    vectors=True,
)
