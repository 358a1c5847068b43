"""Terms are explained at their first use in a section and in a list at its end, and nowhere in markup or charts."""

from markupsafe import Markup

from fedveil.report import Answers, Facts, Page, Table
from fedveil.report.glossary import explain_terms
from fedveil.report.page import render

GLOSSARY = {"AUC": "a chance", "membership": "being in the data", "membership AUC": "both", "A & B": "<two>"}


def explained(text):
    return str(explain_terms(Markup(text), GLOSSARY))


def test_only_the_first_use_of_a_whole_word_is_marked_and_the_longest_term_wins():
    found = explained("<p>AUC, AUC; Membership AUC; memberships, AUCx</p>")
    assert found.startswith(
        '<p><abbr title="a chance">AUC</abbr>, AUC; <abbr title="both">Membership AUC</abbr>; '
        '<abbr title="being in the data">membership</abbr>s, AUCx</p>'
    )
    assert found.count("<dt>") == 3


def test_tags_drawings_and_code_are_left_as_they_are_and_explanations_are_escaped():
    text = '<p title="AUC">x</p><svg><text>AUC</text><g/></svg><code>AUC</code>'
    assert explained(text) == text
    assert '<abbr title="&lt;two&gt;">A &amp; B</abbr>' in explained("<p>A &amp; B</p>")


def test_a_page_explains_terms_in_every_section_but_facts_and_puts_its_command_last_if_it_begins_with_answers():
    sections = [Answers("For the decision", {"Safe?": ["The AUC is 0.5."]}), Table("T", ["AUC"], [["1"]])]
    sections.append(Facts("F", {"membership": "1"}))
    shown = render(Page("A", "B", sections, "fedveil audit", glossary=GLOSSARY))
    assert shown.count('<abbr title="a chance">') == 2
    assert 'title="being in the data"' not in shown
    assert shown.index("<dt>Safe?</dt>") < shown.index("fedveil audit")
    plain = render(Page("A", "B", sections[1:], "fedveil audit"))
    assert "<abbr" not in plain
    assert plain.index("fedveil audit") < plain.index("<table>")
