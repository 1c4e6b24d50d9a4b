"""Creates a virtual environment for a peer whose packages conflict with ours, with the same torch.

python -m benchmarks.programs.other_environment FOLDER PACKAGE==VERSION ...
"""

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Creates the environment if it does not exist."""
    folder, *packages = sys.argv[1:]
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    torch = f"torch=={version('torch').partition('+')[0]}"
    subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *packages], check=True)


if __name__ == "__main__":
    main()
