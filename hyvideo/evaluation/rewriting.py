"""Short prompts in the long form that HunyuanVideo-1.5 is used to, written by a language model behind a chat server."""

import re
from pathlib import Path

from hyvideo.models.reward_models.remote.exchange import ChatServer

ATTEMPTS = 3  # a model that does not answer as asked may do so the next time
INSTRUCTION = Path(__file__).with_suffix(".txt")
"""What the model is asked to do, unless the user names another file."""

LEAST_WORDS, MOST_WORDS = 15, 300
_QUOTED = re.compile(r'["“]([^"”]+)["”]')


def rewritten(server: ChatServer, instruction: str, prompt: str) -> str:
    """Return a prompt in other words, on one line.

    Raises:
        ValueError: however often it was asked, the model wrote far too little or too much, or other texts in quotes.
        Fault, RewardFailureError: the server gave no answer, or refused.
    """
    messages = [{"type": "text", "text": f"{instruction.strip()}\n\nThe prompt:\n{prompt}"}]
    for _ in range(ATTEMPTS):
        choice = server.complete(messages, max_tokens=1024, temperature=0.7)
        answer = (choice.message.content or "").rpartition("</think>")[2]  # some templates open the thoughts themselves
        text = " ".join(answer.split())
        if re.fullmatch(r'"[^"]*"|“[^”]*”', text):
            text = text[1:-1]
        wanted = [" ".join(quoted.split()) for quoted in _QUOTED.findall(prompt)]
        lost = [quoted for quoted in wanted if quoted not in text]
        added = [quoted for quoted in _QUOTED.findall(text) if quoted not in wanted]
        if choice.finish_reason == "length" or "<think>" in answer:
            problem = "its answer was cut off at 1,024 tokens; a model that thinks needs that switched off"
        elif not LEAST_WORDS <= len(text.split()) <= MOST_WORDS:
            problem = f"it wrote {len(text.split())} words, expected {LEAST_WORDS} to {MOST_WORDS}: {text!r:.80}"
        elif added:
            problem = f"it put {added[0]!r} in quotes, which the model of videos would write on the screen"
        elif lost:
            problem = f"it lost the words on screen {lost[0]!r}"
        else:
            return text
    raise ValueError(f"the model did not rewrite it in {ATTEMPTS} attempts: {problem}")
