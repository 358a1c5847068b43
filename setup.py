"""The README as PyPI shows it, where relative links lead into the repository; and the pages of `fedveil help`."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

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


class BuildPages(build_py):
    """Copy the documentation into the package, except in an editable installation, which finds it in the checkout."""

    def run(self) -> None:
        """Copy the modules, then the pages."""
        super().run()
        if not self.editable_mode:
            docs, home = Path(__file__).with_name("docs"), Path(self.build_lib) / "fedveil" / "pages"
            for page in sorted(docs.rglob("*.md")):
                target = home / page.relative_to(docs)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(page, target)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=absolute(readme),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildPages},
    )
