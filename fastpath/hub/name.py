"""hf:OWNER/REPO[/FILE][@REVISION]: where a file lies on the Hub."""

import re
from dataclasses import dataclass

PREFIX = "hf:"
_FORM = re.compile(r"hf:([\w.-]+/[\w.-]+)((?:/[^/@]+)*)(?:@(.+))?", re.ASCII)
_EXPECTED = "expected hf:OWNER/REPO, hf:OWNER/REPO/FILE, or either with @REVISION behind it"


@dataclass(frozen=True)
class HubName:
    """file: "" for the one that its repository is known for; revision: a branch, a tag or a commit."""

    repo: str
    file: str = ""
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> "HubName":
        match = _FORM.fullmatch(text)
        if match is None or any(part in (".", "..") for part in text.removeprefix(PREFIX).split("/")):
            raise ValueError(f"{text}: no name of a file on the Hub, {_EXPECTED}.")
        return cls(match[1], match[2].removeprefix("/"), match[3] or "main")

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{PREFIX}{self.repo}{file}" + ("" if self.revision == "main" else f"@{self.revision}")


def is_hub_name(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIX)
