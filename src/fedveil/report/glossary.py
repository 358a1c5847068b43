"""Explain terms where they appear: on hover at their first use, and in a list at the end of the section."""

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

TAG = re.compile(r"(<[^>]*>)")
SKIPPED_TAGS = ("svg", "button", "code", "pre", "abbr")  # elements whose text is not changed


def explain_terms(body: Markup, glossary: Mapping[str, str]) -> Markup:
    """Return a section's markup with the first use of each term marked, and a list of the explanations at its end.

    >>> print(explain_terms(Markup("<p>An AUC of 0.5</p>"), {"AUC": "a chance"}).splitlines()[0])
    <p>An <abbr title="a chance">AUC</abbr> of 0.5</p>
    """
    remaining, marked_terms, pieces, depth = dict(glossary), list[str](), list[str](), 0
    for piece in TAG.split(str(body)):
        if piece.startswith("<"):
            depth += _depth_change(piece)
        elif depth == 0 and remaining and piece.strip():
            piece = _mark_terms(piece, remaining, marked_terms)
        pieces.append(piece)
    if not marked_terms:
        return body
    rows = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(glossary[term])}</dd></div>" for term in marked_terms)
    return Markup(f'{"".join(pieces)}\n<dl class="words" aria-label="Words used in this section">{rows}</dl>')


def _depth_change(tag: str) -> int:
    """Return 1 for the start of an element that is skipped, -1 for its end, and 0 for other tags."""
    name = re.match(r"</?([a-z0-9]+)", tag)
    if name is None or name[1] not in SKIPPED_TAGS or tag.endswith("/>"):
        return 0
    return -1 if tag.startswith("</") else 1


def _mark_terms(text: str, remaining: dict[str, str], marked_terms: list[str]) -> str:
    """Mark the first use of each term in a text, longest first; move these terms from `remaining` to `marked_terms`."""
    pattern = "|".join(re.escape(str(escape(term))) for term in sorted(remaining, key=len, reverse=True))
    terms = {str(escape(term)).lower(): term for term in remaining}

    def mark(match: re.Match[str]) -> str:
        term = terms[match[1].lower()]
        if term not in remaining:
            return match[0]
        marked_terms.append(term)
        return f'<abbr title="{escape(remaining.pop(term))}">{match[1]}</abbr>{match[2]}'

    return re.sub(rf"(?i)(?<![\w-])({pattern})(s?)(?![\w-])", mark, text)
