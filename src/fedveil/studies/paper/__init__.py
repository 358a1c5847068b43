"""The paper's tables and figures from our code, the paper's values beside ours."""

from fedveil.studies.paper.run import EXHIBITS, reproduce

__all__ = ["EXHIBITS", "reproduce"]
