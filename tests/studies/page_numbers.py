"""The numbers in the tables of a page, for comparing two versions of it."""

import re
from html.parser import HTMLParser

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class _Tables(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tables, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        self.inside = self.inside or tag == "td"

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "td"

    def handle_data(self, data):
        if self.inside:
            self.tables[-1] += NUMBER.findall(data)


def numbers_of(page):
    """For each table that holds any, the numbers in its cells in reading order."""
    parser = _Tables()
    parser.feed(page)
    return [" ".join(table) for table in parser.tables if table]
