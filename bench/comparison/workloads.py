"""The requests of the two workloads, which follow from a seed.

A workload is a list of clients, a client a list of requests. A client sends a request when its last one is answered. A
request of a chat has only what is new: the engine's process puts the chat's tokens so far before it, answers included,
so the prompts of two systems are the same as long as their answers are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["VOCABULARY", "Chats", "Documents", "Request", "Workload"]

VOCABULARY = 1000
"""Tokens of the model; those below 3 have a meaning."""


@dataclass(frozen=True)
class Request:
    """chat: whose tokens so far come before these; empty: nobody's. turn: of the chat, or the times that the document
    has been asked, from 0. answer: tokens to generate.
    """

    name: str
    chat: str
    turn: int
    tokens: list[int]
    answer: int


Workload = list[list[Request]]


@dataclass(frozen=True)
class Chats:
    """Multi-turn chats that share a system prompt. Each client has several chats and takes their turns in rotation, so
    that between two turns of a chat the engine answers all others. Ranges include both ends.
    """

    clients: int = 3
    chats: int = 9
    system_tokens: int = 512
    turns: tuple[int, int] = (12, 18)
    first_tokens: tuple[int, int] = (500, 1000)
    """Of a chat's first message, which brings its material."""
    message_tokens: tuple[int, int] = (40, 120)
    answer_tokens: tuple[int, int] = (8, 24)
    seed: int = 1

    def requests(self) -> Workload:
        """The requests of each client. Raises ValueError if there are fewer chats than clients."""
        if self.chats < self.clients:
            raise ValueError(f"{self.chats} chats for {self.clients} clients")
        rng = random.Random(self.seed)
        system = _text(rng, self.system_tokens)
        chats = [self._chat(rng, f"chat {number}", system) for number in range(self.chats)]
        return [_rotation(chats[client :: self.clients]) for client in range(self.clients)]

    def _chat(self, rng: random.Random, name: str, system: list[int]) -> list[Request]:
        found = []
        for turn in range(rng.randint(*self.turns)):
            message = _text(rng, rng.randint(*(self.message_tokens if turn else self.first_tokens)))
            tokens = message if turn else system + message
            found.append(Request(f"{name}, turn {turn}", name, turn, tokens, rng.randint(*self.answer_tokens)))
        return found


@dataclass(frozen=True)
class Documents:
    """Long documents, each asked several times, with prompts between that nobody has sent before."""

    clients: int = 2
    documents: int = 4
    document_tokens: int = 3072
    questions: int = 3
    question_tokens: int = 48
    misses: int = 1
    """Prompts that nobody has sent before, between two rounds of questions, as long as a document; of each client."""
    answer_tokens: int = 16
    seed: int = 2

    def requests(self) -> Workload:
        """The requests of each client: a client has its own documents. Raises ValueError if it would have none."""
        if self.documents < self.clients:
            raise ValueError(f"{self.documents} documents for {self.clients} clients")
        rng = random.Random(self.seed)
        documents = [_text(rng, self.document_tokens) for _ in range(self.documents)]
        found: Workload = [[] for _ in range(self.clients)]
        for question in range(self.questions):
            for number, document in enumerate(documents):
                tokens = document + _text(rng, self.question_tokens)
                name = f"document {number}, question {question}"
                found[number % self.clients].append(Request(name, "", question, tokens, self.answer_tokens))
            for client in range(self.clients):
                for number in range(self.misses):
                    tokens = _text(rng, self.document_tokens + self.question_tokens)
                    name = f"miss {question}-{client}-{number}"
                    found[client].append(Request(name, "", 0, tokens, self.answer_tokens))
        return found


def _rotation(chats: list[list[Request]]) -> list[Request]:
    """The turns of several chats, one of each in rotation until all have ended."""
    longest = max(map(len, chats))
    return [chat[turn] for turn in range(longest) for chat in chats if turn < len(chat)]


def _text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]
