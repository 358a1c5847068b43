"""A small table like bank's, new rows for its model, and an encoder that knows only encoding.json."""

import csv
import random

NUMBERS = ("age", "duration", "euribor3m")
WORDS = {"job": ("admin.", "services", "student"), "marital": ("married", "single"), "poutcome": ("failure", "success")}
COLUMNS = (*NUMBERS, *WORDS, "region", "y")


def make_row(draw, missing):
    """A row in which each cell but the target's is missing with this probability."""
    age, duration, rate = draw.randint(18, 90), draw.randint(0, 900), round(draw.gauss(3.6, 1.7), 3)
    words = [draw.choice(values) for values in WORDS.values()]
    answer = duration + (300 if words[2] == "success" else 0) + 60 * draw.gauss(0, 1) > 600
    cells = [age, duration, rate, *words, draw.choice((1, 2, 3))]
    absent = ("", "NA", "?")
    found = [draw.choice(absent[: 1 if name == "region" else 3]) if draw.random() < missing else cell
             for name, cell in zip(COLUMNS, cells, strict=False)]  # fmt: skip
    return [*found, "yes" if answer else "no"]


def write_bank(path, rows=600, missing=0.03, seed=0):
    """Write a table separated by semicolons; `poutcome` has no missing cells."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(COLUMNS)
        for _ in range(rows):
            row = make_row(draw, missing)
            row[5] = row[5] if row[5] in WORDS["poutcome"] else "failure"
            table.writerow(row)
    return path


def write_new(path, rows=1000, seed=1):
    """Write rows with shuffled columns, an extra one, new categories and missing cells, separated by commas."""
    draw = random.Random(seed)
    order = [*COLUMNS[:-1], "customer"]
    draw.shuffle(order)
    found = []
    for number in range(rows):
        row = dict(zip(COLUMNS, make_row(draw, 0.1), strict=True)) | {"customer": number}
        for name in ("job", "poutcome"):
            row[name] = "astronaut" if draw.random() < 0.05 else row[name]
        found.append({name: str(row[name]) for name in order})
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, order)
        table.writeheader()
        table.writerows(found)
    return found


def encode(row, inputs):
    """A row as a model's inputs, given "inputs" in encoding.json; the inputs of an unknown category are 0."""
    found = []
    for column in inputs["columns"]:
        missing = {"number": inputs["missing_numbers"], "words": inputs["missing_words"], "text": [""]}[column["kind"]]
        cell = row[column["name"]]
        cell = column["fill"] if cell.strip().lower() in missing and column["fill"] is not None else cell
        if column["kind"] == "number":
            found.append((float(cell) - column["mean"]) / column["deviation"])
        else:
            found += [float(cell == category) for category in column["categories"]]
    return found
