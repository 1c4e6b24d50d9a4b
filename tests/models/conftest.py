import sys
from pathlib import Path

# The recipes and batches of the engine tests serve here as well.
sys.path.append(str(Path(__file__).parent.parent / "engines"))
