"""Short prompts in the long form that HunyuanVideo-1.5 is used to, written by a language model behind a chat server."""

import re
from pathlib import Path

from hyvideo.models.reward_models.remote.exchange import ChatServer

ATTEMPTS = 3  # a model that does not answer as asked may do so the next time
INSTRUCTION = Path(__file__).with_suffix(".txt")
"""What the model is asked to do, unless the user names another file."""

MOST_WORDS = 300
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_QUOTED = re.compile(r'["“]([^"”]+)["”]')


def rewritten(server: ChatServer, instruction: str, prompt: str) -> str:
    """Return a prompt in other words, on one line.

    Raises:
        ValueError: however often it was asked, the model wrote nothing, far too much, or lost a text in quotes.
        Fault, RewardFailureError: the server gave no answer, or refused.
    """
    messages = [{"type": "text", "text": f"{instruction.strip()}\n\nThe prompt:\n{prompt}"}]
    for _ in range(ATTEMPTS):
        choice = server.complete(messages, max_tokens=1024, temperature=0.7)
        answer = _THOUGHT.sub("", choice.message.content or "")
        text = " ".join(answer.split())
        lost = [quoted for quoted in _QUOTED.findall(prompt) if quoted not in text]
        if not 0 < len(text.split()) <= MOST_WORDS:
            problem = f"it wrote {len(text.split())} words, expected 1 to {MOST_WORDS}"
        elif choice.finish_reason == "length" or "<think>" in answer:
            problem = "its answer was cut off at 1,024 tokens; a model that thinks needs that switched off"
        elif lost:
            problem = f"it lost the words on screen {lost[0]!r}"
        else:
            return text
    raise ValueError(f"the model did not rewrite it in {ATTEMPTS} attempts: {problem}")
