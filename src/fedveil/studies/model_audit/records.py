"""The records of a model's audit: members and others are read, checked and divided."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedveil.data.dataset import DataPart, read_part
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import move_inputs
from fedveil.records.inputs import check_same_form, describe_forms, join_batches, tensors_by_path
from fedveil.records.shards import generator
from fedveil.records.sources import UserRecords, check_same_columns, list_columns
from fedveil.studies.membership.attacks import Indices, Records

WHERE = "audit_model"
LEAST = 20  # minimum number of members and of others


@dataclass(frozen=True, eq=False)
class AuditedRecords:
    """The pool of records, members first, and the halves that the attacker knows and is tested on.

    Attributes:
        pool: all records.
        members: number of members.
        order: indices of the members, and of the others, in random order; the first half of each is known.
    """

    pool: DataPart
    members: int
    order: tuple[Indices, Indices]

    def fold(self, number: int) -> Records:
        """Return the records with the known half first (0), or with both halves exchanged (1)."""
        (own_rows, victims), (known, fresh) = (np.array_split(part, 2)[:: -1 if number else 1] for part in self.order)
        return Records(self.pool, own_rows, known, victims, fresh)


def read_records(model: nn.Module, members: UserRecords, others: UserRecords, seed: int) -> AuditedRecords:
    """Read members and others; refuse records that differ in form, that are too few, or that are in both."""
    parts = {"members": read_part("members", members), "others": read_part("others", others)}
    first, second = parts.values()
    check_same_columns("others", others, "members", list_columns(members))
    check_same_form("others", describe_forms(second), "members", describe_forms(first))
    for name, part in parts.items():
        if len(part.targets) < LEAST:
            what = f"there are only {len(part.targets)} {name}"
            fix = f"pass at least {LEAST} {name}; a few hundred give a useful answer"
            raise BadArgument(WHERE, what, fix)
    refuse_overlap(first, second)
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    inputs, targets = join_batches([(part.inputs, part.targets) for part in (first, second)])
    pool, count = DataPart(move_inputs(inputs, torch.device("cpu"), dtype), targets), len(first.targets)
    sizes, rng = (count, len(second.targets)), generator("model audit", seed)
    own_rows, fresh = (torch.randperm(size, generator=rng).numpy() for size in sizes)
    return AuditedRecords(pool, count, (own_rows, count + fresh))


def refuse_overlap(members: DataPart, others: DataPart) -> None:
    """Refuse others that are equal to a member."""
    known = {digest: row for row, digest in enumerate(digest_records(members))}
    both = [(row, known[digest]) for row, digest in enumerate(digest_records(others)) if digest in known]
    if both:
        what = f"{len(both)} of the {len(others.targets)} others are also members"
        first = f"the first is record {both[0][0]}, which equals member {both[0][1]}"
        raise BadArgument(WHERE, f"{what}; {first}", "pass others that the model was not trained on")


def digest_records(part: DataPart) -> list[bytes]:
    """Return a digest of the inputs and the target of each record."""
    tensors = [*tensors_by_path(part.inputs).values(), part.targets]
    rows = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]
    return [
        hashlib.blake2b(b"".join(row[index].tobytes() for row in rows), digest_size=16).digest()
        for index in range(len(part.targets))
    ]
