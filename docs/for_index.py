"""Make README and metadata ready for an index: `python docs/for_index.py https://github.com/OWNER/NAME TAG`.

An index shows README away from the repository, where links such as docs/server.md lead nowhere. Here they become
addresses at a tag, pictures those of raw files, and pyproject.toml gets the project's own addresses. Both files are
changed in place: the workflow of a release does so before it builds, and nothing of it is committed.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def with_addresses(text: str, repository: str, tag: str) -> str:
    """Return a page of the repository's root with links that work anywhere."""
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/") + f"/{tag}"

    def link(found: re.Match[str]) -> str:
        picture, said, place = found.groups()
        if place.startswith(("http", "#")):
            return found[0]
        return f"{picture}[{said}]({raw if picture else f'{repository}/blob/{tag}'}/{place})"

    return LINK.sub(link, text)


def with_urls(text: str, repository: str, tag: str) -> str:
    """Return pyproject.toml with the project's addresses."""
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{place}"\n' for name, place in urls.items())
    return text.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]", 1)


def main(root: Path, repository: str, tag: str) -> None:
    """Change README.md and pyproject.toml of a checkout."""
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", repository):
        sys.exit(f"{repository} is no address of a repository, such as https://github.com/OWNER/NAME.")
    for name, changed in {"README.md": with_addresses, "pyproject.toml": with_urls}.items():
        path = root / name
        path.write_text(changed(path.read_text(), repository, tag))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Call it as: python docs/for_index.py https://github.com/OWNER/NAME TAG")
    main(Path(__file__).parents[1], *sys.argv[1:])
