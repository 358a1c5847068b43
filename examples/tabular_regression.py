"""Regression on a table, from a CSV file to an error in the target's original units.

- Shows: three clinics that predict the progression of diabetes from a file with missing values and categories.
- Who attacks: nobody here. With one output, a veil hides the scale of predictions, but not their ranking.
- Needs: pip install fedveil
- Last line: RMSE on new patients: plain 55.7, veil 55.7; always predicting the mean 70.3

On the command line: fedveil train --data csv --path patients.csv --target progression --missing impute --clients 3
"""

import csv
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import fedveil
from fedveil.data import Data, load, split


def write_patients(path: Path) -> None:
    """Write a realistic file, in which some measurements are missing and sex is a word."""
    patients = load_diabetes(scaled=False)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*patients.feature_names, "progression"])
        for number, (measured, progression) in enumerate(zip(patients.data, patients.target, strict=True)):
            cells = [str(value) for value in measured]
            cells[1] = "female" if measured[1] == 1 else "male"
            if number % 50 == 0:
                cells[2] = ""  # the body mass index was not measured
            rows.writerow([*cells, progression])


def train(defence: str, data: Data) -> float:
    """Train a model and return its root mean squared error on new patients, in the target's units."""
    clinics = [data.train.take(rows) for rows in split(data, 3)]
    torch.manual_seed(0)  # plain and veil start from the same weights
    model = nn.Sequential(nn.Linear(data.train.inputs.shape[1], 16), nn.ReLU(), nn.Linear(16, data.outputs))
    federation = fedveil.Federation(model, clinics, defence, torch.optim.Adam(model.parameters(), lr=1e-2))
    federation.fit(epochs=15, test=data.test)
    with torch.no_grad():
        predicted = data.original_units(model(data.test.inputs))
    return float((predicted - data.original_units(data.test.targets)).pow(2).mean().sqrt())


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "patients.csv"
    write_patients(path)
    data = load("csv", path=path, target="progression", missing="impute")
print(data, *data.notes, sep="\n")
guess = float(data.original_units(data.test.targets).sub(data.original_units(torch.zeros(1))).pow(2).mean().sqrt())
errors = ", ".join(f"{defence} {train(defence, data):.1f}" for defence in ("plain", "veil"))
print(f"RMSE on new patients: {errors}; always predicting the mean {guess:.1f}")
