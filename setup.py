"""The README as PyPI shows it: there a relative link leads nowhere, so it leads into the repository."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/fedveil/fedveil/blob/main/"
PICTURES = "https://raw.githubusercontent.com/fedveil/fedveil/main/"
RELATIVE = r"(?!https?:|mailto:|#)"


def absolute(text: str) -> str:
    """Markdown whose pictures and links are absolute; code is left as it is."""
    blocks = re.split(r"(^```.*?^```$|`[^`\n]*`)", text, flags=re.DOTALL | re.MULTILINE)
    for place in range(0, len(blocks), 2):
        block = re.sub(rf"(!\[[^\]]*\]\(){RELATIVE}", rf"\g<1>{PICTURES}", blocks[place])
        block = re.sub(rf"((?:src|srcset)=\"){RELATIVE}", rf"\g<1>{PICTURES}", block)
        block = re.sub(rf"(\]\(){RELATIVE}", rf"\g<1>{REPOSITORY}", block)
        blocks[place] = re.sub(rf"(href=\"){RELATIVE}", rf"\g<1>{REPOSITORY}", block)
    return "".join(blocks)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme), long_description_content_type="text/markdown")
