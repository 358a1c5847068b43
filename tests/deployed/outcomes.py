"""What becomes of a run when something fails, on every engine: what `test_faults_deployed.py` holds them to."""

from dataclasses import dataclass

GOES_ON = "goes on"
RESUMES = "ends, and resumes by submitting again"
BY_ITSELF = "ends, and fedveil.nvflare.submit submits it again by itself"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault of client 1 in round 1 (of 0, 1, 2 ...), or of the server in round 2."""

    then: str  # GOES_ON, RESUMES or BY_ITSELF
    answered: str  # the clients that answered in each round: "012 02 *" is all, all but 1, either of these two
    text: str  # what happens


OUTCOMES = {
    "the process that computes is killed": {
        "flower": Outcome(
            GOES_ON,
            "012 02 * 012",
            "The SuperNode notices after about 55 s and reports error 8; the client takes part in the next round then.",
        ),
        "nvflare": Outcome(
            BY_ITSELF,
            "012 * 012",
            "FLARE ends the job; the next submission goes on from the checkpoint, with everyone.",
        ),
    },
    "a site is killed": {
        "flower": Outcome(GOES_ON, "012 02 02", "The round goes on without it at its timeout."),
        "nvflare": Outcome(
            GOES_ON, "012 02 02", "The round goes on without it at its timeout; later rounds do not ask it."
        ),
    },
    "a killed site is started again": {
        "flower": Outcome(
            GOES_ON,
            "012 012 012",
            "The SuperLink refuses its key for up to a minute, as if it were still there; a loop starts it until then.",
        ),
        "nvflare": Outcome(
            BY_ITSELF,
            "012 012 012",
            "It takes part in the next job. A job that needs it ends when its patience does, and is submitted again.",
        ),
    },
    "a straggler": {
        "flower": Outcome(GOES_ON, "012 02 012", "The round goes on without it; its late answer is ignored."),
        "nvflare": Outcome(
            GOES_ON,
            "012 02 " + "* " * 25 + "012",
            "The round goes on without it; it is asked again when it answers a probe.",
        ),
    },
    "garbage": {
        "flower": Outcome(GOES_ON, "012 02 012", "The answer is refused, and the round goes on without it."),
        "nvflare": Outcome(GOES_ON, "012 02 012", "The answer is refused, and the round goes on without it."),
    },
    "a wrong certificate": {
        "flower": Outcome(GOES_ON, "02 02", "The SuperNode ends with exit code 305 and never takes part."),
        "nvflare": Outcome(GOES_ON, "02 02", "The site is not let in; it tries again and again and never takes part."),
    },
    "the server is killed and started again": {
        "flower": Outcome(
            RESUMES, "012 012 012 012", "With --database nodes stay registered; a new run goes on from the checkpoint."
        ),
        "nvflare": Outcome(
            BY_ITSELF,
            "012 012 012 012",
            "Sites come back by themselves. FLARE calls the old job running for ever; submit sees that it is not.",
        ),
    },
}
"""By fault and engine."""
