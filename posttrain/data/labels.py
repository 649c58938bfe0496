"""Labels by people: which of the responses to a prompt is best. Shared by the terminal and the studio.

    labels = Labels.read("comparisons.jsonl")            # votes go to comparisons.labels.sqlite
    item = labels.next("ann")                            # in her own order, sides shuffled, no model named
    labels.vote("ann", item.id, [0])                     # the first one shown is best; or TIE, BAD, SKIP
    labels.write()                                       # comparisons.labels.jsonl, for reward_model and preference stages

A vote is one transaction, written before it is answered; nothing is ever changed or removed: an undo is one more line. The order in
which responses are shown depends on the annotator and the item alone, and is recorded with the vote, so that a bias for a side shows.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.data.preferences import spoken
from posttrain.data.records import read_rows
from posttrain.data.stream import permutation
from posttrain.errors import UserError, require
from posttrain.system.files import atomic_write
from posttrain.system.sqlite import transaction
from posttrain.types import JSON

TIE, BAD, SKIP = "tie", "bad", "skip"
Order = Literal["random", "disagreement"]  # of what is asked next
# places of the responses, best first; those that are not named are equal and last
Choice = list[int] | str
WAIT = 30.0  # seconds for another writer
COMMENT, NAME = 4000, 60  # characters
SCHEMA = """
CREATE TABLE IF NOT EXISTS log(
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, item TEXT NOT NULL, annotator TEXT NOT NULL, choice TEXT, shown TEXT, comment TEXT,
  seconds REAL, time REAL NOT NULL, nonce TEXT UNIQUE);
