"""Configure FLARE startup kits: allow a job's classes to run, and keep logs on their site."""

import json
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from fedveil.errors import BadArgument
from fedveil.files import write_atomically

FILE_NAMES = ("resources.json", "resources.json.default")  # FLARE reads the first one that exists


def configure(kit: Path, *packages: str) -> Path:
    """Write the `local/resources.json` of a server or a site, and return its path.

    A site then sends no logs to the server: FLARE streams errors by default, and an application's logs may contain
    records.

    Args:
        kit: folder of the startup kit.
        packages: names of installed packages, such as "bank_flare", whose classes a job may use without shipping their
            code.
    """
    local = Path(kit) / "local"
    settings: dict[str, Any] = {"format_version": 2}
    if file := next((local / name for name in FILE_NAMES if (local / name).exists()), None):
        try:
            settings = dict(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadArgument(str(file), f"cannot be read: {error}", "provision the kit again") from error
    settings["allow_log_streaming"] = False
    if packages:
        for package in packages:
            if not all(part.isidentifier() for part in package.split(".")):
                message = f"{package!r} is not the name of a package"
                raise BadArgument("packages", message, "use a name such as bank_flare")
        class_list = settings.get("class_allow_list", DEFAULT_CLASS_ALLOW_LIST)
        prefixes = ("nvflare.collab.", *(f"{package}." for package in packages))
        settings["class_allow_list"] = list(dict.fromkeys([*class_list, *prefixes]))
    return write_atomically(local / FILE_NAMES[0], json.dumps(settings, indent=2) + "\n")
