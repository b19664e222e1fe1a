"""Write docs/flags.md, a list of every flag, from the schema.

Example: `python -m scripts.flag_page`
"""

import argparse
from pathlib import Path

from hyvideo.config.flags import ALIASES, range_text
from hyvideo.config.settings import GROUPS, SETTINGS, text_of

TARGET = Path(__file__).parents[1] / "docs" / "flags.md"
HEADER = """# Flags

Every setting of `post_train.py` is a flag (`--eta 0.4`) and a key of the YAML files. The files of `--config` override
the defaults from left to right, and flags override both. In brackets stand the default and the range; of a few allowed
words the default is the bold one. `python -m scripts.flag_page` writes this page from `hyvideo/config`.
"""


def flag_page() -> str:
    """The whole page: one list per group, in the order of the schema."""
    parts = [HEADER]
    for group, about in GROUPS.items():
        parts.append(f"\n## {group}\n\n{about}\n\n")
        for setting in (setting for setting in SETTINGS.values() if setting.group == group):
            default = text_of(setting.default)
            choices = ", ".join(f"**`{choice}`**" if choice == default else f"`{choice}`" for choice in setting.choices)
            value = choices or ", ".join(filter(None, [f"`{default}`", range_text(setting)]))
            parts.append(f"- `--{setting.name}` ({value}): {setting.doc}\n")
    others = ", ".join(f"`{name}` ({alias.setting or 'sets nothing'})" for name, alias in ALIASES.items())
    return "".join([*parts, f"\n## Names that set another setting\n\n{others}.\n"])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(flag_page(), encoding="utf-8")
