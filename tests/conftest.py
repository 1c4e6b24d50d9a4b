"""Shared by all tests: a CPU world, quiet, offline."""

import os

# Before torch or deepspeed is imported anywhere.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "200"
