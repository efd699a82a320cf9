"""Prompts for the target: the beginnings of the conversations that it then writes itself.

Nothing here comes from a set that models are judged by. A conversation is a list of turns' parts, each of them either
text that is given or text that the target samples.
"""

import ast
import dataclasses
import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# First words of a user's turn; the target goes on from there. Half of its own conversations start with none.
OPENERS = (
    "Write", "Write a short", "Write a function that", "Write a Python function", "Write an email", "Write a letter",
    "What", "What is", "What are", "How", "How do I", "How can I", "Why", "Which", "Who was", "When", "Where", "Is it",
    "Explain", "Explain how", "Describe", "Compare", "List", "List five", "Name three", "Give me", "Give an example of",
    "Can you", "Could you", "Please", "I need", "I want to", "I have", "My", "We are", "Tell me", "Translate",
    "Rewrite", "Summarize", "Correct", "Create", "Make a table of", "Plan", "Suggest", "Solve", "Calculate", "If",
    "There are",
    "A shop", "In Python,", "Fix this code:", "Convert", "Imagine", "Do you", "Should I", "What does",
)  # fmt: skip

# Further ones, for the second round of sampling, which has prose.
MORE_OPENERS = (
    "A farmer", "Tom has", "Anna buys", "What is the sum of", "What percentage of", "What is the distance from",
    "How many", "How much", "Find x if", "A recipe", "In JavaScript,", "In SQL,", "Using pandas,",
    "Write a test for", "Write a bash script", "Write a class", "Write a story about", "Write a short speech",
    "My friend", "Our neighbours",
    "I would like to", "Is it true that", "What can I do if", "What should I", "Which is better,", "Who invented",
    "Recommend", "Help me", "Give me tips for", "Write instructions for", "Plan a day in", "What happens when",
)  # fmt: skip

TEXT_TASKS = (
    "Summarize this text:", "Summarize this in one sentence:", "What is this text about?", "Explain this simply:",
    "List the main points of this text:", "Rewrite this text more briefly:", "Repeat this text word for word:",
    "Correct the mistakes in this text:", "Continue this text:", "Write it in other words:",
    "Write a title for this text:", "Ask a question about this text and answer it:",
)  # fmt: skip

PROSE_TASKS = (
    "Summarize it briefly.", "What are the key points?", "Give this a catchy title.",
    "Make this text more formal.", "Say the same to a child.", "Rewrite this as a dialogue.",
    "Shorten this text.", "Copy this text unchanged.", "Check this text for errors.", "Continue this text.",
    "Turn this into bullet points.", "Tell this as if it had happened to you.", "Make a table from this text.",
    "What does the author want to say?", "Write an email that says the same.", "Explain this in your own words.",
    "Is there anything wrong in this text?", "Find a title and three keywords for this text.",
)  # fmt: skip

CODE_TASKS = (
    "Explain what this code does:", "Add comments to this code:", "Write a docstring for this function:",
    "Continue this code:", "Copy this code and rename its variables:", "Write a test for this function:",
    "What is wrong with this code?", "Repeat this code:", "Make this code simpler:",
)  # fmt: skip


# How many conversations are of which kind: three in four the target's own, the others about a passage; once there is
# prose to work on, half and half.
SHARES = {"own": 0.76, "text": 0.16, "code": 0.08}
SHARES_WITH_PROSE = {"own": 0.5, "prose": 0.22, "quiz": 0.08, "text": 0.08, "code": 0.12}


@dataclasses.dataclass(frozen=True)
class Opening:
    """How one conversation begins.

    Attributes:
      kind: "own" (the target asks), "text", "code" or "prose" (a passage to work on), or "quiz" (the target asks about
        one).
      question: what the user's turn begins with, or all of it.
      asks_on: whether the target goes on with the user's turn.
      question_temperature: of the user's turn.
      answer_temperature: of the answer; 0 is greedy.
    """

    kind: str
    question: str
    asks_on: bool
    question_temperature: float
    answer_temperature: float


class Documents:
    """Passages of Python's own documentation and standard library (PSF licence), and of the target's own answers.

    Attributes:
      texts: paragraphs of the language reference.
      code: functions of the standard library's modules.
      prose: answers that were sampled before, if there are any.
    """

    def __init__(self, prose: Sequence[str] = ()):
        """Read what this Python has; `digest` says which that was."""
        self.prose = list(prose)
        topics = pydoc_data.topics.topics
        paragraphs = [" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n")]
        self.texts = [p for p in paragraphs if 120 <= len(p) <= 600]
        self.code = _functions(Path(sysconfig.get_path("stdlib")))
        if not self.texts or not self.code:
            raise RuntimeError("this Python's own documentation and library sources are not installed")

    @property
    def digest(self) -> str:
        """SHA-256 over every passage, opener and task."""
        words = (*OPENERS, *MORE_OPENERS, *TEXT_TASKS, *PROSE_TASKS, *CODE_TASKS)
        return hashlib.sha256("\0".join([*self.texts, *self.code, *self.prose, *words]).encode()).hexdigest()


def draw_opening(rng: np.random.Generator, documents: Documents) -> Opening:
    """Draw how a conversation begins."""
    answer = float(rng.choice([0.0, 0.0, 0.3, 0.7, 1.0]))
    shares = SHARES_WITH_PROSE if documents.prose else SHARES
    kind = str(rng.choice(list(shares), p=list(shares.values())))
    if kind == "quiz":
        return Opening(kind, f"{_pick(rng, documents.prose)}\n\nQuestion:", True, 0.7, answer)
    if kind == "own":
        openers = OPENERS + MORE_OPENERS if documents.prose else OPENERS
        opener = _pick(rng, openers) if rng.random() < 0.5 else ""
        return Opening(kind, opener, True, float(rng.choice([0.7, 0.9, 1.0])), answer)
    tasks, passages = {
        "text": (TEXT_TASKS, documents.texts),
        "code": (CODE_TASKS, documents.code),
        "prose": (PROSE_TASKS, documents.prose),
    }[kind]
    task, passage = _pick(rng, tasks), _pick(rng, passages)
    question = f"{task}\n\n{passage}" if rng.random() < 0.7 else f"{passage}\n\n{task}"
    return Opening(kind, question, False, 0.0, answer)


def _pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def _functions(library: Path) -> list[str]:
    """Source of short module-level functions."""
    found = []
    for path in sorted(library.glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.split("\n")
        try:
            nodes = ast.parse(source).body
        except SyntaxError:  # a module kept for tests of the parser
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if 120 <= len(text) <= 600:
                    found.append(text)
    return found
