"""Determines the rank of this process from `TF_CONFIG`, the cluster description that managed services set.

Each entry of the cluster is one worker. The format:
https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

from __future__ import annotations

import json
import re
from typing import Any

from llmtrain.errors import truncate
from llmtrain.launch.discovery.rank import Launcher, Rank, RankReader

VARIABLE = "TF_CONFIG"
LAUNCHER = Launcher("tf_config", (VARIABLE,), *[VARIABLE] * 6)
ORDER = ("chief", "master", "worker")
"""Kinds of tasks that train, in the order of their ranks."""
_FIX = 'it has the form {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def number_of_tasks(text: str) -> int | None:
    """Returns how many tasks it describes; None if it cannot be parsed, which `read` reports."""
    try:
        cluster = json.loads(text)["cluster"] if text.strip() else {}
        return sum(len(tasks) for tasks in cluster.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read(reader: RankReader) -> Rank:
    """Reads the rank of this process; problems are collected in `reader`."""
    try:
        return _rank(json.loads(reader.env[VARIABLE]))
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg} at character {error.pos}"
    except (ValueError, OverflowError) as error:
        message = truncate(str(error))
    except RecursionError:
        message = "is nested too deeply"
    except (TypeError, KeyError, AttributeError):
        message = "does not have the required fields `cluster` and `task`"
    reader.refuse(VARIABLE, message, _FIX)
    return Rank(0, 0, 1, 1, "", 0, LAUNCHER.name)


def _rank(config: dict[str, Any]) -> Rank:
    """Returns the rank of this process. Raises ValueError, TypeError, KeyError or AttributeError."""
    cluster, kind, index = config["cluster"], config["task"]["type"], int(config["task"]["index"])
    if unknown := sorted(name for name in cluster if name not in ORDER and cluster[name]):
        raise ValueError(f"has tasks of the type {', '.join(unknown)}, which do not take part in training")
    if kind not in ORDER:
        raise ValueError(f"says that this task is a {kind!r}, which does not train")
    addresses = [_split(address) for name in ORDER for address in cluster.get(name, [])]
    if not 0 <= index < len(cluster.get(kind, [])):
        raise ValueError(f"says that this is {kind} {index}, but there are only {len(cluster.get(kind, []))}")
    rank = sum(len(cluster.get(name, [])) for name in ORDER[: ORDER.index(kind)]) + index
    hosts = [host for host, _ in addresses]
    return Rank(
        rank=rank,
        local_rank=hosts[:rank].count(hosts[rank]),
        world_size=len(hosts),
        local_world_size=hosts.count(hosts[rank]),
        master_addr=hosts[0],
        master_port=addresses[0][1],
        launcher=LAUNCHER.name,
        nodes=len(set(hosts)),
    )


def _split(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[::1]:port`. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\s]+)):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"names {address!r}, which is not host:port")
    return match[1] or match[2], int(match[3])
