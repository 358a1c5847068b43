"""Settings that all tests share."""

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # two pytest workers share two cores

settings.register_profile(
    "quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