CREATE INDEX IF NOT EXISTS log_item ON log(item, annotator);
"""
# the last entry of each annotator on each item, if that is a vote
LAST = "id IN (SELECT max(id) FROM log GROUP BY item, annotator)"
CURRENT = f"""SELECT item, annotator, choice, shown, coalesce(comment, ''), coalesce(seconds, 0.0), time FROM log
WHERE {LAST} AND kind = 'vote' ORDER BY id"""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and its responses, in the order of the file."""

    id: str
    prompt: Any
    responses: tuple[Any, ...]
    disagreement: float = 0.0  # of reward models, where the file says it

    def order(self, annotator: str) -> list[int]:
        """The responses in the order that this annotator sees, as positions in the file."""
        return [int(n) for n in permutation(len(self.responses), "label", annotator, self.id)]

    def lines(self, annotator: str) -> list[str]:
        texts = [f"prompt: {spoken(self.prompt)}"]
        shown = (spoken(self.responses[place]) for place in self.order(annotator))
        texts += [f"[{n}] {text}" for n, text in enumerate(shown, 1)]
        return [line for text in texts for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Vote:
    """The last vote of an annotator on an item; `choice` names positions in the file, not sides of the screen."""

    item: str
    annotator: str
    choice: Choice
    shown: tuple[int, ...]
    comment: str
    seconds: float
    time: float


@dataclass(slots=True)
class Labels:
    """The items of a file and the votes on them."""

    items: dict[str, Item]
    out: Path
    store: Path
    _local: threading.local = field(default_factory=threading.local)

    @classmethod
    def read(cls, file: str | Path, out: str | Path = "") -> Labels:
        place = Path(out) if out else Path(file).with_suffix(".labels.jsonl")
        require(place.parent.is_dir(), f"out {place}: there is no directory {place.parent}")
        require(place.resolve() != Path(file).resolve(), f"out {place} is the file itself")
        store = place.with_suffix(".sqlite")
        kept = store.is_file() or not (place.is_file() and place.stat().st_size)
        lost = f"out {place} has labels, and {store.name}, which they come from, is missing"
        require(kept, f"{lost}; choose another out")
        rows = (_item(record, where) for where, record in read_rows(file))
        return cls({item.id: item for item in rows}, place, store)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The connection of this thread. An error of a file, such as a full disk, becomes one line."""
        try:
            if not hasattr(self._local, "connection"):
                made = sqlite3.connect(self.store, timeout=WAIT, isolation_level=None)
                made.execute("PRAGMA journal_mode=WAL")
                made.execute("PRAGMA synchronous=FULL")  # a vote that was answered is on the disk
                made.executescript(SCHEMA)
                self._local.connection = made
            yield self._local.connection
        except (sqlite3.Error, OSError) as error:
            where = f"labels cannot be written to {self.out} and {self.store.name}: {error}"
            advice = "check space and rights there; earlier votes are kept"
            raise UserError(f"{where}; {advice}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._opened() as connection, transaction(connection):
            yield connection

    def votes(self) -> list[Vote]:
        """The valid votes, in order."""
        with self._opened() as connection:
            return [
                Vote(item, who, json.loads(choice), tuple(json.loads(shown)), *rest)
                for item, who, choice, shown, *rest in connection.execute(CURRENT)
                if item in self.items
            ]

    def next(
        self,
        annotator: str,
        order: Order = "random",
        disagreement: Mapping[str, float] | None = None,
    ) -> Item | None:
        """The next item that this annotator has not seen, or None. `disagreement`, by item, replaces that of the file."""
        who = annotator_name(annotator)
        done = {vote.item for vote in self.votes() if vote.annotator == who}
        ids = [*self.items]
        queue = [self.items[ids[n]] for n in permutation(len(ids), "queue", who)]
        if order == "disagreement":
            own = {name: item.disagreement for name, item in self.items.items()}
            known = own if disagreement is None else disagreement
            queue.sort(key=lambda item: -known.get(item.id, -1.0))
        return next((item for item in queue if item.id not in done), None)

    def vote(
        self,
        annotator: str,
        item: str,
        choice: Choice,
        comment: str = "",
        seconds: float = 0.0,
        nonce: str = "",
    ) -> None:
        """Record an annotator's vote on an item: sides as they were shown, best first, or TIE, BAD or SKIP. A vote sent twice with
        one `nonce` counts once; a second vote on an item is refused until the first is undone."""
        require(item in self.items, "no such item in this file")
        who = annotator_name(annotator)
        shown = self.items[item].order(who)
        if isinstance(choice, str):
            fine = choice in (TIE, BAD, SKIP)
            require(fine, f"a vote is a list of sides, {TIE}, {BAD} or {SKIP}")
        else:
            whole = all(isinstance(n, int) and not isinstance(n, bool) for n in choice)
            sides = whole and all(0 <= n < len(shown) for n in choice)
            fine = sides and 0 < len(set(choice)) == len(choice)
            require(fine, f"a vote names sides from 0 to {len(shown) - 1}, each once")
            choice = [shown[n] for n in choice]
        require(len(comment) <= COMMENT, f"a comment has at most {COMMENT} characters")
        with self._transaction() as connection:
            sent = connection.execute("SELECT 1 FROM log WHERE nonce = ?", [nonce]).fetchone()
            if nonce and sent:
                return
            said = "SELECT kind FROM log WHERE item = ? AND annotator = ? ORDER BY id DESC LIMIT 1"
            last = connection.execute(said, [item, who]).fetchone()
            fresh = last is None or last[0] == "undo"
            require(fresh, f"{who} has voted on this already; undo that first")
            values: list[JSON] = [item, who, json.dumps(choice), json.dumps(shown), comment]
            values += [max(0.0, float(seconds)), time.time(), nonce or None]
            columns = "kind, item, annotator, choice, shown, comment, seconds, time, nonce"
            marks = ", ".join("?" * len(values))
            connection.execute(f"INSERT INTO log({columns}) VALUES('vote', {marks})", values)

    def undo(self, annotator: str) -> Item | None:
        """Undo this annotator's last vote, and return its item, or None."""
        who = annotator_name(annotator)
        with self._transaction() as connection:
            last = f"SELECT item FROM log WHERE {LAST} AND kind = 'vote' AND annotator = ? ORDER BY id DESC"
            found = connection.execute(last, [who]).fetchone()
            if found is None:
                return None
            undo = "INSERT INTO log(kind, item, annotator, time) VALUES('undo', ?, ?, ?)"
            connection.execute(undo, [found[0], who, time.time()])
        return self.items.get(found[0])

    def labelled(self) -> int:
        """The number of items on which somebody has voted."""
        return len({vote.item for vote in self.votes() if vote.choice != SKIP})

    def rows(self) -> Iterator[dict[str, JSON]]:
        """The annotators' preferences as rows for training: pairs or, for items with more responses, scores. Items without a
        preferred response are left out."""
        pairs = all(len(item.responses) == 2 for item in self.items.values())
        said: dict[str, list[Choice]] = {}
        for vote in self.votes():
            said.setdefault(vote.item, []).append(vote.choice)
        for name, choices in said.items():
            item = self.items[name]
            scores = _scores(choices, len(item.responses))
            if scores is None or max(scores) == min(scores):
                continue
            if pairs:
                best, worst = (scores.index(end) for end in (max(scores), min(scores)))
                chosen, rejected = item.responses[best], item.responses[worst]
                yield {"prompt": item.prompt, "chosen": chosen, "rejected": rejected}
            else:
                yield {"prompt": item.prompt, "responses": list(item.responses), "scores": scores}

    def write(self) -> int:
        """Write the rows for training atomically, and return their number."""
        with self._transaction():  # who writes after another has their votes too
            lines = [json.dumps(row) + "\n" for row in self.rows()]
            atomic_write(self.out, "".join(lines))
        return len(lines)


def _item(record: Mapping[str, Any], where: str) -> Item:
    require("prompt" in record, f"{where}: no prompt")
    found = record.get("responses", record.get("completions"))
    if found is None and {"chosen", "rejected"} <= set(record):
        found = [record["chosen"], record["rejected"]]
    if not isinstance(found, list) or len(found) < 2:
        raise UserError(f"{where}: give responses (a list of two or more), or chosen and rejected")
    name = _digest([record["prompt"], sorted(map(json.dumps, found))]).hex()[:16]
    # an order that depends on the texts alone: neither chosen and rejected nor the alphabet shows in it
    given = record.get("disagreement", 0.0)
    disagreement = float(given) if isinstance(given, int | float) else 0.0
    return Item(name, record["prompt"], tuple(sorted(found, key=_digest)), disagreement)


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()


def annotator_name(annotator: str) -> str:
    """A name without invisible characters."""
    name = " ".join(annotator.split())
    fine = 0 < len(name) <= NAME and name.isprintable()
    require(fine, f"give a name of at most {NAME} characters")
    return name


def _scores(choices: Sequence[Choice], count: int) -> list[float] | None:
    """The mean score of each response over annotators who did not skip, from 0 for the worst to 1 for the best; None if all skipped."""
    voted = [choice for choice in choices if choice != SKIP]
    if not voted:
        return None
    totals = [0.0] * count
    for choice in voted:
        if isinstance(choice, list):
            for place, response in enumerate(choice):
                totals[response] += count - 1 - place
            rest = [n for n in range(count) if n not in choice]
            for response in rest:
                totals[response] += (len(rest) - 1) / 2
        else:
            totals = [total + (count - 1) / 2 for total in totals]
    low, high = min(totals), max(totals)
    return [(total - low) / (high - low) if high > low else 0.0 for total in totals]
