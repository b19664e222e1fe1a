"""Parts of documents that programs write, between markers."""

import re


def replace_part(text: str, name: str, content: str) -> str:
    """Put `content` between the document's markers `<!-- name -->` and `<!-- /name -->`, at its end if it has none."""
    part = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- /{re.escape(name)} -->", re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda match: part, text)
    return f"{text.rstrip()}\n\n{part}\n"
