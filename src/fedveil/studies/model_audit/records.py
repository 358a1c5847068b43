"""Read, check and divide the members and the others for a model's audit."""

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
from fedveil.studies.membership.attacks import Indices, RecordPool

FUNCTION = "audit_model"
MIN_RECORDS = 20  # minimum number of members and of others


@dataclass(frozen=True, eq=False)
class AuditedRecords:
    """The pool of records, members first, and the halves that the attacker knows and is tested on.

    Attributes:
        pool: all records.
        num_members: number of members.
        order: indices of the members, and of the others, in random order; the first half of each is known.
    """

    pool: DataPart
    num_members: int
    order: tuple[Indices, Indices]

    def fold(self, index: int) -> RecordPool:
        """Return the division into known and test records; fold 1 exchanges the halves of fold 0."""
        step = -1 if index else 1
        (known_members, test_members), (known_others, test_others) = (
            np.array_split(part, 2)[::step] for part in self.order
        )
        return RecordPool(self.pool, known_members, known_others, test_members, test_others)


def read_records(model: nn.Module, members: UserRecords, others: UserRecords, seed: int) -> AuditedRecords:
    """Read members and others; refuse records that differ in form, that are too few, or that are in both."""
    parts = {"members": read_part("members", members), "others": read_part("others", others)}
    member_part, other_part = parts.values()
    check_same_columns("others", others, "members", list_columns(members))
    check_same_form("others", describe_forms(other_part), "members", describe_forms(member_part))
    for name, part in parts.items():
        if len(part.targets) < MIN_RECORDS:
            message = f"there are only {len(part.targets)} {name}"
            fix = f"pass at least {MIN_RECORDS} {name}; a few hundred give a useful answer"
            raise BadArgument(FUNCTION, message, fix)
    refuse_overlap(member_part, other_part)
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    inputs, targets = join_batches([(part.inputs, part.targets) for part in (member_part, other_part)])
    pool, count = DataPart(move_inputs(inputs, torch.device("cpu"), dtype), targets), len(member_part.targets)
    sizes, rng = (count, len(other_part.targets)), generator("model audit", seed)
    member_order, other_order = (torch.randperm(size, generator=rng).numpy() for size in sizes)
    return AuditedRecords(pool, count, (member_order, count + other_order))


def refuse_overlap(members: DataPart, others: DataPart) -> None:
    """Refuse other records that are equal to a member."""
    member_rows = {digest: row for row, digest in enumerate(digest_records(members))}
    duplicates = [
        (row, member_rows[digest]) for row, digest in enumerate(digest_records(others)) if digest in member_rows
    ]
    if duplicates:
        message = f"{len(duplicates)} of the {len(others.targets)} others are also members"
        example = f"record {duplicates[0][0]}, for example, equals member {duplicates[0][1]}"
        raise BadArgument(FUNCTION, f"{message}; {example}", "pass others that the model was not trained on")


def digest_records(part: DataPart) -> list[bytes]:
    """Return a digest of the inputs and the target of each record."""
    tensors = [*tensors_by_path(part.inputs).values(), part.targets]
    rows = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]
    return [
        hashlib.blake2b(b"".join(row[index].tobytes() for row in rows), digest_size=16).digest()
        for index in range(len(part.targets))
    ]
