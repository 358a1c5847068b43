"""Audit any PyTorch model: what does it reveal about the records that it was trained on?"""

from fedveil.studies.model_audit.results import ModelAudit
from fedveil.studies.model_audit.run import audit_model

__all__ = ["ModelAudit", "audit_model"]
