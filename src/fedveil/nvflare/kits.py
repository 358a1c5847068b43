"""Settings for a FLARE startup kit: whose classes may run, and that logs stay on their site."""

import json
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from fedveil.errors import BadArgument
from fedveil.files import write_whole

NAMES = ("resources.json", "resources.json.default")  # FLARE reads the first that is there


def configure(kit: Path, *packages: str) -> Path:
    """Write the `local/resources.json` of a server or a site; returns its path.

    A site then sends no log to the server: FLARE streams errors by default, and what an application logs may hold
    records. `packages` are those whose installed classes a job may use without bringing code.

    Args:
        kit: the startup kit's folder.
        packages: such as "bank_flare".
    """
    local = Path(kit) / "local"
    found: dict[str, Any] = {"format_version": 2}
    for name in NAMES:
        if (local / name).exists():
            try:
                found = dict(json.loads((local / name).read_text()))
            except (OSError, ValueError, TypeError) as error:
                raise BadArgument(str(local / name), f"cannot be read: {error}", "provision the kit again") from error
            break
    found["allow_log_streaming"] = False
    if packages:
        for package in packages:
            if not all(part.isidentifier() for part in package.split(".")):
                raise BadArgument("packages", f"{package!r} is no name of a package", "bank_flare")
        listed = found.get("class_allow_list", DEFAULT_CLASS_ALLOW_LIST)
        own = ("nvflare.collab.", *(f"{package}." for package in packages))
        found["class_allow_list"] = list(dict.fromkeys([*listed, *own]))
    return write_whole(local / NAMES[0], json.dumps(found, indent=2) + "\n")
