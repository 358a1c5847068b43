"""A page as a tree, strict about its tags: a wrong one fails the test that reads it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img"}


class Node:
    """An element with its attributes, children and text."""

    def __init__(self, name, attributes, parent):
        self.name, self.attributes, self.parent, self.children = name, dict(attributes), parent, []

    def walk(self):
        """This element and all below it."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, name, part=None):
        """The elements of that name below, by class if one is given."""
        nodes = [node for node in self.walk() if node.name == name]
        return [node for node in nodes if part is None or part in node.attributes.get("class", "").split()]

    @property
    def text(self):
        """All text below."""
        return "".join(child.text if isinstance(child, Node) else child for child in self.children)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = self.at = Node("document", [], None)

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes), f"<{name}> repeats an attribute"
        node = Node(name, attributes, self.at)
        self.at.children.append(node)
        if name not in VOID:
            self.at = node

    def handle_endtag(self, name):
        assert self.at.name == name, f"<{self.at.name}> is closed by </{name}>"
        self.at = self.at.parent

    def handle_data(self, text):
        self.at.children.append(text)


def read(page):
    """The page as a tree; every element must be closed, in order."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.at is reader.root, f"<{reader.at.name}> is never closed"
    return reader.root
