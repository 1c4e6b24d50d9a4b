"""`python -m llmtrain` is the command `llmtrain`."""

from llmtrain.cli import main

main()
